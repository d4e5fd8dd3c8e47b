"""What a table of records is to programs that know nothing of us: plain types, values, and what each column means.

Strings are strings: dictionaries of Arrow become categories in pandas, which compare and concatenate otherwise, and
some readers of Parquet do not take them. There is no column of times, so nobody meets nanoseconds; what has a time is
in seconds since 1970. A shape is a list, since records of a table differ in it.
"""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.errors import BadQuery
from replay.format import ML_DTYPES, numpy_dtype
from replay.log_parquet import page_options

MEANINGS = {
    "rank": ("the process that recorded", "1"),
    "step": ("optimizer step, from 0", "1"),
    "layer": ("qualified name of the module, empty for the root", ""),
    "kind": ("output, input, param, ..., or the gradient of one: grad_output, grad_input, param_grad", ""),
    "call": ("how many earlier calls of the layer were completed in the step", "1"),
    "path": ("where in a nested value the tensor sits; of a parameter, its name", ""),
    "micro": ("which forward pass of the root in the step, from 0", "1"),
    "mode": ("train or eval: module.training at the call", ""),
    "dtype": ("of the recorded tensor, by the name that torch has for it", ""),
    "shape": ("of the recorded tensor", "1"),
    "kept": ("whether the trace has the tensor, besides its statistics", ""),
    "numel": ("elements of the tensor", "1"),
    "n_nan": ("elements that are NaN", "1"),
    "n_posinf": ("elements that are +infinity", "1"),
    "n_neginf": ("elements that are -infinity", "1"),
    "n_zero": ("elements that are 0 or -0", "1"),
    "min": ("smallest finite element; NaN if there is none", "that of the tensor"),
    "max": ("largest finite element; NaN if there is none", "that of the tensor"),
    "absmax": ("largest absolute value of a finite element", "that of the tensor"),
    "mean": ("of the finite elements", "that of the tensor"),
    "std": ("population standard deviation of the finite elements", "that of the tensor"),
    "l2": ("square root of the sum of squares of the finite elements; NaN if there is none", "that of the tensor"),
    "values": ("the elements in row-major order; null where the tensor was not kept", "that of the tensor"),
}
"""What each column means, and its unit. That of a gradient is loss per unit of what it is the gradient of."""

_PART_BYTES = 64 * 2**20
_PART_ROWS = 4096


def plain(table: pa.Table) -> pa.Table:
    """Return records with strings for dictionaries, and with what each column means in its field's metadata."""
    schema = plain_schema(table.schema)
    return pa.table([column.cast(field.type) for column, field in zip(table.columns, schema, strict=True)], schema)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema that `plain` gives records of a schema."""
    types = (field.type.value_type if pa.types.is_dictionary(field.type) else field.type for field in schema)
    return pa.schema([_field(name, type_) for name, type_ in zip(schema.names, types, strict=True)])


def parquet_writer(path: Path, schema: pa.Schema) -> Any:
    """Return a `pyarrow.parquet.ParquetWriter` that writes records, as `Trace.records` has them, as plain ones.

    Parquet has dictionaries of its own, so strings are not written out and looked up again; who reads the file is told
    that they are strings. Statistics are split by significance: a dictionary of them, as pyarrow tries by itself, is
    larger than they are. So it takes less than half the time that it takes to write `plain` records.

    Args:
        path: the file.
        schema: of the records.
    """
    import pyarrow.parquet as pq

    names = [field.name for field in schema if pa.types.is_dictionary(field.type)]
    statistics = [field.name for field in schema if pa.types.is_float64(field.type)]
    told = {b"ARROW:schema": base64.b64encode(plain_schema(schema).serialize().to_pybytes())}
    return pq.ParquetWriter(
        path,
        schema.with_metadata(told),
        store_schema=False,
        compression="zstd",
        compression_level=1,
        use_dictionary=[*names, "call", "micro", "shape.list.element", "numel", "n_nan", "n_posinf", "n_neginf"],
        column_encoding=dict.fromkeys(statistics, "BYTE_STREAM_SPLIT"),
        **page_options(),
    )


def _field(name: str, type_: pa.DataType) -> pa.Field:
    meaning, unit = MEANINGS.get(name, ("", ""))
    return pa.field(name, type_, metadata={"meaning": meaning, "unit": unit})


def with_values(
    table: pa.Table, read: Callable[[dict[str, Any]], NDArray[Any]], dtype: np.dtype[Any]
) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """Return the schema of records with the column `values`, and the records a part at a time, in their order.

    Args:
        table: plain records.
        read: returns the tensor of a record that was kept.
        dtype: of the values, as `common_dtype` has it.
    """
    schema = table.schema.append(_field("values", pa.list_(pa.from_numpy_dtype(dtype))))

    def parts() -> Iterator[pa.Table]:
        sizes = np.asarray(table["numel"].to_numpy(), np.int64) * dtype.itemsize
        begin = 0
        while begin < len(table):
            # Rows whose values fit into a part, at least one.
            within = np.searchsorted(np.cumsum(sizes[begin : begin + _PART_ROWS]), _PART_BYTES, side="right")
            part = table.slice(begin, max(1, int(within)))
            values = [_numbers(read(record), dtype) if record["kept"] else None for record in part.to_pylist()]
            yield pa.table([*part.itercolumns(), _lists(values, dtype)], schema=schema)
            begin += len(part)

    return schema, parts()


def common_dtype(names: list[str]) -> np.dtype[Any]:
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
