"""Whether cost grows as the work does: `python -m benchmarks.linear [--small] [--json] [--keep]`.

Three rows of sizes: records a step from 10 to 10,000 of 1 KB each, bytes a step from 1 MB to 1 GB in sixteen records,
and steps from 10 to 100,000 of a tiny model. The layers do next to nothing, so that recording is what is measured; the
bare steps of the same model are subtracted.

Beside the bytes stand two floors of the same bytes in the same run: to copy them into memory that is there already, and
that followed by a direct write to a file. `all GB/s` counts from the first step to the end of `detach`, when all is on
its way to the disk; `step GB/s` is what the training sees.
"""

import argparse
import contextlib
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hookrec
from benchmarks.memory import own_bytes
from benchmarks.results import Row, facts, finish, progress

RECORDS = (10, 100, 1_000, 10_000)
MEGABYTES = (1, 10, 100, 1_000)
STEPS = (10, 100, 1_000, 10_000, 100_000)


class _Pass(nn.Module):
    """Returns another tensor of the same values, at the price of a view."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x)


def _model(layers: int, elements: int) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(_Pass() for _ in range(layers))), torch.randn(elements, requires_grad=True)


def _steps(model: nn.Module, x: Tensor, count: int, end: Any = lambda: None) -> list[float]:
    gradient = torch.ones_like(x)
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        model(x).backward(gradient)
        end()
        seconds.append(time.perf_counter() - begin)
        x.grad = None
    return seconds


@contextlib.contextmanager
def _recorded(model: nn.Module, **options: Any) -> Iterator[hookrec.Recorder]:
    folder = Path(tempfile.mkdtemp(prefix="hookrec-benchmark-"))
    try:
        with hookrec.attach(model, folder / "trace", keep_free=0, clock="manual", **options) as recorder:
            yield recorder
    finally:
        shutil.rmtree(folder)


def by_records(sizes: tuple[int, ...]) -> list[Row]:
    """Return what a record costs where a step has few, and many."""
    rows = []
    for records in sizes:
        progress(f"{records:,} records a step")
        model, x = _model(records // 2, 256)
        count = max(5, 2_000 // records)
        bare = statistics.median(_steps(model, x, count))
        with _recorded(model) as recorder:
            step = statistics.median(_steps(model, x, count, recorder.step))
        rows.append({"records a step": records, "bare ms": bare * 1e3, "step ms": step * 1e3})
        rows[-1]["us a record"] = (step - bare) / records * 1e6
    return rows


def by_bytes(sizes: tuple[int, ...]) -> list[Row]:
    """Return how fast bytes are recorded, and the floors."""
    rows = []
    for megabytes in sizes:
        progress(f"{megabytes:,} MB a step")
        nbytes = megabytes * 10**6 // 16 // 4096 * 4096 * 16
        count = 3 if megabytes >= 1_000 else 7
        model, x = _model(8, nbytes // 64)
        copy, written = _floors(nbytes, count)
        bare = statistics.median(_steps(model, x, count))
        with _recorded(model) as recorder:
            begin = time.perf_counter()
            step = statistics.median(_steps(model, x, count, recorder.step))
            recorder.detach()
            whole = time.perf_counter() - begin
        row: Row = {"MB a step": megabytes, "bare ms": bare * 1e3, "step ms": step * 1e3}
        row |= {"step GB/s": nbytes / max(step - bare, 1e-9) / 1e9, "all GB/s": nbytes * count / whole / 1e9}
        row |= {"memcpy GB/s": nbytes / copy / 1e9, "memcpy + write GB/s": nbytes / written / 1e9}
        rows.append(row)
    return rows


def _floors(nbytes: int, count: int) -> tuple[float, float]:
    """Return seconds to copy bytes, and to copy and write them past the page cache where the file system allows."""
    source = np.ones(nbytes, np.uint8)
    copies, writes = [], []
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) as memory:
        target = np.frombuffer(memory, np.uint8)
        folder = Path(tempfile.mkdtemp(prefix="hookrec-benchmark-"))
        try:
            file = _direct(folder / "bytes")
            for _ in range(count):
                begin = time.perf_counter()
                np.copyto(target, source)
                copies.append(time.perf_counter() - begin)
                done = 0
                while done < nbytes:
                    done += os.pwrite(file, memoryview(memory)[done:], done)
                writes.append(time.perf_counter() - begin)
            os.close(file)
        finally:
            shutil.rmtree(folder)
        del target
    return statistics.median(copies), statistics.median(writes)


def _direct(path: Path) -> int:
    try:
        return os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_CREAT | os.O_WRONLY)


def by_steps(sizes: tuple[int, ...]) -> list[Row]:
    """Return what a record costs, and how memory grows, as a recording becomes long."""
    rows = []
    for steps in sizes:
        progress(f"{steps:,} steps")
        model, x = _model(5, 256)
        bare = statistics.median(_steps(model, x, min(steps, 1_000)))
        with _recorded(model) as recorder:
            writer = recorder._recording._writer._process.pid
            warm = max(steps // 10, 1)
            seconds = _steps(model, x, warm, recorder.step)
            before = own_bytes(os.getpid()), own_bytes(writer)
            seconds += _steps(model, x, steps - warm, recorder.step)
            after = own_bytes(os.getpid()), own_bytes(writer)
        ours, theirs = ((end - begin) / 1e6 for begin, end in zip(before, after, strict=True))
        each = (statistics.fmean(seconds) - bare) / 10 * 1e6
        rows.append({"steps": steps, "us a record": each, "trainer MB more": ours, "writer MB more": theirs})
    return rows


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the two smallest sizes of each")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/linear.json")
    chosen = parser.parse_args()
    most = 2 if chosen.small else None
    began = facts()
    tables = {
        "records a step": by_records(RECORDS[:most]),
        "bytes a step": by_bytes(MEGABYTES[:most]),
        "steps": by_steps(STEPS[:most]),
    }
    finish("linear", tables, began, as_json=chosen.json, keep=chosen.keep)


if __name__ == "__main__":
    main()
