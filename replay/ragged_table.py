"""What lies beside the array of a place that streams share, the same in each store: where its tensors are, and of what.

Tensor i is `data[begin[i] : begin[i] + numel[i]].reshape(shape[i])`, and the rest are the coordinates of its record.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.errors import TraceDamaged
from replay.format import Rows, Stream, numpy_dtype

Member = tuple[Stream, Rows]
"""A stream of a place, with its rows."""


@dataclass(frozen=True)
class Table:
    """What lies beside the array.

    Attributes:
        columns: arrays over the tensors, in the order of attempt, step and call; `shape` has two dimensions.
        end: how many bytes the array has.
    """

    columns: dict[str, NDArray[Any]]
    end: int


def table_of(members: Sequence[Member]) -> Table:
    """Return the table of a place.

    Raises:
        TraceDamaged: streams that are not alike have the place.
    """
    kinds = {(s.layer, s.kind, s.path, s.dtype, len(s.shape)) for s, _ in members}
    if len(kinds) > 1:
        raise TraceDamaged(f"Streams that are not alike have one place: {sorted(kinds)}. Put streams.jsonl back.")
    itemsize = numpy_dtype(members[0][0].dtype).itemsize
    joined = Rows(*(np.concatenate(column) for column in zip(*(rows for _, rows in members), strict=True)))
    order = np.lexsort((joined.call, joined.step, joined.attempt))
    offset, nbytes = joined.offset, joined.nbytes
    shapes = np.array([stream.shape for stream, _ in members], np.int64).reshape(len(members), -1)
    shape = np.repeat(shapes, [len(rows.step) for _, rows in members], axis=0)
    end = int((offset + nbytes).max(initial=0))
    arrays = {
        "begin": offset // itemsize,
        "numel": nbytes // itemsize,
        "shape": shape,
        **joined.coordinates,
    }
    return Table({name: column[order] for name, column in arrays.items()}, end)
