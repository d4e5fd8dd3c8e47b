"""Segments of a log in Parquet: their values in every program, their size, and segments of earlier versions."""

import duckdb
import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import replay
from benchmarks.records import STEPS, write
from replay.format import RECORD_SCHEMA
from replay.log import Log
from replay.log_parquet import write_segment

ODD = {
    "double": np.array([2**63 - 2**51 + 1, 2**64 - 2**51, 2**63, 2**63 - 2**52, 1, 0x3FF0123456789ABC], np.uint64).view(
        np.float64
    ),  # two NaN, -0, infinity, the smallest number, and one of many digits
    "int64": np.array([2**63 - 1, -(2**63), 0, 2**62, -1, 12345678901]),
    "int32": np.array([2**31 - 1, -(2**31), 0, 7, -1, 3]),
    "uint32": np.array([2**32 - 1, 0, 1, 2**31, 5, 6]),
    "uint8": np.array([0, 1, 255, 7, 1, 0]),
}


def segment(rows: int, path, write_=write_segment) -> pa.Table:
    """Write a segment of extreme values of each type, in an order of its own for each column."""
    rng = np.random.default_rng(0)
    arrays = [pa.array(rng.choice(ODD[str(field.type)], rows), field.type) for field in RECORD_SCHEMA]
    table = pa.Table.from_arrays(arrays, schema=RECORD_SCHEMA)
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        write_(table, file)
    return table


def bits(values) -> bytes:
    return np.ascontiguousarray(values).tobytes()


@pytest.mark.parametrize("program", ["pyarrow", "duckdb", "polars", "replay"])
def test_every_program_reads_the_bits_of_every_value(program, tmp_path):
    path = tmp_path / "rank" / "records-00000.parquet"
    table = segment(140_000, path)  # more than a page

    if program == "duckdb":
        found = duckdb.sql(f"select * from '{path}'").to_arrow_table()
    elif program == "polars":
        found = polars.read_parquet(path).to_arrow()
    elif program == "pyarrow":
        found = pq.ParquetFile(path, page_checksum_verification=True).read()
    else:
        found = Log(path.parent).refresh().table()

    assert found.column_names == RECORD_SCHEMA.names
    for name in RECORD_SCHEMA.names:
        assert bits(found[name].to_numpy()) == bits(table[name].to_numpy()), name


def test_a_segment_as_it_was_written_before_is_read(tmp_path):
    def as_before(table, file) -> None:
        split = ["min", "max", "absmax", "mean", "std", "l2"]
        delta = ["step", "row", "offset", "n_zero"]
        dictionary = ["stream", "call", "micro", "mode", "kept", "nbytes", "numel", "n_nan", "n_posinf", "n_neginf"]
        encodings = {**dict.fromkeys(split, "BYTE_STREAM_SPLIT"), **dict.fromkeys(delta, "DELTA_BINARY_PACKED")}
        pq.write_table(
            table, file, compression="zstd", compression_level=3, use_dictionary=dictionary, column_encoding=encodings,
            write_page_checksum=True, row_group_size=1 << 17,
        )  # fmt: skip

    path = tmp_path / "rank" / "records-00000.parquet"
    table = segment(140_000, path, as_before)

    found = Log(path.parent).refresh().table()

    for name in RECORD_SCHEMA.names:
        assert bits(found[name].to_numpy()) == bits(table[name].to_numpy()), name


def test_a_record_of_statistics_takes_32_bytes_at_most(tmp_path):
    write(tmp_path / "a", 20 * STEPS)

    nbytes = sum(file.stat().st_size for file in (tmp_path / "a").rglob("*") if file.is_file())

    assert nbytes <= 32 * replay.open(tmp_path / "a").count
