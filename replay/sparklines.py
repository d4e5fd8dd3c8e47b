"""Curves in a line of text, for a terminal: a statistic over the steps, or how the elements of a tensor lie."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.series import Bools, Floats
from replay.timelines import LOGARITHMIC, PLACE, Timeline, gridded

_LEVELS = "▁▂▃▄▅▆▇█"
_BROKEN = "×"
_LEAST_RATIO = 2.0
"""What the height of a logarithmic curve stands for at least, or the noise of a level norm would look like a storm."""


def sparkline(values: Floats, broken: Bools, *, logarithmic: bool) -> str:
    """Return a curve of one character a value: a blank for NaN, × where something is broken.

    Args:
        values: shape `(columns,)`.
        broken: likewise.
        logarithmic: whether equal ratios are equal heights. 0 is then as low as the smallest positive value.
    """
    least = 0.0
    if logarithmic:
        positive = values > 0
        smallest = values[positive].min() if positive.any() else 1.0
        values, least = np.log(np.where(values < smallest, smallest, values)), np.log(_LEAST_RATIO)
    known = values[np.isfinite(values)]
    low, high = (known.min(), known.max()) if len(known) else (0.0, 0.0)
    # Halves, since the difference of two large numbers may be infinite. An infinite value is as high as the rest.
    span = max(high / 2 - low / 2, least / 2)
    heights = np.full(len(values), 0.5)
    if span > 0:
        # What does not fill the height lies about the middle of a character, not on an edge that noise would cross.
        middle = 0.5 if span > least / 2 else 0.5 + 0.5 / len(_LEVELS)
        heights = np.clip(middle + (values / 2 - low / 4 - high / 4) / span, 0, 1)
    curve = ""
    for value, height, mark in zip(values, heights, broken, strict=True):
        if mark:
            curve += _BROKEN
        elif np.isnan(value):
            curve += " "
        else:
            curve += _LEVELS[min(int(height * len(_LEVELS)), len(_LEVELS) - 1)]
    return curve


def curves(lines: Sequence[Timeline], stat: str, width: int) -> dict[tuple[Any, ...], str]:
    """Return the curve of each timeline by its place, each over the steps of all."""
    _, values, broken, _ = gridded(lines, width)
    found = {}
    for line, row, marks in zip(lines, values, broken, strict=True):
        key = place_of({name: getattr(line, name) for name in PLACE})
        found[key] = sparkline(row, marks, logarithmic=stat in LOGARITHMIC)
    return found


def place_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the place that a record is of, which is a key of `curves`."""
    return tuple(record[name] for name in PLACE)


def distribution(tensor: NDArray[Any], width: int) -> str:
    """Return how many finite elements lie in each of so many bins, from the smallest to the largest, and both ends.

    Heights go with the square root of the number, so that few are seen beside many; a bin without any is blank.
    """
    if tensor.dtype.kind == "c":
        tensor = np.abs(tensor)
    elements = tensor.astype(np.float64).ravel()
    elements = elements[np.isfinite(elements)]
    if not len(elements):
        return "no finite element"
    low, high = float(elements.min()), float(elements.max())
    if low == high:
        return f"all {low:.4g}"
    # Scaled, since the difference of two large numbers may be infinite.
    bins = np.minimum(((elements / 2 - low / 2) / (high / 2 - low / 2) * width).astype(int), width - 1)
    counts = np.bincount(bins, minlength=width)
    levels = np.ceil(np.sqrt(counts / counts.max()) * len(_LEVELS)).astype(int)
    return f"{low:.4g} {''.join(_LEVELS[level - 1] if level else ' ' for level in levels)} {high:.4g}"
