"""How a trace is written anew in another store: the log says how far it got, as it does for a recording.

The copy grows in `B.partial`, a rank after the other, a block of commits at a time. Its tensors are written before
its rows of the log, so that whoever was interrupted goes on behind the last row. A rank gets its name when it is
verified, and the whole its name when all ranks are there: until then it is no trace.

A trace may come from a stranger, and the copy may go to others. So only files that the format names are copied as they
are, and never what a link leads to.
"""

import dataclasses
import json
import mmap
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from replay.attempts import read_attempts
from replay.documents import read_end, read_identity
from replay.dropping import read_dropped
from replay.errors import CannotConvert, TraceDamaged
from replay.files import PAGE
from replay.format import (
    ALERTS_FILE,
    ATTEMPTS_FILE,
    CODECS,
    DROPPED_FILE,
    END_FILE,
    FIXED,
    KEPT,
    LOCK_FILE,
    MODEL_FILE,
    NOTES_FILE,
    PINNED_FILE,
    RECORD_SCHEMA,
    SCALARS_FILE,
    SENT_FILE,
    STREAMS_FILE,
    TRACE_FILE,
    TRIGGERS_FILE,
    Stream,
    parsed,
    whole_lines,
    write_whole,
)
from replay.hdf5_segments import SEGMENTS_FILE
from replay.log import Log, LogWriter
from replay.log_segments import segments_of
from replay.places import Places
from replay.ranks import PATTERN as RANK
from replay.ranks import ranks_of
from replay.seal import locked, read_streams, seal
from replay.stores import STORES, StoreReader, StoreWriter, open_reader, open_writer
from replay.trace import open as open_trace
from replay.verify import verify_rank
from replay.zarr_store import DIRECTORY

DROPPED_BEFORE, DAMAGED_BEFORE = 9, 10
"""Why a record of the copy has no tensor, where that of the original had one once."""

Progress = Callable[[int, int], None]

_PLAN = "converting.json"
_BLOCK_ROWS = 512
_OF_TRACE = (ALERTS_FILE, SENT_FILE, PINNED_FILE)
_OF_RANK = (MODEL_FILE, SCALARS_FILE, TRIGGERS_FILE)
"""What is copied as it is."""
_WRITTEN = (TRACE_FILE, LOCK_FILE, STREAMS_FILE, END_FILE, DROPPED_FILE, NOTES_FILE, SEGMENTS_FILE, ATTEMPTS_FILE)
_ANEW = re.compile(
    "|".join(re.escape(name) for name in _WRITTEN)
    + rf"|{RANK}|{re.escape(DIRECTORY)}|records-\d+\.(arrows|parquet)(\.partial)?|tensors(-\d+)?\.h5(\.partial)?"
)
"""What is read, and written anew."""


class Converted(NamedTuple):
    """What a copy lacks: how many tensors were damaged, and the paths in the original that were left out."""

    damaged: int
    left_out: list[Path]


def convert(
    source: Path, target: Path, store: str, compression: str | None, progress: Progress | None = None
) -> Converted:
    """Write a trace anew; go on where an earlier attempt was interrupted.

    Args:
        source: a trace that nobody writes to.
        target: where the copy goes; nothing is there.
        store: "zarr" or "hdf5".
        compression: "zstd", "lz4" or "blosc", or None.
        progress: is told how many records are there, and of how many.

    Returns:
        What the copy lacks. Of tensors that are damaged it has the statistics, and a note of each. Left out are links,
        and files that the format does not name.

    Raises:
        CannotConvert: it cannot be done, or not so.
        TraceNotFound: there is no trace at `source`.
        TraceDamaged: the log or the table of streams of the original is damaged, or the copy is not what was written.
        OSError: a file could not be written. The same call goes on from there.
    """
    with open_trace(source) as trace:
        partial = _partial(source, target, trace.status, store, compression)
        directories = dict(sorted(trace.directories.items()))
        total = sum(Log(directory, superseded=True).refresh().rows for directory in directories.values())
    identity = read_identity(source)
    for path in (path for rank in directories.values() for path in (rank, rank / MODEL_FILE)):
        if path.is_symlink():
            raise CannotConvert(f"{path} is a link, and links are not copied. Put what it leads to in its place.")
    with ExitStack() as stack:
        partial.mkdir(parents=True, exist_ok=True)
        try:
            stack.enter_context(locked(partial))
        except BlockingIOError:
            raise CannotConvert(f"{partial} is being written by another process. Wait for it.") from None
        _claim(partial, {"from": str(source.resolve()), "id": identity.get("id"), "plan": [store, compression]})
        done, damaged = 0, 0
        for directory in directories.values():
            # A writer that comes back to a torn trace would add what the copy then lacks.
            if not (directory / END_FILE).exists():
                stack.enter_context(locked(directory))
            copy = partial / directory.name
            if not copy.exists():
                rank = _Rank(directory, partial / f"{directory.name}.partial", store, compression)
                for count in rank.write():
                    if progress is not None:
                        progress(done + count, total)
                rank.finish()
                rank.copy.replace(copy)
            done += Log(copy, superseded=True).refresh().rows
            damaged += _damaged(copy)
        _copy_files(source, partial, _OF_TRACE)
        came = {"path": str(source), "id": identity.get("id"), **{n: identity["plan"].get(n) for n in _CHANGED}}
        plan = {**identity["plan"], "store": store, "compression": compression}
        whole = {**identity, "plan": plan, "converted_from": came}
        write_whole(partial / TRACE_FILE, json.dumps(whole, indent=1) + "\n")
        # The claim goes last: without it, nobody could tell later whose directory this is, nor go on.
        (partial / LOCK_FILE).unlink()
        partial.rename(target)
        (target / _PLAN).unlink()
    return Converted(damaged, _left_out(source))


