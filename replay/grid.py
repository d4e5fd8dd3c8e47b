"""Records as rules look at them: a grid of steps and places for each kind, NaN where nothing was recorded.

A place is where tensors come from, step after step: (rank, layer, kind, path). Several records of a place in a step
(calls of a shared module, micro-batches) are joined as if their tensors were one. So a rule is arithmetic on arrays of
shape `(steps, places)`, whatever the model does, and no rule loops over records.

Values of tensors with NaN or infinity in them are NaN as well, since they describe the finite rest only. Gradients
that still have the factor of a GradScaler in them are divided by it. Where a place has records of training and of
evaluation, those of training count.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.documents import read_scalars
from replay.errors import BadQuery
from replay.format import MODES, STATISTICS
from replay.series import Bools, Floats
from replay.trace import Trace

BACKGROUND = 200
"""How many recorded steps before `since` are read, to compare with."""

_COUNTS = ("numel", "n_nan", "n_posinf", "n_neginf", "n_zero")
_SCALED_KINDS = ("grad_output", "grad_input", "param_grad_acc")


class NotApplicable(Exception):
    """A rule cannot judge this trace; the message says what it lacks."""


@dataclass(frozen=True)
class Place:
    """Where tensors come from, step after step.

    Attributes:
        dtype: of the first record.
        order: position of the first record among those of the rank, which is the order of execution.
        trained: whether it has records of training, not of evaluation alone.
        module: the layer's entry of `model.json`; empty if it has none.
    """

    rank: int
    layer: str
    kind: str
    path: str
    dtype: str
    order: int
    trained: bool
    module: dict[str, Any] = field(compare=False, hash=False)

    @property
    def class_name(self) -> str:
        """The class of the layer, without its module."""
        return str(self.module.get("class", "")).rpartition(".")[2]

    @property
    def parameter(self) -> dict[str, Any]:
        """What `model.json` says of the parameter that the path names; empty if it is none."""
        return next((p for p in self.module.get("parameters", ()) if p.get("name") == self.path), {})

    def __str__(self) -> str:
        name = f"layer {self.layer!r}" if self.layer else "the root"
        return f"{name} ({self.path})" if self.path and self.kind.startswith(("param", "update")) else name


@dataclass(frozen=True)
class Seen:
    """What a rule has seen, before the rule's name, severity and advice are added.

    Attributes:
        layer: None where it is about no layer.
        kind: of the records; the name of the scalar where it is about no layer.
    """

    rank: int
    layer: str | None
    kind: str | None
    first_step: int
    last_step: int
    message: str


def others(count: int, what: str) -> str:
    """Return a sentence that says of how many more the same is so; nothing if of none."""
    return f" The same is so of {count} other {what}{'s' if count > 1 else ''}." if count else ""


class Grid:
    """The records of one kind. Made by `Records.grid`.

    `grid["l2"]` is an array of shape `(steps, places)`; the names are those of the statistics, and "scale" for the
    factor of the GradScaler that gradients have been divided by.

    Attributes:
        kind: of the records.
        steps: shape `(steps,)`: those in which something was recorded of any kind.
        places: in the order of execution, rank after rank.
    """

    def __init__(
        self, kind: str, steps: NDArray[np.int64], places: Sequence[Place], value: Callable[[str], Floats]
    ) -> None:
        self.kind = kind
        self.steps = steps
        self.places = list(places)
        self._value = value

    def __getitem__(self, name: str) -> Floats:
        if name not in (*STATISTICS, "scale"):
            raise BadQuery(f"There is no statistic {name!r}; there are {', '.join(STATISTICS)}, and scale.")
        return self._value(name)

    @property
    def shape(self) -> tuple[int, int]:
        """How many steps, how many places."""
        return len(self.steps), len(self.places)

    def select(self, wanted: Callable[[Place], bool]) -> "Grid":
        """Return the places for which a condition holds."""
        return self._part([n for n, place in enumerate(self.places) if wanted(place)])

    def by_rank(self) -> "Iterator[Grid]":
        """Yield a grid for each rank."""
        columns: dict[int, list[int]] = {}
        for n, place in enumerate(self.places):
            columns.setdefault(place.rank, []).append(n)
        for _, part in sorted(columns.items()):
            yield self._part(part)

    def _part(self, columns: list[int]) -> "Grid":
        return Grid(self.kind, self.steps, [self.places[n] for n in columns], lambda name: self[name][:, columns])

    def column(self, like: Place) -> int | None:
        """Return the column of the same rank, layer and path; None if there is none."""
        return self._columns.get((like.rank, like.layer, like.path))

    @cached_property
    def _columns(self) -> dict[tuple[int, str, str], int]:
        return {(place.rank, place.layer, place.path): n for n, place in enumerate(self.places)}

    def when(self, steps: Bools | np.bool_) -> str:
        """Return in words at which of the steps it was so."""
        when = self.steps[np.asarray(steps)]
        return f"at step {when[0]}" if when[0] == when[-1] else f"from step {when[0]} to {when[-1]}"

    def seen(self, column: int | np.integer[Any], steps: Bools | np.bool_, message: str) -> Seen:
        """Return what was seen at a place.

        Args:
            column: number of the place.
            steps: shape `(steps,)`: where it was so.
            message: a sentence.
        """
        place, when = self.places[column], self.steps[np.asarray(steps)]
        return Seen(place.rank, place.layer, place.kind, int(when[0]), int(when[-1]), message)


class Records:
    """What a rule is given: the records of a trace from a step on, with some steps before it as background.

    Attributes:
        trace: the trace.
        steps: shape `(steps,)`: the steps in which something was recorded.
        earlier: how many recorded steps there are before these.
        table: the records, in the order of execution, as `Trace.records` returns them.
    """

    LOSSES = ("loss", "train_loss", "train/loss", "training_loss")
    """The names by which a loss is known; the first that was logged counts."""

    def __init__(self, trace: Trace, since: int | None = None) -> None:
        self.trace = trace
        self.earlier, self.steps = trace.steps_since(since, BACKGROUND)
        begin = int(self.steps[0]) if len(self.steps) else 0
        self.table = trace.records(steps=slice(begin, None)) if self.earlier else trace.records()
        self._begin = begin
        self._modules = {rank: {m["name"]: m for m in trace.modules(rank)} for rank in trace.ranks}
        self._grids: dict[str, Grid] = {}

    def modules(self, rank: int) -> dict[str, dict[str, Any]]:
        """Return the modules of `model.json` by name."""
        return self._modules[rank]

    def has(self, *kinds: str) -> bool:
        """Whether all these kinds were recorded."""
        return set(kinds) <= {place.kind for place in self.places}

    def need_steps(self, count: int) -> None:
        """Raise NotApplicable unless so many steps were recorded."""
        if len(self.steps) < count:
            raise NotApplicable(f"it needs {count} recorded steps, and there are {len(self.steps)}")

    def grid(self, kind: str) -> Grid:
        """Return the records of a kind as a grid.

        Raises:
            NotApplicable: the kind was not recorded.
        """
        if kind not in self._grids:
            places = [n for n, place in enumerate(self.places) if place.kind == kind]
            if not places:
                there = ", ".join(dict.fromkeys(place.kind for place in self.places)) or "none"
                raise NotApplicable(f"it needs records of kind {kind}; recorded were: {there}")
            self._grids[kind] = self._make_grid(kind, places)
        return self._grids[kind]

    def warm(self, count: int) -> Bools:
        """Return, of shape `(steps,)`, which steps come after the first `count` recorded steps of the trace."""
        return np.arange(len(self.steps)) + self.earlier >= count

    def scalar(self, *names: str) -> dict[int, tuple[str, NDArray[np.int64], Floats]]:
        """Return by rank the name, steps and values of the first of these scalars that was logged; the last of a step.

        Raises:
            NotApplicable: none was.
        """
        found: dict[int, tuple[str, NDArray[np.int64], Floats]] = {}
        for rank, scalars in self._scalars.items():
            name = next((name for name in names if name in scalars), None)
            if name is not None:
                steps = np.array(sorted(scalars[name]), np.int64)
                found[rank] = name, steps, np.array([scalars[name][int(step)] for step in steps], np.float64)
        if not found:
            how = "a GradScaler gives" if names[0].startswith("hookrec/") else f"rec.log({names[0]}=…) records"
            raise NotApplicable(f"it needs the scalar {' or '.join(names)}, which {how}")
        return found

    @cached_property
    def _scalars(self) -> dict[int, dict[str, dict[int, float]]]:
        found: dict[int, dict[str, dict[int, float]]] = {}
        for rank, directory in self.trace.directories.items():
            scalars = found.setdefault(rank, {})
            for step, _, name, value in read_scalars(directory, self._begin, self.trace.attempt):
                if step >= self._begin:
                    scalars.setdefault(name, {})[step] = value
        return found

    # Places and cells.

    def _codes(self, column: str) -> tuple[NDArray[np.int64], list[str]]:
        """Return a column of strings as numbers, and the strings."""
        array = self.table[column].combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # no row at all
            array = array.chunk(0) if array.num_chunks else pa.array([], pa.string()).dictionary_encode()
        numbers: dict[str, int] = {}
        # The dictionary has an entry a stream, so the same string stands in it several times.
        number_of = np.array(
            [numbers.setdefault(name, len(numbers)) for name in array.dictionary.to_pylist()], np.int64
        )
        return number_of[array.indices.to_numpy()] if len(array) else np.empty(0, np.int64), list(numbers)

    @cached_property
    def _in_training(self) -> Bools:
        mode = self.table["mode"].combine_chunks()
        numbers: NDArray[np.int64] = np.asarray(mode.indices if len(self.table) else [], np.int64)
        return np.equal(numbers, MODES.index("train"))

    @cached_property
    def _rows(self) -> tuple[NDArray[np.int64], list[Place], NDArray[np.int64]]:
        rank = self.table["rank"].to_numpy().astype(np.int64)
        names = [self._codes(column) for column in ("layer", "kind", "path")]
        code = rank
        for numbers, strings in names:
            code = code * max(1, len(strings)) + numbers
        _, first, place = np.unique(code, return_index=True, return_inverse=True)
        order = np.argsort(first)
        number = np.empty(len(order), np.int64)
        number[order] = np.arange(len(order))
        dtypes, dtype_names = self._codes("dtype")
        trained = np.zeros(len(order), bool)
        trained[place[self._in_training]] = True
        rank_begins = {int(n): int(np.argmax(rank == n)) for n in np.unique(rank)}
        places = []
        for n in order:
            row = first[n]
            layer, kind, path = (strings[numbers[row]] for numbers, strings in names)
            module = self._modules[int(rank[row])].get(layer, {})
            position = int(row) - rank_begins[int(rank[row])]
            dtype = dtype_names[dtypes[row]]
            places.append(Place(int(rank[row]), layer, kind, path, dtype, position, bool(trained[n]), module))
        return number[place], places, first[order]

    @property
    def places(self) -> list[Place]:
        """All places, in the order of execution, rank after rank."""
        return self._rows[1]

    @property
    def place_of_row(self) -> NDArray[np.int64]:
        """For each row of the table the number of its place."""
        return self._rows[0]

    @property
    def first_row(self) -> NDArray[np.int64]:
        """For each place the number of its first row in the table."""
        return self._rows[2]

    def _make_grid(self, kind: str, places: list[int]) -> Grid:
        number, all_places = self.place_of_row, self.places
        column_of = np.full(len(all_places), -1, np.int64)
        column_of[places] = np.arange(len(places))
        column = column_of[number]
        trained = np.array([place.trained for place in all_places])
        rows = np.flatnonzero((column >= 0) & (self._in_training | ~trained[number]))
        step = np.searchsorted(self.steps, self.table["step"].to_numpy()[rows])
        cells = _Cells(self.table, rows, step * len(places) + column[rows], (len(self.steps), len(places)))
        chosen = [all_places[n] for n in places]
        scale = self._scale(chosen) if kind in _SCALED_KINDS else np.ones((len(self.steps), len(places)))
        known: dict[str, Floats] = {}

        def value(name: str) -> Floats:
            if name == "scale":
                return scale
            if name not in known:
                known[name] = cells[name] if name in _COUNTS else cells[name] / scale
                known[name].setflags(write=False)  # the next rule is given the same array
            return known[name]

        return Grid(kind, self.steps, chosen, value)

    def _scale(self, places: list[Place]) -> Floats:
        scale = np.ones((len(self.steps), len(places)))
        with contextlib.suppress(NotApplicable):
            known = self.scalar("hookrec/grad_scale")
            for n, place in enumerate(places):
                if place.rank in known:
                    _, steps, values = known[place.rank]
                    at = np.clip(np.searchsorted(steps, self.steps, side="right") - 1, 0, None)
                    scale[:, n] = np.where(values[at] > 0, values[at], 1.0)
        return scale


class _Cells:
    """The statistics of some rows, those of one cell joined as if their tensors were one."""

    def __init__(
        self, table: pa.Table, rows: NDArray[np.int64], cell: NDArray[np.int64], shape: tuple[int, int]
    ) -> None:
        self._table = table
        self._rows = rows
        self._cell = cell
        self._shape = shape
        count = np.bincount(cell, minlength=shape[0] * shape[1])
        self._empty = count == 0
        self._single = bool(np.all(count <= 1))

    def __getitem__(self, name: str) -> Floats:
        values = self._table[name].to_numpy()[self._rows].astype(np.float64)
        grid = np.zeros(self._empty.size)
        if name in _COUNTS:
            np.add.at(grid, self._cell, values)
        elif self._single:
            grid[self._cell] = values
        else:
            grid = self._joined(name, values)
        grid[self._empty] = np.nan
        if name not in _COUNTS:
            grid[self._not_finite] = np.nan
        return grid.reshape(self._shape)

    @cached_property
    def _not_finite(self) -> Bools:
        bad = sum(self._table[name].to_numpy()[self._rows] for name in _COUNTS[1:4])
        return np.bincount(self._cell, np.asarray(bad, np.float64), self._empty.size) > 0

    def _joined(self, name: str, values: Floats) -> Floats:
        size = self._empty.size
        numel = self._table["numel"].to_numpy()[self._rows].astype(np.float64)
        if name == "min":
            grid = np.full(size, np.inf)
            np.fmin.at(grid, self._cell, values)
        elif name in ("max", "absmax"):
            grid = np.full(size, -np.inf)
            np.fmax.at(grid, self._cell, values)
        elif name == "l2":
            grid = np.zeros(size)
            np.hypot.at(grid, self._cell, np.where(numel > 0, values, 0))
        else:
            # A tensor without elements has no mean, and no weight either.
            mean = np.where(numel > 0, self._table["mean"].to_numpy()[self._rows], 0)
            total = np.maximum(np.bincount(self._cell, numel, size), 1)
            grid = np.bincount(self._cell, numel * mean, size) / total
            if name == "std":
                apart = mean - grid[self._cell]
                square = np.where(numel > 0, values, 0) ** 2 + apart**2
                grid = np.sqrt(np.bincount(self._cell, numel * square, size) / total)
        return grid
