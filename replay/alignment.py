"""Which record of one trace is the partner of which of another, a step at a time.

Partners have the same step, layer, kind, call and path, where layers may be renamed, steps shifted and ranks set
against each other. A record that has none by its path is paired by the rest of the key, if it is the only one so in
both: one model returns a tensor, the other a tuple of one.

Records are read in windows of steps, so that memory does not follow the length of the traces. A window of them is made
Python's objects, which take ten times the memory of the table; of the table, several windows are read at once, since
the log has them in groups, which are read whole.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute

from replay.errors import BadQuery
from replay.filters import Globs, Names, Steps, check_globs, globs_of, matches, steps_condition
from replay.renaming import renamed
from replay.trace import Trace

Record = dict[str, Any]
"""A row of `Trace.records`."""

_WINDOW = 1 << 13
"""Records of a trace that are objects at a time, or those of one step, if they are more."""
_WINDOWS = 16
"""So many windows are read at once."""
_KEY = ("layer", "kind", "call", "path")


@dataclass(frozen=True)
class Pair:
    """A record of A, its partner in B, and the same record in a second run of A, if there is one.

    `order` is the place of the record in A's step.
    """

    order: int
    a: Record
    b: Record
    noise: Record | None


class Unpaired:
    """What has no partner in the other trace: a row a layer, kind and path, with how many records it stands for."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], list[int]] = {}

    def add(self, record: Record) -> None:
        """Take a record."""
        key = (record["rank"], record["layer"], record["kind"], record["path"])
        step = record["step"]
        entry = self._found.setdefault(key, [0, step, step])
        entry[:] = entry[0] + 1, min(entry[1], step), max(entry[2], step)

    def table(self) -> pa.Table:
        """Return columns rank, layer, kind, path, records, first_step, last_step."""
        rows = [(*key, *entry) for key, entry in self._found.items()]
        columns: Sequence[Any] = list(zip(*rows, strict=True)) or [()] * 7
        types = (pa.int32(), pa.string(), pa.string(), pa.string(), pa.int64(), pa.int64(), pa.int64())
        names = ["rank", "layer", "kind", "path", "records", "first_step", "last_step"]
        return pa.table([pa.array(c, t) for c, t in zip(columns, types, strict=True)], names=names)


