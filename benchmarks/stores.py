"""What it costs to keep tensors, by our stores and by a few lines of code: `python -m benchmarks.stores [WORKLOAD]`.

All ways keep the same tensors: the output of each leaf module and its gradient, at each step. Each round measures a
block of bare steps before and after each way; a round's ratio is the block with it to the mean of the two bare ones.
What is printed are medians over rounds, of medians over steps; the bytes that a step takes on the disk, and the seconds
that it takes to finish after the last step.

A way is a function in `WAYS`: given a model and a folder, a context manager that gives what to call after each step.
"""

import argparse
import contextlib
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import torch
from torch import Tensor, nn

import hookrec
from benchmarks.workloads import STEPS, WORKLOADS, train_step

StepEnd = Callable[[], object]
Way = Callable[[nn.Module, Path], AbstractContextManager[StepEnd]]
Sink = Callable[[str, str, Tensor], object]
"""Takes layer, kind and tensor, which is the training's own."""

WARM = 3


def nothing() -> None:
    """Do what a bare step does."""


@contextmanager
def recorded(model: nn.Module, folder: Path, **plan: Any) -> Iterator[StepEnd]:
    """Record by hookrec."""
    with hookrec.attach(model, folder / "trace", keep_free=0, **plan):
        yield nothing


@contextmanager
def hooked(model: nn.Module, sink: Sink) -> Iterator[None]:
    """Give the output of each leaf module and its gradient to a sink, by hooks of torch alone."""

    def watch(layer: str, _: nn.Module, __: object, output: Tensor) -> None:
        sink(layer, "output", output.detach())
        if output.requires_grad:
            output.register_hook(lambda gradient: sink(layer, "grad_output", gradient))  # type: ignore[no-untyped-call]

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if not any(True for _ in module.children()):
                stack.callback(module.register_forward_hook(partial(watch, name)).remove)
        yield


@contextmanager
def torch_save(model: nn.Module, folder: Path) -> Iterator[StepEnd]:
    """Call `torch.save` in each hook: a file a tensor."""
    step = 0

    def next_step() -> None:
        nonlocal step
        step += 1

    with hooked(model, lambda layer, kind, tensor: torch.save(tensor, folder / f"{step}.{layer}.{kind}.pt")):
        yield next_step


@contextmanager
def torch_save_steps(model: nn.Module, folder: Path) -> Iterator[StepEnd]:
    """Clone in each hook, and call `torch.save` once a step."""
    step, held = 0, dict[tuple[str, str], Tensor]()

    def save() -> None:
        nonlocal step
        torch.save(held, folder / f"{step}.pt")
        held.clear()
        step += 1

    def hold(layer: str, kind: str, tensor: Tensor) -> None:
        held[layer, kind] = tensor.clone()

    with hooked(model, hold):
        yield save


@contextmanager
def h5py_datasets(model: nn.Module, folder: Path) -> Iterator[StepEnd]:
    """Make an HDF5 dataset of each tensor, in its hook."""
    step = 0

    def next_step() -> None:
        nonlocal step
        step += 1

    with h5py.File(folder / "tensors.h5", "w") as file:

        def keep(layer: str, kind: str, tensor: Tensor) -> None:
            file.create_dataset(f"{step}/{layer}/{kind}", data=tensor.numpy())

        with hooked(model, keep):
            yield next_step


@contextmanager
def h5py_appended(model: nn.Module, folder: Path) -> Iterator[StepEnd]:
    """Append each tensor to a chunked HDF5 dataset of its layer and kind, in its hook."""
    with h5py.File(folder / "tensors.h5", "w", libver="latest") as file:
        datasets: dict[tuple[str, str], Any] = {}

        def keep(layer: str, kind: str, tensor: Tensor) -> None:
            data = datasets.get((layer, kind))
            values = tensor.numpy()
            if data is None:
                data = file.create_dataset(
                    f"{layer}/{kind}",
                    (0, *values.shape),
                    values.dtype,
                    maxshape=(None, *values.shape),
                    chunks=(1, *values.shape),
                )
                datasets[layer, kind] = data
            data.resize(len(data) + 1, 0)
            data[-1] = values

        with hooked(model, keep):
            yield nothing


WAYS: dict[str, Way] = {
    "hookrec, zarr": recorded,
    "hookrec, hdf5": partial(recorded, store="hdf5"),
    "hookrec, zarr, zstd": partial(recorded, compression="zstd"),
    "hookrec, hdf5, zstd": partial(recorded, store="hdf5", compression="zstd"),
    "torch.save, a tensor": torch_save,
    "torch.save, a step": torch_save_steps,
    "h5py, a dataset": h5py_datasets,
    "h5py, appended": h5py_appended,
}
DEFAULT = tuple(way for way in WAYS if "zstd" not in way)


def block(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, steps: int, step_end: StepEnd) -> float:
    """Return the median seconds of a step."""
    times = []
    for _ in range(WARM + steps):
        begin = time.perf_counter()
        train_step(loss, optimizer)
        step_end()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM:])


def one_round(workload: str, ways: list[str], steps: int, root: Path) -> dict[str, tuple[float, ...]]:
    """Return by way: seconds of a bare and of a kept step, the ratio, bytes a step, seconds to finish."""
    model, loss = WORKLOADS[workload]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = {}
    before = block(loss, optimizer, steps, nothing)
    for way in ways:
        with tempfile.TemporaryDirectory(dir=root) as name:
            folder = Path(name)
            with WAYS[way](model, folder) as step_end:
                kept = block(loss, optimizer, steps, step_end)
                begin = time.perf_counter()
            finish = time.perf_counter() - begin
            nbytes = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
        after = block(loss, optimizer, steps, nothing)
        bare = (before + after) / 2
        found[way] = bare, kept, kept / bare, nbytes / (WARM + steps), finish
        before = after
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="gpt", choices=WORKLOADS)
    parser.add_argument("--way", action="append", choices=WAYS, help="may be repeated; those without zstd if not given")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="of a block; as many as `python -m benchmarks` does, if not given")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk that is measured")
    chosen = parser.parse_args()
    steps = chosen.steps or STEPS[chosen.workload]
    if chosen.rounds < 1 or steps < 1:
        sys.exit("There must be one round at least, of one step.")
    if shutil.disk_usage(chosen.folder).free < 1 << 30:
        sys.exit("Less than a gigabyte is free in the folder; name another by --folder.")
    ways = chosen.way or list(DEFAULT)
    rounds = [one_round(chosen.workload, ways, steps, chosen.folder) for _ in range(chosen.rounds)]
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{chosen.workload}, {steps} steps, {chosen.rounds} rounds")
    print(f"{'way':22} {'bare ms':>9} {'kept ms':>9} {'ratio':>6} {'MB/step':>8} {'finish s':>8}")
    for way in ways:
        columns = zip(*(found[way] for found in rounds), strict=True)
        bare, kept, ratio, nbytes, finish = map(statistics.median, columns)
        print(
            f"{way:22} {bare * 1e3:9.2f} {kept * 1e3:9.2f} {ratio:6.3f} {nbytes / 1e6:8.2f} {finish:8.2f}", flush=True
        )


if __name__ == "__main__":
    main()
