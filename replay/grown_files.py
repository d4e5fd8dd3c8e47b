"""The files of an export that goes on while a training runs: what each says of itself, and how records leave them.

In its metadata a file says up to where in the log it goes, and how many attempts of the training were known when it was
written. That is all there is to know of what was done: an export that was interrupted, by Ctrl-C or a kill, goes on
behind the last file, and no journal can contradict the files.

A file appears under its name when it is whole. Until then it lies beside the folder, since some readers take whatever
they find in one, names that begin with a dot included.

A training that is resumed takes steps back. The files that have some are written anew without them, under their names:
first all of them aside, then each in its place, the last one first. So there is no moment at which the folder lacks a
step before one that it has, and none at which it has a step of two attempts, since what comes in their stead is written
afterwards. A file that is left without a record stays: whoever has listed the folder must find what he has listed, and
a number that is missing would look like a file that was lost.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.attempts import FOR_EVER, Attempts
from replay.errors import BadQuery
from replay.follow import Place
from replay.new_file import check_place, new_file

_STATE = b"hookrec:follow"


@dataclass(frozen=True)
class Grown:
    """A file that was written.

    Attributes:
        path: the file.
        records: how many it holds.
        taken_back: how many it held before that do not count any more; 0 of a new file.
    """

    path: Path
    records: int
    taken_back: int = 0


class GrownFiles:
    """The files of a folder; made by `grown_files`.

    Attributes:
        places: by rank, up to where in the log they go.
        dtype: of the values in them; None if there are none.
    """

    def __init__(self, out: Path, asked: Mapping[str, Any]) -> None:
        self._out = out
        self._asked = dict(asked)
        self._aside = _aside(out)
        shutil.rmtree(self._aside, ignore_errors=True)  # left by one that was killed
        names = sorted(path.name for path in out.iterdir())
        if names != [f"part-{number:05}.parquet" for number in range(len(names))]:
            raise BadQuery(
                f"{out} has something else in it than one export from its first file on. Choose a new folder."
            )
        self._count = len(names)
        self.places: dict[int, Place] = {}
        self.dtype: np.dtype[Any] | None = None
        self._known: dict[int, int] = {}  # by rank, the last attempt by which each record in the files counts
        if names:
            self._read_state(out / names[-1])

    def _read_state(self, last: Path) -> None:
        import pyarrow.parquet as pq

        try:
            state = json.loads((pq.read_schema(last).metadata or {})[_STATE])
            before = {name: state[name] for name in self._asked}
            self.places = {int(rank): (int(place[0]), int(place[1])) for rank, place in state["places"].items()}
            self._known = {int(rank): int(number) for rank, number in state["attempts"].items()}
            self.dtype = None if state["dtype"] is None else np.dtype(state["dtype"])
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowInvalid):
            raise BadQuery(f"{last} was not written by `replay export --follow`. Choose a new folder.") from None
        for name, value in self._asked.items():
            if before[name] != value:
                raise BadQuery(
                    f"{self._out} was begun with another {name}: {before[name]!r}, not {value!r}. Ask the same, or "
                    "choose a new folder."
                )

    def add(self, schema: pa.Schema, parts: Iterable[pa.Table], places: Mapping[int, Place]) -> Grown:
        """Write another file; each of its records counts by the attempts that `take_back` was told last.

        Args:
            schema: of the records.
            parts: the records.
            places: by rank, up to where in the log all files go then.
        """
        import pyarrow.parquet as pq

        dtype = None if self.dtype is None else self.dtype.name
        state = {**self._asked, "places": places, "attempts": self._known, "dtype": dtype}
        schema = schema.with_metadata({_STATE: json.dumps(state).encode()})
        target, records = self._path(self._count), 0
        with (
            self._whole(target, overwrite=False) as partial,
            pq.ParquetWriter(partial, schema, compression="zstd") as writer,
        ):
            for part in parts:
                writer.write_table(part.cast(schema))
                records += len(part)
        self._count += 1
        self.places = dict(places)
        return Grown(target, records)

    def take_back(self, attempts: Mapping[int, Attempts]) -> list[Grown]:
        """Write those files anew that have records which do not count any more, without them.

        Args:
            attempts: those of each rank, as they are now.
        """
        until = {
            rank: min((one.first_step for one in found.later[self._known.get(rank, 0) :]), default=FOR_EVER)
            for rank, found in attempts.items()
        }
        until = {rank: step for rank, step in until.items() if step < FOR_EVER}
        done: list[Grown] = []
        if until:
            with ExitStack() as replaced:  # which leaves first what was entered last
                for path in map(self._path, range(self._count)):
                    if (left := _Left(path, until)).taken_back:
                        left.write(replaced.enter_context(self._whole(path, overwrite=True)))
                        done.append(Grown(path, left.records, left.taken_back))
        self._known = {rank: found.last for rank, found in attempts.items()}
        return done

    def _path(self, number: int) -> Path:
        return self._out / f"part-{number:05}.parquet"

    @contextmanager
    def _whole(self, target: Path, *, overwrite: bool) -> Iterator[Path]:
        """Give a path to write to, as `new_file` does."""
        try:
            self._aside.mkdir(exist_ok=True)
        except OSError as error:
            raise BadQuery(f"{self._aside} cannot be made: {error.strerror or error}. Choose another folder.") from None
        try:
            with new_file(target, overwrite=overwrite, partial=self._aside / target.name) as partial:
                yield partial
        finally:
            with contextlib.suppress(OSError):
                self._aside.rmdir()  # which others that are not whole keep from going


class _Left:
    """What is left in a file when steps were taken back.

    Args:
        path: the file.
        until: by rank, the first step that counts no more.

    Attributes:
        records: how many records are left.
        taken_back: how many are not.
    """

    def __init__(self, path: Path, until: Mapping[int, int]) -> None:
        import pyarrow.parquet as pq

        self._path = path
        self._counts: list[NDArray[np.bool_]] = []
        self.records = self.taken_back = 0
        with self._named(), pq.ParquetFile(path) as file:
            column = file.metadata.schema.names.index("step")
            ranges = [file.metadata.row_group(group).column(column).statistics for group in range(file.num_row_groups)]
            if all(r is not None and r.has_min_max and r.max < min(until.values()) for r in ranges):
                return
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, ["rank", "step"])
                ranks, steps = (table[name].to_numpy() for name in ("rank", "step"))
                gone = [(ranks == rank) & (steps >= step) for rank, step in until.items()]
                self._counts.append(~np.any(gone, axis=0))
        self.records = sum(int(np.sum(counts)) for counts in self._counts)
        self.taken_back = sum(map(len, self._counts)) - self.records

    def write(self, target: Path) -> None:
        """Write it to another file, which says of itself what this one does."""
        import pyarrow.parquet as pq

        with (
            self._named(),
            pq.ParquetFile(self._path) as file,
            pq.ParquetWriter(target, file.schema_arrow, compression="zstd") as writer,
        ):
            for group, counts in enumerate(self._counts):
                if counts.any():
                    writer.write_table(file.read_row_group(group).filter(pa.array(counts)))

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, ValueError) as error:
            raise BadQuery(f"{self._path} cannot be written anew: {error}. Begin another folder.") from None


@contextmanager
def grown_files(out: Path, asked: Mapping[str, Any]) -> Iterator[GrownFiles]:
    """Give the files of a folder, which is made if it is not there, and see to it that nobody else writes to it.

    Args:
        out: the folder.
        asked: what is exported: names and values as of JSON, which have to be those of an earlier export.

    Raises:
        BadQuery: the folder has something else in it, cannot be written, or is being written by another.
    """
    check_place(out)
    try:
        out.mkdir(exist_ok=True)
        folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BadQuery(f"{out} cannot be written: {error.strerror or error}. Choose another folder.") from None
    with ExitStack() as stack:
        stack.callback(os.close, folder)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadQuery(
                f"{out} is being written by another export. Wait for it, or choose another folder."
            ) from None
        yield GrownFiles(out, asked)


def _aside(out: Path) -> Path:
    """Return where files lie until they are whole: where a rename leads into the folder, and readers do not look."""
    out = out.resolve()
    if out.is_mount() or not os.access(out.parent, os.W_OK):
        return out / ".partial"
    return out.with_name(out.name + ".partial")
