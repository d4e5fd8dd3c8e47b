"""How a selection of records is handed to other programs: Arrow, pandas, numpy, xarray, files.

Nothing is read before it is asked for, and what is written goes through memory a part at a time.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay import notebook
from replay.array_files import Alike, write_npz, write_safetensors
from replay.errors import MissingPackage, NotRecorded
from replay.exported import common_dtype, parquet_writer, plain, with_values
from replay.filters import Names, Steps
from replay.format import Locations
from replay.new_file import new_file, new_folder
from replay.partitions import divided
from replay.ranks import name_of

if TYPE_CHECKING:
    from replay.trace import Trace

KEY = ("rank", "step", "layer", "kind", "call", "path")
"""The columns by which a record is found."""


@dataclass(frozen=True)
class Selection:
    """Some records of a trace. Made by `Trace.select`."""

    trace: "Trace"
    layers: Names = None
    kinds: Names = None
    steps: Steps = None
    where: str | None = None

    def _repr_html_(self) -> str:
        return notebook.selection_as_html(self)

    def stats(self) -> pa.Table:
        """Return the records with their statistics, as `Trace.records` does."""
        return self.trace.records(self.layers, self.kinds, self.steps, self.where)

    def to_pandas(self) -> Any:
        """Return the records with their statistics as a pandas DataFrame, strings as strings.

        Raises:
            MissingPackage: pandas is not installed.
        """
        try:
            import pandas  # noqa: F401
        except ImportError:
            raise MissingPackage("to_pandas() needs pandas: pip install 'hookrec[pandas]'.") from None
        return plain(self.stats()).to_pandas()

    def tensors(self) -> Iterator[tuple[dict[str, Any], NDArray[Any]]]:
        """Yield each record whose tensor was kept, and the tensor, in the order of execution."""
        for batch in self.stats().to_batches(1024):
            for record in batch.to_pylist():
                if record["kept"]:
                    yield record, self._tensor(record)

    def _tensor(self, record: dict[str, Any]) -> NDArray[Any]:
        return self.trace.tensor(**{name: record[name] for name in KEY})

    def to_xarray(self) -> Any:
        """Return the tensors as an `xarray.DataTree`, with a node a layer and kind, such as `tree["layer1.0/output"]`.

        A node has the array `data` of shape `(row, *shape)` with the coordinates `step`, `call` and `micro`; the
        leading dimension is `step` itself where no step has two rows. Where a layer's shape or dtype changes, further
        nodes end in `~2`, `~3`, …; where the trace has several ranks, each has a node above. All of it is read into
        memory.

        Raises:
            MissingPackage: xarray is not installed.
            NotRecorded: no tensor of the selection was kept.
        """
        try:
            import xarray
        except ImportError:
            raise MissingPackage("to_xarray() needs xarray: pip install 'hookrec[xarray]'.") from None
        groups = self._alike()
        if not groups:
            raise NotRecorded(f"No tensor of this selection of {self.trace.path} was kept; stats() has its statistics.")
        nodes: dict[str, Any] = {}
        for group in groups:
            step, call, micro = (group.coordinate(name) for name in ("step", "call", "micro"))
            rows = "step" if np.all(np.diff(step) > 0) else "row"
            data = np.stack([self._tensor(record) for record in group.records])
            nodes[group.name] = xarray.Dataset(
                {"data": ([rows, *(f"d{i}" for i in range(len(group.shape)))], data)},
                {"step": (rows, step), "call": (rows, call), "micro": (rows, micro)},
                {name: group.records[0][name] for name in ("layer", "kind", "path")},
            )
        return xarray.DataTree.from_dict(nodes)

    def _alike(self) -> list[Alike]:
        """The records whose tensors were kept, by what they are alike in, each group by the name of a place."""
        found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for batch in self.stats().to_batches(1024):
            for record in batch.to_pylist():
                if record["kept"]:
                    key = (*(record[name] for name in ("rank", "layer", "kind", "path", "dtype")), (*record["shape"],))
                    found.setdefault(key, []).append(record)
        groups, locations = [], dict[int, Locations]()
        for (rank, layer, kind, path, dtype, shape), records in found.items():
            name = locations.setdefault(rank, Locations()).new(layer, kind, path)
            if len(self.trace.ranks) > 1:
                name = f"{name_of(rank)}/{name}"
            groups.append(Alike(name, dtype, shape, records))
        return groups

    def to_parquet(
        self, path: str | Path, *, tensors: bool = False, overwrite: bool = False, partition: str | None = None
    ) -> int:
        """Write the records to a Parquet file, one row a record; return how many there are.

        Args:
            path: the file; with `partition`, a folder that is not there yet.
            tensors: add a column `values`, a list of the tensor's elements in row-major order, null where the tensor
                was not kept. Records of several dtypes get the smallest that holds all of them exactly; bfloat16 and
                float8 become float32, and a complex element is two numbers.
            overwrite: replace the file if it exists.
            partition: "layer", for a file a layer, `by_layer=NAME/part-0.parquet`, or "step:100", for a file a hundred
                steps, `from_step=300/part-0.parquet`. Each file has all columns.

        Raises:
            BadQuery: the file exists, or cannot be written, or no column can hold all values exactly.
            NotRecorded: no record is so, and there is nothing to divide.
        """
        import pyarrow.parquet as pq

        if partition is None:
            with new_file(Path(path), overwrite=overwrite) as partial:
                if tensors:
                    return _write(*self._with_values(), partial, pq.ParquetWriter, compression="zstd")
                return _write(*_with_schema(self._parts()), partial, parquet_writer)
        with new_folder(Path(path)) as partial:
            table = plain(self.stats())
            if not len(table):
                raise NotRecorded(f"No record of {self.trace.path} is so: there is nothing to divide into files.")
            dtype = _dtype_of(table) if tensors else None
            for name, part in divided(table, partition):
                (partial / name).mkdir()
                schema, parts = (part.schema, [part]) if dtype is None else with_values(part, self._tensor, dtype)
                _write(schema, parts, partial / name / "part-0.parquet", pq.ParquetWriter, compression="zstd")
        return len(table)

    def to_arrow(self, path: str | Path, *, tensors: bool = False, overwrite: bool = False) -> int:
        """Write the records to an Arrow IPC file (Feather, version 2), which can be mapped; return how many there are.

        The arguments and errors are those of `to_parquet`.
        """
        with new_file(Path(path), overwrite=overwrite) as partial:
            parts = self._with_values() if tensors else _with_schema(map(plain, self._parts()))
            return _write(*parts, partial, pa.ipc.new_file)

    def _parts(self) -> Iterator[pa.Table]:
        """The records, in parts of which few are in memory at once: the next is read while one is written."""
        return self.trace.record_parts(self.layers, self.kinds, self.steps, self.where)

    def _with_values(self) -> tuple[pa.Schema, Iterable[pa.Table]]:
        table = plain(self.stats())
        return with_values(table, self._tensor, _dtype_of(table))

    def to_npz(self, path: str | Path, *, overwrite: bool = False) -> int:
        """Write the tensors to a file for `numpy.load`; return how many there are.

        Tensors that are alike but for their step are one array, `LAYER/KIND/data`, of shape `(row, *shape)`;
        `LAYER/KIND/step`, `call` and `micro` say which row is what. Names are those of `to_xarray`. bfloat16 and float8
        become float32.

        Raises:
            BadQuery: the file exists, or cannot be written.
            NotRecorded: no tensor of the selection was kept.
        """
        return self._write_arrays(Path(path), write_npz, overwrite=overwrite)

    def to_safetensors(self, path: str | Path, *, overwrite: bool = False) -> int:
        """Write the tensors to a safetensors file, in their own dtypes; names and errors are those of `to_npz`."""
        return self._write_arrays(Path(path), write_safetensors, overwrite=overwrite)

    def _write_arrays(self, path: Path, write: Callable[..., None], *, overwrite: bool) -> int:
        with new_file(path, overwrite=overwrite) as partial:
            groups = self._alike()
            if not groups:
                raise NotRecorded(
                    f"No tensor of this selection of {self.trace.path} was kept; its statistics go to Parquet or Arrow."
                )
            write(partial, groups, self._tensor)
        return sum(len(group.records) for group in groups)


def _dtype_of(table: pa.Table) -> np.dtype[Any]:
    return common_dtype(table["dtype"].unique().to_pylist())


def _with_schema(parts: Iterator[pa.Table]) -> tuple[pa.Schema, Iterable[pa.Table]]:
    first = next(parts)
    return first.schema, itertools.chain([first], parts)


def _write(schema: pa.Schema, parts: Iterable[pa.Table], path: Path, writer_of: Any, **options: Any) -> int:
    rows = 0
    with writer_of(path, schema, **options) as writer:
        for part in parts:
            writer.write_table(part)
            rows += len(part)
    return rows
