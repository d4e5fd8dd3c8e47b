"""Whether the files of a trace are what was written: the bytes that have a checksum, and what the rest says of others.

Tensors and the log have checksums. The other files are small texts without one, so they are held to the format, to the
log and to what the store says of the same streams. A number that was changed into another number in `scalars.jsonl`,
`notes.jsonl`, `triggers.jsonl`, `model.json` or `trace.json` cannot be told. What is damaged is named, and hides
nothing else: so nothing here asks `Trace`, which wants its tables whole.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replay.attempts import Attempts, read_attempts
from replay.documents import read_end, read_identity, read_modules, read_notes, read_scalars, read_triggers
from replay.dropping import Dropped, read_dropped
from replay.errors import TraceDamaged
from replay.files import checksum
from replay.format import (
    ALERTS_FILE,
    ATTEMPTS_FILE,
    DROPPED_FILE,
    END_FILE,
    KEPT,
    MODEL_FILE,
    NOTES_FILE,
    SCALARS_FILE,
    SENT_FILE,
    STREAMS_FILE,
    TRACE_FILE,
    TRIGGERS_FILE,
    WHY_NOT_KEPT,
    Rows,
    Stream,
    check_location,
    parsed,
    whole_lines,
)
from replay.links import refuse_pipes
from replay.log_segments import segments_of
from replay.ranks import ranks_of
from replay.records import Progress
from replay.seal import COLUMNS_OF_ROWS, is_sealed, rows_of, totals
from replay.stores import StoreReader, faults, open_reader


@dataclass(frozen=True)
class Problem:
    """Something that is not what was written.

    Attributes:
        message: what is wrong.
        file: the file, as a path inside the trace; None where it is the tensor of a record.
        damage: whether something is lost that was committed; a commit that a crash cut off is none.
    """

    message: str
    file: str | None = None
    rank: int | None = None
    step: int | None = None
    layer: str | None = None
    kind: str | None = None
    call: int | None = None
    path: str | None = None
    damage: bool = True


def verify(trace: Path, progress: Progress | None = None) -> Iterator[Problem]:
    """Yield what is wrong with a trace, as it is found.

    Memory follows the largest record, and the number of records of the largest rank.

    Args:
        trace: the directory.
        progress: is told how far it is.

    Raises:
        TraceNotFound: there is no trace at the path.
        TraceTooNew: it has a newer version of the format.
    """
    try:
        refuse_pipes((trace, *ranks_of(trace).values()))
    except TraceDamaged as error:
        yield Problem(str(error), TRACE_FILE)
        return
    try:
        read_identity(trace)
    except TraceDamaged as error:
        yield Problem(str(error), TRACE_FILE)
    for name in (ALERTS_FILE, SENT_FILE):
        yield from _lines_that_are_no_objects(trace / name, trace, None)
    ranks = ranks_of(trace)
    if not ranks:
        yield Problem("There is no rank in it: what was recorded has been moved away.", TRACE_FILE)
    parts = [_Rank(directory, trace) for directory in ranks.values()]
    total, done = sum(part.count() for part in parts), 0
    for part in parts:
        for problem in part.problems():
            if problem is None:
                done += 1
                if progress is not None:
                    progress(done, max(done, total))
            else:
                yield problem


def verify_rank(directory: Path) -> Iterator[Problem]:
    """Yield what is wrong with one rank, wherever it lies."""
    return (problem for problem in _Rank(directory, directory.parent).problems() if problem is not None)


class _Rank:
    def __init__(self, directory: Path, trace: Path) -> None:
        self._directory = directory
        self._trace = trace
        self._number = int(directory.name.removeprefix("rank-").partition(".")[0])
        self._sealed = is_sealed(directory)
        self._streams: list[Stream | None] = []
        self._dropped = Dropped()
        self._attempts = Attempts()
        self._columns: list[dict[str, Any]] = []
        self._log_is_whole = True

    def count(self) -> int:
        """How many records the log has, as far as its ends say."""
        found = 0
        for segment in segments_of(self._directory):
            try:
                found += segment.rows
            except TraceDamaged:
                continue
        return found

    def problems(self) -> Iterator[Problem | None]:
        """Yield problems, and None for each record that was looked at."""
        yield from self._texts()
        yield from self._table_of_streams()
        with closing(open_reader(self._directory)) as store:
            yield from self._log(store)
        yield from self._ending()
        if self._log_is_whole:
            yield from self._store()

    def _file(self, name: str | Path, message: object, *, damage: bool = True) -> Problem:
        return Problem(str(message), _inside(self._directory / name, self._trace), self._number, damage=damage)

    def _texts(self) -> Iterator[Problem]:
        def scalars() -> None:
            for _ in read_scalars(self._directory):
                pass

        readers: tuple[tuple[str, Callable[[], Any]], ...] = (
            (ATTEMPTS_FILE, lambda: read_attempts(self._directory)),
            (MODEL_FILE, lambda: read_modules(self._directory)),
            (NOTES_FILE, lambda: read_notes(self._directory)),
            (TRIGGERS_FILE, lambda: read_triggers(self._directory)),
            (SCALARS_FILE, scalars),
            (DROPPED_FILE, lambda: read_dropped(self._directory)),
        )
        for name, read in readers:
            path = self._directory / name
            try:
                read()
            except TraceDamaged as error:
                yield self._file(name, error)
                continue
            if not path.exists():
                if name == MODEL_FILE:
                    yield self._file(name, "It is missing.")
            elif name.endswith(".jsonl"):
                yield from _lines_that_are_no_objects(path, self._trace, self._number, sealed=self._sealed)
            elif name == DROPPED_FILE:
                self._dropped = read_dropped(self._directory)
            if name == ATTEMPTS_FILE:
                self._attempts = read_attempts(self._directory)

    def _table_of_streams(self) -> Iterator[Problem]:
        path = self._directory / STREAMS_FILE
        if not path.exists():
            yield self._file(STREAMS_FILE, "It is missing.")
        yield from _lines_that_are_no_objects(path, self._trace, self._number, sealed=self._sealed)
        seen: set[tuple[object, ...]] = set()
        for number, line in enumerate(whole_lines(path)[0]):
            stream = None
            try:
                stream = Stream.from_json(line, path)
                check_location(stream, number, path)
            except TraceDamaged as error:
                yield self._file(STREAMS_FILE, error)
                stream = None
            self._streams.append(stream)
            if stream is not None:
                key = (
                    *(stream.layer, stream.kind, stream.path, stream.dtype, stream.shape, stream.location),
                    *stream.whole,
                )
                if key in seen:
                    yield self._file(STREAMS_FILE, f"Stream {number} is there twice: {key}.")
                seen.add(key)

    def _log(self, store: StoreReader) -> Iterator[Problem | None]:
        for segment in segments_of(self._directory):
            try:
                for batch in segment.batches():
                    columns = {name: batch[name].to_numpy() for name in batch.schema.names}
                    columns["attempt"] = np.full(len(batch), self._attempts.of_segment(segment.number), np.int32)
                    self._columns.append({name: columns[name].copy() for name in COLUMNS_OF_ROWS})
                    yield from self._records(columns, store, segment.path.name)
                if (tail := segment.tail()) is not None:
                    self._log_is_whole &= not (tail.damage or self._sealed)
                    yield self._file(segment.path.name, tail.message, damage=tail.damage or self._sealed)
            except TraceDamaged as error:
                self._log_is_whole = False
                yield self._file(segment.path.name, error)

    def _records(self, columns: dict[str, Any], store: StoreReader, file: str) -> Iterator[Problem | None]:
        unknown: set[int] = set()
        for at, number in enumerate(columns["stream"].tolist()):
            yield None
            stream = self._streams[number] if 0 <= number < len(self._streams) else None
            if stream is None:
                # A line of the table that is damaged was named; one that is missing is named once.
                if number not in unknown and not 0 <= number < len(self._streams):
                    yield self._file(STREAMS_FILE, f"It has no stream {number}, of which {file} has records.")
                unknown.add(number)
                continue
            record = {name: column[at].item() for name, column in columns.items()}
            what = self._of_record(stream, record, store)
            if what is not None:
                yield Problem(
                    what, None, self._number, record["step"], stream.layer, stream.kind, record["call"], stream.path
                )

    def _of_record(self, stream: Stream, record: dict[str, Any], store: StoreReader) -> str | None:
        kept, row = record["kept"], record["row"]
        if record["numel"] != stream.numel:
            return f"The log has {record['numel']} elements, and the stream the shape {stream.whole[1]}."
        if kept != KEPT:
            return None if kept in WHY_NOT_KEPT else f"The log gives {kept} as the reason why there is no tensor."
        if row < self._dropped.rows.get(stream.id, 0):
            return None
        try:
            data = store.read(stream, row, record["offset"], record["nbytes"])
        except TraceDamaged as error:
            return str(error)
        if len(data) != stream.nbytes or (len(data) and checksum(data) != record["crc32c"]):
            return "Its bytes are not those that were committed: the checksum differs."
        return None

    def _ending(self) -> Iterator[Problem]:
        try:
            end = read_end(self._directory)
        except TraceDamaged as error:
            yield self._file(END_FILE, error)
            return
        if end is None or not self._log_is_whole:
            return
        for name, found in totals(self._joined(), self._attempts).items():
            if end.get(name) != found:
                yield self._file(END_FILE, f"It says {name}: {end.get(name)!r}, and the log has {found}.")

    def _store(self) -> Iterator[Problem]:
        columns = self._joined()
        streams: list[tuple[Stream, Rows]] = []
        for stream, rows in rows_of(columns, [stream for stream in self._streams if stream is not None]):
            streams.append((stream, rows))
        for path, message in faults(self._directory, streams, self._dropped.rows, sealed=self._sealed):
            yield self._file(path, message)

    def _joined(self) -> dict[str, Any]:
        if len(self._columns) != 1:
            # Column by column, in their own types, and of each no more than one copy: there may be many millions.
            joined = {}
            for name in COLUMNS_OF_ROWS:
                joined[name] = np.concatenate([part.pop(name) for part in self._columns] or [np.zeros(0, np.int64)])
            self._columns = [joined]
        return self._columns[0]


def _lines_that_are_no_objects(path: Path, trace: Path, rank: int | None, *, sealed: bool = False) -> Iterator[Problem]:
    """Yield what is no JSON object, or no UTF-8; a last line without its end counts once the rank is sealed."""
    try:
        lines: Sequence[bytes] = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        yield Problem(f"It cannot be read: {error}", _inside(path, trace), rank)
        return
    for number, line in enumerate(lines[:-1], 1):
        try:
            good = isinstance(parsed(line.decode("utf-8")), dict)
        except ValueError:
            good = False
        if not good:
            yield Problem(f"Line {number} is no JSON object: {line[:200]!r}.", _inside(path, trace), rank)
    if lines[-1] and sealed:
        yield Problem("Its last line is cut off.", _inside(path, trace), rank)


def _inside(path: Path, trace: Path) -> str:
    return path.relative_to(trace).as_posix()
