"""What a record looks like to a reader: a row of the log together with what its stream says of it.

The log names a stream by its number. Layer, kind, path and dtype come from the table of streams as
dictionary-encoded columns, so that no string is copied.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.errors import TraceDamaged
from replay.format import MODES, STATISTICS, Stream

Progress = Callable[[int, int], None]
"""Is told how many records are done, and of how many."""


def check_rows(table: pa.Table, streams: int, rank: Path) -> None:
    """Refuse rows of the log of which no table says anything.

    A checksum says that they are what was written, and not that it made sense.

    Args:
        table: rows with the columns `stream` and `mode`, as far as these are wanted.
        streams: how many streams there are.
        rank: the directory of the rank.

    Raises:
        TraceDamaged: a row is of a stream or a mode that is not there.
    """
    known = {"stream": streams, "mode": len(MODES)}
    for name in known.keys() & set(table.column_names) if len(table) else ():
        values = table[name].to_numpy()
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= known[name]:
            hint = (
                "lines of streams.jsonl are missing. Put that file back from a copy."
                if name == "stream"
                else "the log is damaged."
            )
            raise TraceDamaged(
                f"{rank} has records of {name} {low if low < 0 else high}, and {known[name]} {name}s: {hint}"
            )


class OfStreams:
    """What records have of their streams, made once for the tables of a rank.

    Args:
        streams: the streams of the rank, in the order of their ids; each that rows name.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        def names(values: list[str]) -> pa.DictionaryArray:
            # Each name once, as Parquet and pandas want it.
            return pa.array(values, pa.string()).dictionary_encode()

        self._layers = names([s.layer for s in streams])
        self._kinds = names([s.kind for s in streams])
        self._paths = names([s.path for s in streams])
        self._dtypes = names([s.whole[0] for s in streams])
        self._shapes = pa.array([list(s.whole[1]) for s in streams], pa.list_(pa.int64()))

    def described(self, table: pa.Table, rank: int, kept: NDArray[np.bool_]) -> pa.Table:
        """Return rows of the log as records.

        Args:
            table: rows with the columns of the log that are named below, and `stream`.
            rank: the rank.
            kept: shape `(rows,)`, whether the tensor is there.

        Returns:
            Columns rank, step, layer, kind, call, path, micro, mode, dtype, shape, kept, and the statistics.
            Dtype and shape are those of the whole tensor, as the statistics are.
        """
        if table["stream"].num_chunks > 1:
            table = table.combine_chunks()
        stream = _one_chunk(table["stream"], pa.int32())
        mode = _one_chunk(table["mode"], pa.uint8()).cast(pa.int32())

        def of_stream(names: pa.DictionaryArray) -> pa.DictionaryArray:
            return pa.DictionaryArray.from_arrays(names.indices.take(stream), names.dictionary)

        columns = {
            "rank": pa.array(np.full(len(table), rank, np.int32)),
            "step": table["step"],
            "layer": of_stream(self._layers),
            "kind": of_stream(self._kinds),
            "call": table["call"],
            "path": of_stream(self._paths),
            "micro": table["micro"],
            "mode": pa.DictionaryArray.from_arrays(mode, pa.array(MODES)),
            "dtype": of_stream(self._dtypes),
            "shape": self._shapes.take(stream),
            "kept": pa.array(kept),
            **{name: table[name] for name in STATISTICS},
        }
        return pa.table(columns)


def _one_chunk(column: pa.ChunkedArray, type_: pa.DataType) -> pa.Array:
    return column.chunk(0) if column.num_chunks else pa.array([], type_)
