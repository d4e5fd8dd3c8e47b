"""The commit log: how batches of records lie in segments, and how segments become Parquet.

A segment is written as an Arrow IPC stream, one batch a commit, because a batch can be appended and read
while the next is being written (`log_tail`). Parquet cannot be appended to, but is eight times smaller and is read by
columns: so a segment that has grown, or whose trace is sealed, is turned into Parquet.

Where a training was resumed, the log holds steps twice. `Log` gives what counts: `log_dataset`.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.attempts import Attempts, read_attempts
from replay.errors import TraceDamaged
from replay.files import sync
from replay.format import RECORD_SCHEMA
from replay.log_dataset import dataset_of
from replay.log_parquet import write_segment
from replay.log_rows import LogRows
from replay.log_tail import CHECKSUM, UNREADABLE, TailReader, batch_of, checksum_of

COMPACT_ROWS = 1 << 17

_PART_SEGMENTS = 4
_MOST_PARTS = 32  # DuckDB plans each of them
_DTYPES = {field.name: field.type.to_pandas_dtype() for field in RECORD_SCHEMA}
_SEGMENT = re.compile(r"records-(\d{5,})\.(arrows|parquet)$")


class LogWriter:
    """Appends commits to the log of one rank.

    Owned by the writer process. An existing log is continued: a torn last batch is cut off.

    Args:
        rank_directory: the rank.
        durable: whether a commit is on the disk itself before `append` returns.
    """

    def __init__(self, rank_directory: Path, *, durable: bool = False) -> None:
        self._directory = rank_directory
        self._durable = durable
        segments = segment_files(rank_directory)
        last = max(segments, default=-1)
        self._number = last + 1 if last < 0 or segments[last].suffix == ".parquet" else last
        self._rows = 0
        self._open()

    @property
    def segment(self) -> int:
        """The number of the segment that the next commit goes to."""
        return self._number

    def _open(self) -> None:
        self._path = self._directory / f"records-{self._number:05}.arrows"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._parts: list[bytes] = []
        self._stream = pa.ipc.new_stream(pa.PythonFile(self, mode="w"), RECORD_SCHEMA)
        # The stream writes its head together with its first batch; a segment that is continued has one already.
        self._stream.write_batch(batch_of(0, [b""] * len(RECORD_SCHEMA)))
        self._parts.clear()
        tail = TailReader(self._path)
        self._rows = sum(len(batch) for batch in tail.read())
        self._length = tail.position
        if self._length == 0:
            os.ftruncate(self._fd, 0)
            self._write(RECORD_SCHEMA.serialize().to_pybytes())
        else:
            os.ftruncate(self._fd, self._length)
        if self._durable:  # also what a writer that was killed has appended, and not brought there
            os.fdatasync(self._fd)
            sync(self._directory)

    # What pyarrow writes is collected, so that a commit reaches the file by one write.
    closed = False

    def write(self, data: bytes) -> int:
        """Take a part of the message that pyarrow is writing."""
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Do nothing: parts are written together."""

    def _take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data

    def _write(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._fd, memoryview(data)[written:], self._length + written)
            if self._durable:
                os.fdatasync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._length)
            raise
        self._length += len(data)

    def append(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Commit records.

        Args:
            columns: an array of the same length for each column of the schema.

        Raises:
            OSError: the file could not be written. It is as it was before.
            ValueError: a value is none of its column's type.
        """
        rows = len(columns["step"])
        batch = batch_of(rows, [_bytes_of(name, columns[name], rows) for name in RECORD_SCHEMA.names])
        self._stream.write_batch(batch, custom_metadata={CHECKSUM: checksum_of(batch)})
        self._write(self._take())
        self._rows += len(batch)
        if self._rows >= COMPACT_ROWS:
            self.begin_segment()

    def begin_segment(self) -> None:
        """Let the next commit begin a segment, as another attempt has to."""
        self._compact()
        self._number += 1
        self._open()

    def _compact(self) -> None:
        os.close(self._fd)
        compact(self._path)

    def close(self) -> None:
        """Let go of the file; the segment stays as it is."""
        self.closed = True
        with contextlib.suppress(OSError):
            os.close(self._fd)


def _bytes_of(name: str, values: NDArray[Any], rows: int) -> bytes:
    """Return a column as its type has it."""
    column = values.astype(_DTYPES[name], copy=False)
    if len(column) != rows or (column.dtype != values.dtype and not np.array_equal(column, values, equal_nan=True)):
        raise ValueError(f"Column {name!r} is to have {rows} values of {column.dtype}.")
    return column.tobytes()


def compact(path: Path) -> None:
    """Turn a segment from Arrow IPC into Parquet. The Arrow file goes when the Parquet file is whole."""
    target = path.with_suffix(".parquet")
    partial = target.with_name(target.name + ".partial")
    table = pa.Table.from_batches(TailReader(path).read(), RECORD_SCHEMA)
    with partial.open("wb") as file:
        write_segment(table, file)
        file.flush()
        os.fsync(file.fileno())  # what is removed below may have been on the disk for hours
    partial.replace(target)
    sync(target.parent)
    path.unlink(missing_ok=True)


def compact_all(rank_directory: Path) -> None:
    """Turn whatever is left of a rank's log into Parquet."""
    for path in segment_files(rank_directory).values():
        if path.suffix == ".arrows":
            compact(path)
    for leftover in rank_directory.glob("records-*.arrows"):
        leftover.unlink()  # the Parquet file of the same number is whole: the crash came between the two


class Log:
    """Reads the commits of one rank, also while they are being written.

    Args:
        rank_directory: the rank.
        attempt: the last attempt that counts; the very last if None.
        superseded: read also what does not count, and give each record a column `attempt`.
    """

    def __init__(self, rank_directory: Path, attempt: int | None = None, *, superseded: bool = False) -> None:
        self._directory = rank_directory
        self._attempt = attempt
        self._superseded = superseded
        self.attempts = Attempts()
        self._sealed: dict[int, Path] = {}
        self._tail: TailReader | None = None
        self._tail_number = -1
        self._batches: list[pa.RecordBatch] = []

    def refresh(self) -> Self:
        """Look for commits that came since the last look."""
        self._look_at_commits()
        self._look_at_attempts()
        return self

    def _look_at_commits(self) -> None:
        # A segment is compacted under our feet now and then: its number is then among the Parquet files at the next
        # look.
        segments = segment_files(self._directory)
        self._sealed = {number: path for number, path in sorted(segments.items()) if path.suffix == ".parquet"}
        number = max(segments, default=-1)
        if number in self._sealed or number < 0:
            self._tail, self._tail_number, self._batches = None, -1, []
            return
        if number != self._tail_number:
            self._tail, self._tail_number, self._batches = TailReader(segments[number]), number, []
        assert self._tail is not None
        try:
            self._batches += self._tail.read()
        except FileNotFoundError:
            self._look_at_commits()

    def _look_at_attempts(self) -> None:
        """See which attempts there are, after their commits were read."""
        self.attempts = read_attempts(self._directory, self._attempt)
        shown = self.attempts.shown
        if shown < self.attempts.last and not self._superseded:
            self._sealed = {n: path for n, path in self._sealed.items() if self.attempts.of_segment(n) <= shown}
            if self._tail is not None and self.attempts.of_segment(self._tail_number) > shown:
                self._tail, self._tail_number, self._batches = None, -1, []

    def dataset(self) -> Any:
        """Return the records, in the order of execution, as a `pyarrow.dataset.Dataset` of what is committed now.

        Raises:
            TraceDamaged: a file of it is no part of a log. Of what is inside of files, whoever reads on is told.
        """
        return self._dataset(self._sealed, self._batches)

    def datasets(self) -> list[Any]:
        """Return what `dataset` does in parts, in order, one at least, for who reads a part after the other.

        Of one dataset, DuckDB lets pyarrow read ahead as it sees fit: gigabytes of a large log.
        """
        numbers = list(self._sealed)
        size = max(_PART_SEGMENTS, -(-len(numbers) // _MOST_PARTS))
        begins = range(0, len(numbers), size) or [0]
        parts = [{number: self._sealed[number] for number in numbers[begin : begin + size]} for begin in begins]
        return [self._dataset(part, self._batches if part is parts[-1] else []) for part in parts]

    def _dataset(self, sealed: Mapping[int, Path], tail: Sequence[pa.RecordBatch]) -> Any:
        with self.named():
            return dataset_of(sealed, self._tail_number, tail, self.attempts, everything=self._superseded)

    def table(self, columns: Sequence[str] | None = None, where: Any = None) -> pa.Table:
        """Return records in the order of execution.

        Args:
            columns: names of columns of the schema, or `attempt` where that was asked for; those of the schema if None.
            where: a `pyarrow.compute.Expression` over columns of the schema.

        Raises:
            TraceDamaged: the log cannot be read.
        """
        with self.named():
            names = list(RECORD_SCHEMA.names if columns is None else columns)
            table = self.dataset().to_table(columns=names, filter=where)
            if any(column.null_count for column in table.columns):
                raise pa.ArrowInvalid("a column has nulls")
        return table

    def numbered(self, where: Any = None) -> LogRows:
        """Return the rows, by number, of what is committed now.

        Args:
            where: a `pyarrow.compute.Expression` over the columns step and stream; rows for which it holds.

        Raises:
            TraceDamaged: a file of it is no part of a log. Of what is inside of files, whoever reads on is told.
        """
        with self.named():
            attempts = None if self._superseded else self.attempts
            return LogRows(self._sealed, self._tail_number, self._batches, attempts, where)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Raise TraceDamaged where what is done with its rows finds them damaged."""
        try:
            yield
        except UNREADABLE as error:
            raise TraceDamaged(f"The log in {self._directory} cannot be read: {error}") from error
        except UnicodeEncodeError:
            raise TraceDamaged(
                f"The log in {self._directory} cannot be read by pyarrow: the path is no UTF-8. Rename the folder."
            ) from None

    @property
    def rows(self) -> int:
        """How many records are committed."""
        import pyarrow.parquet as pq

        if self.attempts.last and not self._superseded:
            with self.named():
                return int(self.dataset().count_rows())
        with self.named():
            sealed: int = sum(pq.read_metadata(path).num_rows for path in self._sealed.values())
        return sealed + sum(len(batch) for batch in self._batches)


def segment_files(rank_directory: Path) -> dict[int, Path]:
    """The files of the log by number; Parquet goes before Arrow."""
    found: dict[int, Path] = {}
    with os.scandir(rank_directory) as entries:
        names = sorted(entry.name for entry in entries)  # .arrows sorts before .parquet
    for name in names:
        if match := _SEGMENT.fullmatch(name):
            found[int(match[1])] = rank_directory / name
    return found
