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
from replay.partitions import Divided
from replay.ranks import name_of
from replay.records import Progress

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
        for record in self._with_tensors():
            yield record, self._tensor(record)

    def _with_tensors(self, progress: Progress | None = None) -> Iterator[dict[str, Any]]:
        for part in self._parts(progress):
            for batch in part.filter(part["kept"]).to_batches(1024):
                yield from batch.to_pylist()

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

    def _alike(self, progress: Progress | None = None) -> list[Alike]:
        """The records whose tensors were kept, by what they are alike in, each group by the name of a place."""
        found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for record in self._with_tensors(progress):
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
        self,
        path: str | Path,
        *,
        tensors: bool = False,
        overwrite: bool = False,
        partition: str | None = None,
        progress: Progress | None = None,
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
            progress: is told how many records are done, and of how many; with `partition` once while they are read, and
                once more while they are written.

        Raises:
            BadQuery: the file exists, or cannot be written, or no column can hold all values exactly.
            NotRecorded: no record is so, and there is nothing to divide.
        """
        import pyarrow.parquet as pq

        if partition is None:
            with new_file(Path(path), overwrite=overwrite) as partial:
                if tensors:
                    return _write(*self._with_values(progress), partial, pq.ParquetWriter, compression="zstd")
                return _write(*_with_schema(self._parts(progress)), partial, parquet_writer)
        with new_folder(Path(path)) as partial, Divided(partial, partition) as folders:
            for part in self._parts(progress):
                folders.add(plain(part))
            if not folders.rows:
                raise NotRecorded(f"No record of {self.trace.path} is so: there is nothing to divide into files.")
            dtype, done = common_dtype(folders.dtypes) if tensors else None, 0
            for name, tables in folders:
                (partial / name).mkdir()
                parts = _with_schema(tables) if dtype is None else self._valued(tables, dtype)
                done += _write(*parts, partial / name / "part-0.parquet", pq.ParquetWriter, compression="zstd")
                if progress is not None:
                    progress(done, folders.rows)
        return done

    def to_arrow(
        self, path: str | Path, *, tensors: bool = False, overwrite: bool = False, progress: Progress | None = None
    ) -> int:
        """Write the records to an Arrow IPC file (Feather, version 2), which can be mapped; return how many there are.

        The arguments and errors are those of `to_parquet`.
        """
        with new_file(Path(path), overwrite=overwrite) as partial:
            parts = self._with_values(progress) if tensors else _with_schema(map(plain, self._parts(progress)))
            return _write(*parts, partial, pa.ipc.new_file)

    def _parts(self, progress: Progress | None = None) -> Iterator[pa.Table]:
        """The records, in parts of which few are in memory at once: the next is read while one is written."""
        return self.trace.record_parts(self.layers, self.kinds, self.steps, self.where, progress)

    def _with_values(self, progress: Progress | None) -> tuple[pa.Schema, Iterator[pa.Table]]:
        further = "group by dtype"
        found = self.trace.columns("dtype, count(*) as n", self.layers, self.kinds, self.steps, self.where, further)
        total, done = sum(found["n"].to_pylist()), 0
        schema, parts = self._valued(map(plain, self._parts()), common_dtype(found["dtype"].to_pylist()))

        def told() -> Iterator[pa.Table]:
            nonlocal done
            for part in parts:
                yield part
                done += len(part)
                if progress is not None:
                    progress(done, total)

        return schema, told()

    def _valued(self, tables: Iterator[pa.Table], dtype: np.dtype[Any]) -> tuple[pa.Schema, Iterator[pa.Table]]:
        first = next(tables)
        schema, parts = with_values(first, self._tensor, dtype)
        more = (part for table in tables for part in with_values(table, self._tensor, dtype)[1])
        return schema, itertools.chain(parts, more)

    def to_npz(self, path: str | Path, *, overwrite: bool = False, progress: Progress | None = None) -> int:
        """Write the tensors to a file for `numpy.load`; return how many there are.

        Tensors that are alike but for their step are one array, `LAYER/KIND/data`, of shape `(row, *shape)`;
        `LAYER/KIND/step`, `call` and `micro` say which row is what. Names are those of `to_xarray`. bfloat16 and float8
        become float32.

        Args:
            path: the file.
            overwrite: replace the file if it exists.
            progress: is told how many records are done, and of how many: once while the log is looked through, and once
                more while tensors are written.

        Raises:
            BadQuery: the file exists, or cannot be written.
            NotRecorded: no tensor of the selection was kept.
        """
        return self._write_arrays(Path(path), write_npz, overwrite=overwrite, progress=progress)

    def to_safetensors(self, path: str | Path, *, overwrite: bool = False, progress: Progress | None = None) -> int:
        """Write the tensors to a safetensors file, in their own dtypes; the rest is that of `to_npz`."""
        return self._write_arrays(Path(path), write_safetensors, overwrite=overwrite, progress=progress)

    def _write_arrays(
        self, path: Path, write: Callable[..., None], *, overwrite: bool, progress: Progress | None
    ) -> int:
        with new_file(path, overwrite=overwrite) as partial:
            groups = self._alike(progress)
            if not groups:
                raise NotRecorded(
                    f"No tensor of this selection of {self.trace.path} was kept; its statistics go to Parquet or Arrow."
                )
            total, done = sum(len(group.records) for group in groups), 0

            def read(record: dict[str, Any]) -> NDArray[Any]:
                nonlocal done
                done += 1
                if progress is not None:
                    progress(done, total)
                return self._tensor(record)

            write(partial, groups, read)
        return total


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