@dataclass
class Alignment:
    """Two traces, set beside each other.

    Attributes:
        a: the trace whose order, names and steps count.
        b: the other.
        noise: a second run of A.
        names: of each layer of A the name that it has in B.
        layers: globs over the layers of A.
        kinds: globs over kinds.
        steps: those of A that both have.
        shift: step s of A is step s + shift of B.
        ranks: which rank of A is set beside which of B.
        only_a: records of A without a partner.
        only_b: records of B without a partner.
    """

    a: Trace
    b: Trace
    noise: Trace | None
    names: Mapping[str, str]
    layers: Globs
    kinds: Globs
    steps: list[int]
    shift: int
    ranks: dict[int, int]
    only_a: Unpaired = field(default_factory=Unpaired)
    only_b: Unpaired = field(default_factory=Unpaired)

    def pairs(self) -> Iterator[tuple[int, int, list[Pair]]]:
        """Yield step, rank of A and the pairs in the order of A's execution; steps rise, and ranks within them."""
        each = max(1, _WINDOW * len(self.a.steps) // max(1, self.a.count))
        chosen_b = self._layers_of_b()
        for steps, ours, theirs, again in self._windows(each):
            for step in steps:
                for rank_a, rank_b in self.ranks.items():
                    b = [r for r in theirs.get((step, rank_b), ()) if r["layer"] in chosen_b]
                    pairs = self._pair(ours.get((step, rank_a), []), b, again.get((step, rank_a), []))
                    yield step, rank_a, pairs

    def _windows(self, each: int) -> Iterator[tuple[list[int], "_ByStep", "_ByStep", "_ByStep"]]:
        """Yield so many steps, and what A, B and the second run of A have of them."""
        for begin in range(0, len(self.steps), each * _WINDOWS):
            several = self.steps[begin : begin + each * _WINDOWS]
            ours = _read(self.a, self.layers, self.kinds, several, 0)
            theirs = _read(self.b, None, self.kinds, several, self.shift)
            again = None if self.noise is None else _read(self.noise, self.layers, self.kinds, several, 0)
            for at in range(0, len(several), each):
                steps = several[at : at + each]
                second = {} if again is None else _by_step(again, steps, 0)
                yield steps, _by_step(ours, steps, 0), _by_step(theirs, steps, self.shift), second

    def _layers_of_b(self) -> set[str]:
        """The layers of B that the selected ones of A could meet, or that are selected by their own name."""
        chosen = {self.names[layer] for layer in self.a.layers if matches(layer, self.layers)}
        taken = {self.names[layer] for layer in self.a.layers}
        return chosen | {layer for layer in self.b.layers if layer not in taken and matches(layer, self.layers)}

    def _pair(self, ours: list[Record], theirs: list[Record], again: list[Record]) -> list[Pair]:
        second = {tuple(record[name] for name in _KEY): record for record in again}
        left = {tuple(record[name] for name in _KEY): record for record in theirs}
        found: dict[int, Record] = {}
        for order, record in enumerate(ours):
            key = (self.names[record["layer"]], record["kind"], record["call"], record["path"])
            partner = left.pop(key, None)
            if partner is not None:
                found[order] = partner
        if left and len(found) < len(ours):
            self._pair_whatever_the_path(ours, left, found)
        for order, record in enumerate(ours):
            if order not in found:
                self.only_a.add(record)
        for record in left.values():
            self.only_b.add(record)
        return [
            Pair(order, ours[order], found[order], second.get(tuple(ours[order][name] for name in _KEY)))
            for order in sorted(found)
        ]

    def _pair_whatever_the_path(
        self, ours: list[Record], left: dict[tuple[Any, ...], Record], found: dict[int, Record]
    ) -> None:
        one = _single((self.names[r["layer"]], r["kind"], r["call"], n) for n, r in enumerate(ours) if n not in found)
        other = _single(left)
        for key in one.keys() & other.keys():
            if not key[1].startswith("param") and key[1] != "update":
                found[one[key]] = left.pop((*key, other[key]))


def _single(keys: Iterable[tuple[Any, ...]]) -> dict[tuple[Any, ...], Any]:
    """The keys without their last part that occur once, with that part."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for *key, last in keys:
        found.setdefault(tuple(key), []).append(last)
    return {key: lasts[0] for key, lasts in found.items() if len(lasts) == 1}


def _read(trace: Trace, layers: Globs, kinds: Globs, steps: Sequence[int], shift: int) -> pa.Table:
    """Return the records of some steps of A, and perhaps of others between them; a trace may lack what another has."""
    wanted = [step + shift for step in steps]
    close = wanted[-1] - wanted[0] < 2 * len(wanted)
    chosen: Steps = slice(wanted[0], wanted[-1] + 1) if close else wanted
    # What only the other trace has is nothing to ask this one for.
    layers, kinds = (
        globs and tuple(glob for glob in globs if any(matches(name, (glob,)) for name in names))
        for names, globs in ((trace.layers, layers), (trace.kinds, kinds))
    )
    return trace.records(layers, kinds, chosen)


_ByStep = dict[tuple[int, int], list[Record]]


def _by_step(table: pa.Table, steps: Sequence[int], shift: int) -> _ByStep:
    """Return the records of some steps by step of A and rank, in the order of execution."""
    known = {step + shift for step in steps}
    found: _ByStep = {}
    at = pa.compute.field("step")
    for record in table.filter((at >= steps[0] + shift) & (at <= steps[-1] + shift)).to_pylist():
        if record["step"] in known:
            found.setdefault((record["step"] - shift, record["rank"]), []).append(record)
    return found


def align(
    a: Trace,
    b: Trace,
    *,
    layers: Names,
    kinds: Names,
    steps: Steps,
    rules: Mapping[str, str],
    noise: Trace | None,
    shift: int,
    ranks: tuple[int, int] | None,
) -> tuple[Alignment, list[str]]:
    """Set two traces beside each other; also say in words which steps and ranks only one of them has.

    Raises:
        BadQuery: there is nothing to compare, or a filter or the map cannot be understood.
    """
    for trace in (a, b, *([] if noise is None else [noise])):
        if not trace.steps:
            raise BadQuery(f"{trace.path} has no committed step yet, so there is nothing to compare.")
    globs = globs_of(layers)
    names = renamed(a.layers, rules)
    check_globs("layer", globs, [*a.layers, *b.layers], a.path)
    check_globs("kind", globs_of(kinds), a.kinds, a.path)
    chosen = [layer for layer in a.layers if matches(layer, globs)]
    if not {names[layer] for layer in chosen} & set(b.layers):
        raise BadQuery(_no_layer_in_common(a, b, chosen))
    beside, said = _ranks(a, b, ranks)
    common, also_said = _steps(a, b, steps, shift)
    found = Alignment(a, b, noise, names, globs, globs_of(kinds), common, shift, beside)
    return found, said + also_said


def _no_layer_in_common(a: Trace, b: Trace, chosen: list[str]) -> str:
    ours, theirs = (", ".join(map(repr, layers[:3])) for layers in (chosen, b.layers))
    hint = "'old.*=new.*'"
    for layer in b.layers:
        prefix = layer.removesuffix(chosen[0]) if chosen and chosen[0] else ""
        if prefix.endswith(".") and {prefix + name for name in chosen} & set(b.layers):
            hint = f"'*={prefix}*'"
        elif chosen and chosen[0].endswith("." + layer):
            hint = f"'{chosen[0].removesuffix(layer)}*=*'"
        else:
            continue
        break
    return (
        f"No layer of {a.path} is in {b.path}: one has {ours}, the other {theirs}. "
        f"Say how layers are called there: map={{…}}, or --map {hint}."
    )


def _ranks(a: Trace, b: Trace, ranks: tuple[int, int] | None) -> tuple[dict[int, int], list[str]]:
    if ranks is not None:
        for trace, rank in zip((a, b), ranks, strict=True):
            if rank not in trace.ranks:
                raise BadQuery(f"{trace.path} has no rank {rank}; it has {', '.join(map(str, trace.ranks))}.")
        return {ranks[0]: ranks[1]}, []
    common = sorted(set(a.ranks) & set(b.ranks))
    if not common:
        raise BadQuery(
            f"{a.path} has ranks {a.ranks}, {b.path} has {b.ranks}. "
            "ranks=(of A, of B), or --ranks, says which to compare."
        )
    said = [
        f"rank {rank} is only in {name}"
        for name, trace in (("A", a), ("B", b))
        for rank in trace.ranks
        if rank not in common
    ]
    return {rank: rank for rank in common}, said


def _steps(a: Trace, b: Trace, steps: Steps, shift: int) -> tuple[list[int], list[str]]:
    ours = a.steps
    table = pa.table({"step": pa.array(ours, pa.int64())})
    condition = steps_condition(steps, ours[-1])
    if condition is not None:
        table = table.filter(condition)
    chosen = table["step"].to_pylist()
    if not chosen:
        raise BadQuery(f"{a.path} has none of the steps {steps}; it has {ours[0]} to {ours[-1]}.")
    theirs = {step - shift for step in b.steps}
    common = [step for step in chosen if step in theirs]
    if not common:
        raise BadQuery(
            f"The traces have no step in common: {a.path} has {_span(chosen)}, {b.path} has {_span(b.steps)}. "
            "shift=N (--shift N) compares step s of the first with step s + N of the second."
        )
    said = []
    if len(common) < len(chosen):
        said.append(f"only in A: {_span([step for step in chosen if step not in theirs])}")
    if steps is None and (more := sorted(theirs - set(ours))):
        said.append(f"only in B: {_span([step + shift for step in more])}")
    return common, said


def _span(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
