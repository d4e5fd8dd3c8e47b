"""What a trace of statistics alone costs to keep and to ask: `python -m benchmarks.records [--records 2000000]`.

A sealed trace is written by the classes of the writer process, without a training: 10,000 steps, in each a record of
each of two kinds of some layers, whose statistics walk at random as those of a training do. Measured are the bytes of a
record when sealed, the seconds to open the trace, to find records by filters, and to export all to Parquet. Filters
have a floor: pyarrow reading from the same files the columns that a condition names, all of them, since what the first
filter finds lies in every part. The export is held against pyarrow writing the same table from memory. Each is asked in
a process of its own, of which the peak of memory is said as well; it is told what to import before the clock runs.
Seconds of the processor are those of all threads: where the machine is shared, they say more.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import replay
from benchmarks.results import Row, facts, finish, progress
from replay.exported import plain
from replay.format import FORMAT, RECORD_SCHEMA, VERSION, Stream, write_whole
from replay.log import LogWriter
from replay.query import connect
from replay.seal import locked, seal

STEPS = 10_000
COMMIT_STEPS = 10
REPEATS = 3


def write(path: Path, records: int) -> None:
    """Write a sealed trace of so many records."""
    directory = path / "rank-00000"
    directory.mkdir(parents=True)
    plan = {"tensors": False, "store": "zarr", "compression": None}
    identity = {"format": FORMAT, "version": VERSION, "id": "0" * 32, "created": "2026-01-01T00:00:00Z"}
    write_whole(path / "trace.json", json.dumps({**identity, "plan": plan, "provenance": {}}))
    write_whole(directory / "model.json", '{"modules": []}')
    count = records // STEPS
    kinds = ["output"] * (count - count // 2) + ["grad_output"] * (count // 2)
    rng = np.random.default_rng(0)
    shapes = [(8, int(n)) for n in 2 ** rng.integers(6, 14, count)]
    layers = [f"blocks.{i % (count // 2 or 1)}.linear" for i in range(count)]
    streams = [Stream(i, layers[i], kinds[i], "", "float32", shapes[i], None) for i in range(count)]
    write_whole(directory / "streams.jsonl", "".join(stream.to_json() + "\n" for stream in streams))
    numel = np.array([shape[0] * shape[1] for shape in shapes])
    scale = np.exp(rng.normal(size=count))
    with locked(directory):
        log = LogWriter(directory)
        for step in range(0, STEPS, COMMIT_STEPS):
            rows = COMMIT_STEPS * count
            walk = np.exp(np.cumsum(rng.normal(0, 0.02, (COMMIT_STEPS, count)), 0))
            std = (scale * walk).ravel()
            scale = scale * walk[-1]
            of_rows = np.tile(numel, COMMIT_STEPS)
            mean = std * rng.normal(0, 0.1, rows)
            extent = (std * (3 + rng.random(rows))).astype(np.float32)
            columns = {field.name: np.zeros(rows, field.type.to_pandas_dtype()) for field in RECORD_SCHEMA}
            columns["step"][:] = np.repeat(np.arange(step, step + COMMIT_STEPS), count)
            columns["stream"][:], columns["numel"][:] = np.tile(np.arange(count), COMMIT_STEPS), of_rows
            columns["kept"][:], columns["row"][:], columns["offset"][:] = 1, -1, -1
            columns["n_zero"][:] = np.where(columns["stream"] % 3 == 0, rng.binomial(of_rows, 0.5), 0)
            columns["min"][:], columns["max"][:] = -extent, extent * np.float32(0.9)
            columns["absmax"][:], columns["mean"][:], columns["std"][:] = extent, mean, std
            columns["l2"][:] = np.sqrt(of_rows * (std**2 + mean**2))
            columns["n_nan"][0] = step == STEPS - STEPS // 10
            log.append(columns)
        log.close()
        seal(directory, "detached", None, {})


def _timed(**asks: Callable[[], object]) -> list[Row]:
    """Ask some questions in turn, several times; return the medians of seconds and seconds of the processor of each."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in asks}
    for _ in range(REPEATS):
        for name, ask in asks.items():
            begin = time.perf_counter(), time.process_time()
            ask()
            times[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    medians = {name: map(statistics.median, zip(*found, strict=True)) for name, found in times.items()}
    return [{"what": name.replace("_", " "), "s": s, "cpu s": cpu} for name, (s, cpu) in medians.items()]


def time_open(path: Path) -> list[Row]:
    """Open the trace."""
    return _timed(open=lambda: replay.open(path))


def time_where(path: Path) -> list[Row]:
    """Find some records, scattered over the trace, by their statistics; let pyarrow read statistics, as a floor."""
    trace = replay.open(path)
    floor = _read(path, "min", "max", "absmax", "mean", "std", "l2")
    return _timed(filter_by_statistics=lambda: trace.records(where="absmax > 100"), pyarrow_reads_statistics=floor)


def time_nan(path: Path) -> list[Row]:
    """Find the one record with a NaN, as a trigger or `replay first` does."""
    trace = replay.open(path)
    floor = _read(path, "n_nan")
    return _timed(filter_for_the_one_with_NaN=lambda: trace.records(where="n_nan > 0"), pyarrow_reads_n_nan=floor)


def time_layer(path: Path) -> list[Row]:
    """Find the records of one layer in a tenth of the steps."""
    trace = replay.open(path)
    steps = slice(STEPS // 2, STEPS // 2 + STEPS // 10)
    floor = _read(path, "step", "stream")
    ask = lambda: trace.records(layers="blocks.7.*", steps=steps)  # noqa: E731
    return _timed(filter_by_layer_and_steps=ask, pyarrow_reads_step_and_stream=floor)


def _read(path: Path, *columns: str) -> Callable[[], None]:
    files = sorted(map(str, path.glob("rank-00000/*.parquet")))
    checked = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    every = ds.dataset(files, format=ds.ParquetFileFormat(default_fragment_scan_options=checked))

    def read() -> None:
        for _ in every.scanner(columns=list(columns)).to_batches():
            pass

    return read


def time_export(path: Path) -> list[Row]:
    """Export all records."""
    target = path.parent / "export.parquet"
    selection = replay.open(path).select()
    return _timed(export=lambda: selection.to_parquet(target, overwrite=True))


def time_pyarrow(path: Path) -> list[Row]:
    """Write the same table, which is in memory, by pyarrow."""
    target = path.parent / "pyarrow.parquet"
    table = plain(replay.open(path).records())
    return _timed(pyarrow_writes_the_table=lambda: pq.write_table(table, target, compression="zstd"))


QUESTIONS = (time_open, time_where, time_nan, time_layer, time_export, time_pyarrow)


def _asked(question: Callable[[Path], list[Row]], path: Path) -> list[Row]:
    connect().close()
    ds.dataset(RECORD_SCHEMA.empty_table())
    found = question(path)
    # ru_maxrss would be that of the process that started this one.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [row | {"peak MB": int(status["VmHWM"].split()[0]) * 1024 / 1e6} for row in found]


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/records.json")
    chosen = parser.parse_args()
    if chosen.records < 16 * STEPS:
        sys.exit(f"There must be {16 * STEPS:,} records at least, 16 a step.")
    began = facts()
    answers: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="hookrec-benchmark-") as name:
        path = Path(name) / "trace"
        progress(f"writing {chosen.records:,} records")
        begin = time.perf_counter()
        write(path, chosen.records)
        seconds = time.perf_counter() - begin
        count = replay.open(path).count
        nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for question in QUESTIONS:
            progress(question.__name__)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                answers += pool.submit(_asked, question, path).result()
        exports = {f"{file.stem} MB": file.stat().st_size / 1e6 for file in sorted(path.parent.glob("*.parquet"))}
        found = replay.open(path).records(where="absmax > 100").num_rows
    size: Row = {"records": count, "steps": STEPS, "write and seal s": seconds, "bytes a record": nbytes / count}
    size |= {"by statistics": found} | exports
    tables = {"answers": answers, "a trace of statistics": [size]}
    finish("records", tables, began, as_json=chosen.json, keep=chosen.keep)


if __name__ == "__main__":
    main()
