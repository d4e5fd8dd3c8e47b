"""Tensors in one file of arrays: `.npz` of numpy and `.safetensors`, written an element of a batch at a time.

Both have named arrays and nothing else, so records that are alike but for their step become one array, as in the
stores: `LAYER/KIND/data` of shape `(row, *shape)`, and `LAYER/KIND/step`, `call` and `micro` of shape `(row,)` say
which row is what. Neither library can write what does not fit into memory, and both formats are a page long: a header
that is known before the first tensor is read, and the bytes.
"""

import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.errors import BadQuery
from replay.format import ML_DTYPES, as_attribute, numpy_dtype

_SAFETENSORS = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{letter}{bits}" for sign, letter in (("", "I"), ("u", "U")) for bits in (8, 16, 32, 64)},
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_COORDINATES = {"step": "int64", "call": "int32", "micro": "int32"}

Reader = Callable[[dict[str, Any]], NDArray[Any]]


@dataclass(frozen=True)
class Alike:
    """Records that differ in step, call and micro alone, in the order of execution; each has its tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    records: Sequence[dict[str, Any]]

    def coordinate(self, name: str) -> NDArray[Any]:
        """Return steps, calls or micros, of shape `(row,)`."""
        return np.array([record[name] for record in self.records], _COORDINATES[name])


@dataclass(frozen=True)
class _Array:
    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Iterator[bytes]

    @property
    def nbytes(self) -> int:
        return numpy_dtype(self.dtype).itemsize * int(np.prod(self.shape, dtype=object))


def _arrays(groups: Sequence[Alike], read: Reader, stored_as: Callable[[str], str]) -> Iterator[_Array]:
    """Yield the arrays of a file in their order; nothing is read before their bytes are asked for."""
    for group in groups:
        dtype = stored_as(group.dtype)
        yield _Array(
            f"{group.name}/data", dtype, (len(group.records), *group.shape), _tensors(group.records, read, dtype)
        )
        for name, kind in _COORDINATES.items():
            yield _Array(f"{group.name}/{name}", kind, (len(group.records),), iter([group.coordinate(name).tobytes()]))


def _tensors(records: Sequence[dict[str, Any]], read: Reader, dtype: str) -> Iterator[bytes]:
    for record in records:
        yield read(record).astype(numpy_dtype(dtype), copy=False).tobytes()


def write_npz(path: Path, groups: Sequence[Alike], read: Reader) -> None:
    """Write tensors to a file for `numpy.load`. bfloat16 and float8, which numpy lacks, become float32.

    Args:
        path: the file.
        groups: what is in it.
        read: returns the tensor of a record.
    """

    def stored_as(dtype: str) -> str:
        return "float32" if dtype in ML_DTYPES else dtype

    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for array in _arrays(groups, read, stored_as):
            header = {
                "descr": np.lib.format.dtype_to_descr(numpy_dtype(array.dtype)),
                "fortran_order": False,
                "shape": array.shape,
            }
            with file.open(f"{as_attribute(array.name)}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array_header_1_0(entry, header)
                for chunk in array.chunks:
                    entry.write(chunk)


def write_safetensors(path: Path, groups: Sequence[Alike], read: Reader) -> None:
    """Write tensors to a safetensors file; `__metadata__` has layer, kind and path of each array by its name.

    Args:
        path: the file.
        groups: what is in it.
        read: returns the tensor of a record.

    Raises:
        BadQuery: safetensors has no such dtype.
    """

    def stored_as(dtype: str) -> str:
        if dtype not in _SAFETENSORS:
            raise BadQuery(
                f"The selection has tensors of {dtype}, which safetensors lacks. Leave them out by "
                f"where=\"dtype != '{dtype}'\", or export npz, arrow or parquet."
            )
        return dtype

    arrays = list(_arrays(groups, read, stored_as))
    metadata = {
        as_attribute(group.name): json.dumps({name: group.records[0][name] for name in ("layer", "kind", "path")})
        for group in groups
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for array in arrays:
        name, begin, offset = as_attribute(array.name), offset, offset + array.nbytes
        header[name] = {"dtype": _SAFETENSORS[array.dtype], "shape": array.shape, "data_offsets": [begin, offset]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            for chunk in array.chunks:
                file.write(chunk)
