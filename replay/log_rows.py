"""Rows of a log by number, read by several threads a row group at a time.

pyarrow's dataset can do neither: it does not say which row is which, so whoever has found rows by some columns cannot
ask for the others of these rows alone; and it reads ahead as it sees fit, gigabytes of a large log.
"""

import copy
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replay.attempts import Attempts
from replay.format import RECORD_SCHEMA
from replay.log_parquet import check_schema, constants_of, read_group

NUMBER = "number of the row"
"""The column in which rows are numbered, from the first of the log."""

_THREADS = min(8, os.cpu_count() or 1)
_BY = ("step", "stream")
_FIELDS = RECORD_SCHEMA.append(pa.field(NUMBER, pa.int64()))


@dataclass(frozen=True)
class _Piece:
    """Rows that lie together: a row group of a segment, or those of the segment that is being written.

    Attributes:
        first: the number of its first row.
        rows: how many there are.
        until: the first step that counts no more; None if all count.
        constants: the columns that have one value.
        read: returns others of its columns.
    """

    first: int
    rows: int
    until: int | None
    constants: Mapping[str, pa.Scalar]
    read: Callable[[Sequence[str]], pa.Table]

    def stored(self, columns: Sequence[str]) -> pa.Table:
        """Return columns, all rows, but for those that have one value, and the numbers of the rows."""
        names = [name for name in dict.fromkeys(columns) if name not in self.constants and name != NUMBER]
        numbers = pa.array(np.arange(self.first, self.first + self.rows))
        return self.read(names).append_column(NUMBER, numbers) if names else pa.table({NUMBER: numbers})

    def whole(self, stored: pa.Table, columns: Sequence[str]) -> pa.Table:
        """Return columns of some of the rows that `stored` returned, with those that have one value."""
        schema = pa.schema([_FIELDS.field(name) for name in columns])
        arrays = [
            pa.repeat(self.constants[field.name], len(stored)) if field.name in self.constants else stored[field.name]
            for field in schema
        ]
        return pa.table(arrays, schema=schema)


class LogRows:
    """The rows of a log for which a condition may hold, as they are now.

    Args:
        sealed: the Parquet segments by number, in order.
        tail_number: the number of the segment behind them.
        tail: what is in it.
        attempts: those of the rank; None if what they superseded counts as well.
        where: a `pyarrow.compute.Expression` over the columns step and stream.

    Raises:
        ArrowInvalid: a file is no part of a log.
        OSError: it cannot be read.
    """

    def __init__(
        self,
        sealed: Mapping[int, Path],
        tail_number: int,
        tail: Sequence[pa.RecordBatch],
        attempts: Attempts | None,
        where: Any = None,
    ) -> None:
        import pyarrow.dataset as ds
        from pyarrow.fs import LocalFileSystem

        self._where = where
        self._pieces: list[_Piece] = []
        format_, files, first = ds.ParquetFileFormat(), LocalFileSystem(), 0
        for number, path in sealed.items():
            fragment = format_.make_fragment(str(path), files)
            check_schema(fragment.physical_schema, path)
            wanted = fragment if where is None else fragment.subset(where, schema=RECORD_SCHEMA)
            groups, footer = {group.id for group in wanted.row_groups}, fragment.metadata
            until, constants = _until(number, attempts), constants_of(footer)
            for group in range(footer.num_row_groups):
                rows = footer.row_group(group).num_rows
                if group in groups:
                    read = partial(read_group, path, footer, group)
                    self._pieces.append(_Piece(first, rows, until, constants, read))
                first += rows
        if tail:
            table = pa.Table.from_batches(tail, RECORD_SCHEMA)
            self._pieces.append(_Piece(first, len(table), _until(tail_number, attempts), {}, table.select))

    def __len__(self) -> int:
        """How many rows are gone through to find them."""
        return sum(piece.rows for piece in self._pieces)

    def divided(self, rows: int) -> Iterator["LogRows"]:
        """Yield them in parts, in order, that go through so many rows at least, but for the last; one at least."""
        begin, gone = 0, 0
        for end, piece in enumerate(self._pieces, 1):
            gone += piece.rows
            if gone >= rows or end == len(self._pieces):
                yield self._of(self._pieces[begin:end])
                begin, gone = end, 0
        if not self._pieces:
            yield self

    def _of(self, pieces: list[_Piece]) -> "LogRows":
        found = copy.copy(self)
        found._pieces = pieces
        return found

    def scan(
        self, columns: Sequence[str], *, numbered: bool = False, passed: Callable[[int], None] | None = None
    ) -> Iterator[pa.Table]:
        """Yield the rows for which the condition holds, in order, a table a row group, of which few are in memory.

        Args:
            columns: which; of the schema of the log.
            numbered: add the column `NUMBER`.
            passed: is told how many rows were gone through, each time that more of them were.
        """
        tables = _ahead(partial(self._scanned, piece, columns, numbered) for piece in self._pieces)
        for piece, table in zip(self._pieces, tables, strict=True):
            yield table
            if passed is not None:
                passed(piece.rows)

    def _scanned(self, piece: _Piece, columns: Sequence[str], numbered: bool) -> pa.Table:
        where = self._where
        if piece.until is not None:
            counts = pc.field("step") < piece.until
            where = counts if where is None else where & counts
        names = [*columns, NUMBER] if numbered else list(columns)
        if where is None:
            return piece.whole(piece.stored(names), names)
        return piece.whole(piece.stored([*names, *_BY]).filter(where), names)

    def take(self, found: pa.Table, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield rows that `scan` has numbered, a table a row group.

        Args:
            found: their numbers in the column `NUMBER`, in ascending order, and what is known of them by other columns.
            columns: which; of the schema of the log.
        """
        numbers = found[NUMBER].to_numpy()
        wanted = []
        for piece in self._pieces:
            begin, end = np.searchsorted(numbers, (piece.first, piece.first + piece.rows)).tolist()
            if begin < end:
                wanted.append(partial(_taken, piece, found.slice(begin, end - begin), columns))
        return _ahead(wanted)


def _until(segment: int, attempts: Attempts | None) -> int | None:
    return attempts.until(attempts.of_segment(segment)) if attempts is not None and attempts.last else None


def _taken(piece: _Piece, found: pa.Table, columns: Sequence[str]) -> pa.Table:
    known = [name for name in found.column_names if name in columns and name not in piece.constants]
    table = piece.stored([name for name in columns if name not in known])
    if len(found) < len(table):
        table = table.take(pc.subtract(found[NUMBER], piece.first))
    for name in known:
        table = table.append_column(name, found[name])
    return piece.whole(table, columns)


def _ahead(tasks: Iterable[Callable[[], pa.Table]]) -> Iterator[pa.Table]:
    """Yield what tasks return, in their order, while threads are at work on the next ones."""
    waiting: deque[Future[pa.Table]] = deque()
    pool = ThreadPoolExecutor(_THREADS)
    try:
        for task in tasks:
            waiting.append(pool.submit(task))
            if len(waiting) > _THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
