"""What recording costs: `python -m benchmarks [WORKLOAD ...] [--mode MODE ...] [--rounds 5] [--json] [--keep]`.

A round has a block of bare steps between any two modes; the ratio of a mode is that of its block to the mean of the two
bare ones beside it. The table has medians over rounds, of medians over steps. `stored` is the bytes that tensors take
in the trace to those that they have.

"bare again" is as the bare steps beside it: as far as its ratio is from 1, that of another mode may be by chance. Three
modes are floors. Full cannot cost less than "copy" and "copy and write" of `benchmarks.floors`, in memory as large as
the ring; flight mode not less than "statistics and copy", both at once, in memory as large as its ring.
"""

import argparse
import contextlib
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

import hookrec
import replay
from benchmarks import floors
from benchmarks.floors import EndOfStep
from benchmarks.results import Row, facts, finish, progress
from benchmarks.workloads import RECORDS, STEPS, WORKLOADS, train_step
from replay.format import numpy_dtype

WARM = 3
RING = 2 * 10**9
"""Of flight mode."""
Mode = Callable[[nn.Module, Path], contextlib.AbstractContextManager[EndOfStep]]


def _recorded(**options: Any) -> Mode:
    @contextlib.contextmanager
    def attached(model: nn.Module, folder: Path) -> Iterator[EndOfStep]:
        with hookrec.attach(model, folder / "trace", keep_free=0, **options):
            yield lambda: None

    return attached


@contextlib.contextmanager
def _statistics_and_copy(model: nn.Module, folder: Path) -> Iterator[EndOfStep]:
    with floors.copied(model, RING), _recorded(tensors=False)(model, folder) as end:
        yield end


MODES: dict[str, Mode] = {
    "bare again": lambda model, folder: contextlib.nullcontext(lambda: None),
    "not sampled": _recorded(every=1_000_000),
    "statistics": _recorded(tensors=False),
    "full": _recorded(),
    "copy": lambda model, folder: floors.copied(model),
    "copy and write": lambda model, folder: floors.written(model, folder / "bytes"),
    "full, hdf5": _recorded(store="hdf5"),
    "power": _recorded(durability="power"),
    "flight": _recorded(flight=2, ring=RING),
    "statistics and copy": _statistics_and_copy,
    "zstd": _recorded(compression="zstd"),
    "zstd, hdf5": _recorded(store="hdf5", compression="zstd"),
    "blosc": _recorded(compression="blosc"),
}
_COMMON = ("bare again", "not sampled", "statistics", "full", "copy", "copy and write")
DEFAULT = {
    "mlp": _COMMON,
    "gpt": (*_COMMON, "full, hdf5", "power", "flight", "statistics and copy"),
    "resnet": (*_COMMON, "full, hdf5", "zstd"),
}
"""Modes of each workload if none is given: all of them in five rounds take some five minutes."""


def _block(loss: Any, optimizer: Any, steps: int, end: EndOfStep) -> float:
    times = []
    for _ in range(WARM + steps):
        begin = perf_counter()
        train_step(loss, optimizer)
        end()
        times.append(perf_counter() - begin)
    return statistics.median(times[WARM:])


def _stored(path: Path) -> float:
    """Return the bytes that the tensors of a trace take, to those that they have."""
    if not path.exists():
        return math.nan
    with replay.open(path) as trace:
        kept = trace.sql("select dtype, sum(numel) numel, sum(nbytes) nbytes from records where kept group by dtype")
    raw = sum(row["numel"] * numpy_dtype(row["dtype"]).itemsize for row in kept.to_pylist())
    return sum(row["nbytes"] for row in kept.to_pylist()) / raw if raw else math.nan


def measure(workload: str, modes: list[str], rounds: int, steps: int) -> list[Row]:
    """Return a row a mode."""
    found: dict[str, list[tuple[float, float, float, float]]] = {mode: [] for mode in modes}
    for number in range(rounds):
        progress(f"{workload}, round {number + 1} of {rounds}")
        model, loss = WORKLOADS[workload]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        before = _block(loss, optimizer, steps, lambda: None)
        for mode in modes:
            folder = Path(tempfile.mkdtemp(prefix="hookrec-benchmark-"))
            try:
                with MODES[mode](model, folder) as end:
                    seconds = _block(loss, optimizer, steps, end)
                stored = _stored(folder / "trace")
            finally:
                shutil.rmtree(folder)
            after = _block(loss, optimizer, steps, lambda: None)
            bare = (before + after) / 2
            found[mode].append((bare, seconds, seconds / bare, stored))
            before = after
    rows = []
    for mode in modes:
        bare, seconds, ratio, stored = map(statistics.median, zip(*found[mode], strict=True))
        row: Row = {"workload": workload, "mode": mode, "bare ms": bare * 1e3, "step ms": seconds * 1e3}
        row |= {"ratio": ratio, "us a record": (seconds - bare) / RECORDS[workload] * 1e6, "stored": stored}
        rows.append(row)
    return rows


def main() -> None:
    """Print a table a workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; all if none")
    parser.add_argument("--mode", action="append", choices=MODES, help="may be repeated; those of note if not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of a block; as fits the workload if not given")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/overhead.json")
    chosen = parser.parse_args()
    wanted = chosen.workloads or list(WORKLOADS)
    if unknown := [name for name in wanted if name not in WORKLOADS]:
        parser.error(f"there is no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    if chosen.rounds < 1 or (chosen.steps is not None and chosen.steps < 1):
        parser.error("there must be a round and a step at least")
    began = facts()
    tables = {
        name: measure(name, chosen.mode or list(DEFAULT[name]), chosen.rounds, chosen.steps or STEPS[name])
        for name in wanted
    }
    finish("overhead", tables, began, as_json=chosen.json, keep=chosen.keep)


if __name__ == "__main__":
    main()
