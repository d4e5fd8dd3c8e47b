"""The records that rules look at, read pass after pass: a few columns of them at a time, in parts.

All columns of ten million records are 4 GB, and one is 80 MB. So many records are read from the log again for each
column that a rule asks for, and nothing of them stays. Few are read once and kept, as those of a trace that is followed
are in memory already.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.filters import Steps
from replay.trace import Trace

Columns = dict[str, NDArray[Any]]
"""Columns of some records: arrays of shape `(records,)`."""

_FEW = 1 << 19
"""So many records are kept: 100 MB."""


class Origin(NamedTuple):
    """What a record is of. Several origins make one place where the dtype or the shape changes."""

    rank: int
    layer: str
    kind: str
    path: str
    dtype: str


class Passes:
    """The records of some steps of a trace. The trace is not to be refreshed meanwhile.

    Args:
        trace: the trace.
        steps: which.
        told: called after each part that was read.

    Attributes:
        origins: what records may be of, by number.
    """

    def __init__(self, trace: Trace, steps: Steps, told: Callable[[], None]) -> None:
        self._trace = trace
        self._steps = steps
        self._told = told
        self._kept: Columns = {}
        self._table = _if_few(trace, steps)
        self.origins: list[Origin] = []
        self._first_of: dict[int, int] = {}
        if self._table is not None:
            self._kept["origin"], self.origins = _origins_of(self._table)
            return
        for rank in trace.ranks:
            self._first_of[rank] = len(self.origins)
            streams = trace.streams(rank)
            self.origins += [Origin(rank, s.layer, s.kind, s.path, s.whole[0]) for s in streams]

    def table(self) -> pa.Table:
        """Return all of them, as `Trace.records` does."""
        return self._trace.records(steps=self._steps) if self._table is None else self._table

    def read(self, columns: Sequence[str], kind: str | None = None) -> Iterator[Columns]:
        """Yield columns in parts, rank after rank, in the order of execution.

        Args:
            columns: of `Trace.records`, those of numbers; and `mode`, as a number.
            kind: others may be left out.

        Yields:
            The columns, and `origin`, the number of each record's origin. They are not to be written to.
        """
        if self._table is not None:
            yield {name: self._kept_column(name) for name in ("origin", *columns)}
            self._told()
            return
        stored = [name for name in dict.fromkeys(columns) if name != "rank"]
        for rank, part in self._trace.scan(["stream", *stored], kind, self._steps):
            found = {name: part[name].to_numpy() for name in stored}
            if "rank" in columns:
                found["rank"] = np.full(len(part), rank, np.int32)
            yield found | {"origin": part["stream"].to_numpy().astype(np.int64) + self._first_of[rank]}
            self._told()

    def _kept_column(self, name: str) -> NDArray[Any]:
        if name not in self._kept:
            assert self._table is not None
            column = self._table[name]
            self._kept[name] = _indices(column) if name == "mode" else column.to_numpy()
        return self._kept[name]


def _if_few(trace: Trace, steps: Steps) -> pa.Table | None:
    parts, count = [], 0
    for part in trace.record_parts(steps=steps):
        parts.append(part)
        count += len(part)
        if count > _FEW:
            return None
    return pa.concat_tables(parts).unify_dictionaries().combine_chunks()


def _origins_of(table: pa.Table) -> tuple[NDArray[np.int64], list[Origin]]:
    """Return for each record the number of its origin, and the origins."""
    code = table["rank"].to_numpy().astype(np.int64)
    for name in Origin._fields[1:]:
        numbers = _indices(table[name])
        code = code * (int(numbers.max(initial=0)) + 1) + numbers
    _, first, number = np.unique(code, return_index=True, return_inverse=True)
    rows = table.select(Origin._fields).take(pa.array(first)).to_pylist()
    return number, [Origin(**row) for row in rows]


def _indices(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return a column of few different strings as numbers."""
    chunks = [chunk.indices.to_numpy() for chunk in column.chunks]
    return np.concatenate([np.zeros(0, np.int64), *chunks])
