"""Arithmetic on series of steps with gaps: what lasts, what is in the middle, what was usual before.

NaN stands for a step in which there is nothing, and never spreads: neither into a median nor into the length of a run.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def sustained(so: Bools, known: Bools, count: int) -> Bools:
    """Return where something was so in `count` consecutive records of a place, or more.

    Args:
        so: shape `(steps, places)`.
        known: likewise: where there is a record. Steps without one are passed over.
        count: how many.
    """
    so = so & known

    def length(so: Bools, known: Bools) -> NDArray[np.int64]:
        total = np.cumsum(so, axis=0)
        return total - np.maximum.accumulate(np.where(known & ~so, total, 0), axis=0)

    run: NDArray[np.int64] = length(so, known) + length(so[::-1], known[::-1])[::-1] - 1
    return so & (run >= count)


def median(values: Floats, axis: int = 0) -> Floats:
    """Return the median of the values that are not NaN along an axis; NaN where there is none."""
    ordered = np.sort(values, axis=axis)
    count = np.sum(~np.isnan(ordered), axis=axis, keepdims=True)
    low, high = np.maximum(count - 1, 0) // 2, count // 2
    last = values.shape[axis] - 1
    if last < 0:
        return np.full(np.delete(values.shape, axis), np.nan)
    sides = (np.take_along_axis(ordered, np.minimum(side, last), axis=axis) for side in (low, high))
    middle: Floats = np.where(count > 0, sum(sides) / 2, np.nan)
    return middle.squeeze(axis)


def usual(values: Floats, window: int = 50, least: int = 10) -> tuple[Floats, Floats]:
    """Return what was usual before each value: the median of up to `window` values before it, and their spread.

    The spread is the median absolute deviation times 1.4826, which is the standard deviation of normal values. A value
    that is not finite counts for nothing. Both are NaN where fewer than `least` values came before.

    Args:
        values: shape `(steps,)`.
        window: how many values before each.
        least: how many of them must be there.
    """
    padded = np.concatenate([np.full(window, np.nan), np.where(np.isfinite(values), values, np.nan)])
    before = np.lib.stride_tricks.sliding_window_view(padded, window)[: len(values)]
    middle = median(before, axis=1)
    spread = 1.4826 * median(np.abs(before - middle[:, None]), axis=1)
    few = np.sum(~np.isnan(before), axis=1) < least
    middle[few] = spread[few] = np.nan
    return middle, spread
