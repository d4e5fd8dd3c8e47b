"""How tensors lie in `tensors.zarr`: written by appending, read at known offsets, valid Zarr v3 when sealed.

Zarr's sharding codec keeps the index of a shard at its end, so a shard can be written by appending records
and is finished by adding the index: the bytes that were appended are the store. Records of 64 KiB and more, and smaller
ones of whole pages, begin on page borders, so that they go by direct I/O straight from the shared ring, past the page
cache, which would cost the training a core. Others, and what is compressed, go through the page cache.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replay.codecs import compress, decompress, zarr_codec
from replay.errors import TraceDamaged
from replay.files import PAGE, VECTOR, Files, memory, stride_of, sync
from replay.format import RAGGED, Placed, Rows, Stream, as_attribute, numpy_dtype
from replay.ragged import Appender, Shards, place_faults, seal_place
from replay.ragged_table import Member
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

DIRECTORY = "tensors.zarr"
_SHARD_BYTES = 1 << 30
_SHARD_ROWS = 4096


def rows_per_shard(nbytes: int) -> int:
    """Return how many records a shard holds: a power of two, near 1 GiB and at most 4096."""
    rows = _SHARD_ROWS
    while rows > 1 and rows * stride_of(nbytes) > _SHARD_BYTES:
        rows //= 2
    return rows


class ZarrWriter:
    """Appends records to the arrays of one rank's store.

    Owned by the writer process. It never reads back and knows no step: what is committed is the log's affair.
    """

    def __init__(self, rank_directory: Path) -> None:
        self._root = rank_directory / DIRECTORY
        self._streams: dict[int, _Appending | _Sharing] = {}
        self._shared: dict[str, Appender] = {}
        self._files = Files(os.O_RDWR | os.O_CREAT)
        self._root.mkdir(parents=True, exist_ok=True)
        write_group(self._root)
        self._new: list[Path] = [self._root]
        self._known: set[Path] = set()  # files whose names are on the disk itself

    def add(self, stream: Stream, rows: int = 0) -> None:
        """Make the array of a stream that has `rows` committed rows already."""
        location = _location(stream)
        group = self._root / location
        if stream.layout == RAGGED:
            if location not in self._shared:
                self._shared[location] = Appender(group, stream, self._files)
                self._new += [group.parent, group, group / "data"]
            self._streams[stream.id] = _Sharing(self._shared[location], stream.nbytes, rows)
            return
        group.mkdir(parents=True, exist_ok=True)
        write_group(group.parent)
        write_group(group)
        write_array(group / "data", _array_metadata(stream, rows, one_row_a_step=False))
        (group / "data" / "c").mkdir(exist_ok=True)
        self._streams[stream.id] = _Appending(stream, rows, group / "data")
        self._new += [group.parent, group, group / "data"]

    def append(self, stream_id: int, memory: memoryview, places: Sequence[int]) -> list[Placed]:
        """Write records of a stream.

        Args:
            stream_id: a stream that was added.
            memory: where the records are.
            places: at which byte of it each begins. Those that go by direct I/O lie on a page border, and the page that
                they end in is theirs.

        Returns:
            Of each record its row, the byte where it begins in its shard or shared array, and its bytes there.

        Raises:
            OSError: the file could not be written; no row is taken.
        """
        stream = self._streams[stream_id]
        first, count = stream.rows, len(places)
        if not stream.nbytes:
            stream.rows += count
            return [Placed(row, 0, 0) for row in range(first, first + count)]
        if isinstance(stream, _Sharing):
            offsets = stream.place.append(stream.nbytes, memory, places)
            stream.rows += count
            return [Placed(first + i, offset, stream.nbytes) for i, offset in enumerate(offsets)]
        placed: list[Placed] = []
        while len(placed) < count:
            done = len(placed)
            shard, row = divmod(first + done, stream.shard_rows)
            now = places[done : min(count, done + stream.shard_rows - row, done + VECTOR)]
            path = stream.shard_path(shard)
            if row == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            if stream.codec is None:
                offset, sizes = row * stream.stride, [stream.nbytes] * len(now)
                offsets = range(offset, offset + len(now) * stream.stride, stream.stride)
                records = [memory[place : place + stream.stride] for place in now]
            else:
                records = [compress(stream.codec, memory[p : p + stream.nbytes], stream.itemsize) for p in now]
                sizes = [len(record) for record in records]
                offset = path.stat().st_size if path.exists() else 0
                offsets = (offset + np.cumsum([0, *sizes[:-1]])).tolist()
            self._files.write(path, records, offset, direct=stream.direct)
            placed += map(Placed, range(first + done, first + done + len(now)), offsets, sizes)
            if row + len(now) == stream.shard_rows:
                self._files.drop(path)
        stream.rows = first + count
        return placed

    def rows(self, stream_id: int) -> int:
        """Return how many rows a stream has."""
        return self._streams[stream_id].rows

    def rewind(self, stream_id: int, rows: int) -> None:
        """Forget rows that will not be committed; their place is taken again."""
        self._streams[stream_id].rows = rows

    def sync(self) -> None:
        """Bring what was written since the last call to the disk itself, and the names of what is new."""
        new = self._files.sync() - self._known
        self._known |= new
        metadata = {node / "zarr.json" for node in self._new}
        folders = {
            folder for path in new | metadata for folder in path.parents if self._root in (folder, *folder.parents)
        }
        for path in metadata:
            sync(path)
        for folder in sorted(folders, reverse=True):
            sync(folder)
        if folders:
            sync(self._root.parent)
        self._new.clear()

    def close(self) -> None:
        """Close the files. Sealing is done from the log: `seal_streams`."""
        self._files.close()


class ZarrReader:
    """Reads records at the offsets that the log names."""

    def __init__(self, rank_directory: Path) -> None:
        self._root = rank_directory / DIRECTORY
        self._files = Files(os.O_RDONLY)
        self._layouts: dict[Stream, _Appending] = {}
        self._shared: dict[str, Shards] = {}

    def read(self, stream: Stream, row: int, offset: int, nbytes: int) -> memoryview:
        """Return the bytes of a tensor.

        Args:
            stream: what it is a record of.
            row: its row in the stream.
            offset: the byte at which it begins in its shard or shared array.
            nbytes: its bytes there.

        Raises:
            TraceDamaged: the file is missing or too short, or the bytes are no tensor.
        """
        if stream.layout == RAGGED:
            location = _location(stream)
            if location not in self._shared:
                self._shared[location] = Shards(self._root / location)
            return self._shared[location].read(self._files, offset, nbytes)
        layout = self._layouts.get(stream)
        if layout is None:
            layout = self._layouts[stream] = _Appending(stream, 0, self._root / _location(stream) / "data")
        data = memory(0)
        if nbytes:
            data = self._files.read(layout.shard_path(row // layout.shard_rows), offset, nbytes)
        return data if stream.codec is None else decompress(stream.codec, data, layout.nbytes)

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def seal_streams(rank_directory: Path, streams: Iterable[tuple[Stream, Rows]]) -> None:
    """Finish the arrays: indexes of the shards, shapes, coordinates. May be repeated.

    Args:
        rank_directory: the rank.
        streams: each with its rows.
    """
    shared: dict[str, list[Member]] = {}
    for stream, rows in streams:
        if stream.location is not None and stream.layout == RAGGED:
            shared.setdefault(stream.location, []).append((stream, rows))
        elif stream.location is not None:
            _seal_stream(rank_directory / DIRECTORY / stream.location, stream, rows)
    for location, members in shared.items():
        seal_place(rank_directory / DIRECTORY / location, members)


def _seal_stream(group: Path, stream: Stream, rows: Rows) -> None:
    layout = _Appending(stream, len(rows.step), group / "data")
    if stream.nbytes:
        for shard in range(-(-len(rows.step) // layout.shard_rows)):
            path = layout.shard_path(shard)
            if path.exists():
                part = slice(shard * layout.shard_rows, (shard + 1) * layout.shard_rows)
                offset, nbytes = rows.offset[part], rows.nbytes[part]
                end = int(offset[-1]) + (layout.stride if layout.codec is None else int(nbytes[-1]))
                finish_shard(path, end, shard_index(layout.shard_rows, offset, nbytes))
    group.mkdir(parents=True, exist_ok=True)
    for name, values in rows.coordinates.items():
        write_small(group / name, values, ["step" if rows.one_a_step else "row"])
    write_array(group / "data", _array_metadata(stream, len(rows.step), one_row_a_step=rows.one_a_step))


def shard_files(root: Path, stream: Stream) -> list[tuple[int, Path]]:
    """Return the shards of a stream that are there, in order: number and file."""
    if stream.location is None or stream.layout == RAGGED:
        return []
    layout = _Appending(stream, 0, root / stream.location / "data")
    try:
        numbers = sorted(int(entry.name) for entry in os.scandir(layout.data / "c") if entry.name.isdecimal())
    except FileNotFoundError:
        return []
    return [(number, path) for number in numbers if (path := layout.shard_path(number)).is_file()]


def forget_rows(root: Path, stream: Stream, rows: int) -> int:
    """Write into a sealed stream's array that its first rows will be dropped; return how many rows it has."""
    there: int = drop_first(root / _location(stream) / "data", stream.dtype, rows)["shape"][0]
    return there


