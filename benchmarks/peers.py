"""What else people do, in the same run: `python -m benchmarks.peers [WORKLOAD ...] [--rounds 3] [--json] [--keep]`.

Each way takes the output of each leaf module and the gradient with respect to it, at each step. The first ones keep the
tensors: by hookrec, by `torch.save` of each tensor or of a step's together, by safetensors, h5py or zarr-python in the
hooks. The others keep eleven numbers of each: hookrec without tensors, and torch operations with `.item()`. torchlens
and nnsight keep the outputs of a forward pass in memory, and no gradients; a further forward pass a step is given to
them, which is in their time. What is not installed is left out with the reason (`pip install 'hookrec[peers]'`); so
are smdebug and msprobe, of which nothing here says how they would be called.

A round has a block of bare steps between any two ways, and a ratio is that to the mean of its two neighbours; the table
has medians over rounds, of medians over steps. `finish ms` is the rest of the work when the steps are done, such as
what the writer process still has to write. None of them waits for the disk itself. `MB a step` is room on the disk.
"""

import argparse
import contextlib
import importlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hookrec
from benchmarks.results import Row, facts, finish, progress
from benchmarks.workloads import RECORDS, WORKLOADS, train_step

STEPS = {"mlp": 40, "gpt": 5, "resnet": 4}
_WARM = 2

Sink = Callable[[int, str, Tensor], None]
EndOfStep = Callable[[], None]
Way = Callable[[nn.Module, Path], Any]


