"""Print what recording costs: `python -m benchmarks [WORKLOAD ...] [--mode MODE ...]`.

Each round measures a block of bare steps, of recorded ones and of bare ones again; a round's ratio is recorded to the
mean of its two bare blocks. What is printed are medians over rounds, of medians over steps, and the bytes that tensors
take in the trace to those that they have.
"""

import argparse
import contextlib
import math
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hookrec
import replay
from benchmarks.workloads import RECORDS, STEPS, WORKLOADS, train_step
from replay.format import numpy_dtype

ROUNDS = 7
RING = 2 * 10**9
MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "full, hdf5": {"store": "hdf5"},
    "zstd": {"compression": "zstd"},
    "zstd, hdf5": {"store": "hdf5", "compression": "zstd"},
    "blosc": {"compression": "blosc"},
    "statistics": {"tensors": False},
    "not sampled": {"every": 1_000_000},
    "flight": {"flight": 2, "ring": RING},
    "statistics and copy": {"tensors": False},
    "power": {"durability": "power"},
}
"""Flight mode cannot cost less than "statistics and copy": statistics, and hooks that copy into as much memory."""


def _block(workload: str, loss: Any, optimizer: Any) -> float:
    warm = 5
    times = []
    for _ in range(STEPS[workload] + warm):
        begin = time.perf_counter()
        train_step(loss, optimizer)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[warm:])


def _copy(model: nn.Module) -> contextlib.ExitStack:
    """Copy what leaf modules return, and its gradients, into one place of memory after the other."""
    memory = torch.zeros(RING, dtype=torch.uint8)
    hooks, place = contextlib.ExitStack(), 0

    def copy(tensor: Tensor) -> None:
        nonlocal place
        begin = place if place + tensor.nbytes <= RING else 0
        place = -(-(begin + tensor.nbytes) // 4096) * 4096
        memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        copy(output.detach())
        output.register_hook(copy)

    for module in model.modules():
        if not list(module.children()):
            hooks.callback(module.register_forward_hook(hook).remove)
    return hooks


def _stored(path: Path) -> float:
    """Return the bytes that the tensors of a trace take, to those that they have."""
    with replay.open(path) as trace:
        kept = trace.sql("select dtype, sum(numel) numel, sum(nbytes) nbytes from records where kept group by dtype")
    raw = sum(row["numel"] * numpy_dtype(row["dtype"]).itemsize for row in kept.to_pylist())
    return sum(row["nbytes"] for row in kept.to_pylist()) / raw if raw else math.nan


def _measure(workload: str, mode: str) -> tuple[float, float, float, float]:
    """Return seconds of a bare and of a recorded step, the ratio, and that of bytes stored to bytes of the tensors."""
    bares, recordeds, ratios = [], [], []
    for _ in range(ROUNDS):
        model, loss = WORKLOADS[workload]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        before = _block(workload, loss, optimizer)
        directory = Path(tempfile.mkdtemp(prefix="hookrec-benchmark-"))
        try:
            with (
                _copy(model) if mode == "statistics and copy" else contextlib.nullcontext(),
                hookrec.attach(model, directory / "trace", keep_free=0, **MODES[mode]),
            ):
                recorded = _block(workload, loss, optimizer)
            stored = _stored(directory / "trace")
        finally:
            shutil.rmtree(directory)
        bare = (before + _block(workload, loss, optimizer)) / 2
        bares.append(bare)
        recordeds.append(recorded)
        ratios.append(recorded / bare)
    return statistics.median(bares), statistics.median(recordeds), statistics.median(ratios), stored


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; all if none")
    parser.add_argument("--mode", action="append", choices=MODES, help="may be repeated; all if not given")
    chosen = parser.parse_args()
    wanted = chosen.workloads or list(WORKLOADS)
    unknown = [name for name in wanted if name not in WORKLOADS]
    if unknown:
        parser.error(f"there is no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'workload':9} {'mode':20} {'bare ms':>9} {'recorded':>9} {'ratio':>6} {'us/record':>9} {'stored':>6}")
    for workload in wanted:
        for mode in chosen.mode or MODES:
            bare, recorded, ratio, stored = _measure(workload, mode)
            each = (recorded - bare) / RECORDS[workload] * 1e6
            times = f"{bare * 1e3:9.2f} {recorded * 1e3:9.2f} {ratio:6.3f} {each:9.1f}"
            print(f"{workload:9} {mode:20} {times} {stored:6.3f}", flush=True)


if __name__ == "__main__":
    main()
