"""How tensors of a sealed rank are dropped: the reason is written first, then the files go.

So whoever reads at any moment, also after a kill in the middle, finds the tensor or the reason why it is gone, and
never a file that is missing for no reason. Statistics stay. What goes are whole shards of a stream, from its first,
so that one number a stream says all: the row at which its tensors begin. Where streams share a place, its first shards
go, and the log says which rows of each were in them.
"""

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.errors import TraceDamaged
from replay.format import DROPPED_FILE, KEPT, RAGGED, Stream, parsed, write_whole
from replay.links import refuse_links
from replay.log import Log
from replay.ragged import Shards, forget_shards, shards_of, tensors_before
from replay.ragged_table import Member
from replay.seal import COLUMNS_OF_ROWS, read_streams, rows_of
from replay.zarr_store import DIRECTORY, forget_rows, rows_per_shard, shard_files

_BLOCK = 4096


@dataclass(frozen=True)
class Dropped:
    """What was dropped of a rank.

    Attributes:
        why: the last reason, the end of a sentence.
        time: when (RFC 3339).
        rows: by stream id, how many of its first rows have no tensor any more.
        nbytes: bytes of the tensors that were dropped.
    """

    why: str = ""
    time: str = ""
    rows: Mapping[int, int] = field(default_factory=dict)
    nbytes: int = 0

    def __str__(self) -> str:
        return f"dropped by {self.why} on {self.time}"

    def kept(self, table: pa.Table) -> NDArray[np.bool_]:
        """Return whether the tensors of rows of the log are there; takes the columns stream, kept and row."""
        kept: NDArray[np.bool_] = table["kept"].to_numpy() == KEPT
        if self.rows:
            streams = np.array(sorted(self.rows), np.int64)
            begins = np.array([self.rows[stream] for stream in streams.tolist()], np.int64)
            found = table["stream"].to_numpy()
            at = np.minimum(np.searchsorted(streams, found), len(streams) - 1)
            kept &= (streams[at] != found) | (table["row"].to_numpy() >= begins[at])
        return kept


@dataclass(frozen=True)
class Shard:
    """A file of tensors, the least that is dropped.

    Attributes:
        stream: whose; of a shared place, one of its streams.
        number: which of the stream's shards, or the place's, from 0.
        path: the file.
        nbytes: what it takes on the disk.
        time_s: when it was last written (seconds since 1970), and not before the shards in front of it.
    """

    stream: Stream
    number: int
    path: Path
    nbytes: int
    time_s: float


def read_dropped(rank_directory: Path) -> Dropped:
    """Return what was dropped of a rank; nothing, where nothing was.

    Raises:
        TraceDamaged: the file is not what the format says.
    """
    path = rank_directory / DROPPED_FILE
    try:
        found = parsed(path.read_text(encoding="utf-8"))
        rows = {int(stream): count for stream, count in found["streams"].items()}
        why, time, nbytes = found["why"], found["time"], found["bytes"]
        if not (isinstance(why, str) and isinstance(time, str)):
            raise TypeError("why and time are strings")
        if any(not isinstance(number, int) or not 0 <= number < 2**63 for number in (nbytes, *rows, *rows.values())):
            raise TypeError("bytes, and what streams says, are numbers from 0 to 2^63")
        return Dropped(why, time, rows, nbytes)
    except FileNotFoundError:
        return Dropped()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceDamaged(f"{path} does not say which tensors were dropped: {error!r}.") from None


