"""How tensors lie in `tensors.zarr`: written by appending, read at known offsets, valid Zarr v3 when sealed.

Zarr's sharding codec keeps the index of a shard at its end, so a shard can be written by appending records
and is finished by adding the index: the bytes that were appended are the store. Records of 64 KiB and more, and smaller
ones of whole pages, begin on page borders, so that they go by direct I/O straight from the shared ring, past the page
cache, which would cost the training a core. Others go through the page cache.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import resource
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from replay.errors import TraceDamaged
from replay.format import Stream, numpy_dtype, write_whole

DIRECT_BYTES = 65_536
PAGE = 4096
_SHARD_BYTES = 1 << 30
_SHARD_ROWS = 4096
_OPEN_FILES = 400
_VECTOR = 1024  # the most that one call writes: IOV_MAX


def stride_of(nbytes: int) -> int:
    """Return the distance in bytes from one record to the next."""
    return nbytes if nbytes < DIRECT_BYTES else -(-nbytes // PAGE) * PAGE


def goes_direct(nbytes: int) -> bool:
    """Return whether records of a size are whole pages in the file, so that direct I/O can write them."""
    return stride_of(nbytes) % PAGE == 0


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

    def __init__(self, root: Path) -> None:
        self._root = root
        self._streams: dict[int, _Appending] = {}
        self._files = _Files(os.O_RDWR | os.O_CREAT)
        root.mkdir(parents=True, exist_ok=True)
        _write_group(root)

    def add(self, stream: Stream, rows: int = 0) -> None:
        """Make the array of a stream that has `rows` committed rows already."""
        group = self._root / _location(stream)
        group.mkdir(parents=True, exist_ok=True)
        _write_group(group.parent)
        _write_group(group)
        _write_array(group, stream, rows, one_row_a_step=False)
        (group / "data" / "c").mkdir(exist_ok=True)
        self._streams[stream.id] = _Appending(stream, rows, group / "data")

    def append(self, stream_id: int, records: Sequence[memoryview]) -> list[tuple[int, int]]:
        """Write records of a stream.

        Args:
            stream_id: a stream that was added.
            records: their bytes, each of `stride_of(nbytes)`: a record and, if its size is no multiple of a page and it
                goes by direct I/O, padding. What goes by direct I/O must lie on a page border.

        Returns:
            Of each record its row in the stream and its byte offset in the shard.

        Raises:
            OSError: the file could not be written; no row is taken.
        """
        stream = self._streams[stream_id]
        first, count = stream.rows, len(records)
        done = 0 if stream.nbytes else count
        while done < count:
            shard, place = divmod(first + done, stream.shard_rows)
            end = min(count, done + stream.shard_rows - place, done + _VECTOR)
            path = stream.shard_path(shard)
            if place == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._files.write(path, records[done:end], place * stream.stride, direct=stream.direct)
            if place + end - done == stream.shard_rows:
                self._files.drop(path)
                _finish_shard(path, stream.shard_rows, stream)
            done = end
        stream.rows = first + count
        return [(row, row % stream.shard_rows * stream.stride) for row in range(first, first + count)]

    def rows(self, stream_id: int) -> int:
        """Return how many rows a stream has."""
        return self._streams[stream_id].rows

    def rewind(self, stream_id: int, rows: int) -> None:
        """Forget rows that will not be committed; their place is taken again."""
        self._streams[stream_id].rows = rows

    def close(self) -> None:
        """Close the files. Sealing is done from the log: `seal`."""
        self._files.close()


class ZarrReader:
    """Reads records at the offsets that the log names."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = _Files(os.O_RDONLY)
        self._layouts: dict[Stream, _Appending] = {}

    def read(self, stream: Stream, rows: NDArray[np.int64], offsets: NDArray[np.int64]) -> bytearray:
        """Return the bytes of records, one after the other.

        Args:
            stream: where they are.
            rows: shape `(n,)`, rows in the stream.
            offsets: shape `(n,)`, their byte offsets in their shards.

        Raises:
            TraceDamaged: a file is missing or too short.
        """
        nbytes = stream.nbytes
        out = bytearray(nbytes * len(rows))
        if not nbytes:
            return out
        view = memoryview(out)
        layout = self._layouts.get(stream)
        if layout is None:
            layout = self._layouts[stream] = _Appending(stream, 0, self._root / _location(stream) / "data")
        shards = rows // layout.shard_rows
        # Rows that follow each other without a gap, in one shard, are read at once.
        breaks = np.flatnonzero((np.diff(offsets) != nbytes) | (np.diff(shards) != 0)) + 1
        starts = [0, *breaks.tolist(), len(rows)]
        for start, end in itertools.pairwise(starts):
            path = layout.shard_path(int(shards[start]))
            part = view[start * nbytes : end * nbytes]
            try:
                got = self._files.read(path, part, int(offsets[start]))
            except OSError as error:
                raise TraceDamaged(
                    f"{path} cannot be read: {error}. The records of other files can still be read."
                ) from error
            if got != len(part):
                raise TraceDamaged(
                    f"{path} is too short: {len(part)} bytes were committed at {int(offsets[start])}, {got} are there."
                )
        return out

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def seal_stream(
    root: Path, stream: Stream, step: NDArray[np.int64], call: NDArray[np.int32], micro: NDArray[np.int32]
) -> None:
    """Finish a stream's array: shard indexes, shape, coordinates. May be repeated.

    Args:
        root: the store.
        stream: the stream.
        step: shape `(rows,)`, the step of each row.
        call: shape `(rows,)`, its call.
        micro: shape `(rows,)`, which forward pass of the root it was in.
    """
    group = root / _location(stream)
    layout = _Appending(stream, len(step), group / "data")
    one_row_a_step = bool(np.all(np.diff(step) > 0))
    if stream.nbytes:
        for shard in range(-(-len(step) // layout.shard_rows)):
            path = layout.shard_path(shard)
            count = min(layout.shard_rows, len(step) - shard * layout.shard_rows)
            if path.exists():
                _finish_shard(path, count, layout)
    coordinates: dict[str, tuple[NDArray[Any], str]] = {
        "step": (step, "int64"),
        "call": (call, "int32"),
        "micro": (micro, "int32"),
    }
    for name, (values, dtype) in coordinates.items():
        _write_coordinate(group, name, values.astype(f"<{dtype[0]}{int(dtype[3:]) // 8}"), dtype, one_row_a_step)
    _write_array(group, stream, len(step), one_row_a_step=one_row_a_step)


class _Appending:
    """The layout of a stream's shards, and how many rows it has."""

    __slots__ = ("_shard", "_shard_path", "data", "dimensions", "direct", "nbytes", "rows", "shard_rows", "stride")

    def __init__(self, stream: Stream, rows: int, data: Path) -> None:
        nbytes = stream.nbytes
        self.data = data
        self.dimensions = len(stream.shape)
        self.nbytes = nbytes
        self.stride = stride_of(nbytes)
        self.direct = goes_direct(nbytes)
        self.shard_rows = rows_per_shard(nbytes)
        self.rows = rows
        self._shard = -1
        self._shard_path = data

    def shard_path(self, shard: int) -> Path:
        if shard != self._shard:
            self._shard, self._shard_path = shard, self.data.joinpath("c", str(shard), *("0",) * self.dimensions)
        return self._shard_path


def _location(stream: Stream) -> str:
    if stream.location is None:
        raise TraceDamaged(f"Stream {stream.id} ({stream.layer!r}, {stream.kind}) has no place in the store.")
    return stream.location


def _finish_shard(path: Path, count: int, layout: _Appending) -> None:
    """Write the shard's index behind its records, where it is not there yet."""
    index = np.full((layout.shard_rows, 2), 2**64 - 1, "<u8")
    index[:count, 0] = np.arange(count, dtype="<u8") * layout.stride
    index[:count, 1] = layout.nbytes
    body = index.tobytes()
    body += struct.pack("<I", google_crc32c.value(body))
    end = count * layout.stride
    with path.open("r+b") as file:
        file.seek(end)
        if file.read() != body:
            file.truncate(end)
            file.seek(end)
            file.write(body)


class _Files:
    """A few open files; the longest unused is closed first."""

    def __init__(self, flags: int) -> None:
        self._flags = flags | os.O_CLOEXEC
        self._fds: OrderedDict[Path, int] = OrderedDict()
        self._most = min(_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    def _fd(self, path: Path, direct: bool) -> int:
        fd = self._fds.get(path)
        if fd is not None:
            self._fds.move_to_end(path)
            return fd
        if len(self._fds) >= self._most:
            self._close(self._fds.popitem(last=False)[1])
        try:
            fd = os.open(path, self._flags | (os.O_DIRECT if direct else 0), 0o666)
        except OSError:
            if not direct:
                raise
            fd = os.open(path, self._flags, 0o666)  # a file system without direct I/O
        self._fds[path] = fd
        return fd

    def write(self, path: Path, parts: Sequence[memoryview], offset: int, *, direct: bool) -> None:
        fd = self._fd(path, direct)
        while parts:
            try:
                written = os.pwritev(fd, parts, offset)
            except OSError as error:
                # Some file systems take O_DIRECT at open and refuse it at the first write; what is left of a write
                # that was cut short may not end on a border.
                if not direct or error.errno != errno.EINVAL:
                    raise
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                direct = False
                continue
            offset += written
            whole = 0
            while whole < len(parts) and written >= len(parts[whole]):
                written -= len(parts[whole])
                whole += 1
            parts = [parts[whole][written:], *parts[whole + 1 :]] if whole < len(parts) else []

    def read(self, path: Path, into: memoryview, offset: int) -> int:
        fd = self._fd(path, direct=False)
        got = 0
        while got < len(into):
            n = os.preadv(fd, [into[got:]], offset + got)
            if not n:
                break
            got += n
        return got

    def drop(self, path: Path) -> None:
        if (fd := self._fds.pop(path, None)) is not None:
            self._close(fd)

    def _close(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            os.close(fd)

    def close(self) -> None:
        while self._fds:
            self._close(self._fds.popitem()[1])


def _write_group(path: Path) -> None:
    file = path / "zarr.json"
    if not file.exists():
        write_whole(file, json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}))


def _write_array(group: Path, stream: Stream, rows: int, *, one_row_a_step: bool) -> None:
    inner = [1, *(max(1, n) for n in stream.shape)]
    names = ["step" if one_row_a_step else "row", *(f"d{i}" for i in range(len(stream.shape)))]
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": inner,
            "codecs": [little if numpy_dtype(stream.dtype).itemsize > 1 else {"name": "bytes"}],
            "index_codecs": [little, {"name": "crc32c"}],
            "index_location": "end",
        },
    }
    attributes = {"layer": stream.layer, "kind": stream.kind, "path": stream.path}
    shape = [rows, *stream.shape]
    outer = [rows_per_shard(stream.nbytes), *inner[1:]]
    _write_metadata(group / "data", shape, outer, stream.dtype, _zero(stream.dtype), [sharding], names, attributes)


def _write_coordinate(group: Path, name: str, values: NDArray[Any], dtype: str, one_row_a_step: bool) -> None:
    path = group / name
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    dimension = ["step" if one_row_a_step else "row"]
    (path / "c").mkdir(parents=True, exist_ok=True)
    if len(values):
        (path / "c" / "0").write_bytes(values.tobytes())
    _write_metadata(path, [len(values)], [max(1, len(values))], dtype, 0, [little], dimension, {})


def _write_metadata(
    path: Path,
    shape: list[int],
    chunk: list[int],
    dtype: str,
    fill_value: object,
    codecs: list[dict[str, Any]],
    names: Iterable[str],
    attributes: dict[str, str],
) -> None:
    path.mkdir(exist_ok=True)
    write_whole(
        path / "zarr.json",
        json.dumps(
            {
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
        ),
    )


def _zero(dtype: str) -> object:
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    return 0.0 if "float" in dtype else 0
