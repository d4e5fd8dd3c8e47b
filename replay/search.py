"""The records of some ranks that fit layers, kinds, steps and a condition: whole, or in parts that fit into memory.

A condition is asked of the columns that it names, of some hundred thousand records at a time, and the rest is read of
those for which it holds. That cannot be done where a condition looks at other records than the one it is asked of, as
one with a subquery does: then DuckDB is given all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute

from replay.filters import Globs, Steps
from replay.log_rows import LogRows
from replay.query import Part, columns_where, found_where, rows_where
from replay.rank import Rank
from replay.records import Progress

_LOOKED_AT = 1 << 19
"""Records that a condition is asked of together, where they are wanted in parts."""


class _NotKnown(Exception):
    """What a condition finds is not known from some of the records at a time, but from all, or it has no answer."""


class Search:
    """What is asked for, of ranks by number. The methods raise and return what those of `Trace` do.

    Args:
        ranks: the ranks, in order.
        layers: globs over layer names.
        kinds: globs over kinds.
        steps: as of `Trace.records`.
    """

    def __init__(self, ranks: Mapping[int, Rank], layers: Globs, kinds: Globs, steps: Steps) -> None:
        self._ranks = ranks
        self._wanted = layers, kinds, steps

    def records(self, where: str | None, limit: int | None = None) -> pa.Table:
        """Return the records."""
        if limit is None:
            if where is None:
                parts = [rank.records(number, *self._wanted) for number, rank in self._ranks.items()]
                return pa.concat_tables(parts).unify_dictionaries()
            if found := self._found(where):
                parts = [self._ranks[number].numbered_records(number, *rows) for number, rows in found.items()]
                return pa.concat_tables(parts).unify_dictionaries()
        return rows_where(self._parts, where, limit)

    def record_parts(self, where: str | None, progress: Progress | None) -> Iterator[pa.Table]:
        """Yield the records in parts, one at least."""
        given = 0
        try:
            for number, tables in self._tables(Rank.columns, where, progress):
                for part in self._ranks[number].parts(number, tables):
                    given += len(part)
                    yield part
        except _NotKnown:
            yield self.records(where).slice(given)

    def column_parts(
        self, columns: Sequence[str], where: str | None, progress: Progress | None
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield columns in parts, each with its rank."""
        given = 0
        try:
            for number, tables in self._tables(lambda _: columns, where, progress):
                for table in self._ranks[number].checked(tables):
                    given += len(table)
                    yield number, table
        except _NotKnown:
            names = ", ".join(f'"{name}"' for name in ("rank", *columns))
            found = self.columns(names, where).slice(given)
            for number in self._ranks:
                yield number, found.filter(pa.compute.equal(found["rank"], number)).drop_columns("rank")

    def scan(self, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """Yield columns in parts, each with its rank, of the kinds and steps."""
        _, kinds, steps = self._wanted
        for number, rank in self._ranks.items():
            yield from ((number, table) for table in rank.scan(columns, kinds, steps))

    def columns(self, columns: str, where: str | None, further: str = "") -> pa.Table:
        """Return what SQL makes of the records."""
        return columns_where(self._parts, where, columns, further)

    @property
    def _parts(self) -> list[Part]:
        return [rank.part(number, rank.datasets(*self._wanted)) for number, rank in self._ranks.items()]

    def _tables(
        self, columns: Callable[[Rank], Sequence[str]], where: str | None, progress: Progress | None
    ) -> Iterator[tuple[int, Iterator[pa.Table]]]:
        """Yield columns of the log, rank by rank, in tables that are read as they are asked for.

        Raises:
            _NotKnown: the condition cannot be asked of some records after the others.
        """
        rows = {number: rank.numbered(*self._wanted) for number, rank in self._ranks.items()}
        total, done = sum(map(len, rows.values())), 0

        def passed(more: int) -> None:
            nonlocal done
            done += more
            if progress is not None:
                progress(done, total)

        for number, rank in self._ranks.items():
            if where is None:
                yield number, rows[number].scan(columns(rank), passed=passed)
                continue
            for some in rows[number].divided(_LOOKED_AT):
                found = found_where([rank.part(number, some)], where)
                if found is None:
                    raise _NotKnown
                yield number, some.take(found[0], columns(rank))
                passed(len(some))

    def _found(self, where: str) -> dict[int, tuple[LogRows, pa.Table]]:
        """Return by rank the rows for which a condition holds; nothing where that is not known: `found_where`."""
        parts = [rank.part(number, rank.numbered(*self._wanted)) for number, rank in self._ranks.items()]
        found = found_where(parts, where)
        if found is None:
            return {}
        return {part.rank: (part.log, rows) for part, rows in zip(parts, found, strict=True)}