_CHANGED = ("store", "compression")


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        if _is_plain(source / name):
            shutil.copy2(source / name, target / name, follow_symlinks=False)


def _left_out(source: Path) -> list[Path]:
    """Return what of a trace is in no copy."""
    folders = [(source, _OF_TRACE)]
    folders += [(rank, _OF_RANK) for rank in ranks_of(source).values()]
    return [
        path.relative_to(source)
        for folder, copied in folders
        for path in sorted(folder.iterdir())
        if not (_is_plain(path) if path.name in (*copied, NOTES_FILE) else _ANEW.fullmatch(path.name))
    ]


def _partial(source: Path, target: Path, status: str, store: str, compression: str | None) -> Path:
    """Return where the copy grows; raise CannotConvert where it must not."""
    if store not in STORES or compression not in (None, *CODECS):
        raise CannotConvert(
            f"There is no store {store!r} with compression {compression!r}; the stores are {', '.join(STORES)}, the "
            f"compressions {', '.join(CODECS)}, none."
        )
    if status == "live":
        raise CannotConvert(f"{source} is being recorded. Convert it when the recording has ended.")
    if target.exists() or target.is_symlink():
        raise CannotConvert(f"{target} exists. Name another place, or remove it first.")
    if target.resolve().is_relative_to(source.resolve()):
        raise CannotConvert(f"{target} lies inside of the trace {source}. Name a place outside.")
    return target.with_name(target.name + ".partial")


def _claim(partial: Path, wanted: dict[str, Any]) -> None:
    """Make sure that what is in a directory is of this conversion."""
    path = partial / _PLAN
    try:
        found = parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if {child.name for child in partial.iterdir()} - {LOCK_FILE, _PLAN + ".partial"}:
            raise CannotConvert(f"{partial} is there, and no conversion of ours. Remove it first.") from None
        write_whole(path, json.dumps(wanted))
        return
    except ValueError:
        found = None
    if found != wanted:
        raise CannotConvert(f"{partial} holds a conversion of another trace, or to another store. Remove it first.")


