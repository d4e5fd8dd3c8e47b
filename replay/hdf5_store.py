"""How tensors lie in HDF5 files: segments that are valid from their first byte on, joined by `tensors.h5` when sealed.

HDF5's own ways to append go through its library, its chunk index and the page cache, and a file whose writer was killed
must be repaired. Here a segment `tensors-NNNNN.h5` is made whole before the first record: contiguous datasets of a
fixed number of rows, whose room HDF5 has allotted without writing to it (the file is sparse). Then it is closed, and
from there on only bytes inside of the datasets are written, at the addresses that HDF5 gave them, by direct I/O
straight from shared memory. So it is as fast as Zarr, a live segment is readable by anybody, and no crash can harm what
HDF5 needs to find its way. How many rows of a dataset are filled is the log's affair.

Compressed records differ in size, so they have no such room; they lie in a file of their own, of `hdf5_chunks`.

When the trace is sealed, `tensors.h5` is written beside these files: of each stream a virtual dataset of the rows
that are there, with the coordinates `step`, `call` and `micro`, of which `step` is its dimension scale.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from replay import hdf5_chunks
from replay.errors import TraceDamaged
from replay.files import PAGE, VECTOR, Files, memory, stride_of
from replay.format import RAGGED, Placed, Rows, Stream, numpy_dtype
from replay.hdf5_master import MASTER, master_faults, write_master
from replay.hdf5_segments import (
    SEGMENTS_FILE,
    UNREADABLE,
    Key,
    Part,
    Segments,
    key_of,
    read_parts,
    rows_needed,
    segment_faults,
)


class Hdf5Writer:
    """Appends records to the datasets of one rank's store. Owned by the writer process."""

    def __init__(self, rank_directory: Path) -> None:
        self._files = Files(os.O_RDWR)
        self._chunks = hdf5_chunks.Appender(rank_directory, self._files)
        self._segments = Segments(rank_directory)
        self._streams: dict[int, Stream] = {}
        self._rows: dict[int, int] = {}
        self._used: dict[Key, int] = {}  # of each dataset, up to which row it is taken
        self._parts: dict[Key, Part] = {}  # where that is

    def add(self, stream: Stream, rows: int = 0) -> None:
        """Take a stream that has `rows` committed rows already."""
        self._streams[stream.id] = stream
        self._rows[stream.id] = rows
        if not stream.nbytes or stream.codec is not None:
            return
        room = self._segments.add(stream)
        if stream.layout == RAGGED:
            # How much of its last segment was taken by whoever was here before is not known, so it is left to him.
            self._used.setdefault(key_of(stream), room)
        else:
            self._used[stream.id] = rows

    def append(self, stream_id: int, memory: memoryview, places: Sequence[int]) -> list[Placed]:
        """Write records of a stream.

        Args:
            stream_id: a stream that was added.
            memory: where the records are.
            places: at which byte of it each begins. Those of whole pages, and those of a shared place that are of
                64 KiB and more, lie on a page border, and the page that the latter end in is theirs.

        Returns:
            Of each record its row, the byte where it begins in the segment or the shared array, and its bytes there.

        Raises:
            OSError: the file could not be written; no row is taken.
        """
        stream, first = self._streams[stream_id], self._rows[stream_id]
        if not stream.nbytes:
            placed = [Placed(first + i, 0, 0) for i in range(len(places))]
        elif stream.codec is not None:
            placed = self._chunks.append(stream, first, memory, places)
        elif stream.layout == RAGGED:
            placed = self._append_shared(stream, first, memory, places)
        else:
            placed = self._append_own(stream, first, memory, places)
        self._rows[stream_id] = first + len(places)
        return placed

    def _append_own(self, stream: Stream, first: int, memory: memoryview, places: Sequence[int]) -> list[Placed]:
        nbytes = stream.nbytes
        placed: list[Placed] = []
        while len(placed) < len(places):
            row = first + len(placed)
            part = self._part(stream.id, row)
            now = places[len(placed) : len(placed) + min(part.end - row, VECTOR)]
            offset = part.offset + (row - part.first) * nbytes
            records = [memory[place : place + nbytes] for place in now]
            self._files.write(part.path, records, offset, direct=nbytes % PAGE == 0)
            placed += [Placed(row + i, offset + i * nbytes, nbytes) for i in range(len(now))]
        self._used[stream.id] = first + len(places)
        return placed

    def _append_shared(self, stream: Stream, first: int, memory: memoryview, places: Sequence[int]) -> list[Placed]:
        """Write records behind those of other shapes; each lies in one segment."""
        key, itemsize, stride = key_of(stream), numpy_dtype(stream.dtype).itemsize, stride_of(stream.nbytes)
        direct, each = stride % PAGE == 0, rows_needed(stream)
        placed: list[Placed] = []
        while len(placed) < len(places):
            begin = self._used[key]
            if direct:
                begin = -(-begin * itemsize // PAGE) * PAGE // itemsize
            part = self._part(key, begin, each)
            begin = max(begin, part.first)
            now = places[len(placed) : len(placed) + min((part.end - begin) // each, VECTOR)]
            records = [memory[place : place + stride] for place in now]
            offset = part.offset + (begin - part.first) * itemsize
            self._files.write(part.path, records, offset, direct=direct)
            count = len(placed)
            placed += [Placed(first + count + i, (begin + i * each) * itemsize, stream.nbytes) for i in range(len(now))]
            self._used[key] = begin + len(now) * each
        return placed

    def rows(self, stream_id: int) -> int:
        """Return how many rows a stream has."""
        return self._rows[stream_id]

    def rewind(self, stream_id: int, rows: int) -> None:
        """Forget rows that will not be committed; their place is taken again, or in a shared one left."""
        self._rows[stream_id] = rows
        if stream_id in self._used:
            self._used[stream_id] = rows

    def sync(self) -> None:
        """Bring what was written since the last call to the disk itself."""
        self._files.sync()
        self._segments.sync()

    def close(self) -> None:
        """Close the files. Sealing is done from the log."""
        self._files.close()
        self._segments.close()

    def _part(self, key: Key, row: int, least: int = 1) -> Part:
        """Return where so many rows of a dataset, from one on, go; a segment is begun if there is no place for them."""
        part = self._parts.get(key)
        if part is None or not part.first <= row <= part.end - least:
            part = self._segments.part(key, row, least) or self._segments.begin(key, self._used, least)
            self._parts[key] = part
        return part


class Hdf5Reader:
    """Reads records at the offsets that the log names, without HDF5."""

    def __init__(self, rank_directory: Path) -> None:
        self._directory = rank_directory
        self._files = Files(os.O_RDONLY)
        self._parts: dict[Key, list[Part]] = {}

    def read(self, stream: Stream, row: int, offset: int, nbytes: int) -> memoryview:
        """Return the bytes of a tensor.

        Args:
            stream: what it is a record of.
            row: its row in the stream.
            offset: the byte at which it begins in its segment or shared array.
            nbytes: its bytes there.

        Raises:
            TraceDamaged: the file is missing or too short.
        """
        if not stream.nbytes:
            return memory(0)
        if stream.codec is not None:
            return hdf5_chunks.read(self._files, self._directory, stream, offset, nbytes)
        if stream.layout != RAGGED:
            return self._files.read(self._part(stream, row).path, offset, nbytes)
        itemsize = numpy_dtype(stream.dtype).itemsize
        part = self._part(stream, offset // itemsize)
        at = offset - part.first * itemsize
        if nbytes < 0 or at + nbytes > part.rows * itemsize:
            raise TraceDamaged(f"The log has row {row} of stream {stream.id} where {part.path} ends.")
        return self._files.read(part.path, part.offset + at, nbytes)

    def _part(self, stream: Stream, row: int) -> Part:
        for look in (1, 2):
            for part in reversed(self._parts.get(key_of(stream), ())):
                if part.first <= row < part.end:
                    return part
            if look == 1:
                self._parts = read_parts(self._directory)
        raise TraceDamaged(
            f"{self._directory / SEGMENTS_FILE} does not say where row {row} of stream {stream.id} is: lines of it are "
            "missing. Put that file back from a copy."
        )

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def seal_streams(rank_directory: Path, streams: Iterable[tuple[Stream, Rows]]) -> None:
    """Write `tensors.h5`, which joins the segments. May be repeated.

    Args:
        rank_directory: the rank.
        streams: each with its rows.
    """
    placed = [(stream, rows) for stream, rows in streams if stream.location is not None]
    compressed = _compressed(placed)
    hdf5_chunks.seal_chunks(rank_directory, compressed)
    write_master(rank_directory, placed, read_parts(rank_directory) | _parts_of(rank_directory, compressed))


def faults(rank_directory: Path, streams: Iterable[tuple[Stream, Rows]], *, sealed: bool) -> Iterator[tuple[Path, str]]:
    """Yield what in the store contradicts the log: the file, and a sentence on it.

    Args:
        rank_directory: the rank.
        streams: each with its rows.
        sealed: whether `tensors.h5` is there.
    """
    placed = [(stream, rows) for stream, rows in streams if stream.location is not None]
    try:
        parts = read_parts(rank_directory)
    except TraceDamaged as error:
        yield rank_directory / SEGMENTS_FILE, str(error)
        return
    yield from segment_faults(parts, [stream for stream, _ in placed])
    if not sealed:
        return
    compressed = _compressed(placed)
    parts |= _parts_of(rank_directory, compressed)
    for path, found in (
        (rank_directory / hdf5_chunks.FILE, hdf5_chunks.chunk_faults(rank_directory, compressed)),
        (rank_directory / MASTER, master_faults(rank_directory, placed, parts)),
    ):
        try:
            for sentence in found:
                yield path, sentence
        except TraceDamaged as error:
            yield path, str(error)
        except UNREADABLE as error:
            yield path, f"HDF5 cannot read it: {error}"


def _compressed(streams: Iterable[tuple[Stream, Rows]]) -> list[tuple[Stream, Rows]]:
    """Return the streams that have compressed records."""
    return [(stream, rows) for stream, rows in streams if stream.codec is not None and stream.nbytes and len(rows.step)]


def _parts_of(rank_directory: Path, compressed: Iterable[tuple[Stream, Rows]]) -> dict[Key, list[Part]]:
    """Return where the rows of compressed streams are."""
    path = rank_directory / hdf5_chunks.FILE
    return {stream.id: [Part(path, 0, len(rows.step), 0)] for stream, rows in compressed}
