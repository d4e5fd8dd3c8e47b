"""How tensors of many shapes share a place in `tensors.zarr`: behind one another in one flat array.

A place for each shape has directories and files of its own, and a training whose batches are padded to their longest
sequence has hundreds of shapes a layer. Here the log says at which byte of the array a tensor begins, and its stream
says its shape, so nothing is counted but the bytes: a tensor that is taken back leaves a hole, and whoever goes on
after a crash begins behind whatever is there.

The files of the array are shards, and a tensor may go from one to the next. Their inner chunks have nothing to do with
tensors: they are what other programs read at a time, and let the last file end where its tensors do.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replay.errors import TraceDamaged
from replay.files import PAGE, VECTOR, Files, memory, stride_of
from replay.format import Stream, as_attribute, numpy_dtype
from replay.ragged_table import Member, table_of
from replay.zarr_metadata import (
    GROUP,
    bytes_of,
    document_faults,
    drop_first,
    finish_shard,
    shard_index,
    sharded_metadata,
    small_faults,
    write_array,
    write_group,
    write_small,
)

SHARD_BYTES = 1 << 30
_INNER_BYTES = 1 << 18


class Shards:
    """The files of a place's array: which of them has which bytes."""

    def __init__(self, group: Path) -> None:
        self._directory = group / "data" / "c"
        self._paths: dict[int, Path] = {}

    def path(self, number: int) -> Path:
        """Return the file of a shard."""
        path = self._paths.get(number)
        if path is None:
            path = self._paths[number] = self._directory / str(number)
        return path

    def files(self) -> list[tuple[int, Path]]:
        """Return the shards that are there, in order: number and file."""
        try:
            with os.scandir(self._directory) as entries:
                numbers = sorted(int(entry.name) for entry in entries if entry.name.isdecimal())
        except FileNotFoundError:
            return []
        return [(number, self.path(number)) for number in numbers]

    def read(self, files: Files, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the array.

        Raises:
            TraceDamaged: they are not all there.
        """
        pieces = []
        done = 0
        while done < nbytes or nbytes < 0:
            number, begin = divmod(offset + done, SHARD_BYTES)
            count = min(nbytes - done, SHARD_BYTES - begin)
            files.check(self.path(number), begin, count)
            pieces.append((self.path(number), done, done + count, begin))
            done += count
        data = memory(nbytes)
        for path, first, last, begin in pieces:
            files.fill(path, data[first:last], begin)
        return data


class Appender:
    """Appends tensors to the array of a place.

    Args:
        group: the place.
        stream: one of its streams.
        files: writes.
    """

    def __init__(self, group: Path, stream: Stream, files: Files) -> None:
        (group / "data" / "c").mkdir(parents=True, exist_ok=True)
        write_group(group.parent)
        write_group(group)
        write_array(group / "data", _data_metadata(stream, 0))
        self._files = files
        self._shards = Shards(group)
        self._end = 0
        for number, path in self._shards.files()[-1:]:
            self._end = number * SHARD_BYTES + -(-min(path.stat().st_size, SHARD_BYTES) // PAGE) * PAGE

    def append(self, nbytes: int, memory: memoryview, places: Sequence[int]) -> range:
        """Write tensors of one shape, not empty ones; return the byte of the array at which each begins.

        Args:
            nbytes: bytes of each.
            memory: where they are.
            places: at which byte of it each begins, as for `ZarrWriter.append`.

        Raises:
            OSError: they could not be written; their room will be taken by others.
        """
        stride = stride_of(nbytes)
        direct = stride % PAGE == 0
        # What is packed begins at a multiple of its item, since whatever is before it has the same dtype, or whole
        # pages.
        begin = -(-self._end // PAGE) * PAGE if direct else self._end
        end = begin + stride * len(places)
        pieces = self._cut(begin, [memory[place : place + stride] for place in places])
        for number, of_shard in itertools.groupby(pieces, lambda piece: piece[0] // SHARD_BYTES):
            while some := list(itertools.islice(of_shard, VECTOR)):
                path, offset = self._shards.path(number), some[0][0] % SHARD_BYTES
                self._files.write(path, [part for _, part in some], offset, direct=direct)
            if (number + 1) * SHARD_BYTES <= end:
                self._files.drop(self._shards.path(number))
        self._end = end
        return range(begin, end, stride)

    def _cut(self, position: int, parts: Iterable[memoryview]) -> Iterator[tuple[int, memoryview]]:
        """Yield parts that lie behind one another, cut where a file ends, and where each begins."""
        for part in parts:
            while len(part):
                piece = part[: SHARD_BYTES - position % SHARD_BYTES]
                yield position, piece
                position += len(piece)
                part = part[len(piece) :]


def seal_place(group: Path, members: Sequence[Member]) -> None:
    """Finish a place: indexes of the shards, the shape, and the table of its tensors. May be repeated.

    Raises:
        TraceDamaged: streams that are not alike have the place.
    """
    table = table_of(members)
    shards = Shards(group)
    for number, path in shards.files():
        if table.end > number * SHARD_BYTES:
            chunks, index = _index(number, table.end)
            finish_shard(path, chunks * _INNER_BYTES, index)
    group.mkdir(parents=True, exist_ok=True)
    write_group(group)
    for name, values in table.columns.items():
        write_small(group / name, values, _dimensions(name))
    write_array(group / "data", _data_metadata(members[0][0], table.end))


def place_faults(
    group: Path, members: Sequence[Member], dropped: Sequence[int], *, sealed: bool
) -> Iterator[tuple[Path, str]]:
    """Yield what in a place contradicts the log: the file, and a sentence on it.

    Args:
        group: the place.
        members: its streams.
        dropped: of each, how many of its first rows have no tensor any more.
        sealed: whether the place was finished.
    """
    try:
        table = table_of(members)
    except TraceDamaged as error:
        yield group, str(error)
        return
    for node in (group.parent.parent, group.parent, group):
        yield from document_faults(node / "zarr.json", GROUP)
    wanted = _data_metadata(members[0][0], table.end)
    if not sealed:
        del wanted["shape"]
    yield from document_faults(group / "data" / "zarr.json", wanted, dropped=any(dropped))
    if not sealed:
        return
    for name, values in table.columns.items():
        yield from small_faults(group / name, values, _dimensions(name), name)
    shards = Shards(group)
    for number in shards_of(members, dropped):
        path, (_, index) = shards.path(number), _index(number, table.end)
        if bytes_of(path, -len(index)) != index:
            yield path, "Its index is not what the log says of its tensors."


def shards_of(members: Iterable[Member], dropped: Iterable[int]) -> list[int]:
    """Return the numbers of the shards that have bytes of tensors which were not dropped, in order."""
    found: set[int] = set()
    for (_, rows), begin in zip(members, dropped, strict=True):
        there = np.flatnonzero(rows.nbytes[begin:]) + begin
        first = rows.offset[there] // SHARD_BYTES
        last = (rows.offset[there] + rows.nbytes[there] - 1) // SHARD_BYTES
        for one, other in set(zip(first.tolist(), last.tolist(), strict=True)):
            found.update(range(one, other + 1))
    return sorted(found)


def tensors_before(member: Member, shards: int) -> int:
    """Return how many tensors of a stream, from its first, begin in the first shards of its place."""
    stream, rows = member
    return int(np.searchsorted(rows.offset, shards * SHARD_BYTES)) if stream.nbytes else 0


def forget_shards(group: Path, dtype: str, shards: int) -> None:
    """Write into a sealed place's array that so many of its first shards will be dropped."""
    drop_first(group / "data", dtype, shards * SHARD_BYTES // numpy_dtype(dtype).itemsize)


def _data_metadata(stream: Stream, end: int) -> dict[str, Any]:
    itemsize = numpy_dtype(stream.dtype).itemsize
    attributes = {name: as_attribute(getattr(stream, name)) for name in ("layer", "kind", "path")}
    shape, shard, inner = ([nbytes // itemsize] for nbytes in (end, SHARD_BYTES, _INNER_BYTES))
    return sharded_metadata(shape, shard, inner, stream.dtype, ["element"], attributes)


def _dimensions(name: str) -> list[str]:
    return ["tensor", "dimension"] if name == "shape" else ["tensor"]


def _index(number: int, end: int) -> tuple[int, bytes]:
    """Return how many inner chunks a shard of an array of so many bytes has, and its index."""
    chunks = -(-min(SHARD_BYTES, end - number * SHARD_BYTES) // _INNER_BYTES)
    return chunks, shard_index(SHARD_BYTES // _INNER_BYTES, np.arange(chunks) * _INNER_BYTES, _INNER_BYTES)
