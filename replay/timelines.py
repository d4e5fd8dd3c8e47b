"""A statistic over the steps, one line for each place that tensors come from: what `trend` and `plot` show.

A place is (rank, layer, kind, path). A statistic is of the finite elements of a tensor, so it looks well where the rest
is NaN; each step therefore says beside its value whether something was NaN or infinite. Where several values share a
place in the picture (calls within a step, steps within a column), the one farthest from 0 stands for all, so that a
spike of one step is seen among thousands.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.errors import BadQuery, NotRecorded
from replay.filters import Names
from replay.format import STATISTICS
from replay.records import Progress
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
    trace: Trace,
    stat: str,
    layers: Names = None,
    kinds: Names = None,
    where: str | None = None,
    progress: Progress | None = None,
) -> list[Timeline]:
    """Return a statistic over the steps for each place, in the order in which layers first ran.

    Args:
        trace: where the records are.
        stat: the name of the statistic.
        layers: as in `Trace.records`.
        kinds: likewise.
        where: likewise.
        progress: as in `Trace.record_parts`.

    Raises:
        BadQuery: a name or a condition that cannot be understood.
        NotRecorded: there is no such record.
    """
    if stat not in STATISTICS:
        raise BadQuery(f"{stat!r} is no statistic. There are {', '.join(STATISTICS)}.")
    names = list(dict.fromkeys(("stream", "step", "n_nan", "n_posinf", "n_neginf", stat)))
    numbers: dict[tuple[int, str, str, str], int] = {}
    found: dict[int, list[tuple[NDArray[np.int64], Floats, Bools]]] = {}
    places = {rank: _places(trace, rank, numbers) for rank in trace.ranks}
    for rank, table in trace.column_parts(names, layers, kinds, where, progress):
        column = {name: table[name].to_numpy() for name in names}
        values = column[stat].astype(np.float64)
        broken = np.isinf(values)
        for name in ("n_nan", "n_posinf", "n_neginf"):
            broken |= column[name] > 0
        for place, at in _by_place(places[rank][column["stream"]]):
            found.setdefault(place, []).append((column["step"][at], values[at], broken[at]))
    if not found:
        steps, there = trace.steps, ", ".join(map(repr, trace.layers[:3]))
        raise NotRecorded(
            f"No record of {trace.path} is so. It has "
            + (f"steps {steps[0]} to {steps[-1]}, layers such as {there}, " if steps else "no committed step, ")
            + f"kinds {', '.join(trace.kinds) or 'none'}."
        )
    order = {name: n for n, name in enumerate(trace.layers)}
    lines = []
    for key, place in numbers.items():
        if parts := found.pop(place, None):  # which frees them as the lines are made
            lines.append(Timeline(*key, *_one_a_step(*map(np.concatenate, zip(*parts, strict=True)))))
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


def _places(trace: Trace, rank: int, numbers: dict[tuple[int, str, str, str], int]) -> NDArray[np.uint32]:
    """Return the number of the place of each stream of a rank; places that are new get the next ones."""
    keys = [(rank, s.layer, s.kind, s.path) for s in trace.streams(rank)]
    found = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.uint32)
    return found.astype(np.uint16) if len(numbers) < 1 << 16 else found  # such are sorted in a tenth of the time


def _by_place(place: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield the places, and the numbers of the rows of each, in their order."""
    order = np.argsort(place, kind="stable")
    found, begins = np.unique(place[order], return_index=True)
    yield from zip(found.tolist(), np.split(order, begins)[1:], strict=True)
