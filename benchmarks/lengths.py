"""What sequences of many lengths cost, against one: `python -m benchmarks.lengths [--steps 300] [--store hdf5]`.

A small transformer of 12 layers is recorded twice: with a random length each step, and with the mean length in all.
Printed are the files and directories of the trace, its bytes on the disk, the memory of the training and of the writer
process when a tenth and when all of the steps are done, the time of a step, and the time to read random tensors from
the sealed trace, once from the disk, since they were written past the page cache, and once more from memory.
"""

import argparse
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional

import hookrec
import replay
from benchmarks.memory import own_bytes
from benchmarks.workloads import GPT
from replay.stores import STORES

READS = 2000


def record(path: Path, lengths: list[int], longest: int, width: int, store: str) -> dict[str, float]:
    """Record a training, a step for each length; return what was seen of it."""
    torch.manual_seed(0)
    model = GPT(vocabulary=256, width=width, depth=12, context=longest)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds, memory = list[float](), {"10 %": (0, 0), "end": (0, 0)}
    with hookrec.attach(model, path, store=store, keep_free=0) as recorder:
        writer = recorder._recording._writer._process.pid
        for step, length in enumerate(lengths):
            tokens = torch.randint(0, 256, (1, length))
            begin = time.perf_counter()
            optimizer.zero_grad()
            functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
            if step in (len(lengths) // 10, len(lengths) - 1):
                at = "end" if step == len(lengths) - 1 else "10 %"
                memory[at] = own_bytes(os.getpid()), own_bytes(writer)
        begin = time.perf_counter()
    return {
        "step ms": statistics.median(seconds) * 1e3,
        **{f"training MB at {at}": training / 1e6 for at, (training, _) in memory.items()},
        **{f"writer MB at {at}": writing / 1e6 for at, (_, writing) in memory.items()},
        "seal s": time.perf_counter() - begin,
    }


def on_disk(path: Path) -> dict[str, float]:
    """Count what lies below a folder."""
    files = [file for file in path.rglob("*") if file.is_file()]
    folders = sum(1 for folder in path.rglob("*") if folder.is_dir())
    return {"files": len(files), "folders": folders, "MB": sum(file.stat().st_blocks for file in files) * 512 / 1e6}


def reads(path: Path) -> dict[str, float]:
    """Read random tensors."""
    begin = time.perf_counter()
    with replay.open(path) as trace:
        opened = time.perf_counter() - begin
        keys = trace.records().select(["step", "layer", "kind", "call", "path"]).to_pylist()
        trace.tensor(**keys[0])  # the log is looked through at the first
        chosen = random.Random(0).sample(keys, min(READS, len(keys)))
        passes = []
        for _ in range(2):
            seconds = []
            for key in chosen:
                begin = time.perf_counter()
                trace.tensor(**key)
                seconds.append(time.perf_counter() - begin)
            passes.append(seconds)
        sizes = [trace.tensor(**key).nbytes for key in chosen]
    return {
        "open s": opened,
        "first read us": statistics.median(passes[0]) * 1e6,
        "second read us": statistics.median(passes[1]) * 1e6,
        "of KB": statistics.median(sizes) / 1e3,
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--width", type=int, default=64, help="of the transformer, a multiple of 8")
    parser.add_argument("--store", choices=STORES, default="zarr")
    chosen = parser.parse_args()
    if chosen.steps < 20 or chosen.longest < 1:
        sys.exit("There must be 20 steps at least, and lengths from 1.")
    rng = random.Random(0)
    cases = {
        "one": [(chosen.longest + 1) // 2] * chosen.steps,
        "random": [rng.randint(1, chosen.longest) for _ in range(chosen.steps)],
    }
    found = {}
    for name, lengths in cases.items():
        with tempfile.TemporaryDirectory(prefix="hookrec-benchmark-") as folder:
            path = Path(folder) / "trace"
            found[name] = (
                record(path, lengths, chosen.longest, chosen.width, chosen.store) | on_disk(path) | reads(path)
            )
            shutil.rmtree(path)
    processor = platform.processor() or platform.machine()
    print(f"{processor}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    print(f"{chosen.steps} steps of width {chosen.width}, {chosen.store}")
    print(f"{'':20} {'one length':>11} {'random':>11} {'ratio':>6}")
    for fact in found["one"]:
        one, other = (found[name][fact] for name in cases)
        print(f"{fact:20} {one:11.2f} {other:11.2f} {other / one if one else 0:6.2f}")


if __name__ == "__main__":
    main()
