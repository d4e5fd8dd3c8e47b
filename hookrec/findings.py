"""What the daemon asks of a trace: rules over the whole of it, and conditions over each new record.

Rules come in by one seam, a function of a trace and the first step that is new. Conditions are the simplest rule there
is, and see each record once: the first, in the order of execution, of each rank, layer and kind is a finding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from replay import BadQuery, Trace
from replay.alerts import Alert, alert_id
from replay.format import RECORD_SCHEMA
from replay.query import connect, numbers_where, records_where
from replay.records import OfStreams

_MOST_ROWS = 100_000  # that wait to be asked about, of which each takes 200 bytes


class Finding(Protocol):
    """What a rule found. None stands for: no single one."""

    @property
    def rule(self) -> str:
        """The name of the rule."""

    @property
    def severity(self) -> str:
        """How bad it is: "error" or "warning"."""

    @property
    def rank(self) -> int | None:
        """Which process."""

    @property
    def layer(self) -> str | None:
        """Qualified module name."""

    @property
    def kind(self) -> str | None:
        """Kind of the records."""

    @property
    def first_step(self) -> int | None:
        """The first step that it is about."""

    @property
    def last_step(self) -> int | None:
        """The last step that it is about, or that was seen."""

    @property
    def message(self) -> str:
        """What was found."""

    @property
    def advice(self) -> str:
        """What to do about it."""


Check = Callable[[Trace, int | None], Sequence[Finding]]
"""Judges a trace; the second argument is the first step that was not judged before, None for all."""


@dataclass(frozen=True)
class Noticed:
    """What the daemon finds by itself: a `Finding`."""

    rule: str
    severity: str
    rank: int | None
    layer: str | None
    kind: str | None
    first_step: int | None
    last_step: int | None
    message: str
    advice: str


class Conditions:
    """SQL conditions over records. Owned by one thread.

    A query takes milliseconds, however few its records are. So what fifty traces bring in a round is collected, and
    asked together.

    Args:
        conditions: each the name of a rule as well.

    Raises:
        BadQuery: one cannot be understood.
    """

    def __init__(self, conditions: Sequence[str]) -> None:
        self._conditions = tuple(dict.fromkeys(conditions))
        self._waiting: list[_Asked] = []
        self._rows = 0
        if self._conditions:
            self._connection = connect()
            nothing = OfStreams([]).described(RECORD_SCHEMA.empty_table(), 0, np.zeros(0, bool))
            for condition in self._conditions:
                records_where(nothing, condition, self._connection)

    def ask(self, records: pa.Table, found: Callable[[list[Noticed]], None], trouble: Callable[[str], None]) -> None:
        """Take records of which the conditions are to be asked; many are asked about at once.

        Args:
            records: as `Trace.records` returns them, of one rank.
            found: is given, by `answer`, the first record of each layer and kind for which a condition holds; once.
            trouble: is told of a condition that cannot be answered for these records, such as a number made of a name.
        """
        self._waiting.append(_Asked(records, found, trouble))
        self._rows += len(records)
        if self._rows > _MOST_ROWS:
            self.answer()

    def answer(self) -> None:
        """Answer whatever was asked since the last time."""
        waiting, self._waiting, self._rows = self._waiting, [], 0
        found: list[list[Noticed]] = [[] for _ in waiting]
        for condition in self._conditions if waiting else ():
            try:
                self._look(condition, [one.records for one in waiting], found)
            except Exception:  # about one of them; of the others it can be said
                for one, noticed in zip(waiting, found, strict=True):
                    try:
                        self._look(condition, [one.records], [noticed])
                    except Exception as error:
                        one.trouble(str(error) if isinstance(error, BadQuery) else repr(error))
        for one, noticed in zip(waiting, found, strict=True):
            one.found(noticed)

    def _look(self, condition: str, tables: Sequence[pa.Table], found: Sequence[list[Noticed]]) -> None:
        """Add what is found in each of some tables to its list."""
        ends = np.cumsum([len(table) for table in tables])
        together = pa.concat_tables(tables).unify_dictionaries()
        numbers = numbers_where(together, condition, self._connection)
        table_of = np.searchsorted(ends, numbers, side="right")
        for at in np.unique(table_of).tolist():
            first = ends[at] - len(tables[at])
            found[at].extend(_firsts(tables[at].take(pa.array(numbers[table_of == at] - first)), condition))


@dataclass(frozen=True)
class _Asked:
    records: pa.Table
    found: Callable[[list[Noticed]], None]
    trouble: Callable[[str], None]


def _firsts(rows: pa.Table, condition: str) -> Iterator[Noticed]:
    """Yield a finding for the first record of each layer and kind."""
    keys = np.stack([_numbers(rows[name]) for name in ("layer", "kind")])
    firsts = np.unique(keys, axis=1, return_index=True)[1]
    for row in rows.take(pa.array(np.sort(firsts))).to_pylist():
        facts = f"n_nan {row['n_nan']}, "
        facts += ", ".join(f"{name} {row[name]:.4g}" for name in ("absmax", "mean", "std", "l2"))
        layer = repr(row["layer"]) if row["layer"] else "(root)"
        yield Noticed(
            rule=condition,
            severity="error",
            rank=row["rank"],
            layer=row["layer"],
            kind=row["kind"],
            first_step=row["step"],
            last_step=row["step"],
            message=f"{condition} at step {row['step']}, {row['kind']} of layer {layer}: {facts}",
            advice="`replay stats` shows the records around it, `replay show` its values.",
        )


def ended(rank: int, end: Mapping[str, Any], attempt: int = 0) -> Noticed | None:
    """Return what is to be said of how an attempt of a rank ended, as `end.json` has it; None if it was detached.

    A training that is resumed may end more than once; the attempt stands where a record has its kind.
    """
    if end["how"] == "detached":
        return None
    detail = f" ({end['detail']})" if end.get("detail") else ""
    return Noticed(
        rule="ended",
        severity="error",
        rank=rank,
        layer=None,
        kind=f"attempt {attempt}" if attempt else None,
        first_step=None,
        last_step=None,
        message=f"rank {rank} ended{f' in attempt {attempt}' if attempt else ''}: {end['how']}{detail}",
        advice="`replay info` names the last step; its records show what the model did then.",
    )


def _numbers(column: pa.ChunkedArray) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    encoded = column.combine_chunks()
    parts = encoded.chunks if isinstance(encoded, pa.ChunkedArray) else [encoded]
    return np.concatenate([np.zeros(0, np.int64), *(part.indices.to_numpy() for part in parts)]).astype(np.int64)


def as_alert(finding: Finding, trace_id: str, time: str) -> Alert:
    """Return a finding as it is kept and sent; rules may have their numbers from numpy."""
    rule, rank = str(finding.rule), _plain(finding.rank)
    layer, kind = (None if name is None else str(name) for name in (finding.layer, finding.kind))
    return Alert(
        id=alert_id(trace_id, rule, rank, layer, kind),
        time=time,
        trace_id=trace_id,
        rule=rule,
        severity="error" if finding.severity == "error" else "warning",
        rank=rank,
        layer=layer,
        kind=kind,
        first_step=_plain(finding.first_step),
        last_step=_plain(finding.last_step),
        message=str(finding.message),
        advice=str(finding.advice),
    )


def _plain(number: int | None) -> int | None:
    return None if number is None else int(number)
