"""Run on a machine with a GPU, in under six minutes: `python -m benchmarks.gpu`.

Prints the device; runs the tests marked `gpu`; then prints what recording costs, bare and recorded steps in turn. Where
there is no GPU it says so and ends with status 2. A part that takes too long is cut off and named.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import hookrec

TESTS_S, SECONDS = 150, 330
MODES = {"full": {}, "statistics": {"tensors": False}, "not sampled": {"every": 1_000_000}}
WARM, STEPS, ROUNDS = 5, 30, 3


def transformer(width: int, depth: int, batch: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a transformer of encoder layers on the GPU, and its loss on fixed data."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False).cuda()
    x, y = torch.randn(batch, 128, width, device="cuda"), torch.randn(batch, 128, width, device="cuda")
    return model, lambda: functional.mse_loss(model(x), y)


WORKLOADS = {"small layers": (64, 12, 4), "wide layers": (512, 6, 16)}


def _steps(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, count: int) -> float:
    """Return the seconds of a step; the GPU is waited for at both ends only, as a training seldom does."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def _measure(workload: str, mode: str) -> tuple[float, float, float]:
    """Return milliseconds of a bare and of a recorded step, and the ratio: medians over rounds."""
    rounds = []
    for _ in range(ROUNDS):
        model, loss = transformer(*WORKLOADS[workload])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        _steps(loss, optimizer, WARM)
        before = _steps(loss, optimizer, STEPS)
        with (
            tempfile.TemporaryDirectory(dir=".") as directory,
            hookrec.attach(model, Path(directory, "trace"), keep_free=0, **MODES[mode]),
        ):
            _steps(loss, optimizer, WARM)
            recorded = _steps(loss, optimizer, STEPS)
        bare = (before + _steps(loss, optimizer, STEPS)) / 2
        rounds.append((bare * 1e3, recorded * 1e3, recorded / bare))
    bares, recordeds, ratios = zip(*rounds, strict=True)
    return statistics.median(bares), statistics.median(recordeds), statistics.median(ratios)


def main() -> None:
    """Run the tests, then print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if not torch.cuda.is_available():
        print(f"there is no CUDA device for torch {torch.__version__}", file=sys.stderr)
        sys.exit(2)
    since, failed = time.monotonic(), False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "tests/test_measure.py",
        "tests/test_device_copies.py",
    ]
    try:
        failed = subprocess.run(command, timeout=TESTS_S, check=False).returncode != 0
    except subprocess.TimeoutExpired:
        failed = True
        print(f"the tests were cut off after {TESTS_S} s")
    print(f"{'workload':14} {'mode':12} {'bare ms':>9} {'recorded':>9} {'ratio':>6}")
    for workload in WORKLOADS:
        for mode in MODES:
            if time.monotonic() - since > SECONDS - 30:
                failed = True
                print(f"{workload:14} {mode:12} not measured, for want of time")
                continue
            bare, recorded, ratio = _measure(workload, mode)
            print(f"{workload:14} {mode:12} {bare:9.2f} {recorded:9.2f} {ratio:6.3f}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
