"""Which rows of which dataset lie in which segment of the HDF5 store, and how a segment is made.

A segment is made whole before its first record and closed; `segments.jsonl` then says where each of its datasets
begins. A dataset is of a stream, and its rows are records; or of a place that streams share, and its rows are elements.
In both cases its parts, segment by segment, follow one another without a gap.
"""

import contextlib
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from replay.errors import TraceDamaged
from replay.files import PAGE, stride_of, sync
from replay.format import RAGGED, Stream, numpy_dtype, parsed, whole_lines
from replay.hdf5_types import dataset_name, hdf5_type, new_links, set_attributes, shape_of, wrong_attribute

SEGMENTS_FILE = "segments.jsonl"

UNREADABLE = (OSError, KeyError, RuntimeError, ValueError, TypeError, AttributeError, struct.error)
"""What HDF5, h5py and we raise at files that are damaged."""

_SEGMENT = re.compile(r"tensors-\d{5,}\.h5")
_FIRST_SEGMENT_BYTES = 1 << 28
_SEGMENT_BYTES = 1 << 31
_SEGMENT_ROWS = 1 << 16

Key = int | str
"""Whose a dataset is: the number of a stream, or the location of a place that several share."""


@dataclass
class Part:
    """The rows of a dataset that are in one segment."""

    path: Path
    first: int
    rows: int
    offset: int  # of the first row, in bytes

    @property
    def end(self) -> int:
        """The row behind the last."""
        return self.first + self.rows


def key_of(stream: Stream) -> Key:
    """Return whose dataset the records of a stream are in."""
    return str(stream.location) if stream.layout == RAGGED else stream.id


def described(stream: Stream) -> Stream:
    """Return a stream as HDF5 is told of its dataset: of a shared place, one whose records are elements."""
    return replace(stream, shape=()) if stream.layout == RAGGED else stream