@contextlib.contextmanager
def _hooks(model: nn.Module, take: Sink) -> Iterator[list[int]]:
    """Give each output and its gradient to a function; yield the number of the step, which the loop counts up."""
    step = [0]
    handles = []
    for name, module in model.named_modules():
        if next(module.children(), None) is not None:
            continue

        def after(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            take(step[0], f"{name}.output", output.detach())
            if output.requires_grad:
                output.register_hook(lambda grad: take(step[0], f"{name}.grad_output", grad))

        handles.append(module.register_forward_hook(after))
    try:
        yield step
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _counting(model: nn.Module, take: Sink, end: EndOfStep = lambda: None) -> Iterator[EndOfStep]:
    with _hooks(model, take) as step:

        def end_step() -> None:
            end()
            step[0] += 1

        yield end_step


@contextlib.contextmanager
def _hookrec(model: nn.Module, folder: Path, **options: Any) -> Iterator[EndOfStep]:
    with hookrec.attach(model, folder / "trace", keep_free=0, **options):
        yield lambda: None


@contextlib.contextmanager
def _torch_save_tensor(model: nn.Module, folder: Path) -> Iterator[EndOfStep]:
    folder.mkdir(exist_ok=True)
    with _counting(model, lambda step, name, tensor: torch.save(tensor, folder / f"{step}.{name}.pt")) as end:
        yield end


@contextlib.contextmanager
def _a_step(model: nn.Module, save: Callable[[dict[str, Tensor], int], Any]) -> Iterator[EndOfStep]:
    held: dict[str, Tensor] = {}
    number = [0]

    def flush() -> None:
        save(held, number[0])
        held.clear()
        number[0] += 1

    def take(step: int, name: str, tensor: Tensor) -> None:
        held[name] = tensor.clone(memory_format=torch.contiguous_format)

    with _counting(model, take, flush) as end:
        yield end


def _torch_save_step(model: nn.Module, folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    return _a_step(model, lambda held, step: torch.save(held, folder / f"{step}.pt"))


def _safetensors_step(model: nn.Module, folder: Path) -> Any:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    return _a_step(model, lambda held, step: save_file(held, folder / f"{step}.safetensors"))


@contextlib.contextmanager
def _h5py(model: nn.Module, folder: Path) -> Iterator[EndOfStep]:
    import h5py

    folder.mkdir(exist_ok=True)
    with h5py.File(folder / "tensors.h5", "w") as file:

        def take(step: int, name: str, tensor: Tensor) -> None:
            file.create_dataset(f"{step}/{name}", data=tensor.numpy())

        with _counting(model, take, file.flush) as end:
            yield end


@contextlib.contextmanager
def _h5py_appended(model: nn.Module, folder: Path) -> Iterator[EndOfStep]:
    import h5py

    folder.mkdir(exist_ok=True)
    with h5py.File(folder / "tensors.h5", "w", libver="latest") as file:

        def take(step: int, name: str, tensor: Tensor) -> None:
            values = tensor.numpy()
            if name not in file:
                sizes: dict[str, Any] = {"maxshape": (None, *values.shape), "chunks": (1, *values.shape)}
                file.create_dataset(name, (0, *values.shape), values.dtype, **sizes)
            data = file[name]
            data.resize(len(data) + 1, 0)
            data[-1] = values

        with _counting(model, take, file.flush) as end:
            yield end


@contextlib.contextmanager
def _zarr(model: nn.Module, folder: Path) -> Iterator[EndOfStep]:
    import zarr

    group = zarr.open_group(folder / "tensors.zarr", mode="w")

    def take(step: int, name: str, tensor: Tensor) -> None:
        values = tensor.numpy()
        group.create_array(f"{step}/{name}", data=values, chunks=values.shape, compressors=None)

    with _counting(model, take) as end:
        yield end


@contextlib.contextmanager
def _torch_statistics(model: nn.Module, folder: Path) -> Iterator[EndOfStep]:
    found: list[tuple[Any, ...]] = []

    def take(step: int, name: str, tensor: Tensor) -> None:
        x = tensor.float()
        infinite = x.isinf()
        counts = (x.isnan().sum(), (infinite & (x > 0)).sum(), (infinite & (x < 0)).sum(), (x == 0).sum())
        measures = (x.min(), x.max(), x.abs().max(), x.mean(), x.std(correction=0), x.norm())
        found.append((step, name, x.numel(), *(number.item() for number in (*counts, *measures))))

    with _counting(model, take, found.clear) as end:
        yield end


@contextlib.contextmanager
def _torchlens(model: nn.Module, folder: Path) -> Iterator[EndOfStep]:
    torchlens = importlib.import_module("torchlens")
    inputs = _first_input(model)

    def end() -> None:
        torchlens.trace(model, inputs)

    yield end


@contextlib.contextmanager
def _nnsight(model: nn.Module, folder: Path) -> Iterator[EndOfStep]:
    wrapped = importlib.import_module("nnsight").NNsight(model)
    inputs = _first_input(model)
    names = [name for name, module in model.named_modules() if next(module.children(), None) is None]

    def end() -> None:
        with wrapped.trace(inputs):
            for name in names:
                wrapped.get(name).output.save()

    yield end


def _first_input(model: nn.Module) -> Tensor:
    """Return what the workload gives its model."""
    return model.benchmark_input  # type: ignore[no-any-return]


PERSIST: dict[str, Way] = {
    "hookrec": _hookrec,
    "hookrec, hdf5": lambda model, folder: _hookrec(model, folder, store="hdf5"),
    "hookrec, zstd": lambda model, folder: _hookrec(model, folder, compression="zstd"),
    "hookrec, hdf5, zstd": lambda model, folder: _hookrec(model, folder, store="hdf5", compression="zstd"),
    "torch.save a tensor": _torch_save_tensor,
    "torch.save a step": _torch_save_step,
    "safetensors a step": _safetensors_step,
    "h5py in hooks": _h5py,
    "h5py in hooks, appended": _h5py_appended,
    "zarr-python in hooks": _zarr,
}
STATISTICS: dict[str, Way] = {
    "hookrec statistics": lambda model, folder: _hookrec(model, folder, tensors=False),
    "torch ops and .item()": _torch_statistics,
}
IN_MEMORY: dict[str, Way] = {"torchlens": _torchlens, "nnsight": _nnsight}
WAYS = PERSIST | STATISTICS | IN_MEMORY
DEFAULT = tuple(way for way in WAYS if "zstd" not in way)
_UNWRITTEN = ("smdebug", "msprobe")
_PACKAGES = {"safetensors a step": "safetensors", "torchlens": "torchlens", "nnsight": "nnsight"}


def measure(workload: str, names: list[str], rounds: int, steps: int) -> tuple[list[Row], dict[str, str]]:
    """Return a row a way, and why others are left out."""
    ratios: dict[str, list[tuple[float, float, float, float, float]]] = {name: [] for name in names}
    skipped: dict[str, str] = {}
    for number in range(rounds):
        progress(f"{workload}, round {number + 1} of {rounds}")
        model, loss = WORKLOADS[workload]()
        taken = model.register_forward_pre_hook(lambda model, args: setattr(model, "benchmark_input", args[0]))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loss()
        taken.remove()
        before = _block(loss, optimizer, steps, lambda: None)
        for name in names:
            if name in skipped:
                continue
            folder = Path(tempfile.mkdtemp(prefix="hookrec-benchmark-"))
            try:
                with contextlib.ExitStack() as stack:
                    end = stack.enter_context(WAYS[name](model, folder))
                    seconds = _block(loss, optimizer, steps, end)
                    done = time.perf_counter()
                    stack.pop_all().close()
                    rest = time.perf_counter() - done
                nbytes = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
            except Exception as error:
                if name not in _PACKAGES:
                    raise
                skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            finally:
                shutil.rmtree(folder)
            after = _block(loss, optimizer, steps, lambda: None)
            bare = (before + after) / 2
            ratios[name].append((bare, seconds, seconds / bare, rest, nbytes / (_WARM + steps)))
            before = after
    rows = []
    for name, found in ratios.items():
        if name in skipped:
            continue
        bare, seconds, ratio, rest, nbytes = map(statistics.median, zip(*found, strict=True))
        each = (seconds - bare) / RECORDS[workload] * 1e6
        rows.append(
            {
                "workload": workload,
                "way": name,
                "keeps": _kept_by(name),
                "bare ms": bare * 1e3,
                "step ms": seconds * 1e3,
                "ratio": ratio,
                "us a record": each,
                "finish ms": rest * 1e3,
                "MB a step": nbytes / 1e6,
            }
        )
    return rows, skipped


def unwritten() -> dict[str, str]:
    """Return why the peers that nothing here calls are left out."""
    why = {}
    for name in _UNWRITTEN:
        try:
            importlib.import_module(name)
        except Exception as error:
            why[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            why[name] = "installed, but no way to call it is written"
    return why


def _kept_by(name: str) -> str:
    return "tensors" if name in PERSIST else "statistics" if name in STATISTICS else "outputs, in memory"


def _block(loss: Any, optimizer: Any, steps: int, end: EndOfStep) -> float:
    times = []
    for _ in range(_WARM + steps):
        begin = time.perf_counter()
        train_step(loss, optimizer)
        end()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[_WARM:])


def main() -> None:
    """Print a table a workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; all if none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of a block; as fits the workload if not given")
    parser.add_argument("--way", action="append", choices=WAYS, help="may be repeated; those without zstd if not given")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/peers.json")
    chosen = parser.parse_args()
    wanted = chosen.workloads or list(WORKLOADS)
    if unknown := [name for name in wanted if name not in WORKLOADS]:
        parser.error(f"there is no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    if chosen.rounds < 1 or (chosen.steps is not None and chosen.steps < 1):
        parser.error("there must be a round and a step at least")
    began, tables, left_out = facts(), {}, {}
    for workload in wanted:
        steps = chosen.steps or STEPS[workload]
        tables[workload], skipped = measure(workload, chosen.way or list(DEFAULT), chosen.rounds, steps)
        left_out |= skipped
    if not chosen.way:
        left_out |= unwritten()
    rows = [{"left out": name, "why": why} for name, why in left_out.items()]
    finish("peers", tables | ({"left out": rows} if rows else {}), began, as_json=chosen.json, keep=chosen.keep)


if __name__ == "__main__":
    main()
