"""How a selection of records is handed to other programs: Arrow, pandas, numpy, xarray, Parquet.

Nothing is read before it is asked for, and what is written goes through memory a part at a time.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay import notebook
from replay.errors import BadQuery, MissingPackage, NotRecorded
from replay.filters import Names, Steps
from replay.format import ML_DTYPES, Locations, numpy_dtype

if TYPE_CHECKING:
    from replay.trace import Trace

KEY = ("rank", "step", "layer", "kind", "call", "path")
"""The columns by which a record is found."""

_ROW_GROUP_BYTES = 64 * 2**20


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
        return _plain(self.stats()).to_pandas()

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
        groups: dict[tuple[Any, ...], list[tuple[dict[str, Any], NDArray[Any]]]] = {}
        for record, tensor in self.tensors():
            key = (*(record[name] for name in ("rank", "layer", "kind", "path", "dtype")), tensor.shape)
            groups.setdefault(key, []).append((record, tensor))
        if not groups:
            raise NotRecorded(f"No tensor of this selection of {self.trace.path} was kept; stats() has its statistics.")
        nodes: dict[str, Any] = {}
        locations: dict[int, Locations] = {}
        for (rank, layer, kind, path, _, shape), found in groups.items():
            step, call, micro = (np.array([record[name] for record, _ in found]) for name in ("step", "call", "micro"))
            rows = "step" if np.all(np.diff(step) > 0) else "row"
            name = locations.setdefault(rank, Locations()).new(layer, kind, path)
            if len(self.trace.ranks) > 1:
                name = f"rank-{rank:05}/{name}"
            nodes[name] = xarray.Dataset(
                {"data": ([rows, *(f"d{i}" for i in range(len(shape)))], np.stack([tensor for _, tensor in found]))},
                {"step": (rows, step), "call": (rows, call), "micro": (rows, micro)},
                {"layer": layer, "kind": kind, "path": path},
            )
        return xarray.DataTree.from_dict(nodes)

    def to_parquet(self, path: str | Path, *, tensors: bool = False, overwrite: bool = False) -> int:
        """Write the records to a Parquet file, one row a record; return how many there are.

        Args:
            path: the file.
            tensors: add a column `values`, a list of the tensor's elements in row-major order, null where the tensor
                was not kept. Records of several dtypes get the smallest that holds all of them exactly; bfloat16 and
                float8 become float32, and a complex element is two numbers.
            overwrite: replace the file if it exists.

        Raises:
            BadQuery: the file exists, or cannot be written, or no column can hold all values exactly.
        """
        import pyarrow.parquet as pq

        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        try:
            _check_target(target, overwrite=overwrite)
            table = _plain(self.stats())
            if tensors:
                self._write_with_values(table, partial)
            else:
                pq.write_table(table, partial, compression="zstd")
            partial.replace(target)
            return len(table)
        except OSError as error:
            raise BadQuery(f"{target} cannot be written: {error.strerror or error}. Choose another file.") from None
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def _write_with_values(self, table: pa.Table, path: Path) -> None:
        import pyarrow.parquet as pq

        dtype = _common_dtype(table["dtype"].unique().to_pylist())
        schema = table.schema.append(pa.field("values", pa.list_(pa.from_numpy_dtype(dtype))))
        sizes = np.asarray(table["numel"].to_numpy(), np.int64) * dtype.itemsize
        begin = 0
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            while begin < len(table):
                # Rows whose values fit into a row group, at least one.
                within = np.searchsorted(np.cumsum(sizes[begin : begin + 4096]), _ROW_GROUP_BYTES, side="right")
                part = table.slice(begin, max(1, int(within)))
                records = part.to_pylist()
                values = [_numbers(self._tensor(record), dtype) if record["kept"] else None for record in records]
                column = _lists(values, dtype)
                writer.write_table(part.append_column(schema.field("values"), column))
                begin += len(part)


def _check_target(target: Path, *, overwrite: bool) -> None:
    if target.is_dir():
        raise BadQuery(f"{target} is a directory. Name a file, such as {target / 'records.parquet'}.")
    if not target.parent.is_dir():
        raise BadQuery(f"{target} cannot be written: {target.parent} is no directory. Make it first.")
    if target.exists() and not target.is_file():
        raise BadQuery(f"{target} is no file of data, and is not replaced. Choose another file.")
    if target.exists() and not overwrite:
        raise BadQuery(f"{target} exists already. Choose another file, or pass overwrite=True (--overwrite).")


def _common_dtype(names: list[str]) -> np.dtype[Any]:
    """Return the smallest dtype of numpy that holds the values of all these dtypes exactly.

    Raises:
        BadQuery: there is none.
    """
    numbers = [np.dtype(np.float32) if name in ML_DTYPES else numpy_dtype(name) for name in names]
    common = np.result_type(*numbers) if numbers else np.dtype(np.float32)
    kinds = {number.kind for number in numbers}
    too_wide = common.kind == "f" and any(number.kind in "iu" and number.itemsize > 4 for number in numbers)
    if too_wide or ("c" in kinds and len(kinds) > 1):
        raise BadQuery(
            f"The selection has tensors of {', '.join(sorted(names))}, and no column holds all of them exactly. "
            "Export them one after the other, by layers or by the condition \"dtype = '…'\"."
        )
    if common.kind == "c":
        common = np.dtype(np.float32 if common.itemsize == 8 else np.float64)
    return common


def _numbers(tensor: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if tensor.dtype.kind == "c":
        tensor = tensor.reshape(-1).view(tensor.real.dtype)
    return tensor.reshape(-1).astype(dtype, copy=False)


def _lists(values: list[NDArray[Any] | None], dtype: np.dtype[Any]) -> pa.Array:
    lengths = [0 if value is None else len(value) for value in values]
    flat = np.concatenate([np.empty(0, dtype), *(value for value in values if value is not None)])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    missing = pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat), mask=missing)


def _plain(table: pa.Table) -> pa.Table:
    """Strings instead of dictionaries: some readers of Parquet do not take those."""
    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(index, field.name, table[field.name].cast(pa.string()))
    return table