class Segments:
    """The segments of a rank, to be written to. Owned by the writer process.

    A segment that is begun holds the datasets that were added since the last was, or those that were filling up
    together.
    """

    def __init__(self, rank_directory: Path) -> None:
        self._directory = rank_directory
        self._streams: dict[Key, Stream] = {}
        self._least: dict[Key, int] = {}  # rows that a dataset needs at least, by what came first
        self._new: list[Key] = []
        self._parts = read_parts(rank_directory)
        self._next = 1 + max((_number(path) for path in rank_directory.glob("tensors-[0-9]*.h5*")), default=-1)
        self._lines = (rank_directory / SEGMENTS_FILE).open("a", encoding="utf-8")

    def add(self, stream: Stream) -> int:
        """Take the dataset of a stream; return how many rows of it there is room for already."""
        key = key_of(stream)
        if key not in self._streams:
            self._streams[key] = described(stream)
            self._least[key] = rows_needed(stream)
            if key not in self._parts:
                self._new.append(key)
        parts = self._parts.get(key)
        return parts[-1].end if parts else 0

    def part(self, key: Key, row: int, least: int) -> Part | None:
        """Return the first part of a dataset that has so many rows from one on, or behind it; None if none has."""
        return next((part for part in self._parts.get(key, ()) if max(row, part.first) + least <= part.end), None)

    def begin(self, key: Key, used: Mapping[Key, int], least: int = 1) -> Part:
        """Begin a segment; return the place that it has for further rows of a dataset.

        Args:
            key: the dataset.
            used: of each dataset, how many rows of it are taken.
            least: how many rows the place must have.

        Raises:
            OSError: the segment could not be made; there is none.
        """
        if key in self._new:
            # How many rows each needs is not known yet, so they get little, and the next time as they had need.
            self._make({new: self._least[new] for new in self._new}, key, least, _FIRST_SEGMENT_BYTES)
            self._new.clear()
        else:
            self._make(self._filling_up(key, used), key, least, _SEGMENT_BYTES)
        return self._parts[key][-1]

    def sync(self) -> None:
        """Bring the table to the disk itself."""
        os.fdatasync(self._lines.fileno())

    def close(self) -> None:
        """Close the table."""
        self._lines.close()

    def _filling_up(self, key: Key, used: Mapping[Key, int]) -> dict[Key, int]:
        """Return the datasets that need a further segment with this one, and how many rows each has had in the last."""
        full = self._parts[key][-1]
        found = {}
        for other in self._parts.keys() & self._streams.keys():
            part = self._parts[other][-1]
            taken = used.get(other, 0) - part.first
            if other == key or (part.path == full.path and 2 * taken >= part.rows):
                found[other] = part.rows if other == key else max(1, taken)
        return found

    def _make(self, weights: dict[Key, int], wanted: Key, least: int, budget: int) -> None:
        """Make a segment with rows in proportion to `weights`."""
        one_each = sum(weight * self._streams[key].nbytes for key, weight in weights.items())
        times = max(1, budget // max(1, one_each))
        rows: dict[Key, int] = {}
        for key, weight in weights.items():
            if isinstance(key, str):
                # Whole pages, so that what begins on a page border of the array does so in the file.
                a_page = PAGE // self._streams[key].nbytes
                count = max(weight * times, least if key == wanted else 1)
                rows[key] = -(-count // a_page) * a_page
            else:
                rows[key] = max(1, min(weight * times, _SEGMENT_ROWS))
        path = self._directory / f"tensors-{self._next:05}.h5"
        self._next += 1
        partial = path.with_name(path.name + ".partial")
        offsets = _make_segment(partial, [(self._streams[key], count) for key, count in rows.items()])
        # The line below must name nothing that a loss of power could take. A segment is rare, and next to empty.
        sync(partial)
        partial.replace(path)
        sync(self._directory)
        streams, places = list[list[Key]](), list[list[Key]]()
        for (key, count), offset in zip(rows.items(), offsets, strict=True):
            parts = self._parts.setdefault(key, [])
            first = parts[-1].end if parts else 0
            parts.append(Part(path, first, count, offset))
            (places if isinstance(key, str) else streams).append([key, first, count, offset])
        line = {"file": path.name, "streams": streams, **({"places": places} if places else {})}
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()


def rows_needed(stream: Stream) -> int:
    """Return how many rows of its dataset one record of a stream takes."""
    if stream.layout != RAGGED:
        return 1
    itemsize = numpy_dtype(stream.dtype).itemsize
    return max(1, stride_of(stream.nbytes) // itemsize)


def read_parts(rank_directory: Path) -> dict[Key, list[Part]]:
    """Return where the rows of each dataset are.

    Raises:
        TraceDamaged: a line is not what it should be.
    """
    found: dict[Key, list[Part]] = {}
    path = rank_directory / SEGMENTS_FILE
    for line in whole_lines(path)[0]:
        try:
            segment = parsed(line)
            name = segment["file"]
            if not _SEGMENT.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a segment")
            for kind, entries in ((int, segment["streams"]), (str, segment.get("places", ()))):
                for key, *numbers in entries:
                    if type(key) is not kind or len(numbers) != 3 or not all(map(_is_count, numbers)):
                        raise ValueError(f"{numbers} are no rows of {key!r}")
                    found.setdefault(key, []).append(Part(rank_directory / name, *numbers))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceDamaged(f"{path} has a line that is no segment: {line[:200]!r} ({error}).") from None
    return found


def segment_faults(parts: Mapping[Key, Sequence[Part]], streams: Iterable[Stream]) -> Iterator[tuple[Path, str]]:
    """Yield in what the segments contradict the table of them: the file, and a sentence on it.

    Args:
        parts: where the rows of each dataset are.
        streams: those that have a place.
    """
    import h5py

    known = {key_of(stream): described(stream) for stream in streams}
    of_files: dict[Path, list[tuple[Stream, Part]]] = {}
    for key, found in parts.items():
        for part in found:
            if key in known:
                of_files.setdefault(part.path, []).append((known[key], part))
    for path, inside in of_files.items():
        try:
            with h5py.File(path, "r", locking=False) as file:
                for stream, part in inside:
                    data = file[dataset_name(stream)]
                    if data.shape != (part.rows, *shape_of(stream)) or data.id.get_offset() != part.offset:
                        yield path, f"{stream.location} does not lie in it where {SEGMENTS_FILE} says."
                    elif wrong := wrong_attribute(data, stream):
                        yield path, wrong
        except UNREADABLE as error:
            yield path, f"HDF5 cannot read it: {error}"


def _is_count(number: object) -> bool:
    return type(number) is int and number >= 0


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
        errors_of_the_system(path),
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
def errors_of_the_system(path: Path) -> Iterator[None]:
    """Raise OSError for a file that could not be written, for which HDF5 has RuntimeError when it is closed."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"HDF5 could not write {path.name}: {' '.join(str(error).split())}") from error


def _number(path: Path) -> int:
    return int("".join(filter(str.isdigit, path.name.partition(".")[0])) or 0)