def on_disk(stat: os.stat_result) -> int:
    """Return what a file takes on the disk: blocks of 4 KiB. What the system says of fresh files is not settled yet."""
    return -(-stat.st_size // _BLOCK) * _BLOCK


def shards(rank_directory: Path) -> list[Shard]:
    """Return the files of tensors that a rank has, those of a stream in order."""
    store = rank_directory / DIRECTORY
    found = []
    shared: set[str] = set()
    for stream in read_streams(rank_directory):
        if stream.location is None or stream.location in shared:
            continue
        if stream.layout == RAGGED:
            shared.add(stream.location)
            files = Shards(store / stream.location).files()
        else:
            files = shard_files(store, stream)
        time_s = 0.0
        for number, path in files:
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                time_s = max(time_s, stat.st_mtime)
                found.append(Shard(stream, number, path, on_disk(stat), time_s))
    return found


def drop(rank_directory: Path, victims: Iterable[Shard], why: str, time: str) -> None:
    """Drop shards of a sealed rank, and those before them in their streams or places. May be repeated.

    Args:
        rank_directory: the rank; its writer's lock is held by the caller.
        victims: what to drop.
        why: the reason, the end of a sentence that begins with "dropped by".
        time: now (RFC 3339).

    Raises:
        OSError: a file could not be written or removed. What the rank says of itself is right all the same.
    """
    store = rank_directory / DIRECTORY
    victims = list(victims)
    before = read_dropped(rank_directory)
    rows, nbytes = dict(before.rows), before.nbytes
    streams = {shard.stream.id: shard.stream for shard in victims if shard.stream.layout != RAGGED}
    ends: dict[str, int] = {}
    for shard in victims:
        if shard.stream.layout == RAGGED:
            location = str(shard.stream.location)
            ends[location] = max(shard.number + 1, ends.get(location, 0))
        else:
            end = (shard.number + 1) * rows_per_shard(shard.stream.nbytes)
            rows[shard.stream.id] = max(end, rows.get(shard.stream.id, 0))
    for number, stream in streams.items():
        there = forget_rows(store, stream, rows[number])
        gone = min(rows[number], there) - min(before.rows.get(number, 0), there)
        nbytes += gone * stream.nbytes
    shared = _shared(rank_directory, ends)
    for location, members in shared.items():
        forget_shards(store / location, members[0][0].dtype, ends[location])
        for member in members:
            number, first = member[0].id, before.rows.get(member[0].id, 0)
            if (end := tensors_before(member, ends[location])) > first:
                nbytes += int(member[1].nbytes[first:end].sum())
                rows[number] = end
    if rows != before.rows:
        document = {"why": why, "time": time, "bytes": nbytes, "streams": {str(k): v for k, v in sorted(rows.items())}}
        write_whole(rank_directory / DROPPED_FILE, json.dumps(document, indent=1) + "\n")
        with (rank_directory / DROPPED_FILE).open("rb") as file:
            os.fsync(file)  # the files must not be gone before it, when the power fails
    _remove_below(store, streams.values(), rows)
    _remove_shared(store, shared, rows)


def finish_dropping(rank_directory: Path) -> None:
    """Remove files that were dropped before a kill came in between.

    Raises:
        OSError: one could not be removed.
        TraceDamaged: what was dropped cannot be read, or there is a link among the files.
    """
    rows = read_dropped(rank_directory).rows
    if rows:
        refuse_links(rank_directory)
        streams = [stream for stream in read_streams(rank_directory) if stream.id in rows]
        _remove_below(rank_directory / DIRECTORY, (stream for stream in streams if stream.layout != RAGGED), rows)
        places = {str(stream.location) for stream in streams if stream.layout == RAGGED}
        _remove_shared(rank_directory / DIRECTORY, _shared(rank_directory, places), rows)


def _remove_below(store: Path, streams: Iterable[Stream], rows: Mapping[int, int]) -> None:
    for stream in streams:
        for number, path in shard_files(store, stream):
            if number * rows_per_shard(stream.nbytes) >= rows[stream.id]:
                continue
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                for folder in list(path.parents)[: len(stream.shape)]:
                    folder.rmdir()


def _shared(rank_directory: Path, locations: Collection[str]) -> dict[str, list[Member]]:
    """Return the streams of shared places with their rows, from the log."""
    found: dict[str, list[Member]] = {}
    if locations:
        streams = [stream for stream in read_streams(rank_directory) if stream.location in locations]
        table = Log(rank_directory, superseded=True).refresh().table(COLUMNS_OF_ROWS)
        columns = {name: table[name].to_numpy() for name in table.column_names}
        for member in rows_of(columns, streams):
            found.setdefault(str(member[0].location), []).append(member)
    return found


def _remove_shared(store: Path, places: Mapping[str, Sequence[Member]], rows: Mapping[int, int]) -> None:
    """Remove the shards of shared places in which no tensor is left."""
    for location, members in places.items():
        needed = shards_of(members, [rows.get(stream.id, 0) for stream, _ in members])
        for number, path in Shards(store / location).files():
            if number not in needed:
                path.unlink(missing_ok=True)
