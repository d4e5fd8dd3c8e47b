"""The files of a log one by one, and what in each is not whole: where one of them is damaged, the others are read on.

`Log` joins them, and takes what is behind a torn commit for not there, as a reader must. Who asks whether a trace is
whole has to know whether anything is there.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from replay.errors import TraceDamaged
from replay.format import RECORD_SCHEMA
from replay.log import segment_files
from replay.log_parquet import check_schema, constants_of, opened
from replay.log_tail import CHECKSUM, UNREADABLE, TailReader


@dataclass(frozen=True)
class Tail:
    """What lies behind the last whole batch of a segment; `damage` if it is more than a commit that was cut off."""

    message: str
    damage: bool


class Segment:
    """One file of a log, for those who look at each by itself."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number
        self._read = TailReader(path)

    @property
    def rows(self) -> int:
        """How many records are in it; of Parquet, as its footer says."""
        with self._named():
            if self.path.suffix == ".arrows":
                return sum(len(batch) for batch in TailReader(self.path).read())
            with opened(self.path) as file:
                return int(file.metadata.num_rows)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the records.

        Raises:
            TraceDamaged: it cannot be read on.
        """
        with self._named():
            if self.path.suffix == ".arrows":
                yield from self._read.read()
                return
            with opened(self.path) as file:
                check_schema(file.schema_arrow, self.path)
                rows = 0
                for batch in file.iter_batches(4096):
                    batch.validate()
                    rows += len(batch)
                    yield batch.select(RECORD_SCHEMA.names).cast(RECORD_SCHEMA)
                if rows != file.metadata.num_rows:
                    raise TraceDamaged(f"{self.path} has {rows} records, and says {file.metadata.num_rows}.")
                self._check_ranges(file)

    def _check_ranges(self, file: Any) -> None:
        """Hold to the values what the footer says of them, by which readers skip rows and columns."""
        constants = constants_of(file.metadata, strict=True)
        for group in range(file.num_row_groups):
            for number, name in enumerate(RECORD_SCHEMA.names[:10]):
                found = file.metadata.row_group(group).column(number).statistics
                if found is None or not found.has_min_max:
                    continue
                values = pc.min_max(file.read_row_group(group, [name])[name]).as_py()
                if (found.min, found.max) != (values["min"], values["max"]):
                    raise TraceDamaged(f"{self.path} says of {name} what is not so: {found.min} to {found.max}.")
            for name, value in constants.items():
                if pc.any(pc.not_equal(file.read_row_group(group, [name])[name], value)).as_py():
                    raise TraceDamaged(f"{self.path} says of {name} what is not so: {value} in all rows.")

    def tail(self) -> Tail | None:
        """Return what the batches left over, after they were read to the end."""
        if self.path.suffix != ".arrows":
            return None
        with self.path.open("rb") as file:
            file.seek(self._read.position)
            rest = file.read()
        if not rest:
            return None
        where = f"behind byte {self._read.position:,}, where its last whole commit ends"
        if self._read.position and rest.count(CHECKSUM) <= 1 and not _is_whole(rest):
            return Tail(f"There are {len(rest):,} bytes of a commit that was cut off, {where}.", False)
        return Tail(f"There are {len(rest):,} bytes that are damaged, {where}; commits in them are lost.", True)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            raise TraceDamaged(f"{self.path} cannot be read: {error}") from error


def segments_of(rank_directory: Path) -> list[Segment]:
    """Return the files of a rank's log, in order; a number that is missing is one that cannot be read."""
    found = segment_files(rank_directory)
    numbers = range(max(found, default=-1) + 1)
    return [Segment(found.get(number, rank_directory / f"records-{number:05}.parquet"), number) for number in numbers]


def _is_whole(message: bytes) -> bool:
    """Whether all bytes of an Arrow message are there, whatever they are."""
    try:
        pa.ipc.read_message(message)
    except (EOFError, *UNREADABLE):
        return False
    return True
