"""How compressed records lie in an HDF5 file: appended one behind the other, and found by HDF5 once it is sealed.

HDF5's `write_direct_chunk` takes bytes that are compressed already, but puts each through its library, and a file whose
writer was killed is none any more. What HDF5 needs to find chunks, though, is a table of where they begin: so records
are appended to `tensors-compressed.h5`, where the log says, and when the trace is sealed everything else is written
behind them, from the log. A page at the beginning is left free for the superblock, which says where that is and goes
last, so that a kill leaves a file that is sealed again.

HDF5 itself makes groups, datasets, types and filters. It has no call for "the chunks are there", so their index, a
version 1 B-tree as the HDF5 File Format Specification has it (III.A.1), is made here, and its address put into the
header of the dataset (IV.A.2.i, version 3 of the layout message). These are the oldest structures of the format: every
version of HDF5 reads them, and they have no checksums.
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.codecs import compress, decompress, hdf5_filter
from replay.files import PAGE, VECTOR, Files, sync
from replay.format import Placed, Rows, Stream, numpy_dtype
from replay.hdf5_types import dataset_name, hdf5_type, new_links, set_attributes, shape_of, wrong_attribute

FILE = "tensors-compressed.h5"

_END_OF_FILE = 40
"""Where the superblock, version 0, has the number of bytes of the file."""
_FANOUT = 64
"""Children of a node: twice the K that HDF5 assumes where the superblock does not name one."""
_ADDRESS = struct.Struct("<Q")
_NOWHERE = 2**64 - 1
_LAYOUT, _CONTINUATION = 8, 16
"""Messages in the header of a dataset."""
_COPY_BYTES = 1 << 20


class Appender:
    """Appends compressed records to the file of a rank.

    Args:
        rank_directory: the rank.
        files: of the writer process, which owns this as well.
    """

    def __init__(self, rank_directory: Path, files: Files) -> None:
        self.path = rank_directory / FILE
        self._files = files
        # Whoever was here before may have written what no log names; it stays where it is.
        self._is_there = self.path.exists()
        self._end = max(PAGE, self.path.stat().st_size if self._is_there else 0)

    def append(self, stream: Stream, first: int, memory: memoryview, places: Sequence[int]) -> list[Placed]:
        """Write records of a stream, of which the first gets the row `first`; return where each is.

        Raises:
            OSError: the file could not be written.
        """
        itemsize = numpy_dtype(stream.dtype).itemsize
        assert stream.codec is not None
        if not self._is_there:
            self.path.touch()
            sync(self.path.parent)
            self._is_there = True
        placed: list[Placed] = []
        for begin in range(0, len(places), VECTOR):
            now = places[begin : begin + VECTOR]
            records = [compress(stream.codec, memory[place : place + stream.nbytes], itemsize) for place in now]
            self._files.write(self.path, records, self._end, direct=False)
            for record in records:
                placed.append(Placed(first + len(placed), self._end, len(record)))
                self._end += len(record)
        return placed


def read(files: Files, rank_directory: Path, stream: Stream, offset: int, nbytes: int) -> memoryview:
    """Return the bytes of a tensor.

    Raises:
        TraceDamaged: the file is missing or too short, or the bytes are no tensor.
    """
    assert stream.codec is not None
    return decompress(stream.codec, files.read(rank_directory / FILE, offset, nbytes), stream.nbytes)


def seal_chunks(rank_directory: Path, streams: Iterable[tuple[Stream, Rows]]) -> None:
    """Make the file HDF5: a dataset for each stream. May be repeated.

    Args:
        rank_directory: the rank.
        streams: those that are compressed, each with its rows, of which there are some.
    """
    streams = list(streams)
    path = rank_directory / FILE
    if not streams or not path.exists():
        return
    end = max(int((rows.offset + rows.nbytes).max()) for _, rows in streams)
    partial = path.with_name(FILE + ".partial")
    try:
        _describe(partial, end, streams)
        with partial.open("rb") as made, path.open("r+b") as file:
            made.seek(end)
            file.seek(end)
            while block := made.read(_COPY_BYTES):
                file.write(block)
            file.truncate()
            file.flush()
            made.seek(0)
            os.pwrite(file.fileno(), made.read(PAGE), 0)
    finally:
        partial.unlink(missing_ok=True)


def chunk_faults(rank_directory: Path, streams: Iterable[tuple[Stream, Rows]]) -> Iterator[str]:
    """Yield in what the sealed file contradicts the log: sentences. Streams are those that `seal_chunks` was given.

    Raises:
        OSError: HDF5 cannot read it; KeyError, RuntimeError and others may say the same.
    """
    import h5py

    path, streams = rank_directory / FILE, list(streams)
    if not streams:
        return
    with path.open("rb") as raw, h5py.File(path, "r", locking=False) as file:
        for stream, rows in streams:
            data = file[dataset_name(stream)]
            if data.shape != (len(rows.step), *shape_of(stream)) or data.chunks != (1, *shape_of(stream)):
                yield f"Stream {stream.id} has the shape {data.shape} in it, in chunks of {data.chunks}."
            elif data.id.get_type() != hdf5_type(stream.dtype):
                yield f"Stream {stream.id} has another type in it."
            elif _filters(data.id.get_create_plist()) != _filters(_properties(stream)):
                yield f"Stream {stream.id} has other filters in it."
            elif wrong := wrong_attribute(data, stream):
                yield wrong
            else:
                place = _place_of_address(raw.fileno(), h5py.h5o.get_info(data.id).addr)
                (address,) = _ADDRESS.unpack(os.pread(raw.fileno(), _ADDRESS.size, place))
                index = _index(address, stream, rows)
                if os.pread(raw.fileno(), len(index), address) != index:
                    yield f"The chunks of stream {stream.id} are not where the log says."


def _describe(path: Path, end: int, streams: Sequence[tuple[Stream, Rows]]) -> None:
    """Make a file like the sealed one, in which the bytes from the first page on to `end` are a hole."""
    import h5py

    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_EARLIEST, h5py.h5f.LIBVER_V18)
    access.set_file_locking(False, True)  # nobody else knows the file yet, and some file systems have no locks
    h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, fapl=access).close()
    assert path.stat().st_size <= PAGE
    with path.open("r+b") as file:
        _set_end(file.fileno(), end)  # HDF5 takes room from there on
    links = new_links()
    headers = []
    with h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDWR, fapl=access)) as made:
        for stream, rows in streams:
            space = h5py.h5s.create_simple((len(rows.step), *shape_of(stream)))
            dataset = h5py.h5d.create(
                made.id, dataset_name(stream), hdf5_type(stream.dtype), space, dcpl=_properties(stream), lcpl=links
            )
            set_attributes(h5py.Dataset(dataset), stream)
            headers.append(h5py.h5o.get_info(dataset).addr)
    with path.open("r+b") as file:
        at = path.stat().st_size
        for header, (stream, rows) in zip(headers, streams, strict=True):
            index = _index(at, stream, rows)
            os.pwrite(file.fileno(), index, at)
            os.pwrite(file.fileno(), _ADDRESS.pack(at), _place_of_address(file.fileno(), header))
            at += len(index)
        _set_end(file.fileno(), at)


def _properties(stream: Stream) -> Any:
    import h5py

    assert stream.codec is not None
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((1, *shape_of(stream)))
    # Optional, or HDF5 would want to have the filter, which only a reader needs.
    number, values = hdf5_filter(stream.codec, numpy_dtype(stream.dtype).itemsize, stream.nbytes)
    properties.set_filter(number, h5py.h5z.FLAG_OPTIONAL, values)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)  # sealed again, the file is the same
    return properties


def _filters(properties: Any) -> list[tuple[int, tuple[int, ...]]]:
    found = [properties.get_filter(number) for number in range(properties.get_nfilters())]
    return [(number, values) for number, _, values, _ in found]


def _set_end(fd: int, end: int) -> None:
    os.pwrite(fd, _ADDRESS.pack(end), _END_OF_FILE)
    os.ftruncate(fd, end)


def _place_of_address(fd: int, header: int) -> int:
    """Return where in the file the header of a chunked dataset has the address of its index."""
    _, _, count, _, size = struct.unpack("<BBHII", os.pread(fd, 12, header))
    blocks = [(header + 16, size)]
    for begin, length in blocks:
        at, block = 0, os.pread(fd, length, begin)
        while at + 8 <= len(block) and count:
            kind, size = struct.unpack_from("<HH", block, at)
            if kind == _LAYOUT:
                return begin + at + 8 + 3  # version, class, dimensions
            if kind == _CONTINUATION:
                blocks.append(struct.unpack_from("<QQ", block, at + 8))
            at, count = at + 8 + size, count - 1
    raise ValueError("the header of a dataset has no layout")


def _index(address: int, stream: Stream, rows: Rows) -> bytes:
    """Return the B-tree of a stream's chunks, which lies at an address, its root first."""
    count, dimensions = len(rows.offset), len(shape_of(stream)) + 2  # the last is the bytes of an element
    key = np.dtype([("nbytes", "<u4"), ("mask", "<u4"), ("start", "<u8", (dimensions,))])
    node = np.dtype(
        [
            *(("signature", "S4"), ("type", "u1"), ("level", "u1"), ("used", "<u2"), ("left", "<u8"), ("right", "<u8")),
            ("entries", [("key", key), ("child", "<u8")], (_FANOUT,)),
            ("last", key),
        ]
    )
    firsts = np.arange(count)  # of each child the row it begins with, and where it is
    children: NDArray[np.int64] = rows.offset
    levels: list[NDArray[Any]] = []
    sizes = [-(-count // _FANOUT)]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // _FANOUT))
    begin = address + sum(sizes) * node.itemsize
    for level, size in enumerate(sizes):
        begin -= size * node.itemsize
        nodes = np.zeros(size, node)
        nodes["signature"], nodes["type"], nodes["level"] = b"TREE", 1, level
        nodes["used"] = np.minimum(_FANOUT, len(firsts) - _FANOUT * np.arange(size))
        addresses = begin + node.itemsize * np.arange(size)
        nodes["left"], nodes["right"] = _NOWHERE, _NOWHERE
        nodes["left"][1:], nodes["right"][:-1] = addresses[:-1], addresses[1:]
        # The key behind the last child of a node is that of the next node; behind all there is a chunk of no bytes.
        keys = np.zeros(size * _FANOUT + 1, key)
        keys["nbytes"][: len(firsts)] = rows.nbytes[firsts]
        keys["start"][: len(firsts), 0] = firsts
        keys["start"][len(firsts)] = (count, *shape_of(stream), numpy_dtype(stream.dtype).itemsize)
        nodes["entries"]["key"] = keys[:-1].reshape(size, _FANOUT)
        nodes["last"] = keys[_FANOUT::_FANOUT]
        padded = np.zeros(size * _FANOUT, np.int64)
        padded[: len(children)] = children
        nodes["entries"]["child"] = padded.reshape(size, _FANOUT)
        levels.insert(0, nodes)
        firsts, children = firsts[::_FANOUT], addresses
    return b"".join(nodes.tobytes() for nodes in levels)
