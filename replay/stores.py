"""Which store a rank's tensors are in: the layouts are interchangeable, and whoever writes or reads one asks here.

A store appends the records of streams, gives them back by row, and is finished from the log. What is in it is known by
the module of its own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from replay import hdf5_store, zarr_store
from replay.format import Placed, Rows, Stream
from replay.hdf5_segments import SEGMENTS_FILE

STORES = ("zarr", "hdf5")


class StoreWriter(Protocol):
    """Appends records. What they are and when they count is the log's affair."""

    def add(self, stream: Stream, rows: int = 0) -> None:
        """Take a stream that has `rows` committed rows already."""
        ...

    def append(self, stream_id: int, memory: memoryview, places: Sequence[int]) -> list[Placed]:
        """Write records that begin at `places` in the memory; raise OSError, and take none, if that cannot be."""
        ...

    def rows(self, stream_id: int) -> int:
        """Return how many rows a stream has."""
        ...

    def rewind(self, stream_id: int, rows: int) -> None:
        """Forget rows that will not be committed."""
        ...

    def sync(self) -> None:
        """Bring what was written to the disk itself; raise OSError if that cannot be."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class StoreReader(Protocol):
    """Gives records back."""

    def read(self, stream: Stream, row: int, offset: int, nbytes: int) -> memoryview:
        """Return the bytes of a tensor; raise TraceDamaged if they are not there."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


def open_writer(store: str, rank_directory: Path) -> StoreWriter:
    """Begin a store, or go on with it."""
    if store == "hdf5":
        return hdf5_store.Hdf5Writer(rank_directory)
    return zarr_store.ZarrWriter(rank_directory)


def open_reader(rank_directory: Path) -> StoreReader:
    """Read the store that a rank has."""
    if store_of(rank_directory) == "hdf5":
        return hdf5_store.Hdf5Reader(rank_directory)
    return zarr_store.ZarrReader(rank_directory)


def seal_streams(rank_directory: Path, streams: Iterable[tuple[Stream, Rows]]) -> None:
    """Finish the store, so that other programs read it. May be repeated."""
    if store_of(rank_directory) == "hdf5":
        hdf5_store.seal_streams(rank_directory, streams)
    else:
        zarr_store.seal_streams(rank_directory, streams)


def faults(
    rank_directory: Path, streams: Iterable[tuple[Stream, Rows]], dropped: Mapping[int, int], *, sealed: bool
) -> Iterator[tuple[Path, str]]:
    """Yield what in the store contradicts the log, tensors aside: the file, and a sentence on it.

    Args:
        rank_directory: the rank.
        streams: each with its rows.
        dropped: by stream id, how many of its first rows have no tensor any more.
        sealed: whether the store was finished.
    """
    if store_of(rank_directory) == "hdf5":
        yield from hdf5_store.faults(rank_directory, streams, sealed=sealed)
    else:
        yield from zarr_store.faults(rank_directory, streams, dropped, sealed=sealed)


def store_of(rank_directory: Path) -> str:
    """Return the name of the store that a rank has."""
    return "hdf5" if (rank_directory / SEGMENTS_FILE).exists() else "zarr"
