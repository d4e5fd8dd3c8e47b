"""What a Parquet segment of a log is: the encodings it is written in, and how its row groups are read, checked.

The encodings are those that make it small and are cheap to take apart, of those that every reader of Parquet has.
Statistics seldom repeat, so a dictionary of them is larger than they are; split by significance, the bytes of their
exponents compress, and those of their mantissas are left alone. zstd looks at 128 KiB at a time, which is as many
values: where a page has so many, each byte of significance is compressed by itself. Pages of 20,000 values, as pyarrow
has them if it is not told, are 3 % larger.
"""

import contextlib
import inspect
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import pyarrow as pa
import pyarrow.compute as pc

from replay.format import RECORD_SCHEMA, parsed

_PAGE_ROWS = 1 << 17
_GROUP_ROWS = 2 * _PAGE_ROWS
"""Of a segment that is begun anew at 2^17 rows, a commit's rows more make no row group of their own."""

_SPLIT = [field.name for field in RECORD_SCHEMA if pa.types.is_floating(field.type)]
_DICTIONARY = ["call", "micro", "mode", "kept", "nbytes", "numel", "n_nan", "n_posinf", "n_neginf"]
_DELTA = ["step", "stream", "row", "offset"]
# n_zero is nothing for some layers and never twice the same for others: as differences it would take 2 bytes, and as
# eight bytes each, compressed, half a one.

_CONSTANTS = b"hookrec:constants"
_MAY_BE_CONSTANT = [f.name for f in RECORD_SCHEMA if pa.types.is_integer(f.type) and f.name not in ("step", "stream")]


def write_segment(table: pa.Table, file: BinaryIO) -> None:
    """Write records, all columns of the log, as a segment."""
    import pyarrow.parquet as pq

    pq.write_table(
        table.replace_schema_metadata({**(RECORD_SCHEMA.metadata or {}), _CONSTANTS: _constants(table)}),
        file,
        compression="zstd",
        compression_level={**dict.fromkeys(RECORD_SCHEMA.names, 3), "n_zero": 1},  # of both levels, what is smaller
        use_dictionary=_DICTIONARY,
        column_encoding={**dict.fromkeys(_SPLIT, "BYTE_STREAM_SPLIT"), **dict.fromkeys(_DELTA, "DELTA_BINARY_PACKED")},
        write_page_checksum=True,
        row_group_size=_GROUP_ROWS,
        **page_options(),
    )


def _constants(table: pa.Table) -> bytes:
    found = {}
    for name in _MAY_BE_CONSTANT if len(table) else ():
        range_ = pc.min_max(table[name]).as_py()
        if range_["min"] == range_["max"]:
            found[name] = range_["min"]
    text = json.dumps(found).encode()
    return b"%08x %s" % (google_crc32c.value(text), text)


def constants_of(metadata: Any, *, strict: bool = False) -> Mapping[str, pa.Scalar]:
    """Return the columns that have one value in a whole segment, and need not be read.

    Half of the columns have, in most segments, and would take a quarter of the time. They are said with a checksum,
    since the ranges that Parquet has in its footer have none.

    Args:
        metadata: the footer.
        strict: raise ArrowInvalid where what is said is damaged. Else nothing is said then: pages have all values.
    """
    checksum, _, text = (metadata.metadata or {}).get(_CONSTANTS, b"").partition(b" ")
    if not checksum:
        return {}
    try:
        if checksum != b"%08x" % google_crc32c.value(text):
            raise ValueError("the checksum differs")
        found = parsed(text)
        return {
            name: pa.scalar(operator.index(found[name]), RECORD_SCHEMA.field(name).type)
            for name in _MAY_BE_CONSTANT
            if name in found
        }
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        if strict:
            raise pa.ArrowInvalid(f"{_CONSTANTS.decode()} is damaged: {error}") from None
        return {}


def page_options() -> dict[str, int]:
    """Return what pyarrow is told to make pages of 2^17 values, unless there are fewer."""
    import pyarrow.parquet as pq

    options = {"data_page_size": 2 * 8 * _PAGE_ROWS, "max_rows_per_page": _PAGE_ROWS}
    # A pyarrow that does not know the latter has no limit on rows.
    return {name: value for name, value in options.items() if name in inspect.signature(pq.write_table).parameters}


@contextlib.contextmanager
def opened(path: Path, metadata: Any = None) -> Iterator[Any]:
    """Open a segment as a `pyarrow.parquet.ParquetFile` that holds pages to their checksums.

    Args:
        path: the segment.
        metadata: its footer, if that was read before.
    """
    import pyarrow.parquet as pq

    with (
        path.open("rb") as source,  # by name, pyarrow takes no path that is not UTF-8
        pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True) as file,
    ):
        yield file


def read_group(path: Path, metadata: Any, group: int, columns: Sequence[str]) -> pa.Table:
    """Return columns of a row group, each in one chunk, in the calling thread alone.

    Raises:
        ArrowInvalid: the group is not what the footer says.
    """
    with opened(path, metadata) as file:
        table = file.read_row_group(group, columns=list(columns), use_threads=False)
    if len(table) != metadata.row_group(group).num_rows or table.column_names != list(columns):
        raise pa.ArrowInvalid(f"{path} has not the rows and columns that it says")
    if any(column.null_count for column in table.columns):
        raise pa.ArrowInvalid("a column has nulls")
    return table


def check_schema(found: pa.Schema, path: str | Path) -> None:
    """Raise ArrowInvalid where the columns of a segment are not ours: Parquet's footer has no checksum."""
    for field in RECORD_SCHEMA:
        if field.name not in found.names or not found.field(field.name).equals(field):
            raise pa.ArrowInvalid(f"{path} has no column {field.name} of {field.type}")
