"""What a picture of a trace shows, before any library draws it: numbers, names, marks and notes.

A picture that hides something says so in a note. Too many layers are thinned out evenly, not cut off; elements that
share a point show the one farthest from 0; and what is NaN or infinite is a mark of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from replay.errors import BadQuery, NotRecorded
from replay.filters import Names
from replay.printable import printable
from replay.records import Progress
from replay.series import Bools, Floats
from replay.timelines import LOGARITHMIC, Timeline, gridded, timelines
from replay.trace import Trace

COLUMNS = 600
"""The most columns of a picture over steps."""
PANELS = 36
"""The most images of one tensor."""
PIXELS = 512
"""The most rows and columns of an image, where there are no more than four."""
BINS = 80
HISTOGRAMS = 200
"""The most steps of a histogram, each of which reads a tensor."""

_LONG = 44
"""The most characters of a name beside a line."""
_BROKEN_ROW = "NaN, inf"


@dataclass(frozen=True)
class Panel:
    """One part of a picture.

    Attributes:
        name: what it shows.
        values: shape `(rows, columns)`, NaN where there is nothing to show.
        broken: likewise: whether there is NaN or infinity.
        rows: a name a row, row 0 on top.
        columns: a number a column.
        steps: the first and the last step of what it shows.
        whole: the names of rows in full, where `rows` has them shortened.
    """

    name: str
    values: Floats
    broken: Bools
    rows: Sequence[str]
    columns: Sequence[int]
    steps: tuple[int, int]
    whole: Sequence[str] = ()


@dataclass(frozen=True)
class Reach:
    """Which numbers a dtype can hold, and what a tensor would lose in it.

    Attributes:
        name: the dtype.
        subnormal: the exponent of its smallest positive number.
        normal: the exponents of its smallest and its largest number of full precision.
        lost: the share of elements, neither 0 nor NaN nor infinite, that it would turn into 0.
        coarse: likewise: into subnormal numbers, which have fewer digits.
        over: likewise: into infinity, or NaN where the dtype has no infinity.
    """

    name: str
    subnormal: int
    normal: tuple[int, int]
    lost: float
    coarse: float
    over: float


@dataclass(frozen=True)
class Chart:
    """A picture.

    Attributes:
        form: "lines" and "grid" have a panel below the other, each with a scale of its own, and rows as lines or as
            colours; "tiles" are images side by side with one scale; "bars" is one panel of one row.
        label: what the values are.
        axes: what columns and rows are.
        logarithmic: whether the scale of the values is.
        reaches: dtypes to compare bars of exponents with.
    """

    form: Literal["lines", "grid", "tiles", "bars"]
    title: str
    label: str
    axes: tuple[str, str]
    logarithmic: bool
    panels: tuple[Panel, ...]
    notes: tuple[str, ...]
    reaches: tuple[Reach, ...] = ()


def statistic(
    trace: Trace,
    stat: str,
    layers: Names,
    kinds: Names,
    where: str | None,
    limit: int,
    form: Literal["lines", "grid"] = "lines",
    progress: Progress | None = None,
) -> Chart:
    """Return a statistic over the steps: a panel a kind, a row a place.

    Args:
        trace: where the records are.
        stat: the name of the statistic.
        layers: as in `Trace.records`.
        kinds: likewise.
        where: likewise.
        limit: how many rows a panel may have.
        form: whether a row is a line, or a row of a heat map.
        progress: as in `Trace.record_parts`.

    Raises:
        BadQuery: a name or a condition that cannot be understood.
        NotRecorded: there is no such record.
    """
    every = timelines(trace, stat, layers, kinds, where, progress)
    several_ranks = len({line.rank for line in every}) > 1
    by_kind: dict[str, list[Timeline]] = {}
    for line in every:
        by_kind.setdefault(line.kind, []).append(line)
    panels, notes = [], dict[str, None]()  # an ordered set
    for kind, lines in by_kind.items():
        shown = _chosen(lines, limit)
        if len(shown) < len(lines):
            which = "those with NaN or infinity first" if any(line.broken.any() for line in shown) else "evenly spaced"
            notes[
                f"{len(shown)} of {len(lines)} lines of {kind} are drawn, {which}; --layers chooses, --limit "
                "draws more."
            ] = None
        if any(line.several for line in shown):
            notes["Where a layer has several records in a step, the one farthest from 0 is drawn."] = None
        columns, values, broken, width = gridded(shown, COLUMNS)
        if width > 1:
            notes[f"Each point of {kind} is the one farthest from 0 of {width} steps."] = None
        if stat in LOGARITHMIC and (values == 0).any():
            notes["0 is drawn below the smallest value."] = None
        whole = [_name(line, with_rank=several_ranks) for line in shown]
        if shortened(whole) != whole:
            notes["Names are shortened; `replay ls` prints them whole."] = None
        first = [f"  × {line.steps[line.broken][0]}" if line.broken.any() else "" for line in shown]
        rows = [name + mark for name, mark in zip(shortened(whole), first, strict=True)]
        steps = min(int(line.steps[0]) for line in shown), max(int(line.steps[-1]) for line in shown)
        panels.append(Panel(printable(kind), values, broken, rows, columns.tolist(), steps, whole))
    title = f"{stat} over the steps, {printable(trace.path.name)}"
    return Chart(form, title, stat, ("step", "layer"), stat in LOGARITHMIC, tuple(panels), tuple(notes))


def _chosen(lines: list[Timeline], limit: int) -> list[Timeline]:
    """Return at most so many lines, in their order: up to half of them those that broke first, then evenly spaced."""
    if len(lines) <= limit:
        return lines
    broken = [n for n, line in enumerate(lines) if line.broken.any()]
    broken.sort(key=lambda n: int(lines[n].steps[lines[n].broken][0]))
    kept = set(broken[: -(-limit // 2)])
    others = [n for n in range(len(lines)) if n not in kept]
    kept.update(others[place] for place in _evenly(len(others), limit - len(kept)))
    return [lines[n] for n in sorted(kept)]


def _name(line: Timeline, *, with_rank: bool) -> str:
    path = f" ({printable(line.path)})" if line.path else ""
    return (f"rank {line.rank}: " if with_rank else "") + (printable(line.layer) or "(root)") + path


def shortened(names: Sequence[str]) -> list[str]:
    """Return names as they are written beside lines, by what tells them apart.

    If one is long, what all begin and end with goes first, in whole parts of qualified names. Of each that is long
    still the end stays, which says most of a layer; or both ends where the ends are the same. Names that were different
    stay so: if need be they are numbered.
    """
    short = list(names)
    for way in (1, -1):  # beginnings, then ends, which are the beginnings of names read backwards
        if max(map(len, short), default=0) > _LONG and len(set(short)) > 1:
            turned = [name[::way] for name in short]
            least, most = min(turned), max(turned)  # what these two begin with, all do
            same = next((n for n, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), len(least))
            common = least[: least.rfind(".", 0, same) + 1]
            if common:
                short = [f"…{name.removeprefix(common)}"[::way] for name in turned]
    for cut in (_end, _ends):
        found = [cut(name) for name in short]
        if len(set(found)) == len(set(names)):
            return found
    return [f"{n} {name}" for n, name in enumerate(found)]


def title_name(layer: str) -> str:
    """Return the name of a layer as a title has it."""
    return _ends(printable(layer) or "(root)")


def _end(name: str) -> str:
    return name if len(name) <= _LONG else f"…{name[1 - _LONG :]}"


def _ends(name: str) -> str:
    return name if len(name) <= _LONG else f"{name[: _LONG // 2]}…{name[1 - _LONG // 2 :]}"


def _evenly(count: int, most: int) -> list[int]:
    """Return at most so many places out of `count`, evenly spaced, the first and the last among them."""
    places: list[int] = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()
    return places


def histogram(
    trace: Trace,
    layer: str,
    kind: str,
    *,
    call: int = 0,
    path: str = "",
    rank: int = 0,
    progress: Progress | None = None,
) -> Chart:
    """Return how the elements of a tensor are distributed: a column a step, a row a bin, the largest on top.

    A value is the share of the finite elements that lie in the bin. Of complex numbers it is the absolute values.

    Args:
        trace: where the tensors are.
        layer: whose.
        kind: of which kind.
        call: as in `Trace.tensor`.
        path: likewise.
        rank: likewise.
        progress: is told how many tensors were read, each of them twice, and how many are to be read.

    Raises:
        NotRecorded: no such tensor was kept.
        StepNotCommitted: the trace has no step.
    """
    key: dict[str, Any] = {"call": call, "path": path, "rank": rank}
    wanted = {**key, "layer": layer, "kind": kind}
    there_is = layer in trace.layers and kind in trace.kinds
    records = trace.records(layer, kind).select([*wanted, "step", "kept"]).to_pylist() if there_is else []
    there = [row["step"] for row in records if all(row[name] == value for name, value in wanted.items())]
    steps = [row["step"] for row in records if row["kept"] and all(row[name] == wanted[name] for name in wanted)]
    if not steps:
        last = trace.steps[-1:] or [0]
        trace.tensor((there or last)[-1], layer, kind, **key)  # says what is missing, and what is there
        raise NotRecorded(f"No tensor of {kind} of layer {layer!r} was kept in {trace.path}.")
    steps, notes = sorted(steps), []
    if len(steps) > HISTOGRAMS:
        notes.append(f"{HISTOGRAMS} of {len(steps)} steps are drawn, evenly spaced.")
        steps = [steps[n] for n in _evenly(len(steps), HISTOGRAMS)]
    read = 0

    def elements(step: int) -> Floats:
        nonlocal read
        read += 1
        if progress is not None:
            progress(read, 2 * len(steps))
        return real(trace.tensor(step, layer, kind, **key)).ravel()

    # Each tensor is read twice, so that memory holds one at a time.
    ends = np.array([(part.min(), part.max()) for part in map(finite, map(elements, steps)) if len(part)])
    edges = _edges(float(ends.min()), float(ends.max())) if len(ends) else _edges(0.0, 1.0)
    values = np.full((BINS, len(steps)), np.nan)
    broken = np.zeros(len(steps), bool)
    for column, tensor in enumerate(map(elements, steps)):
        known = finite(tensor)
        broken[column] = len(known) < len(tensor)
        counts = np.histogram(known, edges)[0][::-1]
        values[:, column] = np.where(counts, counts / max(1, len(known)), np.nan)
    rows = [f"{value:.3g}" for value in (edges[:-1] / 2 + edges[1:] / 2)[::-1]]
    marks = np.zeros(values.shape, bool)
    if broken.any():  # a row of their own, since they are in no bin
        values = np.vstack([np.full(len(steps), np.nan), values])
        marks = np.vstack([broken, marks])
        rows = [_BROKEN_ROW, *rows]
    title = f"{printable(kind)} of {title_name(layer)}, {printable(trace.path.name)}"
    panel = Panel("", values, marks, rows, steps, (steps[0], steps[-1]))
    return Chart("grid", title, "share of elements", ("step", "value"), True, (panel,), tuple(notes))


def _edges(low: float, high: float) -> Floats:
    if not low < high:
        room = max(0.5, abs(low) / 1000)
        low, high = low - room, high + room
    # Halves, since the difference of two large numbers may be infinite.
    return np.linspace(low / 2, high / 2, BINS + 1) * 2


def finite(values: Floats) -> Floats:
    """Return the elements that are neither NaN nor infinite."""
    return values[np.isfinite(values)]


def real(tensor: NDArray[Any]) -> Floats:
    """Return a tensor as real numbers: of complex ones the absolute values."""
    return np.abs(tensor).astype(np.float64) if tensor.dtype.kind == "c" else tensor.astype(np.float64)


def images(
    trace: Trace, step: int, layer: str, kind: str, *, sample: int = 0, call: int = 0, path: str = "", rank: int = 0
) -> Chart:
    """Return a tensor as images of its last two dimensions, one for each index of the third last.

    So a matrix is one image, feature maps are one a channel, attention is one a head.

    Args:
        trace: where it is.
        step: when.
        layer: whose.
        kind: of which kind.
        sample: which element of the leading dimension, where there are more than three.
        call: as in `Trace.tensor`.
        path: likewise.
        rank: likewise.

    Raises:
        BadQuery: the tensor has no such element, or none at all.
        NotRecorded: it is not there.
        StepNotCommitted: the step is not there.
    """
    tensor = real(trace.tensor(step, layer, kind, call=call, path=path, rank=rank))
    shape, what = tensor.shape, f"The {kind} of layer {layer!r} at step {step} has shape {tensor.shape}"
    notes = []
    if not tensor.size:
        raise BadQuery(f"{what}: there is no element to show.")
    if tensor.ndim > 3:
        if sample >= shape[0]:
            raise BadQuery(f"{what}; there is no sample {sample}.")
        first = (sample, *(0,) * (tensor.ndim - 4))
        notes.append(f"Drawn is [{', '.join(map(str, first))}] of the leading dimensions; --sample chooses.")
        tensor = tensor[first]
    elif sample:
        raise BadQuery(f"{what}; a sample is chosen where there are more than three dimensions.")
    stack = tensor.reshape((1,) * (3 - tensor.ndim) + tensor.shape)
    if len(stack) > PANELS:
        notes.append(f"The first {PANELS} of {len(stack)} images are drawn.")
        stack = stack[:PANELS]
    most = min(PIXELS, 2 * PIXELS // math.ceil(math.sqrt(len(stack))))
    height, width = (-(-n // most) for n in stack.shape[1:])
    if height > 1 or width > 1:
        notes.append(f"A point is the one farthest from 0 of {height} × {width} elements.")
    panels = []
    for number, image in enumerate(stack):
        values, broken = _pooled(image, height, width)
        rows, columns = (range(0, n, by) for n, by in zip(image.shape, (height, width), strict=True))
        name = str(number) if len(stack) > 1 else ""
        panels.append(Panel(name, values, broken, list(map(str, rows)), columns, (step, step)))
    shown = "×".join(map(str, shape)) or "scalar"
    title = f"{printable(kind)} of {title_name(layer)} at step {step}, {shown}, {printable(trace.path.name)}"
    return Chart("tiles", title, "value", ("", ""), False, tuple(panels), tuple(notes))


def _pooled(image: Floats, height: int, width: int) -> tuple[Floats, Bools]:
    """Return the finite element farthest from 0 of each block, NaN if it has none, and whether it has another."""
    rows, columns = (-(-n // by) for n, by in zip(image.shape, (height, width), strict=True))
    padded = np.zeros((rows * height, columns * width))
    padded[: image.shape[0], : image.shape[1]] = image
    blocks = padded.reshape(rows, height, columns, width).swapaxes(1, 2).reshape(rows, columns, -1)
    finite: Bools = np.isfinite(blocks)
    size = np.where(finite, np.abs(blocks), -1.0)
    most = np.take_along_axis(blocks, size.argmax(axis=2)[..., None], axis=2)[..., 0]
    broken: Bools = np.any(~finite, axis=2)
    return np.where(np.isfinite(most), most, np.nan), broken
