"""A statistic over the steps, one line for each place that tensors come from: what `trend` and `plot` show.

A place is (rank, layer, kind, path). A statistic is of the finite elements of a tensor, so it looks well where the rest
is NaN; each step therefore says beside its value whether something was NaN or infinite. Where several values share a
place in the picture (calls within a step, steps within a column), the one farthest from 0 stands for all, so that a
spike of one step is seen among thousands.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replay.errors import BadQuery, NotRecorded
from replay.filters import Names
from replay.format import STATISTICS
from replay.series import Bools, Floats
from replay.trace import Trace

LOGARITHMIC = ("absmax", "std", "l2")
"""The statistics that are never negative and go over decades."""

PLACE = ("rank", "layer", "kind", "path")
"""What tells timelines apart."""


@dataclass(frozen=True)
class Timeline:
    """A statistic of one place, step after step.

    Attributes:
        steps: shape `(steps,)`, ascending: those in which the place has a record.
        values: likewise; NaN where no element was finite.
        broken: likewise: whether an element, or the statistic itself, was NaN or infinite.
        several: whether a step has several records, of which the one farthest from 0 is in `values`.
    """

    rank: int
    layer: str
    kind: str
    path: str
    steps: NDArray[np.int64]
    values: Floats
    broken: Bools
    several: bool


def timelines(
    trace: Trace, stat: str, layers: Names = None, kinds: Names = None, where: str | None = None
) -> list[Timeline]:
    """Return a statistic over the steps for each place, in the order in which layers first ran.

    Raises:
        BadQuery: a name or a condition that cannot be understood.
        NotRecorded: there is no such record.
    """
    if stat not in STATISTICS:
        raise BadQuery(f"{stat!r} is no statistic. There are {', '.join(STATISTICS)}.")
    # Not all columns of all records: of ten million, these are a quarter of a gigabyte.
    broken = f"n_nan + n_posinf + n_neginf > 0 or isinf({stat}::double) as broken"
    found = trace.columns(f"rank, stream, step, {stat}::double as value, {broken}", layers, kinds, where=where)
    if not len(found):
        steps, there = trace.steps, ", ".join(map(repr, trace.layers[:3]))
        raise NotRecorded(
            f"No record of {trace.path} is so. It has "
            + (f"steps {steps[0]} to {steps[-1]}, layers such as {there}, " if steps else "no committed step, ")
            + f"kinds {', '.join(trace.kinds) or 'none'}."
        )
    step, value, marks = (found[name].to_numpy() for name in ("step", "value", "broken"))
    order = {name: n for n, name in enumerate(trace.layers)}
    lines = []
    for place, at in _by_place(trace, found["rank"].to_numpy(), found["stream"].to_numpy()):
        lines.append(Timeline(*place, *_one_a_step(step[at], value[at], marks[at])))
    return sorted(lines, key=lambda line: (line.rank, order[line.layer], trace.kinds.index(line.kind)))


def gridded(lines: Sequence[Timeline], most: int) -> tuple[NDArray[np.int64], Floats, Bools, int]:
    """Return timelines as a grid, with at most so many columns.

    Args:
        lines: at least one.
        most: how many columns there may be; where there are more steps, a column stands for several.

    Returns:
        The first step of each column; values and marks of shape `(lines, columns)`, NaN and false where a line has
        nothing; how many steps a column stands for.
    """
    steps = np.unique(np.concatenate([line.steps for line in lines]))
    width = -(-len(steps) // most)
    values = np.full((len(lines), len(steps[::width])), np.nan)
    marks = np.zeros(values.shape, bool)
    for row, line in enumerate(lines):
        columns = np.searchsorted(steps, line.steps) // width
        order = _by_size(line.values)
        values[row, columns[order]] = line.values[order]
        marks[row, columns[line.broken]] = True
    return steps[::width], values, marks, width


def _by_size(values: Floats) -> NDArray[np.int64]:
    """Return the places of values that are not NaN, nearest to 0 first: what is assigned last stays."""
    order = np.argsort(np.abs(values), kind="stable")
    return order[: np.sum(~np.isnan(values))]  # NaN sorts to the end


def _one_a_step(step: NDArray[np.int64], value: Floats, broken: Bools) -> tuple[NDArray[np.int64], Floats, Bools, bool]:
    if np.all(np.diff(step) > 0):
        return step, value, broken, False
    steps, at = np.unique(step, return_inverse=True)
    values, marks = np.full(len(steps), np.nan), np.zeros(len(steps), bool)
    order = _by_size(value)
    values[at[order]] = value[order]
    marks[at[broken]] = True
    return steps, values, marks, len(steps) < len(step)


def _by_place(
    trace: Trace, rank: NDArray[np.int32], stream: NDArray[np.int32]
) -> Iterator[tuple[tuple[int, str, str, str], NDArray[np.int64]]]:
    """Yield the places, in the order of their streams, and the numbers of the rows of each, in their order."""
    numbers: dict[tuple[int, str, str, str], int] = {}
    place = np.empty(len(rank), np.int32)
    for number in trace.ranks:
        keys = [(number, s.layer, s.kind, s.path) for s in trace.streams(number)]
        of_stream = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int32)
        rows = slice(None) if len(trace.ranks) == 1 else np.flatnonzero(rank == number)
        place[rows] = of_stream[stream[rows]]
    if len(numbers) < 1 << 16:
        place = place.astype(np.uint16)  # such are sorted in a tenth of the time
    order = np.argsort(place, kind="stable")
    ends = np.searchsorted(place, np.arange(len(numbers) + 1), sorter=order)
    for key, number in numbers.items():
        if ends[number] < ends[number + 1]:
            yield key, order[ends[number] : ends[number + 1]]
