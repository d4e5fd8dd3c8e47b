"""A place in a log, and what is behind it: for readers that stay beside a live trace and keep nothing.

A place is the number of a segment and how many of its rows were read. It stays right when the segment is turned into
Parquet, and after a restart of the reader.
"""

from pathlib import Path

import pyarrow as pa

from replay.errors import TraceDamaged
from replay.format import RECORD_SCHEMA
from replay.log import segment_files
from replay.log_parquet import check_schema, opened
from replay.log_tail import UNREADABLE, TailReader

_NOTHING = pa.Table.from_batches([], RECORD_SCHEMA)  # `Schema.empty_table` imports pandas


class Following:
    """Reads each commit of one rank once, and keeps none: a reader that stays beside a live trace.

    A place in the log is the number of a segment and how many of its rows were read. It stays right when the segment
    is turned into Parquet, and after a restart.

    Args:
        rank_directory: the rank.
        place: where an earlier reader ended.

    Attributes:
        place: up to where everything was read.
        segment: of which the rows are that were read last.
    """

    def __init__(self, rank_directory: Path, place: tuple[int, int] = (0, 0)) -> None:
        self._directory = rank_directory
        self.place = place
        self.segment = place[0]
        self._tail: TailReader | None = None
        self._skip = place[1]
        self._seen = (-1, 0)

    def read(self) -> pa.Table:
        """Return rows that were committed since the last call, at most to the end of a segment.

        A segment that has not grown is not opened. If no row is returned, there is none for now.

        Raises:
            TraceDamaged: a segment is not what the format says, or is missing.
        """
        while True:
            number, done = self.place
            self.segment = number
            found = self._of_parquet(number, done)
            if found is None:
                found = self._of_arrow(number)
                self.place = number, done + len(found)
                return found
            self.place, self._tail, self._skip, self._seen = (number + 1, 0), None, 0, (-1, 0)
            if len(found):
                return found

    def _of_arrow(self, number: int) -> pa.Table:
        path = self._directory / f"records-{number:05}.arrows"
        try:
            stat = path.stat()
            seen = stat.st_size, stat.st_mtime_ns
            if seen == self._seen:
                return _NOTHING
            self._tail = self._tail or TailReader(path)
            batches = self._tail.read()
        except FileNotFoundError:
            later = [n for n in segment_files(self._directory) if n > number]
            if later and self._of_parquet(number, 0) is None:
                raise TraceDamaged(
                    f"The log in {self._directory} lacks its segment {number}, and has {min(later)}."
                ) from None
            return _NOTHING
        self._seen = seen
        table = pa.Table.from_batches(batches, RECORD_SCHEMA)
        skipped = min(self._skip, len(table))
        self._skip -= skipped
        return table.slice(skipped)

    def _of_parquet(self, number: int, done: int) -> pa.Table | None:
        """The rows of a compacted segment from one of them on; None if it is not compacted."""
        path = self._directory / f"records-{number:05}.parquet"
        if not path.exists():
            return None
        try:
            with opened(path) as file:
                check_schema(file.schema_arrow, path)
                if file.metadata.num_rows == done:
                    return _NOTHING
                return file.read(RECORD_SCHEMA.names).slice(done).cast(RECORD_SCHEMA)
        except UNREADABLE as error:
            raise TraceDamaged(f"{path} cannot be read: {error}") from error
