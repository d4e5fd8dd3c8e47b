"""Which difference is rounding, and which is a divergence.

A fixed tolerance is wrong twice: rounding grows with every layer that it passes, so a deep layer is accused of what the
first ones did; and a tolerance that is wide enough for the deep layers misses a small fault in the first. So a record
is held against what went before it in the order of execution:

    error      the larger of  rms(a - b) / rms(a)  and  1/16 of the largest  |a - b| / (|a| + rms(a))  of an element
    growth     4 × the largest error that was rounding before, but at most √T of the lowest precision so far, and in the
               first step, where no training has carried it on, at most 64 T
    tolerance  the largest of  T, by the dtype of the lower precision,  growth,  and 10 × the noise, where a second
               run of A was given: the record's own, or the median of its kind in the step, if that is larger

T is 11 eps for float32 and float64, and eps for smaller floats, where eps is the distance from 1 to the next number:
1.3e-6 for float32 and 1e-3 for float16 are the rtol of `torch.testing.assert_close`; for bfloat16 it is half of that
(7.8e-3, torch has 1.6e-2), and for float64 2.4e-15 instead of 1e-7, since those are errors of one operation: small
floats are summed in float32 and rounded once. √T means that half of the digits may go; what is further off is
accused however slowly it came. Integers and booleans have T = 0. A tolerance that the user gives stays what it is.

Gradients are another matter.

* An error e moves about a share e of the elements across a kink (of a ReLU, of a max pool), where the gradient jumps:
  √e in l2. So √growth is within their tolerance, and single elements are not looked at.
* Those of parameters are sums over the whole batch, n terms of either sign, whose rounding grows with √n: their T is
  16 times as large, for float32 and float64.
* Some are zero but for rounding (of a bias before a normalisation) and differ from themselves by 100 %. So a part of
  the largest rms of the same kind in the step is added to rms(a): 1/64, of the kinds of parameters 1/16. torch's
  absolute tolerance of 1e-5 would call all gradients of a deep net equal.

Parameters get that too: an optimizer makes full steps of gradients that are rounding. In the first step that is
compared they are still what was loaded, so that an element of theirs counts by 1/2, not by 1/16.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from replay.distance import Distance, is_real_number, rms_of
from replay.errors import BadQuery
from replay.format import DTYPES, numpy_dtype

Tolerance = float | Mapping[str, float] | None
"""T for all floating dtypes, or by the name of a dtype; None for those of the table."""

GROWTH = 4.0
MOST_IN_A_STEP = 64.0
NOISE_FACTOR = 10.0
BATCH_SUM = 16.0
_FLOORS = {
    **dict.fromkeys(("grad_output", "grad_input"), 1 / 64),
    **dict.fromkeys(("param", "param_grad", "param_grad_acc", "update"), 1 / 16),
}
_GRADIENTS = frozenset(_FLOORS) - {"param"}
_BATCH_SUMS = ("param_grad", "param_grad_acc", "update")
_ELEMENT = 1 / 16
_ELEMENT_AS_LOADED = 1 / 2
_WIDE_EPS = 1e-6


def floors_of(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return by kind what is added to the scale of a record, given the records of a step."""
    floors: dict[str, float] = {}
    for record in records:
        kind = record["kind"]
        if kind in _FLOORS:
            floors[kind] = max(floors.get(kind, 0.0), rms_of(record) * _FLOORS[kind])
    return floors


def error_of(distance: Distance, kind: str, *, loaded: bool) -> float:
    """Return the one number that is held against a tolerance; infinite where no rounding explains the difference.

    Args:
        distance: between the record and its partner.
        kind: of the record.
        loaded: whether parameters are as they were loaded: no step went before.
    """
    if distance.unlike:
        return math.inf
    error = distance.spread
    if kind not in _GRADIENTS:
        error = max(error, distance.peak * (_ELEMENT_AS_LOADED if kind == "param" and loaded else _ELEMENT))
    return math.inf if math.isnan(error) else error


class Bounds:
    """The tolerances of one process's records, in the order of execution."""

    def __init__(self, given: Tolerance) -> None:
        self._given = _checked(given)
        self._known: dict[str, float] = {}
        self._lowest = 0.0  # T of the lowest precision so far
        self._before = 0.0  # the largest error that was rounding so far
        self._trained = False  # whether a step went before

    def of_step(
        self, records: Sequence[tuple[str, str, str]], errors: Sequence[float], noise: Sequence[float | None]
    ) -> list[tuple[float, float]]:
        """Return of each record of a step its tolerance, and the largest error that was rounding before it.

        Args:
            records: kind, dtype in A and dtype in B.
            errors: as `error_of` has them.
            noise: the error of the same record between two runs of A; None where it is not known.
        """
        by_kind: dict[str, list[float]] = {}
        for (kind, _, _), known in zip(records, noise, strict=True):
            if known is not None:
                by_kind.setdefault(kind, []).append(known)
        # A tensor of few elements may differ little in one pair of runs by chance, and much in another.
        typical = {kind: median(values) for kind, values in by_kind.items()}
        found = []
        for (kind, *dtypes), error, own in zip(records, errors, noise, strict=True):
            least = max(self._least(kind, dtype) for dtype in dtypes)
            self._lowest = max(self._lowest, *map(self.of_dtype, dtypes))
            most = math.sqrt(self._lowest)
            if not self._trained:
                most = min(most, MOST_IN_A_STEP * self._lowest)
            growth = min(GROWTH * self._before, most)
            exact = not any(is_real_number(numpy_dtype(dtype)) for dtype in dtypes)
            fixed = exact or self._is_given(dtypes)
            if fixed:
                growth = 0.0
            smooth = max(least, growth)
            bound = max(smooth, math.sqrt(growth)) if kind in _GRADIENTS else smooth
            if own is not None:
                bound = max(bound, NOISE_FACTOR * max(own, 0.0 if exact else typical[kind]))
            found.append((bound, self._before))
            if error <= smooth and not fixed:
                self._before = max(self._before, error)
        self._trained = True
        return found

    def _is_given(self, dtypes: Iterable[str]) -> bool:
        return "*" in self._given or any(dtype in self._given for dtype in dtypes)

    def _least(self, kind: str, dtype: str) -> float:
        """T of a record."""
        wide = kind in _BATCH_SUMS and _eps(numpy_dtype(dtype)) < _WIDE_EPS and not self._is_given((dtype,))
        return self.of_dtype(dtype) * (BATCH_SUM if wide else 1.0)

    def of_dtype(self, name: str) -> float:
        """Return T of a dtype."""
        if name not in self._known:
            eps = _eps(numpy_dtype(name))
            default = 11 * eps if eps < _WIDE_EPS else eps
            self._known[name] = self._given.get(name, self._given.get("*", default)) if eps else 0.0
        return self._known[name]


def _eps(dtype: np.dtype[Any]) -> float:
    """The distance from 1 to the next number of a dtype; 0 if it is not rounded."""
    if not is_real_number(dtype):
        return 0.0
    if dtype.kind in "fc":
        return float(np.finfo(dtype).eps)
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def _checked(given: Tolerance) -> dict[str, float]:
    by_name = {} if given is None else dict(given) if isinstance(given, Mapping) else {"*": given}
    for name, value in by_name.items():
        if name != "*" and name not in DTYPES:
            raise BadQuery(f"tolerance names a dtype {name!r}; there are {', '.join(sorted(DTYPES))}.")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise BadQuery(f"tolerance is {value!r}; it is a number from 0, relative to the size of a tensor.")
    return {name: float(value) for name, value in by_name.items()}
