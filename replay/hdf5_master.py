"""`tensors.h5`, which joins the segments of a sealed rank: for each place a virtual dataset, and what lies beside it.

The rows of a stream's own dataset are records, with the coordinates `step`, `call` and `micro`, of which `step` is its
dimension scale. Those of a place that streams share are elements, with the table of `ragged_table`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.format import RAGGED, Rows, Stream, numpy_dtype
from replay.hdf5_segments import SEGMENTS_FILE, Key, Part, described, errors_of_the_system, key_of
from replay.hdf5_types import dataset_name, hdf5_type, set_attributes, shape_of, wrong_attribute
from replay.ragged_table import Member, table_of

MASTER = "tensors.h5"


@dataclass(frozen=True)
class _Place:
    """A group of the file.

    Attributes:
        stream: whose; of a shared place, one that has its elements for records.
        count: rows of the dataset.
        columns: the arrays beside it.
        parts: where the rows are.
        dimension: the name of the dataset's first dimension.
    """

    stream: Stream
    count: int
    columns: Mapping[str, NDArray[Any]]
    parts: Sequence[Part]
    dimension: str

    @property
    def whose(self) -> str:
        """Whose it is, in words."""
        return f"place {self.stream.location}" if self.stream.layout == RAGGED else f"stream {self.stream.id}"

    @property
    def sources(self) -> list[tuple[Part, int]]:
        """Parts that have rows, each with how many of them count."""
        counts = ((part, min(part.rows, self.count - part.first)) for part in self.parts)
        return [(part, rows) for part, rows in counts if rows > 0] if self.stream.nbytes else []


def write_master(
    rank_directory: Path, streams: Iterable[tuple[Stream, Rows]], parts: Mapping[Key, Sequence[Part]]
) -> None:
    """Write the file, at once or not at all.

    Args:
        rank_directory: the rank.
        streams: those that have a place, each with its rows.
        parts: where the rows of each dataset are.

    Raises:
        TraceDamaged: streams that are not alike share a place.
        OSError: it could not be written.
    """
    import h5py

    partial = rank_directory / (MASTER + ".partial")
    with errors_of_the_system(partial), h5py.File(partial, "w", libver=("v110", "v110")) as file:
        for place in _places(streams, parts):
            group = file.require_group(str(place.stream.location))
            data = _make_virtual(group, place)
            for name, values in place.columns.items():
                group.create_dataset(name, data=values)
            group["step"].make_scale("step")
            data.dims[0].label = place.dimension
            # The steps are those of the records, which in a shared place the rows of the other arrays are.
            along = [data] if place.stream.layout != RAGGED else [group[name] for name in ("begin", "numel", "shape")]
            for dataset in along:
                dataset.dims[0].attach_scale(group["step"])
    partial.replace(rank_directory / MASTER)


def master_faults(
    rank_directory: Path, streams: Iterable[tuple[Stream, Rows]], parts: Mapping[Key, Sequence[Part]]
) -> Iterator[str]:
    """Yield in what the file contradicts the log: sentences. Arguments are those of `write_master`.

    Raises:
        TraceDamaged: streams that are not alike share a place.
        OSError: HDF5 cannot read it; KeyError, RuntimeError and others may say the same.
    """
    import h5py

    with h5py.File(rank_directory / MASTER, "r", locking=False) as file:
        for place in _places(streams, parts):
            group, whose = file[place.stream.location], place.whose
            if group["data"].shape != (place.count, *shape_of(place.stream)):
                yield f"{whose.capitalize()} has the shape {group['data'].shape} in it."
            if wrong := wrong_attribute(group["data"], place.stream):
                yield wrong
            if place.stream.nbytes and place.count:
                sources = [
                    (
                        source.file_name,
                        source.dset_name.replace("%%", "%"),  # as it is given to HDF5, a format
                        source.vspace.get_select_bounds()[0][0],
                        source.src_space.get_select_bounds(),
                    )
                    for source in group["data"].virtual_sources()
                ]
                if sources != list(_as_hdf5_has_them(place)):
                    yield f"It does not join the segments of {whose} as {SEGMENTS_FILE} has them."
            for name, values in place.columns.items():
                if not np.array_equal(group[name][()], values):
                    yield f"{name!r} of {whose} is not what the log has."


def _places(streams: Iterable[tuple[Stream, Rows]], parts: Mapping[Key, Sequence[Part]]) -> Iterator[_Place]:
    shared: dict[Key, list[Member]] = {}
    for stream, rows in streams:
        key = key_of(stream)
        if stream.layout == RAGGED:
            shared.setdefault(key, []).append((stream, rows))
        else:
            dimension = "step" if rows.one_a_step else "row"
            yield _Place(stream, len(rows.step), rows.coordinates, parts.get(key, ()), dimension)
    for key, members in shared.items():
        table, stream = table_of(members), members[0][0]
        elements = table.end // numpy_dtype(stream.dtype).itemsize
        yield _Place(described(stream), elements, table.columns, parts.get(key, ()), "element")


def _as_hdf5_has_them(place: _Place) -> Iterator[tuple[str, str, int, Any]]:
    """Yield what a virtual dataset is made of: file, dataset, first row, and what is selected in it."""
    shape = shape_of(place.stream)
    for part, rows in place.sources:
        bounds = (0, *(0 for _ in shape)), (rows - 1, *(n - 1 for n in shape))
        yield part.path.name, dataset_name(place.stream).decode(), part.first, bounds


def _make_virtual(group: Any, place: _Place) -> Any:
    import h5py

    stream, shape = place.stream, shape_of(place.stream)
    space = h5py.h5s.create_simple((place.count, *shape))
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if stream.nbytes and place.count:
        properties.set_layout(h5py.h5d.VIRTUAL)
        for part, rows in place.sources:
            target, source = space.copy(), h5py.h5s.create_simple((part.rows, *shape))
            target.select_hyperslab((part.first, *(0 for _ in shape)), (rows, *shape))
            source.select_hyperslab((0, *(0 for _ in shape)), (rows, *shape))
            # HDF5 takes the name for a format.
            name = dataset_name(stream).replace(b"%", b"%%")
            properties.set_virtual(target, part.path.name.encode(), name, source)
    made = h5py.h5d.create(group.id, b"data", hdf5_type(stream.dtype), space, dcpl=properties)
    data = h5py.Dataset(made)
    set_attributes(data, stream)
    return data
