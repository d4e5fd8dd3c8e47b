"""Which layer differs first between two traces, and by how much.

All pairs of a step are measured before one is judged, since what counts as rounding depends on the other records of
the step. Of a step only its measures stay in memory; the tensors go through it a pair at a time.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import replay.trace
from replay.alignment import Alignment, Pair, Record, align
from replay.diff_rows import Rows
from replay.distance import Distance, distance, rms_of, statistics_distance
from replay.divergence import Divergence, first_divergence
from replay.errors import BadQuery, TraceDamaged
from replay.filters import Names, Steps
from replay.layout import arrangements, matching_rows
from replay.renaming import Map, rules_of
from replay.tolerance import Bounds, Tolerance, error_of, floors_of
from replay.trace import Trace

_OF_PARAMETERS = ("param", "param_grad", "param_grad_acc", "update")
_REARRANGED = 0.01
"""Relative difference from which on rows or axes are looked for in another order: rounding does not make it."""


@dataclass(frozen=True)
class Diff:
    """What differs between two traces. Made by `diff`.

    Attributes:
        first: the first record, in the order of A's execution, that is out of tolerance; None if there is none.
        rows: a row a compared record, in the order of A's execution. Columns rank, step, layer_a, layer_b, kind,
            call, path, dtype_a, dtype_b; compared ("tensors", "statistics", or "shapes" where these cannot be
            compared); max_abs, relative (l2(a - b) / l2(a)), cosine, max_ulp, where and unlike as in
            `replay.distance.Distance`; error and tolerance as in `replay.tolerance`; within; note. Empty if they
            were not asked for.
        compared: how many records were compared.
        worst: of each layer, kind and path its worst record, those out of tolerance first, then by the size of the
            error: some columns of `rows`, `records`, how many were compared, and `outside`, how many are out of
            tolerance.
        only_a: what is only in A, a row a rank, layer, kind and path: how many records, the first and the last step.
        only_b: likewise what is only in B, by B's names and steps.
        damaged: how many tensors could not be read, and were compared by their statistics.
        notes: what else is to be known: steps that only one has, other dtypes, tensors that could not be read.
    """

    first: Divergence | None
    rows: pa.Table
    compared: int
    worst: list[dict[str, Any]]
    only_a: pa.Table
    only_b: pa.Table
    damaged: int
    notes: list[str]

    @property
    def equal(self) -> bool:
        """Whether every record has a partner, could be read, and is within tolerance, in the steps that both have."""
        return self.first is None and not len(self.only_a) and not len(self.only_b) and not self.damaged


def diff(
    a: Trace | str | Path,
    b: Trace | str | Path | None = None,
    *,
    layers: Names = None,
    kinds: Names = None,
    steps: Steps = None,
    map: Map = None,
    tolerance: Tolerance = None,
    noise: Trace | str | Path | None = None,
    ranks: tuple[int, int] | None = None,
    shift: int = 0,
    pair: str | None = None,
    stop: bool = False,
    rows: bool = True,
    progress: Callable[[float], None] | None = None,
) -> Diff:
    """Compare two traces record by record.

    Args:
        a: a trace, or its path. Its order, steps and names count.
        b: another; None to compare ranks of A with each other.
        layers: glob or globs over A's layers.
        kinds: glob or globs over kinds.
        steps: a step, a slice of steps, or several, of A.
        map: how layers of A are called in B, see `replay.renaming.renamed`: a mapping, "old=new" strings, or a file.
        tolerance: T of `replay.tolerance`, for all floating dtypes or by dtype.
        noise: a second run of A. What differs between the two is no divergence.
        ranks: which rank of A is compared with which of B; else each with the same.
        shift: compare step s of A with step s + shift of B.
        pair: "rows" to pair the samples of a batch by their values where they are in another order.
        stop: end after the step of the first divergence.
        rows: whether to return a row a compared record. Without, memory does not follow the traces.
        progress: is told how much is done, from 0 to 1.

    Raises:
        BadQuery: there is nothing to compare, the batches are in another order, or an argument cannot be understood.
        TraceNotFound: there is no trace at a path.
        TraceDamaged: the log of a trace cannot be read. A tensor that cannot is compared by its statistics.
    """
    if b is None and ranks is None:
        raise BadQuery(
            "Two traces are compared, or two ranks of one: name B, or --ranks 0,1 (in Python: ranks=(0, 1))."
        )
    if pair not in (None, "rows"):
        raise BadQuery(f"pair is {pair!r}; it is None, or 'rows' to pair the samples of a batch by their values.")
    with contextlib.ExitStack() as stack:

        def opened(trace: Trace | str | Path) -> Trace:
            return trace if isinstance(trace, Trace) else stack.enter_context(replay.trace.open(trace))

        left = opened(a)
        right = left if b is None else opened(b)
        again = None if noise is None else opened(noise)
        alignment, notes = align(
            left,
            right,
            layers=layers,
            kinds=kinds,
            steps=steps,
            rules=rules_of(map),
            noise=again,
            shift=shift,
            ranks=ranks,
        )
        return _Comparison(alignment, tolerance, by_rows=pair == "rows").run(notes, progress, stop=stop, keep=rows)


@dataclass(frozen=True)
class _Measured:
    """A pair, how far it is apart, and how far A is from its second run."""

    pair: Pair
    distance: Distance | None
    error: float
    noise: float | None
    compared: str
    note: str
    dtypes: tuple[str, str]


class _Comparison:
    """One comparison of two aligned traces."""

    def __init__(self, alignment: Alignment, tolerance: Tolerance, *, by_rows: bool) -> None:
        self._alignment = alignment
        self._by_rows = by_rows
        self._bounds = {rank: Bounds(tolerance) for rank in alignment.ranks}
        self._damaged: dict[tuple[Any, ...], str] = {}
        self._dtypes: dict[tuple[str, str], str] = {}

    def run(self, notes: list[str], progress: Callable[[float], None] | None, *, stop: bool, keep: bool) -> Diff:
        first: tuple[int, int, Divergence] | None = None
        rows = Rows(keep=keep)
        total = len(self._alignment.steps) * len(self._alignment.ranks)

        for number, (step, rank, pairs) in enumerate(self._alignment.pairs()):
            if first is not None and stop and step > first[0]:
                break
            told = None if progress is None else _part(progress, number, total, len(pairs))
            found = self._judge(step, rank, list(self._measure(step, rank, pairs, told)))
            divergence = first_divergence(found, self._is_bare)
            if divergence is not None:
                order = next(row["order"] for row in found if not row["within"])
                if first is None or (step, order) < first[:2]:
                    self._refuse_other_order(divergence, pairs)
                    first = step, order, divergence
            rows.add(found)
        if not rows.count:
            raise BadQuery(
                "No record of A has a partner in B: the layers have other names (map=, --map 'A=B'), or other kinds "
                "were recorded. replay ls shows both."
            )
        return Diff(
            first=None if first is None else first[2],
            rows=rows.table(),
            compared=rows.count,
            worst=rows.worst(),
            only_a=self._alignment.only_a.table(),
            only_b=self._alignment.only_b.table(),
            damaged=len(self._damaged),
            notes=notes + self._notes(rows.compared),
        )

    def _measure(self, step: int, rank: int, pairs: list[Pair], told: Callable[[], None] | None) -> Iterator[_Measured]:
        loaded = step == self._alignment.steps[0]
        floors = floors_of(pair.a for pair in pairs)
        rows: NDArray[np.int64] | None = None
        looked = not self._by_rows
        for pair in pairs:
            floor = floors.get(pair.a["kind"], 0.0)
            found = self._compare(pair, floor, rows)
            if not looked and _is_of_batch(pair) and found[0] is not None and found[0].relative > _REARRANGED:
                looked = True
                rows = self._order_of_rows(pair, rank)
                found = self._compare(pair, floor, rows)
            far, compared, note, dtypes = found
            noise = self._noise(pair, floor, loaded=loaded)
            if told is not None:
                told()
            error = math.inf if far is None else error_of(far, pair.a["kind"], loaded=loaded)
            yield _Measured(pair, far, error, noise, compared, note, dtypes)

    def _noise(self, pair: Pair, floor: float, *, loaded: bool) -> float | None:
        """Return how far A is from its second run; None if that is not known, or nothing that rounding could do."""
        other, trace = pair.noise, self._alignment.noise
        if other is None or trace is None or other["shape"] != pair.a["shape"]:
            return None
        a, b = self._tensor(self._alignment.a, pair.a), self._tensor(trace, other)
        if a is None or b is None or a.shape != b.shape:
            far = statistics_distance(pair.a, other, floor)
        else:
            far = distance(a, b, rms_of(pair.a), floor)
        error = error_of(far, pair.a["kind"], loaded=loaded)
        return error if math.isfinite(error) else None

    def _compare(
        self, pair: Pair, floor: float, rows: NDArray[np.int64] | None
    ) -> tuple[Distance | None, str, str, tuple[str, str]]:
        """Return how far a pair is apart, what was compared, what is to be said of it, and in which dtypes it was."""
        ours, theirs = pair.a, pair.b
        dtypes = ours["dtype"], theirs["dtype"]
        notes = []
        if ours["path"] != theirs["path"]:
            notes.append(f"path {ours['path']!r} in A, {theirs['path']!r} in B")
        a, b = self._tensor(self._alignment.a, ours), self._tensor(self._alignment.b, theirs)
        if ours["shape"] != theirs["shape"]:
            notes.append(f"shape {_shape(ours)} in A, {_shape(theirs)} in B")
        if ours["numel"] != theirs["numel"]:
            return None, "shapes", ", ".join(notes), dtypes
        whole = all(tensor is None or tensor.size == ours["numel"] for tensor in (a, b))
        if a is not None and b is not None and not whole:
            a, b = _common_rows(a, b)
        if a is None or b is None:
            notes.append("statistics alone: " + _statistics_in_words(ours, theirs))
            return statistics_distance(ours, theirs, floor), "statistics", ", ".join(notes), dtypes
        if rows is not None and a.shape == b.shape and len(a.shape) and len(a) == len(rows) and _is_of_batch(pair):
            b = b[rows]
            notes.append("rows paired by their values")
        dtypes = a.dtype.name, b.dtype.name  # those in which they are stored
        notes += [
            f"stored as {dtype} in {which}"
            for which, dtype, record in zip("AB", dtypes, (ours, theirs), strict=True)
            if dtype != record["dtype"]
        ]
        found, other = self._nearest(a, b, rms_of(ours), floor, notes)
        if not whole:
            notes.append(f"the first {len(a)} rows of the tensors, and the statistics of all")
            found = _farther(found, statistics_distance(ours, theirs, floor))
        if found.unlike and (at := found.where) is not None:
            notes.append(f"{a[at]!s:.12} in A and {other[at]!s:.12} in B at {list(at)}")
        return found, "tensors", ", ".join(notes), dtypes

    @staticmethod
    def _nearest(
        a: NDArray[Any], b: NDArray[Any], rms: float, floor: float, notes: list[str]
    ) -> tuple[Distance, NDArray[Any]]:
        """Compare a with b; where shapes differ, with b's axes exchanged, if that fits far better. Also return that b.

        Where shapes are the same, a transposed tensor is another one, so that it fits is said and no more.
        """
        as_it_is = b.reshape(a.shape)
        found = distance(a, as_it_is, rms, floor)
        if found.relative > _REARRANGED or found.unlike:
            for order in arrangements(a.shape, b.shape):
                exchanged = np.ascontiguousarray(b.transpose(order))
                other = distance(a, exchanged, rms, floor)
                if other.unlike <= found.unlike and other.relative < found.relative * _REARRANGED:
                    notes.append(f"with B's axes in the order {', '.join(map(str, order))} they fit")
                    return (found, as_it_is) if a.shape == b.shape else (other, exchanged)
        return found, as_it_is

    def _tensor(self, trace: Trace, record: Record) -> NDArray[Any] | None:
        if not record["kept"]:
            return None
        key = {name: record[name] for name in ("rank", "step", "layer", "kind", "call", "path")}
        try:
            return trace.tensor(**key)
        except TraceDamaged as error:
            self._damaged[trace.path, *key.values()] = str(error)
            return None

    def _judge(self, step: int, rank: int, measured: list[_Measured]) -> list[dict[str, Any]]:
        bounds = self._bounds[rank].of_step(
            [(m.pair.a["kind"], *m.dtypes) for m in measured],
            [m.error for m in measured],
            [m.noise for m in measured],
        )
        return [self._row(step, rank, m, *bound) for m, bound in zip(measured, bounds, strict=True)]

    def _row(self, step: int, rank: int, measured: _Measured, tolerance: float, before: float) -> dict[str, Any]:
        a, b, far = measured.pair.a, measured.pair.b, measured.distance
        dtype_a, dtype_b = measured.dtypes
        if dtype_a != dtype_b:
            what = f"{a['layer']!r} ({a['kind']}): {dtype_a} in A, {dtype_b} in B"
            self._dtypes.setdefault((a["layer"], a["kind"]), what)
        return {
            "rank": rank,
            "step": step,
            "layer_a": a["layer"],
            "layer_b": b["layer"],
            **{name: a[name] for name in ("kind", "call", "path")},
            "dtype_a": dtype_a,
            "dtype_b": dtype_b,
            "compared": measured.compared,
            "max_abs": math.nan if far is None else far.max_abs,
            "relative": math.nan if far is None else far.relative,
            "cosine": math.nan if far is None else far.cosine,
            "max_ulp": None if far is None else far.max_ulp,
            "where": None if far is None or far.where is None else list(far.where),
            "unlike": 0 if far is None else far.unlike,
            "error": measured.error,
            "tolerance": tolerance,
            "within": bool(measured.error <= tolerance),
            "note": measured.note,
            "before": before,
            "order": measured.pair.order,
        }

    def _order_of_rows(self, pair: Pair, rank: int) -> NDArray[np.int64] | None:
        a, b = self._tensor(self._alignment.a, pair.a), self._tensor(self._alignment.b, pair.b)
        if a is None or b is None or a.size != pair.a["numel"] or b.size != pair.b["numel"]:
            return None
        bound = max(self._bounds[rank].of_dtype(tensor.dtype.name) for tensor in (a, b))
        return matching_rows(a, b, math.sqrt(bound))

    def _refuse_other_order(self, divergence: Divergence, pairs: list[Pair]) -> None:
        """Raise BadQuery where what diverges holds the same samples in another order.

        All that follows differs then, and none of it says anything of the model.
        """
        key = divergence.layer, divergence.kind, divergence.call, divergence.path
        pair = next(p for p in pairs if tuple(p.a[name] for name in ("layer", "kind", "call", "path")) == key)
        if self._by_rows or not _is_of_batch(pair) or self._order_of_rows(pair, divergence.rank) is None:
            return
        raise BadQuery(
            f"At step {divergence.step} the batches are in another order: the rows of layer {divergence.layer!r} "
            f"({divergence.kind}) are in B those of A, exchanged. Record both with the same order of samples, or let "
            "the rows be paired by their values: pair='rows' (--pair rows)."
        )

    def _is_bare(self, layer: str) -> bool:
        modules = self._alignment.a.modules(min(self._alignment.ranks))
        return any(module["name"] == layer and not module["parameters"] for module in modules)

    def _notes(self, counts: dict[str, int]) -> list[str]:
        notes = []
        total = sum(counts.values())
        if counts["statistics"]:
            notes.append(f"{counts['statistics']:,} of {total:,} records compared by their statistics alone")
        if self._dtypes:
            first = next(iter(self._dtypes.values()))
            notes.append(f"another dtype in B: {len(self._dtypes)} layers and kinds, the first {first}")
        if self._damaged:
            reason = next(iter(self._damaged.values()))
            notes.append(f"{len(self._damaged):,} damaged tensors, compared by their statistics; the first: {reason}")
        return notes


def _part(progress: Callable[[float], None], number: int, total: int, pairs: int) -> Callable[[], None]:
    done = 0

    def told() -> None:
        nonlocal done
        done += 1
        progress((number + done / pairs) / total)

    return told


def _is_of_batch(pair: Pair) -> bool:
    """Whether the first dimension may be that of the samples."""
    return pair.a["kind"] not in _OF_PARAMETERS and len(pair.a["shape"]) > 0


def _shape(record: Record) -> str:
    return "×".join(map(str, record["shape"])) or "scalar"


def _statistics_in_words(a: Record, b: Record) -> str:
    for name in ("n_nan", "n_posinf", "n_neginf"):
        if a[name] != b[name]:
            return f"{name} {a[name]} in A, {b[name]} in B"
    return f"l2 {a['l2']:.6g} in A, {b['l2']:.6g} in B"


def _common_rows(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    """Return the first rows that two tensors both have, where one is stored in part; None if there are no such."""
    if not a.ndim or a.ndim != b.ndim or a.shape[1:] != b.shape[1:]:
        return None, None
    rows = min(len(a), len(b))
    return a[:rows], b[:rows]


def _farther(rows: Distance, whole: Distance) -> Distance:
    """Return how far rows are apart, made larger where the statistics of the whole tensors are farther apart."""
    worst = {name: max(getattr(rows, name), getattr(whole, name)) for name in ("unlike", "spread", "peak")}
    return replace(rows, **worst)