@dataclass(slots=True)
class _Sharing:
    """A stream that has no place of its own, of which there may be many: how many rows it has."""

    place: Appender
    nbytes: int
    rows: int


class _Appending:
    """The layout of a stream's shards, and how many rows it has."""

    __slots__ = (
        *("_shard", "_shard_path", "codec", "data", "dimensions", "direct"),
        *("itemsize", "nbytes", "rows", "shard_rows", "stride"),
    )

    def __init__(self, stream: Stream, rows: int, data: Path) -> None:
        nbytes = stream.nbytes
        self.data = data
        self.codec = stream.codec
        self.dimensions = len(stream.shape)
        self.itemsize = numpy_dtype(stream.dtype).itemsize
        self.nbytes = nbytes
        self.stride = stride_of(nbytes)
        self.direct = stream.codec is None and self.stride % PAGE == 0
        self.shard_rows = rows_per_shard(nbytes)
        self.rows = rows
        self._shard = -1
        self._shard_path = data

    def shard_path(self, shard: int) -> Path:
        if shard != self._shard:
            self._shard, self._shard_path = shard, self.data.joinpath("c", str(shard), *("0",) * self.dimensions)
        return self._shard_path


def faults(
    rank_directory: Path, streams: Iterable[tuple[Stream, Rows]], dropped: Mapping[int, int], *, sealed: bool
) -> Iterator[tuple[Path, str]]:
    """Yield what in a store contradicts the log: the file, and a sentence on it.

    Args:
        rank_directory: the rank.
        streams: each with its rows.
        dropped: by stream id, how many of its first rows have no tensor any more.
        sealed: whether the store was finished, so that shapes, coordinates and indexes count.
    """
    shared: dict[str, list[Member]] = {}
    for stream, rows in streams:
        if stream.location is None:
            continue
        if stream.layout == RAGGED:
            shared.setdefault(stream.location, []).append((stream, rows))
            continue
        group = rank_directory / DIRECTORY / stream.location
        layout = _Appending(stream, len(rows.step), group / "data")
        begin = dropped.get(stream.id, 0)
        for node in (group.parent.parent, group.parent, group):
            yield from document_faults(node / "zarr.json", GROUP)
        wanted = _array_metadata(stream, len(rows.step), one_row_a_step=rows.one_a_step)
        if not sealed:
            del wanted["shape"], wanted["dimension_names"]
        yield from document_faults(group / "data" / "zarr.json", wanted, dropped=bool(begin))
        if not sealed:
            continue
        for name, values in rows.coordinates.items():
            yield from small_faults(group / name, values, ["step" if rows.one_a_step else "row"], name)
        if not stream.nbytes:
            continue
        for shard in range(begin // layout.shard_rows, -(-len(rows.step) // layout.shard_rows)):
            part = slice(shard * layout.shard_rows, (shard + 1) * layout.shard_rows)
            path, body = layout.shard_path(shard), shard_index(layout.shard_rows, rows.offset[part], rows.nbytes[part])
            if bytes_of(path, -len(body)) != body:
                yield path, "Its index is not what the log says of its records."
    for location, members in shared.items():
        begins = [dropped.get(stream.id, 0) for stream, _ in members]
        yield from place_faults(rank_directory / DIRECTORY / location, members, begins, sealed=sealed)


def _location(stream: Stream) -> str:
    if stream.location is None:
        raise TraceDamaged(f"Stream {stream.id} ({stream.layer!r}, {stream.kind}) has no place in the store.")
    return stream.location


def _array_metadata(stream: Stream, rows: int, *, one_row_a_step: bool) -> dict[str, Any]:
    names = ["step" if one_row_a_step else "row", *(f"d{i}" for i in range(len(stream.shape)))]
    attributes = {name: as_attribute(getattr(stream, name)) for name in ("layer", "kind", "path")}
    record = [max(1, n) for n in stream.shape]
    shard, inner = [rows_per_shard(stream.nbytes), *record], [1, *record]
    compression = [] if stream.codec is None else [zarr_codec(stream.codec, numpy_dtype(stream.dtype).itemsize)]
    return sharded_metadata([rows, *stream.shape], shard, inner, stream.dtype, names, attributes, compression)
