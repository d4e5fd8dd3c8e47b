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

import contextlib
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replay import hdf5_chunks
from replay.errors import TraceDamaged
from replay.files import PAGE, VECTOR, Files, memory, sync
from replay.format import Placed, Rows, Stream, parsed, whole_lines
from replay.hdf5_types import dataset_name, hdf5_type, new_links, set_attributes, shape_of, wrong_attribute

MASTER = "tensors.h5"
SEGMENTS_FILE = "segments.jsonl"

_SEGMENT = re.compile(r"tensors-\d{5,}\.h5")
_FIRST_SEGMENT_BYTES = 1 << 28
_SEGMENT_BYTES = 1 << 31
_SEGMENT_ROWS = 1 << 16
_UNREADABLE = (OSError, KeyError, RuntimeError, ValueError, TypeError, AttributeError, struct.error)
"""What HDF5, h5py and we raise at files that are damaged."""


@dataclass
class _Part:
    """The rows of a stream that are in one segment."""

    path: Path
    first: int
    rows: int
    offset: int  # of the first row, in bytes

    @property
    def end(self) -> int:
        return self.first + self.rows


class Hdf5Writer:
    """Appends records to the datasets of one rank's store.

    Owned by the writer process. A segment that is begun holds the streams that were added since the last was, or those
    that were filling up together.
    """

    def __init__(self, rank_directory: Path) -> None:
        self._directory = rank_directory
        self._files = Files(os.O_RDWR)
        self._chunks = hdf5_chunks.Appender(rank_directory, self._files)
        self._streams: dict[int, Stream] = {}
        self._rows: dict[int, int] = {}
        self._parts: dict[int, _Part] = {}
        self._new: list[int] = []
        self._known = _read_parts(rank_directory)
        self._segment = 1 + max((_number(path) for path in rank_directory.glob("tensors-[0-9]*.h5*")), default=-1)
        self._lines = (rank_directory / SEGMENTS_FILE).open("a", encoding="utf-8")

    def add(self, stream: Stream, rows: int = 0) -> None:
        """Take a stream that has `rows` committed rows already."""
        self._streams[stream.id] = stream
        self._rows[stream.id] = rows
        part = next((part for part in self._known.get(stream.id, ()) if part.first <= rows < part.end), None)
        if part is not None:
            self._parts[stream.id] = part
        elif stream.nbytes and stream.codec is None:
            self._new.append(stream.id)

    def append(self, stream_id: int, memory: memoryview, places: Sequence[int]) -> list[Placed]:
        """Write records of a stream.

        Args:
            stream_id: a stream that was added.
            memory: where the records are.
            places: at which byte of it each begins; those of whole pages on a page border.

        Returns:
            Of each record its row, the byte where it begins in the segment, and its bytes there.

        Raises:
            OSError: the file could not be written; no row is taken.
        """
        stream, first = self._streams[stream_id], self._rows[stream_id]
        nbytes = stream.nbytes
        placed: list[Placed] = []
        if not nbytes:
            placed = [Placed(first + i, 0, 0) for i in range(len(places))]
        elif stream.codec is not None:
            placed = self._chunks.append(stream, first, memory, places)
        while len(placed) < len(places):
            row = first + len(placed)
            part = self._part(stream_id, row)
            now = places[len(placed) : len(placed) + min(part.end - row, VECTOR)]
            offset = part.offset + (row - part.first) * nbytes
            records = [memory[place : place + nbytes] for place in now]
            self._files.write(part.path, records, offset, direct=nbytes % PAGE == 0)
            placed += [Placed(row + i, offset + i * nbytes, nbytes) for i in range(len(now))]
        self._rows[stream_id] = first + len(places)
        return placed

    def rows(self, stream_id: int) -> int:
        """Return how many rows a stream has."""
        return self._rows[stream_id]

    def rewind(self, stream_id: int, rows: int) -> None:
        """Forget rows that will not be committed; their place is taken again."""
        self._rows[stream_id] = rows

    def sync(self) -> None:
        """Bring what was written since the last call to the disk itself."""
        self._files.sync()
        os.fdatasync(self._lines.fileno())

    def close(self) -> None:
        """Close the files. Sealing is done from the log."""
        self._files.close()
        self._lines.close()

    def _part(self, stream_id: int, row: int) -> _Part:
        """Return where a row goes; a segment is begun if there is no place for it."""
        parts = self._known.get(stream_id, ())
        part = self._parts.get(stream_id)
        if part is None or not part.first <= row < part.end:
            part = next((part for part in parts if part.first <= row < part.end), None)
        if part is None:
            if stream_id in self._new:
                # How many rows each needs is not known yet, so they get little, and the next time as they had need.
                self._begin_segment(dict.fromkeys(self._new, 1), _FIRST_SEGMENT_BYTES)
                self._new.clear()
            else:
                self._begin_segment(self._filling_up(stream_id), _SEGMENT_BYTES)
            part = self._known[stream_id][-1]
        self._parts[stream_id] = part
        return part

    def _filling_up(self, stream_id: int) -> dict[int, int]:
        """Return the streams that need a further segment with this one, and how many rows each has had in the last."""
        full = self._known[stream_id][-1]
        found = {}
        for other, parts in self._known.items():
            part = parts[-1]
            used = self._rows.get(other, 0) - part.first
            if other == stream_id or (part.path == full.path and 2 * used >= part.rows):
                found[other] = part.rows if other == stream_id else max(1, used)
        return found

    def _begin_segment(self, weights: dict[int, int], budget: int) -> None:
        """Make a segment with rows in proportion to `weights`."""
        one_each = sum(weight * self._streams[number].nbytes for number, weight in weights.items())
        times = max(1, budget // max(1, one_each))
        rows = {number: max(1, min(weight * times, _SEGMENT_ROWS)) for number, weight in weights.items()}
        path = self._directory / f"tensors-{self._segment:05}.h5"
        self._segment += 1
        partial = path.with_name(path.name + ".partial")
        offsets = _make_segment(partial, [(self._streams[number], count) for number, count in rows.items()])
        # The line below must name nothing that a loss of power could take. A segment is rare, and next to empty.
        sync(partial)
        partial.replace(path)
        sync(self._directory)
        line: list[list[int]] = []
        for (number, count), offset in zip(rows.items(), offsets, strict=True):
            parts = self._known.setdefault(number, [])
            first = parts[-1].end if parts else 0
            parts.append(_Part(path, first, count, offset))
            line.append([number, first, count, offset])
        self._lines.write(json.dumps({"file": path.name, "streams": line}) + "\n")
        self._lines.flush()


class Hdf5Reader:
    """Reads records at the offsets that the log names, without HDF5."""

    def __init__(self, rank_directory: Path) -> None:
        self._directory = rank_directory
        self._files = Files(os.O_RDONLY)
        self._parts: dict[int, list[_Part]] = {}

    def read(self, stream: Stream, row: int, offset: int, nbytes: int) -> memoryview:
        """Return the bytes of a tensor.

        Args:
            stream: what it is a record of.
            row: its row in the stream.
            offset: the byte at which it begins in its segment.
            nbytes: its bytes there.

        Raises:
            TraceDamaged: the file is missing or too short.
        """
        if not stream.nbytes:
            return memory(0)
        if stream.codec is not None:
            return hdf5_chunks.read(self._files, self._directory, stream, offset, nbytes)
        return self._files.read(self._segment(stream, row), offset, nbytes)

    def _segment(self, stream: Stream, row: int) -> Path:
        for look in (1, 2):
            for part in reversed(self._parts.get(stream.id, ())):
                if part.first <= row < part.end:
                    return part.path
            if look == 1:
                self._parts = _read_parts(self._directory)
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
    import h5py

    streams = list(streams)
    compressed = _compressed(streams)
    hdf5_chunks.seal_chunks(rank_directory, compressed)
    parts = _read_parts(rank_directory) | _parts_of(rank_directory, compressed)
    partial = rank_directory / (MASTER + ".partial")
    with _errors_of_the_system(partial), h5py.File(partial, "w", libver=("v110", "v110")) as file:
        for stream, rows in streams:
            if stream.location is None:
                continue
            group = file.require_group(stream.location)
            data = _make_virtual(group, stream, len(rows.step), parts.get(stream.id, ()))
            for name, values in rows.coordinates.items():
                group.create_dataset(name, data=values)
            group["step"].make_scale("step")
            data.dims[0].attach_scale(group["step"])
            data.dims[0].label = "step" if rows.one_a_step else "row"
    partial.replace(rank_directory / MASTER)


def faults(rank_directory: Path, streams: Iterable[tuple[Stream, Rows]], *, sealed: bool) -> Iterator[tuple[Path, str]]:
    """Yield what in the store contradicts the log: the file, and a sentence on it.

    Args:
        rank_directory: the rank.
        streams: each with its rows.
        sealed: whether `tensors.h5` is there.
    """
    import h5py

    try:
        parts = _read_parts(rank_directory)
    except TraceDamaged as error:
        yield rank_directory / SEGMENTS_FILE, str(error)
        return
    streams = list(streams)
    by_id = {stream.id: stream for stream, _ in streams}
    of_files: dict[Path, list[tuple[Stream, _Part]]] = {}
    for number, found in parts.items():
        for part in found:
            if number in by_id:
                of_files.setdefault(part.path, []).append((by_id[number], part))
    for path, inside in of_files.items():
        try:
            with h5py.File(path, "r", locking=False) as file:
                for stream, part in inside:
                    data = file[dataset_name(stream)]
                    if data.shape != (part.rows, *shape_of(stream)) or data.id.get_offset() != part.offset:
                        yield path, f"Stream {stream.id} does not lie in it where {SEGMENTS_FILE} says."
                    elif wrong := wrong_attribute(data, stream):
                        yield path, wrong
        except _UNREADABLE as error:
            yield path, f"HDF5 cannot read it: {error}"
    if not sealed:
        return
    compressed = _compressed(streams)
    parts |= _parts_of(rank_directory, compressed)
    path = rank_directory / hdf5_chunks.FILE
    try:
        for sentence in hdf5_chunks.chunk_faults(rank_directory, compressed):
            yield path, sentence
    except _UNREADABLE as error:
        yield path, f"HDF5 cannot read it: {error}"
    path = rank_directory / MASTER
    try:
        with h5py.File(path, "r", locking=False) as file:
            for stream, rows in streams:
                if stream.location is None:
                    continue
                group = file[stream.location]
                if group["data"].shape != (len(rows.step), *shape_of(stream)):
                    yield path, f"Stream {stream.id} has the shape {group['data'].shape} in it."
                if wrong := wrong_attribute(group["data"], stream):
                    yield path, wrong
                if stream.nbytes and len(rows.step):
                    sources = [
                        (
                            source.file_name,
                            source.dset_name.replace("%%", "%"),  # as it is given to HDF5, a format
                            source.vspace.get_select_bounds()[0][0],
                            source.src_space.get_select_bounds(),
                        )
                        for source in group["data"].virtual_sources()
                    ]
                    if sources != list(_sources(stream, len(rows.step), parts.get(stream.id, ()))):
                        yield path, f"It does not join the segments of stream {stream.id} as {SEGMENTS_FILE} has them."
                for name, values in rows.coordinates.items():
                    if not np.array_equal(group[name][()], values):
                        yield path, f"{name!r} of stream {stream.id} is not what the log has."
    except _UNREADABLE as error:
        yield path, f"HDF5 cannot read it: {error}"


def _compressed(streams: Iterable[tuple[Stream, Rows]]) -> list[tuple[Stream, Rows]]:
    """Return the streams that have compressed records."""
    return [
        (stream, rows)
        for stream, rows in streams
        if stream.location is not None and stream.codec is not None and stream.nbytes and len(rows.step)
    ]


def _parts_of(rank_directory: Path, compressed: Iterable[tuple[Stream, Rows]]) -> dict[int, list[_Part]]:
    """Return where the rows of compressed streams are."""
    path = rank_directory / hdf5_chunks.FILE
    return {stream.id: [_Part(path, 0, len(rows.step), 0)] for stream, rows in compressed}


def _sources(stream: Stream, count: int, parts: Sequence[_Part]) -> Iterator[tuple[str, str, int, Any]]:
    """Yield what the virtual dataset of a stream is made of: file, dataset, first row, and what is selected in it."""
    for part in parts:
        rows = min(part.rows, count - part.first)
        if rows > 0:
            zeros = (0, *(0 for _ in shape_of(stream)))
            yield (
                part.path.name,
                dataset_name(stream).decode(),
                part.first,
                (zeros, (rows - 1, *(n - 1 for n in shape_of(stream)))),
            )


def _make_virtual(group: Any, stream: Stream, count: int, parts: Sequence[_Part]) -> Any:
    import h5py

    space = h5py.h5s.create_simple((count, *shape_of(stream)))
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if stream.nbytes and count:
        properties.set_layout(h5py.h5d.VIRTUAL)
        for part in parts:
            rows = min(part.rows, count - part.first)
            if rows <= 0:
                continue
            target, source = space.copy(), h5py.h5s.create_simple((part.rows, *shape_of(stream)))
            target.select_hyperslab((part.first, *(0 for _ in shape_of(stream))), (rows, *shape_of(stream)))
            source.select_hyperslab((0, *(0 for _ in shape_of(stream))), (rows, *shape_of(stream)))
            # HDF5 takes the name for a format.
            name = dataset_name(stream).replace(b"%", b"%%")
            properties.set_virtual(target, part.path.name.encode(), name, source)
    made = h5py.h5d.create(group.id, b"data", hdf5_type(stream.dtype), space, dcpl=properties)
    data = h5py.Dataset(made)
    set_attributes(data, stream)
    return data


def _make_segment(path: Path, streams: Sequence[tuple[Stream, int]]) -> list[int]:
    """Make a file with a dataset for each stream, of so many rows; return where in the file each begins."""
    import h5py

    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_alignment(PAGE, PAGE)
    access.set_file_locking(False, True)  # nobody else knows the file yet, and some file systems have no locks
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    links = new_links()
    offsets = []
    with (
        _errors_of_the_system(path),
        h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, fapl=access)) as file,
    ):
        for stream, rows in streams:
            space = h5py.h5s.create_simple((rows, *shape_of(stream)))
            made = h5py.h5d.create(
                file.id, dataset_name(stream), hdf5_type(stream.dtype), space, dcpl=properties, lcpl=links
            )
            set_attributes(h5py.Dataset(made), stream)
            offsets.append(int(made.get_offset()))
    return offsets


@contextlib.contextmanager
def _errors_of_the_system(path: Path) -> Iterator[None]:
    """Raise OSError for a file that could not be written, for which HDF5 has RuntimeError when it is closed."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"HDF5 could not write {path.name}: {' '.join(str(error).split())}") from error


def _read_parts(rank_directory: Path) -> dict[int, list[_Part]]:
    """Return where the rows of each stream are.

    Raises:
        TraceDamaged: a line is not what it should be.
    """
    found: dict[int, list[_Part]] = {}
    path = rank_directory / SEGMENTS_FILE
    for line in whole_lines(path)[0]:
        try:
            segment = parsed(line)
            name = segment["file"]
            if not _SEGMENT.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a segment")
            for stream, *numbers in segment["streams"]:
                if len(numbers) != 3 or any(not isinstance(n, int) or n < 0 for n in (stream, *numbers)):
                    raise ValueError(f"{numbers} are no rows")
                found.setdefault(stream, []).append(_Part(rank_directory / name, *numbers))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceDamaged(f"{path} has a line that is no segment: {line[:200]!r} ({error}).") from None
    return found


def _number(path: Path) -> int:
    return int("".join(filter(str.isdigit, path.name.partition(".")[0])) or 0)
