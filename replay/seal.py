"""How a rank's part of a trace is finished: all is derived from the log, so anybody can do it, at any time, again.

The writer seals what it wrote when the training ends, and whoever finds a trace whose writer is gone seals it from
the same log. There is one way to seal, and it never needs to know what the writer knew.
"""

import datetime
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.attempts import Attempts, read_attempts
from replay.documents import read_laid_aside
from replay.files import sync_tree
from replay.format import (
    END_FILE,
    KEPT,
    LAID_ASIDE,
    LOCK_FILE,
    STREAMS_FILE,
    Rows,
    Stream,
    check_location,
    whole_lines,
    write_whole,
)
from replay.links import refuse_link, refuse_links
from replay.log import Log, compact_all
from replay.stores import seal_streams

COLUMNS_OF_ROWS = ("stream", "kept", "row", "step", "call", "micro", "offset", "nbytes", "attempt")
"""The columns of a log, superseded records included, that say what rows a stream has."""

COUNTED_COLUMNS = ("step", "kept", "nbytes", "attempt")
"""Those of them that `end.json` counts."""


def read_streams(rank_directory: Path) -> list[Stream]:
    """Return the streams of a rank, in the order of their ids."""
    return further_streams(rank_directory, 0, 0)[0]


def further_streams(rank_directory: Path, count: int, begin: int) -> tuple[list[Stream], int]:
    """Return the streams of a rank from one of them on, and the byte of the table at which the next will begin.

    Args:
        rank_directory: the rank.
        count: how many streams are known.
        begin: the byte of the table at which the first that is not known begins.
    """
    path = rank_directory / STREAMS_FILE
    lines, end = whole_lines(path, begin)
    streams = []
    for number, line in enumerate(lines, count):
        stream = Stream.from_json(line, path)
        check_location(stream, number, path)
        streams.append(stream)
    return streams, end


def rows_of(columns: Mapping[str, NDArray[Any]], streams: Iterable[Stream]) -> Iterator[tuple[Stream, Rows]]:
    """Yield each stream with the rows that a rank's log has of it.

    Args:
        columns: `COLUMNS_OF_ROWS` of the log.
        streams: which.
    """
    kept = np.flatnonzero(columns["kept"] == KEPT)
    order = kept[np.lexsort((columns["row"][kept], columns["stream"][kept]))]
    streams = list(streams)
    ids = np.array([stream.id for stream in streams], columns["stream"].dtype)  # of another, all is converted first
    bounds = (np.searchsorted(columns["stream"][order], ids, side).tolist() for side in ("left", "right"))
    for stream, first, last in zip(streams, *bounds, strict=True):
        yield stream, Rows(*(columns[name][order[first:last]] for name in Rows._fields))


def seal(
    rank_directory: Path,
    how: str,
    detail: str | None,
    books: dict[str, Any],
    *,
    durable: bool = False,
    ended: str | None = None,
) -> None:
    """Finish a rank's store and log and write `end.json`.

    The store keeps the tensors of earlier attempts; what is counted is what counts.

    Args:
        rank_directory: the rank; its writer's lock is held by the caller.
        how: one of the words of section 11 of the format.
        detail: a sentence on it.
        books: what recording cost and dropped, as far as it is known.
        durable: whether all is brought to the disk itself before it counts as finished.
        ended: when that was (RFC 3339); now if None.
    """
    log = Log(rank_directory, superseded=True).refresh()
    table = log.table(COLUMNS_OF_ROWS)
    columns = {name: table[name].to_numpy() for name in table.column_names}
    seal_streams(rank_directory, rows_of(columns, read_streams(rank_directory)))
    compact_all(rank_directory)
    end = {
        "how": how,
        "detail": detail,
        "time": ended or datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        **totals(columns, log.attempts),
        "books": books,
    }
    if durable:
        sync_tree(rank_directory)
    write_whole(rank_directory / END_FILE, json.dumps(end, indent=1) + "\n", durable=durable)


def seal_abandoned(rank_directory: Path, detail: str, *, durable: bool = False) -> None:
    """Finish a rank whose writer is gone: as it was, if an attempt took it up again and has recorded nothing.

    Args:
        rank_directory: the rank; its writer's lock is held by the caller.
        detail: a sentence for a rank that never was finished.
        durable: as of `seal`.
    """
    end = read_laid_aside(rank_directory)
    if end is None:
        seal(rank_directory, "recovered", detail, {}, durable=durable)
        return
    seal(rank_directory, end["how"], end.get("detail"), end["books"], durable=durable, ended=end["time"])
    (rank_directory / LAID_ASIDE.format(read_attempts(rank_directory).last)).unlink(missing_ok=True)


def totals(columns: Mapping[str, NDArray[Any]], attempts: Attempts) -> dict[str, int]:
    """Return what `end.json` counts: steps, records and tensors of what counts, and the bytes of all tensors.

    Args:
        columns: `COUNTED_COLUMNS` of a log.
        attempts: those of the rank.
    """
    counts = attempts.mask(columns["attempt"], columns["step"])
    return {
        "steps": len(np.unique(columns["step"][counts])),
        "records": int(np.sum(counts)),
        "tensors": int(np.sum(columns["kept"][counts] == KEPT)),
        "bytes": int(columns["nbytes"].sum()),
    }


def is_sealed(rank_directory: Path) -> bool:
    """Whether the rank is finished."""
    return (rank_directory / END_FILE).exists()


def is_locked(directory: Path, file: str = LOCK_FILE) -> bool:
    """Whether a writer is at work on the rank, or whoever else locks a file in a directory."""
    try:
        fd = os.open(directory / file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # no pipe is waited for
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextmanager
def locked(rank_directory: Path) -> Iterator[None]:
    """Hold the writer's lock of a rank. All that changes a rank is done inside.

    Raises:
        BlockingIOError: another writer holds it.
        TraceDamaged: there is a link in it, and what is written would go elsewhere.
    """
    refuse_link(rank_directory)
    fd = os.open(rank_directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        for wait_s in (0.01, 0.05, None):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if wait_s is None:
                    raise
                time.sleep(wait_s)  # whoever asks `is_locked` holds it for a moment, and a daemon asks every second
        refuse_links(rank_directory)
        yield
    finally:
        os.close(fd)
