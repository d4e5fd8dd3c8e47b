"""How fast tensors are read: `python -m benchmarks.reading [--small] [--json] [--keep]`.

A trace is recorded in each store, of one layer whose outputs are all alike; then the same bytes are read by replay, by
the libraries that the store is for, from the same files, and by nothing but the system (`dd`).

A read is *warm* when the bytes are in the page cache, which a read before sees to. It is *cold* when they are not:
`sync`, then `posix_fadvise(DONTNEED)` on each file below the trace. That is advice, and what a disk or a hypervisor has
in a cache of its own stays there, so cold figures are of this machine's kernel and not of bare disks; `resident` says
which part of the bytes was in the page cache all the same, by `mincore`.
"""

import argparse
import contextlib
import ctypes
import itertools
import mmap
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import nn

import hookrec
import replay
from benchmarks.results import Row, facts, finish, progress

LAYER = "0"
SEED = 0
COLD_ROUNDS = 3
SMALL_BYTES, LARGE_BYTES = 8 << 10, 4 << 20
Read = Callable[[int], Any]


class _Pass(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)


def record(path: Path, store: str, nbytes: int, steps: int) -> None:
    """Record outputs of so many bytes, each of other values."""
    model = nn.Sequential(_Pass())
    x = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(SEED))
    with hookrec.attach(model, path, store=store, kinds=("output",), keep_free=0, clock="manual") as recorder:
        for step in range(steps):
            model(x + step)
            recorder.step()


def forget(folder: Path) -> None:
    """Ask the kernel to let go of what it holds of the files below a folder."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(path: Path) -> float:
    """Return which part of a file is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as memory:
        view = np.frombuffer(memory, np.uint8)
        found = (ctypes.c_ubyte * pages)()
        failed = libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), found)
        del view
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in found) / pages


def _largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@contextlib.contextmanager
def _replay(path: Path) -> Iterator[Read]:
    with replay.open(path) as trace:
        yield lambda step: trace.tensor(step=step, layer=LAYER, kind="output")


@contextlib.contextmanager
def _zarr_python(path: Path) -> Iterator[Read]:
    import zarr

    array: Any = zarr.open_array(_array(path), mode="r")
    yield lambda step: array[step]


@contextlib.contextmanager
def _tensorstore(path: Path) -> Iterator[Read]:
    import tensorstore

    where = {"driver": "file", "path": str(_array(path))}
    array = tensorstore.open({"driver": "zarr3", "kvstore": where}).result()
    yield lambda step: array[step].read().result()


@contextlib.contextmanager
def _h5py(path: Path) -> Iterator[Read]:
    with h5py.File(path / "rank-00000" / "tensors.h5") as file:
        data = file[f"{LAYER}/output/data"]
        yield lambda step: data[step]


def _array(path: Path) -> Path:
    return path / "rank-00000" / "tensors.zarr" / LAYER / "output" / "data"


READERS = {
    "zarr": {"replay": _replay, "zarr-python": _zarr_python, "tensorstore": _tensorstore},
    "hdf5": {"replay": _replay, "h5py": _h5py},
}


def one_tensor(root: Path, steps: int) -> list[Row]:
    """Return the time of a read of 8 KB, whose bytes were read before."""
    rows = []
    for store, readers in READERS.items():
        progress(f"8 KB, {store}")
        path = root / f"small-{store}"
        record(path, store, SMALL_BYTES, steps)
        for name, opened in readers.items():
            with opened(path) as read:
                for step in range(steps):
                    _check(read(step), path, step)
                seconds = [_seconds(lambda step=step: read(step)) for step in range(steps)]
            rows.append({"store": store, "reader": name, "us": statistics.median(seconds) * 1e6})
    return rows


def one_layer(root: Path, steps: int) -> list[Row]:
    """Return how fast all tensors of a layer of 4 MB are read, one after the other."""
    rows = []
    for store, readers in READERS.items():
        progress(f"4 MB, {store}")
        path = root / f"large-{store}"
        record(path, store, LARGE_BYTES, steps)
        nbytes = LARGE_BYTES * steps
        ways: dict[str, Callable[[], object]] = {"dd": lambda path=path, nbytes=nbytes: _dd(_largest(path), nbytes)}
        ways |= {name: lambda opened=opened, path=path: _all(opened, path, steps) for name, opened in readers.items()}
        found: dict[str, Row] = {}
        colds: dict[str, list[float]] = {name: [] for name in ways}
        # In turn, and the first round does not count: below the system's cache another may wait to be filled.
        for number, (name, way) in itertools.product(range(COLD_ROUNDS + 1), ways.items()):
            forget(path)
            held = resident(_largest(path))
            seconds = _seconds(way)
            if number:
                colds[name].append(seconds)
                found[name] = {"store": store, "reader": name, "cold GB/s": 0.0, "warm GB/s": 0.0, "resident": held}
        for name, way in ways.items():
            warm = statistics.median(_seconds(way) for _ in range(3))
            found[name]["cold GB/s"] = nbytes / statistics.median(colds[name]) / 1e9
            found[name]["warm GB/s"] = nbytes / warm / 1e9
        for row in found.values():
            row["cold, to dd"] = row["cold GB/s"] / found["dd"]["cold GB/s"]
            row["warm, to dd"] = row["warm GB/s"] / found["dd"]["warm GB/s"]
            rows.append(row)
    return rows


def _all(opened: Callable[[Path], contextlib.AbstractContextManager[Read]], path: Path, steps: int) -> None:
    with opened(path) as read:
        for step in range(steps):
            if (nbytes := read(step).nbytes) != LARGE_BYTES:
                raise ValueError(f"step {step} of {path} has {nbytes} bytes")


def _check(values: Any, path: Path, step: int) -> None:
    """Refuse what is not the recorded tensor: a missing file of a virtual dataset reads as zeros, and fast."""
    expected = torch.randn(SMALL_BYTES // 4, generator=torch.Generator().manual_seed(SEED)) + step
    if not np.array_equal(values, expected.numpy()):
        raise ValueError(f"step {step} of {path} was read wrong")


def _dd(path: Path, nbytes: int) -> None:
    command = ["dd", f"if={path}", "of=/dev/null", "bs=4M", "iflag=count_bytes", f"count={nbytes}", "status=none"]
    subprocess.run(command, check=True)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="5 steps, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/reading.json")
    chosen = parser.parse_args()
    began = facts()
    with tempfile.TemporaryDirectory(prefix="hookrec-benchmark-") as name:
        root = Path(name)
        tables = {
            "one tensor of 8 KB, warm": one_tensor(root, 5 if chosen.small else 1_000),
            "one layer of 4 MB tensors": one_layer(root, 5 if chosen.small else 200),
        }
    finish("reading", tables, began, as_json=chosen.json, keep=chosen.keep)


if __name__ == "__main__":
    main()
