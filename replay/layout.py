"""Whether two tensors that differ hold the same values arranged otherwise: axes exchanged, rows in another order.

Rows are told by a number each, their product with a random vector. Sorted by it, equal rows of both tensors stand at
the same place, whatever their order was; rounding may exchange neighbours, so what does not fit is sorted once more by
another vector.
"""

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_MOST_AXES = 5


def arrangements(a: tuple[int, ...], b: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the orders of b's axes that give the shape a, that of no change left out."""
    if len(a) != len(b) or sorted(a) != sorted(b) or len(a) > _MOST_AXES:
        return []
    orders = itertools.permutations(range(len(b)))
    return [order for order in orders if tuple(b[i] for i in order) == a and order != tuple(range(len(b)))]


def matching_rows(a: NDArray[Any], b: NDArray[Any], tolerance: float) -> NDArray[np.int64] | None:
    """Return the order of the rows of b in which they are those of a; None if there is none, or if it is no other.

    Args:
        a: shape `(rows, *features)`.
        b: of the same shape.
        tolerance: relative size of a difference that is none.
    """
    if a.shape != b.shape or a.ndim == 0 or len(a) < 2 or not a.size:
        return None
    x, y = _rows(a), _rows(b)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    order = np.full(len(x), -1, np.int64)
    left, right = np.arange(len(x)), np.arange(len(x))
    near = tolerance * (math.sqrt(float(np.mean(x * x))) or 1.0) * math.sqrt(x.shape[1])
    generator = np.random.default_rng(0)
    for _ in range(_ROUNDS):
        vector = generator.standard_normal(x.shape[1])
        one = left[np.argsort(x[left] @ vector, kind="stable")]
        other = right[np.argsort(y[right] @ vector, kind="stable")]
        same = np.linalg.norm(x[one] - y[other], axis=1) <= near
        order[one[same]] = other[same]
        left, right = one[~same], other[~same]
        if not len(left):
            return None if np.array_equal(order, np.arange(len(order))) else order
        if not same.any():
            return None
    return None


def _rows(values: NDArray[Any]) -> NDArray[np.float64]:
    """Rows as float64; of a complex number both parts."""
    rows = np.ascontiguousarray(values).reshape(len(values), -1)
    if rows.dtype.kind == "c":
        rows = rows.view(rows.real.dtype)
    return rows.astype(np.float64)
