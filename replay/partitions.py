"""How an export is divided into folders that readers of datasets know: `by_layer=fc1/`, `from_step=300/`.

The names of the keys are none of the columns': readers make numbers of what looks like one, and layers of a
`Sequential` are called `0` and `1`. So each file has all of its columns, of their own types, and the folder says it
once more for readers who choose files by it.

Records come in the order of execution, which is that of no file. They are put by in a file of their own, each folder's
together as they came, and read back a folder after the other: so neither memory nor open files grow with the trace.
"""

import hashlib
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.errors import BadQuery

_LONGEST = 200
_ROOT = "(root)"
"""For the empty name, which readers would take for null; a null among names is more than some of them can bear."""

_CODEC = "lz4"
_PART_ROWS = 1 << 18
"""Of a table that is read back at least, unless it is the last of its folder."""


class Divided:
    """Records by the name of the folder that they belong in.

    Args:
        folder: where they are put by until the end of the block.
        partition: "layer", or "step:N" for a folder N steps.

    Raises:
        BadQuery: the partition cannot be understood.
    """

    def __init__(self, folder: Path, partition: str) -> None:
        what, _, number = partition.partition(":")
        self._steps = 0
        if what == "step" and number.isdecimal() and 0 < int(number) < 2**62:
            self._steps = int(number)
        elif partition != "layer":
            raise BadQuery(
                f"A partition is 'layer', or 'step:100' for a file a hundred steps; {partition!r} is neither."
            )
        self._path = folder / "records.partial"
        self._schema: pa.Schema | None = None
        self._places: dict[str | int, list[tuple[int, int, int]]] = {}  # offset and bytes in the file, and bytes
        self._dtypes: set[str] = set()
        self.rows = 0

    def __enter__(self) -> Self:
        self._file = self._path.open("w+b")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._path.unlink()

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the tensors that they are of."""
        return sorted(self._dtypes)

    def add(self, table: pa.Table) -> None:
        """Put plain records by."""
        self._schema = table.schema
        self.rows += len(table)
        self._dtypes.update(table["dtype"].unique().to_pylist())
        keys, of_rows = self._keys(table)
        table = table.take(np.argsort(of_rows, kind="stable"))
        begin = 0
        for key, rows in zip(keys, np.bincount(of_rows, minlength=len(keys)).tolist(), strict=True):
            (batch,) = table.slice(begin, rows).combine_chunks().to_batches()
            begin += rows
            message = batch.serialize()
            packed = pa.compress(message, _CODEC, asbytes=True)
            self._places.setdefault(key, []).append((self._file.tell(), len(packed), message.size))
            self._file.write(packed)

    def _keys(self, table: pa.Table) -> tuple[list[Any], NDArray[np.int64]]:
        """Return the layers, or the first steps, that there are, and which of them each row has."""
        if self._steps:
            found, of_rows = np.unique(table["step"].to_numpy() // self._steps, return_inverse=True)
            return (found * self._steps).tolist(), of_rows.astype(np.int64)
        names = table["layer"].combine_chunks().dictionary_encode()
        return names.dictionary.to_pylist(), names.indices.to_numpy().astype(np.int64)

    def __iter__(self) -> Iterator[tuple[str, Iterator[pa.Table]]]:
        """Yield the name of each folder, and its records in their order, in parts of which one is in memory."""
        taken: set[str] = set()
        for key, places in self._places.items():
            name = f"from_step={key}" if isinstance(key, int) else f"by_layer={_folder(key, taken)}"
            yield name, self._tables(places)

    def _tables(self, places: list[tuple[int, int, int]]) -> Iterator[pa.Table]:
        waiting: list[pa.RecordBatch] = []
        for number, (offset, packed, size) in enumerate(places, 1):
            self._file.seek(offset)
            message = pa.decompress(self._file.read(packed), size, _CODEC)
            waiting.append(pa.ipc.read_record_batch(message, self._schema))
            if number == len(places) or sum(map(len, waiting)) >= _PART_ROWS:
                yield pa.Table.from_batches(waiting).combine_chunks()
                waiting.clear()


def _folder(layer: str, taken: set[str]) -> str:
    name = urllib.parse.quote(layer or _ROOT, safe="")
    if len(name) > _LONGEST:  # file systems take 255 bytes
        name = f"sha256-{hashlib.sha256(layer.encode()).hexdigest()}"
    while name in taken:
        name += "~"
    taken.add(name)
    return name
