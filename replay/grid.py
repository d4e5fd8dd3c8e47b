"""Records as rules look at them: a grid of steps and places for each kind, NaN where nothing was recorded.

A place is where tensors come from, step after step: (rank, layer, kind, path). Several records of a place in a step
(calls of a shared module, micro-batches) are joined as if their tensors were one. So a rule is arithmetic on arrays of
shape `(steps, places)`, whatever the model does, and no rule loops over records.

Values of tensors with NaN or infinity in them are NaN as well, since they describe the finite rest only. Gradients
that still have the factor of a GradScaler in them are divided by it. Where a place has records of training and of
evaluation, those of training count.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.cells import COUNTS, Cells
from replay.documents import read_scalars
from replay.errors import BadQuery
from replay.format import MODES, STATISTICS
from replay.passes import Columns, Passes
from replay.series import Bools, Floats
from replay.trace import Trace

BACKGROUND = 200
"""How many recorded steps before `since` are read, to compare with."""

_SCALED_KINDS = ("grad_output", "grad_input", "param_grad_acc")
_KNOWN_BYTES = 128 << 20
"""Of the arrays that rules were given, so much is kept for the next rule."""


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

    Args:
        trace: the trace. It is not to be refreshed while rules look.
        since: the step; None for all.
        told: called again and again while records are read.

    Attributes:
        trace: the trace.
        steps: shape `(steps,)`: the steps in which something was recorded.
        earlier: how many recorded steps there are before these.
    """

    LOSSES = ("loss", "train_loss", "train/loss", "training_loss")
    """The names by which a loss is known; the first that was logged counts."""

    def __init__(self, trace: Trace, since: int | None = None, told: Callable[[], None] = lambda: None) -> None:
        self.trace = trace
        self.earlier, self.steps = trace.steps_since(since, BACKGROUND)
        self._begin = int(self.steps[0]) if len(self.steps) else 0
        self._passes = Passes(trace, slice(self._begin, None) if self.earlier else None, told)
        self._modules = {rank: {m["name"]: m for m in trace.modules(rank)} for rank in trace.ranks}
        self._grids: dict[str, Grid] = {}
        self._known: dict[tuple[str, str], Floats] = {}  # the last that was asked for at its end

    @cached_property
    def table(self) -> pa.Table:
        """The records, in the order of execution, as `Trace.records` returns them: all of them, in memory."""
        return self._passes.table()

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

    @cached_property
    def _places(self) -> "_Places":
        return _places_of(self._passes, self._modules)

    @property
    def places(self) -> list[Place]:
        """All places, in the order of execution, rank after rank."""
        return self._places.places

    @cached_property
    def place_of_row(self) -> NDArray[np.int64]:
        """For each row of the table the number of its place."""
        parts = [self._places.of_origin[part["origin"]] for part in self._passes.read([])]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    @property
    def first_row(self) -> NDArray[np.int64]:
        """For each place the number of its first row in the table."""
        return self._places.first_row

    @property
    def count(self) -> int:
        """How many records there are."""
        return int(self._places.rows.sum())

    @property
    def rows_of_place(self) -> NDArray[np.int64]:
        """For each place how many rows of the table are of it."""
        return self._places.rows

    def collect(self, columns: Sequence[str], take: Callable[[Columns], Columns]) -> Columns:
        """Return what a function takes of all records, which are given to it in parts.

        Args:
            columns: of the table, those of numbers.
            take: is given arrays of shape `(records,)`: these columns and `rank`, `step`, `row`, the number of the row
                in the table, and `place`, the number of the place. It returns arrays of the same names in each part.

        Returns:
            What it returned, the parts of each array joined.
        """
        found: list[Columns] = []
        row = 0
        for part in self._passes.read(["rank", "step", *columns]):
            place, count = self._places.of_origin[part["origin"]], len(part["origin"])
            found.append(take({**part, "row": np.arange(row, row + count), "place": place}))
            row += count
        return {name: np.concatenate([part[name] for part in found]) for name in found[0]} if found else {}

    def _make_grid(self, kind: str, places: list[int]) -> Grid:
        column_of = np.full(len(self.places) + 1, -1, np.int64)  # the last is of origins without a record
        column_of[places] = np.arange(len(places))
        trained = np.array([*(place.trained for place in self.places), False])
        place = self._places.of_origin
        cells = Cells(self._passes, kind, self.steps, column_of[place], trained[place])
        chosen = [self.places[n] for n in places]

        def scale() -> Floats | None:
            return self._scale(chosen) if kind in _SCALED_KINDS else None

        def value(name: str) -> Floats:
            if name == "scale":
                return np.ones(cells.shape) if (factor := scale()) is None else factor
            found = self._known.pop((kind, name), None)
            if found is None:
                found = cells[name]
                if name not in COUNTS and (factor := scale()) is not None:
                    found = found / factor
                found.setflags(write=False)  # the next rule is given the same array
            self._known[kind, name] = found
            while len(self._known) > 1 and sum(each.nbytes for each in self._known.values()) > _KNOWN_BYTES:
                del self._known[next(iter(self._known))]
            return found

        return Grid(kind, self.steps, chosen, value)

    def _scale(self, places: list[Place]) -> Floats | None:
        """Return the factors that are in gradients; None if there are none."""
        try:
            known = self.scalar("hookrec/grad_scale")
        except NotApplicable:
            return None
        scale = np.ones((len(self.steps), len(places)))
        for n, place in enumerate(places):
            if place.rank in known:
                _, steps, values = known[place.rank]
                at = np.clip(np.searchsorted(steps, self.steps, side="right") - 1, 0, None)
                scale[:, n] = np.where(values[at] > 0, values[at], 1.0)
        return scale


@dataclass(frozen=True)
class _Places:
    """The places, by number; for each its first row and how many it has; for each origin its place, -1 if none."""

    places: list[Place]
    first_row: NDArray[np.int64]
    rows: NDArray[np.int64]
    of_origin: NDArray[np.int64]


def _places_of(passes: Passes, modules: Mapping[int, Mapping[str, dict[str, Any]]]) -> _Places:
    origins = passes.origins
    first, rows = np.full(len(origins), -1, np.int64), np.zeros(len(origins), np.int64)
    trained = np.zeros(len(origins), bool)
    begin = 0
    for part in passes.read(["mode"]):
        origin = part["origin"]
        new = np.flatnonzero(first[origin] < 0)
        if len(new):
            which, at = np.unique(origin[new], return_index=True)
            first[which] = begin + new[at]
        trained[origin[np.equal(part["mode"], MODES.index("train"))]] = True
        rows += np.bincount(origin, minlength=len(origins))
        begin += len(origin)
    there = np.flatnonzero(first >= 0)
    there = there[np.argsort(first[there])]
    numbers: dict[Any, int] = {}
    of_origin = np.full(len(origins), -1, np.int64)
    of_origin[there] = [numbers.setdefault(origins[n][:4], len(numbers)) for n in there]
    is_trained = np.bincount(of_origin[there], trained[there], len(numbers)) > 0
    heads = there[np.unique(of_origin[there], return_index=True)[1]]  # of each place the first origin
    rank_begins: dict[int, int] = {}
    places = []
    for number, head in enumerate(heads):
        rank, layer, kind, path, dtype = origins[head]
        order = int(first[head]) - rank_begins.setdefault(rank, int(first[head]))
        module = modules[rank].get(layer, {})
        places.append(Place(rank, layer, kind, path, dtype, order, bool(is_trained[number]), module))
    count = np.bincount(of_origin[there], rows[there], len(numbers)).astype(np.int64)
    return _Places(places, first[heads], count, of_origin)
