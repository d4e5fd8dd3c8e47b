"""What a trace of statistics alone costs to keep and to ask: `python -m benchmarks.records [--records 2000000]`.

A sealed trace is written by the classes of the writer process, without a training: 10,000 steps, in each a record of
each of two kinds of some layers, whose statistics walk at random as those of a training do. Printed are the bytes of a
record when sealed, the seconds to open the trace, to find records by filters, and to export all to Parquet. The first
filter is held against pyarrow reading the six statistics of all records, since what it finds lies in all of them, and
the export against pyarrow writing the same table from memory. Each is asked in a process of its own, of which the peak
of memory is printed as well; it is told what to import before the clock runs. Seconds of the processor are those of all
threads: where the machine is shared, they say more.
"""

import argparse
import json
import multiprocessing
import os
import platform
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
from replay.exported import plain
from replay.format import FORMAT, RECORD_SCHEMA, VERSION, Stream, write_whole
from replay.log import LogWriter
from replay.query import connect
from replay.seal import locked, seal

STEPS = 10_000
COMMIT_STEPS = 10
REPEATS = 3
BARS = {
    "bytes a record": "at most 32",
    "open s": "at most 0.2",
    "filter by statistics s": "at most 0.3",
    "filter for the one with NaN s": "at most 0.3",
    "filter by layer and steps s": "at most 0.3",
    "export, to pyarrow's speed": "at least 0.7",
}


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


def _timed(**asks: Callable[[], object]) -> dict[str, float]:
    """Ask some questions in turn, several times; return the medians of seconds and seconds of the processor of each."""
    times: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        for name, ask in asks.items():
            begin = time.perf_counter(), time.process_time()
            ask()
            ended = time.perf_counter(), time.process_time()
            for unit, since, until in zip(("s", "cpu s"), begin, ended, strict=True):
                times.setdefault(f"{name.replace('_', ' ')} {unit}", []).append(until - since)
    return {name: statistics.median(found) for name, found in times.items()}


def time_open(path: Path) -> dict[str, float]:
    """Open the trace."""
    return _timed(open=lambda: replay.open(path))


def time_where(path: Path) -> dict[str, float]:
    """Find some records, scattered over the trace, by their statistics; let pyarrow read statistics, as a floor."""
    trace = replay.open(path)
    files = sorted(map(str, path.glob("rank-00000/*.parquet")))
    checked = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    every = ds.dataset(files, format=ds.ParquetFileFormat(default_fragment_scan_options=checked))

    def floor() -> None:
        for _ in every.scanner(columns=["min", "max", "absmax", "mean", "std", "l2"]).to_batches():
            pass

    found = _timed(filter_by_statistics=lambda: trace.records(where="absmax > 100"), pyarrow_reads_statistics=floor)
    return {**found, "of records": len(trace.records(where="absmax > 100"))}


def time_nan(path: Path) -> dict[str, float]:
    """Find the one record with a NaN, as a trigger or `replay first` does."""
    trace = replay.open(path)
    return _timed(filter_for_the_one_with_NaN=lambda: trace.records(where="n_nan > 0"))


def time_layer(path: Path) -> dict[str, float]:
    """Find the records of one layer in a tenth of the steps."""
    trace = replay.open(path)
    steps = slice(STEPS // 2, STEPS // 2 + STEPS // 10)
    return _timed(filter_by_layer_and_steps=lambda: trace.records(layers="blocks.7.*", steps=steps))


def time_export(path: Path) -> dict[str, float]:
    """Export all records."""
    target = path.parent / "export.parquet"
    selection = replay.open(path).select()
    found = _timed(export=lambda: selection.to_parquet(target, overwrite=True))
    return {**found, "export MB": target.stat().st_size / 1e6}


def time_pyarrow(path: Path) -> dict[str, float]:
    """Write the same table, which is in memory, by pyarrow."""
    target = path.parent / "pyarrow.parquet"
    table = plain(replay.open(path).records())
    return _timed(pyarrow=lambda: pq.write_table(table, target, compression="zstd"))


QUESTIONS = (time_open, time_where, time_nan, time_layer, time_export, time_pyarrow)


def _asked(question: Callable[[Path], dict[str, float]], path: Path) -> tuple[dict[str, float], float]:
    connect().close()
    ds.dataset(RECORD_SCHEMA.empty_table())
    found = question(path)
    # ru_maxrss would be that of the process that started this one.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return found, int(status["VmHWM"].split()[0]) * 1024 / 1e6


def main() -> None:
    """Print a line a figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--folder", type=Path, default=Path())
    chosen = parser.parse_args()
    if chosen.records < 16 * STEPS:
        sys.exit(f"There must be {16 * STEPS:,} records at least, 16 a step.")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    facts: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        path = Path(name) / "trace"
        begin = time.perf_counter()
        write(path, chosen.records)
        facts["write and seal s"] = time.perf_counter() - begin
        count = replay.open(path).count
        print(f"{count:,} records, {STEPS:,} steps")
        nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        facts["bytes a record"] = nbytes / count
        for question in QUESTIONS:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                found, peak = pool.submit(_asked, question, path).result()
            facts |= found | {f"peak MB of {question.__name__.removeprefix('time_')}": peak}
    facts["export, to pyarrow's speed"] = facts["pyarrow s"] / facts["export s"]
    facts["the same, of the processor"] = facts["pyarrow cpu s"] / facts["export cpu s"]
    for fact, value in facts.items():
        print(f"{fact:36} {value:12,.3f} {BARS.get(fact, '')}")


if __name__ == "__main__":
    main()
