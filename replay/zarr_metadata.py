"""What arrays of Zarr version 3 say of themselves: their `zarr.json`, and the index of a shard.

A `zarr.json` is written whole, by a rename, so that a reader finds the old one or the new one. How the bytes came to be
where the index says is the affair of those who write them.
"""

import contextlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from replay.errors import TraceDamaged
from replay.format import numpy_dtype, parsed, write_whole

GROUP: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
MISSING = 2**64 - 1
"""Offset and size, in the index of a shard, of a chunk that is not there."""
DROPPED_ROWS = "dropped_rows"
"""The attribute that says how many rows, from the first, have no tensor any more."""

_LITTLE: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}


def write_group(path: Path) -> None:
    """Make a directory a group, if it is none."""
    file = path / "zarr.json"
    if not file.exists():
        write_whole(file, json.dumps(GROUP))


def write_array(path: Path, metadata: dict[str, Any]) -> None:
    """Say what the array in a directory is; the directory is made if its parent is there.

    What was said of rows that were dropped stays.
    """
    path.mkdir(exist_ok=True)
    with contextlib.suppress(FileNotFoundError, ValueError, LookupError, TypeError):
        before = parsed((path / "zarr.json").read_bytes())
        dropped = {DROPPED_ROWS: before["attributes"][DROPPED_ROWS], **metadata["attributes"]}
        metadata = {**metadata, "fill_value": before["fill_value"], "attributes": dropped}
    write_whole(path / "zarr.json", json.dumps(metadata))


def write_small(path: Path, values: NDArray[Any], names: list[str]) -> None:
    """Write an array whole, as one chunk."""
    chunk = path.joinpath("c", *("0",) * values.ndim)
    chunk.parent.mkdir(parents=True, exist_ok=True)
    if values.size:
        chunk.write_bytes(values.astype(values.dtype.newbyteorder("<")).tobytes())
    write_array(path, small_metadata(values.shape, values.dtype.name, names))


def small_metadata(shape: tuple[int, ...], dtype: str, names: list[str]) -> dict[str, Any]:
    """Return the metadata of an array in one chunk."""
    return _metadata(list(shape), [max(1, n) for n in shape], dtype, [_LITTLE], names, {})


def sharded_metadata(
    shape: list[int],
    shard: list[int],
    inner: list[int],
    dtype: str,
    names: list[str],
    attributes: dict[str, str],
    compression: Iterable[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return the metadata of an array in files of many chunks, with an index at the end of each."""
    plain = _LITTLE if numpy_dtype(dtype).itemsize > 1 else {"name": "bytes"}
    configuration = {
        "chunk_shape": inner,
        "codecs": [plain, *compression],
        "index_codecs": [_LITTLE, {"name": "crc32c"}],
        "index_location": "end",
    }
    codec = {"name": "sharding_indexed", "configuration": configuration}
    return _metadata(shape, shard, dtype, [codec], names, attributes)


def _metadata(
    shape: list[int],
    chunk: list[int],
    dtype: str,
    codecs: list[dict[str, Any]],
    names: list[str],
    attributes: dict[str, str],
) -> dict[str, Any]:
    """Return the metadata of an array."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _zero(dtype),
        "codecs": codecs,
        "dimension_names": names,
        "attributes": attributes,
    }


def shard_index(chunks: int, offset: NDArray[np.int64], nbytes: NDArray[np.int64] | int) -> bytes:
    """Return the index of a shard of so many chunks, the first of which are there, with its checksum."""
    index = np.full((chunks, 2), MISSING, "<u8")
    index[: len(offset), 0] = offset
    index[: len(offset), 1] = nbytes
    body = index.tobytes()
    return body + struct.pack("<I", google_crc32c.value(body))


def finish_shard(path: Path, end: int, index: bytes) -> None:
    """Write the index of a shard where its chunks end, if it is not there yet; what else is there goes."""
    with path.open("r+b") as file:
        file.seek(end)
        if file.read() != index:
            file.truncate(end)
            file.seek(end)
            file.write(index)


def document_faults(path: Path, wanted: dict[str, Any], *, dropped: bool = False) -> Iterator[tuple[Path, str]]:
    """Yield where a `zarr.json` is not as it should be: the file, and a sentence on it.

    Args:
        path: the file.
        wanted: the members that are known.
        dropped: whether records of the array were dropped, which changes it.
    """
    data = bytes_of(path)
    try:
        found = parsed(data.decode("utf-8")) if data is not None else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        yield path, "It is missing." if data is None else "It is no JSON object."
        return
    if dropped and isinstance(found.get("attributes"), dict):
        found["attributes"].pop(DROPPED_ROWS, None)
        found["fill_value"] = wanted["fill_value"]
    for name, value in wanted.items():
        if found.get(name) != value:
            yield path, f"It has {name!r} as {found.get(name)!r}, where {value!r} belongs."


def small_faults(path: Path, values: NDArray[Any], names: list[str], what: str) -> Iterator[tuple[Path, str]]:
    """Yield where an array that `write_small` wrote is not as it should be."""
    yield from document_faults(path / "zarr.json", small_metadata(values.shape, values.dtype.name, names))
    chunk = path.joinpath("c", *("0",) * values.ndim)
    if values.size and bytes_of(chunk) != values.astype(values.dtype.newbyteorder("<")).tobytes():
        yield chunk, f"It is not the {what} of the records that the log has."


def bytes_of(path: Path, begin: int = 0) -> bytes | None:
    """Return a file from a byte on, counted from its end; None if it is not there, no file, or shorter."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            file.seek(begin, os.SEEK_END if begin else os.SEEK_SET)
            return file.read()
    except OSError:
        return None


def drop_first(path: Path, dtype: str, rows: int) -> dict[str, Any]:
    """Say in the array in a directory that its first rows will be dropped; return what it says now.

    To Zarr, a missing shard is full of the fill value: NaN from now on, where the dtype has one, rather than zero.

    Raises:
        TraceDamaged: the array is not what it should be; nothing was changed.
    """
    file = path / "zarr.json"
    try:
        metadata: dict[str, Any] = parsed(file.read_bytes())
        there = metadata["shape"][0]
        if not isinstance(there, int) or there < 0:
            raise TypeError(f"{there!r} is no number of rows")
        metadata["attributes"][DROPPED_ROWS] = rows
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TraceDamaged(f"{file} does not say what the array has: {error!r}. Nothing of it is dropped.") from None
    if dtype in ("float16", "float32", "float64"):
        metadata["fill_value"] = "NaN"
    write_array(path, metadata)
    return metadata


def _zero(dtype: str) -> object:
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    return 0.0 if "float" in dtype else 0
