"""How tensors lie in `tensors.zarr`: written by appending, read at known offsets, valid Zarr v3 when sealed.

Zarr's sharding codec keeps the index of a shard at its end, so a shard can be written by appending records
and is finished by adding the index: the bytes that were appended are the store. Records of 64 KiB and more, and smaller
ones of whole pages, begin on page borders, so that they go by direct I/O straight from the shared ring, past the page
cache, which would cost the training a core. Others, and what is compressed, go through the page cache.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from replay.codecs import compress, decompress, zarr_codec
from replay.errors import TraceDamaged
from replay.files import PAGE, VECTOR, Files, sync
from replay.format import Placed, Rows, Stream, as_attribute, numpy_dtype, parsed, write_whole

DIRECTORY = "tensors.zarr"
DIRECT_BYTES = 65_536
_SHARD_BYTES = 1 << 30
_SHARD_ROWS = 4096
_GROUP: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
_COORDINATES = {"step": "int64", "call": "int32", "micro": "int32"}


def stride_of(nbytes: int) -> int:
    """Return the distance in bytes from one record to the next, where they are not compressed."""
    return nbytes if nbytes < DIRECT_BYTES else -(-nbytes // PAGE) * PAGE


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
        self._streams: dict[int, _Appending] = {}
        self._files = Files(os.O_RDWR | os.O_CREAT)
        self._root.mkdir(parents=True, exist_ok=True)
        _write_group(self._root)
        self._new: list[Path] = [self._root]
        self._known: set[Path] = set()  # files whose names are on the disk itself

    def add(self, stream: Stream, rows: int = 0) -> None:
        """Make the array of a stream that has `rows` committed rows already."""
        group = self._root / _location(stream)
        group.mkdir(parents=True, exist_ok=True)
        _write_group(group.parent)
        _write_group(group)
        _write_array(group, stream, rows, one_row_a_step=False)
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
            Of each record its row, the byte where it begins in its shard, and its bytes there.

        Raises:
            OSError: the file could not be written; no row is taken.
        """
        stream = self._streams[stream_id]
        first, count = stream.rows, len(places)
        if not stream.nbytes:
            stream.rows += count
            return [Placed(row, 0, 0) for row in range(first, first + count)]
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

    def read(self, stream: Stream, row: int, offset: int, nbytes: int) -> bytearray:
        """Return the bytes of a tensor.

        Args:
            stream: what it is a record of.
            row: its row in the stream.
            offset: the byte at which it begins in its shard.
            nbytes: its bytes there.

        Raises:
            TraceDamaged: the file is missing or too short, or the bytes are no tensor.
        """
        layout = self._layouts.get(stream)
        if layout is None:
            layout = self._layouts[stream] = _Appending(stream, 0, self._root / _location(stream) / "data")
        data = bytearray()
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
    for stream, rows in streams:
        if stream.location is not None:
            _seal_stream(rank_directory / DIRECTORY / stream.location, stream, rows)