class _Rank:
    """The copy of one rank."""

    def __init__(self, source: Path, copy: Path, store: str, compression: str | None) -> None:
        self._source = source
        self.copy = copy
        self._store = store
        self._attempts = read_attempts(source)
        self._dropped = read_dropped(source)
        self._old = read_streams(source)
        places = Places()
        recoded = [dataclasses.replace(stream, codec=compression, layout=FIXED) for stream in self._old]
        self._new = [stream if stream.location is None else places.place(stream) for stream in recoded]

    def write(self) -> Iterator[int]:
        """Write tensors and log; yield how many records are there."""
        self.copy.mkdir(exist_ok=True)
        _copy_files(self._source, self.copy, _OF_RANK)
        write_whole(self.copy / STREAMS_FILE, "".join(stream.to_json() + "\n" for stream in self._new))
        with ExitStack() as stack:
            log = LogWriter(self.copy)
            stack.callback(log.close)
            done, rows = self._state()
            reader = stack.enter_context(closing(open_reader(self._source)))
            writer: StoreWriter | None = None
            if any(stream.location is not None for stream in self._new):
                writer = stack.enter_context(closing(open_writer(self._store, self.copy)))
                for stream in self._new:
                    if stream.location is not None:
                        writer.add(stream, int(rows[stream.id]))
            for number, columns in self._blocks(done):
                self._begin_attempts(log, self._attempts.of_segment(number))
                self._write_block(columns, reader, writer)
                log.append(columns)
                done += len(columns["step"])
                yield done
            self._begin_attempts(log, self._attempts.last)

    def _begin_attempts(self, log: LogWriter, attempt: int) -> None:
        """Give each attempt up to one of them a segment of its own, as it has in the original, and its line."""
        lines = whole_lines(self._source / ATTEMPTS_FILE)[0]
        copied = whole_lines(self.copy / ATTEMPTS_FILE)[0]
        for line in lines[len(copied) : attempt]:
            log.begin_segment()
            copied.append(json.dumps({**parsed(line), "segment": log.segment}))
            write_whole(self.copy / ATTEMPTS_FILE, "".join(f"{one}\n" for one in copied))

    def _state(self) -> tuple[int, NDArray[np.int64]]:
        """How many records the copy has, and how many rows of each stream."""
        done, rows = 0, np.zeros(len(self._new) + 1, np.int64)
        for segment in segments_of(self.copy):
            for batch in segment.batches():
                done += len(batch)
                streams = batch["stream"].to_numpy()[batch["kept"].to_numpy() == KEPT]
                rows += np.bincount(streams, minlength=len(rows))
        return done, rows

    def _blocks(self, skip: int) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        """Yield records of the original, from one of them on, with the number of their segment."""
        for segment in segments_of(self._source):
            for batch in segment.batches():
                if skip >= len(batch):
                    skip -= len(batch)
                    continue
                for begin in range(skip, len(batch), _BLOCK_ROWS):
                    part = batch.slice(begin, _BLOCK_ROWS)
                    yield segment.number, {name: part[name].to_numpy().copy() for name in RECORD_SCHEMA.names}
                skip = 0
            if (tail := segment.tail()) is not None and tail.damage:
                raise TraceDamaged(f"{segment.path}: {tail.message} A trace whose log is damaged is not converted.")

    def _write_block(self, columns: dict[str, Any], reader: StoreReader, writer: StoreWriter | None) -> None:
        for at, number in enumerate(columns["stream"].tolist()):
            if not 0 <= number < len(self._old):
                raise TraceDamaged(f"{self._source / STREAMS_FILE} has no stream {number}, and the log has.")
            if columns["kept"][at] != KEPT:
                continue
            data = b""
            if columns["row"][at] < self._dropped.rows.get(number, 0):
                columns["kept"][at] = DROPPED_BEFORE
            else:
                try:
                    data = self._read(reader, self._old[number], {name: column[at] for name, column in columns.items()})
                except TraceDamaged:
                    columns["kept"][at] = DAMAGED_BEFORE
            if columns["kept"][at] != KEPT or writer is None:
                columns["row"][at] = columns["offset"][at] = -1
                columns["nbytes"][at] = columns["crc32c"][at] = 0
                continue
            # Direct I/O takes whole pages of memory that begin on a page border.
            with mmap.mmap(-1, max(1, -(-len(data) // PAGE)) * PAGE) as memory:
                memory[: len(data)] = data
                view = memoryview(memory)
                placed = writer.append(number, view, [0])[0]
                view.release()
            columns["row"][at], columns["offset"][at], columns["nbytes"][at] = placed

    def _read(self, reader: StoreReader, stream: Stream, record: dict[str, Any]) -> bytes:
        if int(record["numel"]) != stream.numel:
            raise TraceDamaged("The log and the table of streams differ in its shape.")
        data = bytes(reader.read(stream, int(record["row"]), int(record["offset"]), int(record["nbytes"])))
        if len(data) != stream.nbytes or (data and google_crc32c.value(data) != record["crc32c"]):
            raise TraceDamaged("The checksum differs.")
        return data

    def finish(self) -> None:
        """Seal the copy and read it back.

        Raises:
            TraceDamaged: it is not what was written.
        """
        self._write_notes()
        end = read_end(self._source)
        if end is None:
            seal(self.copy, "recovered", "the writer was gone; sealed when the trace was converted", {})
        else:
            seal(self.copy, end["how"], end.get("detail"), end["books"])
            sealed = read_end(self.copy) or {}
            write_whole(self.copy / END_FILE, json.dumps({**end, **sealed, "time": end["time"]}, indent=1) + "\n")
        problem = next(verify_rank(self.copy), None)
        if problem is not None:
            raise TraceDamaged(f"The copy {self.copy} is not what was written: {problem}. Remove it and try again.")

    def _write_notes(self) -> None:
        """Copy the notes, with one for each tensor that was not copied, and one for what had been dropped."""
        path = self._source / NOTES_FILE
        text = path.read_bytes() if _is_plain(path) else b""
        notes = [text[: text.rfind(b"\n") + 1].decode("utf-8", "replace")]
        dropped = 0
        for columns in _not_copied(self.copy):
            for step, number, kept in zip(*(columns[name] for name in ("step", "stream", "kept")), strict=True):
                stream = self._new[number]
                dropped += kept == DROPPED_BEFORE
                if kept == DAMAGED_BEFORE:
                    what = f"the {stream.kind} {stream.path}".rstrip() + " was damaged before the trace was converted"
                    notes.append(json.dumps({"step": step, "layer": stream.layer, "note": what}) + "\n")
        if dropped:
            what = f"{dropped:,} tensors were {self._dropped} before the trace was converted"
            notes.append(json.dumps({"step": None, "layer": None, "note": what}) + "\n")
        write_whole(self.copy / NOTES_FILE, "".join(notes))


def _not_copied(rank: Path) -> Iterator[dict[str, list[int]]]:
    for segment in segments_of(rank):
        for batch in segment.batches():
            kept = batch["kept"].to_numpy()
            chosen = (kept == DROPPED_BEFORE) | (kept == DAMAGED_BEFORE)
            yield {name: batch[name].to_numpy()[chosen].tolist() for name in ("step", "stream", "kept")}


def _damaged(rank: Path) -> int:
    return sum(columns["kept"].count(DAMAGED_BEFORE) for columns in _not_copied(rank))