def _seal_stream(group: Path, stream: Stream, rows: Rows) -> None:
    layout = _Appending(stream, len(rows.step), group / "data")
    if stream.nbytes:
        for shard in range(-(-len(rows.step) // layout.shard_rows)):
            path = layout.shard_path(shard)
            if path.exists():
                of_shard = slice(shard * layout.shard_rows, (shard + 1) * layout.shard_rows)
                _finish_shard(path, rows.offset[of_shard], rows.nbytes[of_shard], layout)
    for name, values in (("step", rows.step), ("call", rows.call), ("micro", rows.micro)):
        _write_coordinate(group, name, values, rows.one_a_step)
    _write_array(group, stream, len(rows.step), one_row_a_step=rows.one_a_step)


def shard_files(root: Path, stream: Stream) -> list[tuple[int, Path]]:
    """Return the shards of a stream that are there, in order: number and file."""
    if stream.location is None:
        return []
    layout = _Appending(stream, 0, root / stream.location / "data")
    try:
        numbers = sorted(int(entry.name) for entry in os.scandir(layout.data / "c") if entry.name.isdecimal())
    except FileNotFoundError:
        return []
    return [(number, path) for number in numbers if (path := layout.shard_path(number)).is_file()]


def forget_rows(root: Path, stream: Stream, rows: int) -> int:
    """Write into a sealed stream's array that its first rows will be dropped; return how many rows it has.

    To Zarr, a missing shard is full of the fill value: NaN from now on, where the dtype has one, rather than zero.

    Raises:
        TraceDamaged: the array is not what it should be; nothing was changed.
    """
    path = root / _location(stream) / "data" / "zarr.json"
    try:
        metadata = parsed(path.read_bytes())
        there = metadata["shape"][0]
        if not isinstance(there, int) or there < 0:
            raise TypeError(f"{there!r} is no number of rows")
        metadata["attributes"]["dropped_rows"] = rows
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TraceDamaged(f"{path} does not say what the array has: {error!r}. Nothing of it is dropped.") from None
    if stream.dtype in ("float16", "float32", "float64"):
        metadata["fill_value"] = "NaN"
    write_whole(path, json.dumps(metadata))
    return there


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
    for stream, rows in streams:
        if stream.location is None:
            continue
        group = rank_directory / DIRECTORY / stream.location
        layout = _Appending(stream, len(rows.step), group / "data")
        begin = dropped.get(stream.id, 0)
        for node in (group.parent.parent, group.parent, group):
            yield from _document_faults(node / "zarr.json", _GROUP)
        wanted = _array_metadata(stream, len(rows.step), one_row_a_step=rows.one_a_step)
        if not sealed:
            del wanted["shape"], wanted["dimension_names"]
        yield from _document_faults(group / "data" / "zarr.json", wanted, dropped=bool(begin))
        if not sealed:
            continue
        for name, values in (("step", rows.step), ("call", rows.call), ("micro", rows.micro)):
            wanted = _coordinate_metadata(_COORDINATES[name], len(values), rows.one_a_step)
            yield from _document_faults(group / name / "zarr.json", wanted)
            chunk = group / name / "c" / "0"
            if len(values) and _bytes_of(chunk) != values.astype(_COORDINATES[name]).tobytes():
                yield chunk, f"It is not the {name} of the records that the log has."
        if not stream.nbytes:
            continue
        for shard in range(begin // layout.shard_rows, -(-len(rows.step) // layout.shard_rows)):
            part = slice(shard * layout.shard_rows, (shard + 1) * layout.shard_rows)
            path, body = layout.shard_path(shard), _shard_index(rows.offset[part], rows.nbytes[part], layout)
            if _bytes_of(path, -len(body)) != body:
                yield path, "Its index is not what the log says of its records."


def _document_faults(path: Path, wanted: dict[str, Any], *, dropped: bool = False) -> Iterator[tuple[Path, str]]:
    data = _bytes_of(path)
    try:
        found = parsed(data.decode("utf-8")) if data is not None else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        yield path, "It is missing." if data is None else "It is no JSON object."
        return
    if dropped and isinstance(found.get("attributes"), dict):
        found["attributes"].pop("dropped_rows", None)
        found["fill_value"] = wanted["fill_value"]
    for name, value in wanted.items():
        if found.get(name) != value:
            yield path, f"It has {name!r} as {found.get(name)!r}, where {value!r} belongs."


def _bytes_of(path: Path, begin: int = 0) -> bytes | None:
    """Return a file from a byte on, counted from its end; None if it is not there, or shorter."""
    try:
        with path.open("rb") as file:
            file.seek(begin, os.SEEK_END if begin else os.SEEK_SET)
            return file.read()
    except OSError:
        return None


def _location(stream: Stream) -> str:
    if stream.location is None:
        raise TraceDamaged(f"Stream {stream.id} ({stream.layer!r}, {stream.kind}) has no place in the store.")
    return stream.location


def _finish_shard(path: Path, offset: NDArray[np.int64], nbytes: NDArray[np.int64], layout: _Appending) -> None:
    """Write the shard's index behind its records, where it is not there yet."""
    body = _shard_index(offset, nbytes, layout)
    end = int(offset[-1]) + (layout.stride if layout.codec is None else int(nbytes[-1]))
    with path.open("r+b") as file:
        file.seek(end)
        if file.read() != body:
            file.truncate(end)
            file.seek(end)
            file.write(body)


def _shard_index(offset: NDArray[np.int64], nbytes: NDArray[np.int64], layout: _Appending) -> bytes:
    index = np.full((layout.shard_rows, 2), 2**64 - 1, "<u8")
    index[: len(offset), 0] = offset
    index[: len(offset), 1] = nbytes
    body = index.tobytes()
    return body + struct.pack("<I", google_crc32c.value(body))


def _write_group(path: Path) -> None:
    file = path / "zarr.json"
    if not file.exists():
        write_whole(file, json.dumps(_GROUP))


def _write_array(group: Path, stream: Stream, rows: int, *, one_row_a_step: bool) -> None:
    (group / "data").mkdir(exist_ok=True)
    metadata = _array_metadata(stream, rows, one_row_a_step=one_row_a_step)
    write_whole(group / "data" / "zarr.json", json.dumps(metadata))


def _array_metadata(stream: Stream, rows: int, *, one_row_a_step: bool) -> dict[str, Any]:
    inner = [1, *(max(1, n) for n in stream.shape)]
    names = ["step" if one_row_a_step else "row", *(f"d{i}" for i in range(len(stream.shape)))]
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    itemsize = numpy_dtype(stream.dtype).itemsize
    codecs = [little if itemsize > 1 else {"name": "bytes"}]
    if stream.codec is not None:
        codecs.append(zarr_codec(stream.codec, itemsize))
    sharding = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": inner,
            "codecs": codecs,
            "index_codecs": [little, {"name": "crc32c"}],
            "index_location": "end",
        },
    }
    attributes = {name: as_attribute(getattr(stream, name)) for name in ("layer", "kind", "path")}
    shape = [rows, *stream.shape]
    outer = [rows_per_shard(stream.nbytes), *inner[1:]]
    return _metadata(shape, outer, stream.dtype, _zero(stream.dtype), [sharding], names, attributes)


def _write_coordinate(group: Path, name: str, values: NDArray[Any], one_row_a_step: bool) -> None:
    path = group / name
    (path / "c").mkdir(parents=True, exist_ok=True)
    if len(values):
        (path / "c" / "0").write_bytes(values.astype(values.dtype.newbyteorder("<")).tobytes())
    metadata = _coordinate_metadata(values.dtype.name, len(values), one_row_a_step)
    write_whole(path / "zarr.json", json.dumps(metadata))


def _coordinate_metadata(dtype: str, rows: int, one_row_a_step: bool) -> dict[str, Any]:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    dimension = ["step" if one_row_a_step else "row"]
    return _metadata([rows], [max(1, rows)], dtype, 0, [little], dimension, {})


def _metadata(
    shape: list[int],
    chunk: list[int],
    dtype: str,
    fill_value: object,
    codecs: list[dict[str, Any]],
    names: Iterable[str],
    attributes: dict[str, str],
) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value,
        "codecs": codecs,
        "dimension_names": list(names),
        "attributes": attributes,
    }


def _zero(dtype: str) -> object:
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    return 0.0 if "float" in dtype else 0
