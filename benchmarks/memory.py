"""What recording takes of memory: `python -m benchmarks.memory [--steps 10000] [--ring 64MB] [--json] [--keep]`.

The same training, `mlp` on one thread, runs bare and recorded in full, each in a process of its own. Measured is the
memory that belongs to a process alone (RssAnon), after a tenth of the steps and at the end: of the training above the
bare one at the same step, and of the writer process. The ring, which both of them share, is none of it, nor is code
that is mapped from files. Every step is recorded, so the trace takes 1.3 MB a step of the disk until the end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import hookrec
from benchmarks.results import Row, facts, finish, progress
from benchmarks.workloads import WORKLOADS, train_step
from hookrec.plan import parse_bytes

LEAST_STEPS = 10


def train(steps: int, ring: str, path: Path | None) -> dict[str, Any]:
    """Train, recorded if there is a path; return the memory of this process and of the writer at both moments."""
    torch.set_num_threads(1)
    model, loss = WORKLOADS["mlp"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen: dict[str, Any] = {"training": [], "writer": []}
    recording = nullcontext() if path is None else hookrec.attach(model, path, ring=ring, keep_free=0)
    with recording as recorder:
        for step in range(1, steps + 1):
            train_step(loss, optimizer)
            if step in (steps // 10, steps):
                seen["training"].append(own_bytes(os.getpid()))
                if recorder is not None:
                    seen["writer"].append(own_bytes(recorder._recording._writer._process.pid))
    return seen


def own_bytes(pid: int) -> int:
    """Return the memory of a process without what it shares."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def measure(steps: int, ring: str) -> list[Row]:
    """Return a row for each of the two processes."""
    command = [sys.executable, "-m", "benchmarks.memory", "--steps", str(steps), "--ring", ring, "--train"]
    with tempfile.TemporaryDirectory(prefix="hookrec-benchmark-") as folder:
        seen = []
        for way, path in (("bare", ""), ("recorded", f"{folder}/trace")):
            progress(f"{steps:,} steps, {way}")
            done = subprocess.run([*command, path], stdout=subprocess.PIPE, text=True, check=True)
            seen.append(json.loads(done.stdout))
    bare, recorded = seen
    above = [ours - theirs for ours, theirs in zip(recorded["training"], bare["training"], strict=True)]
    return [
        _row("training, above the bare one", above, ring),
        _row("writer process", recorded["writer"], ring),
        _row("bare training", bare["training"], None),
    ]


def _row(process: str, nbytes: list[int], ring: str | None) -> Row:
    tenth, end = (each / 1e6 for each in nbytes)
    shared = None if ring is None else parse_bytes(ring) / 1e6
    return {"process": process, "MB after a tenth": tenth, "MB at the end": end, "more": end - tenth, "ring MB": shared}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ring", default="64MB", help="as `hookrec.attach` takes it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/memory.json")
    parser.add_argument("--train", metavar="PATH", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.steps < LEAST_STEPS:
        parser.error(f"there must be {LEAST_STEPS} steps at least")
    if chosen.train is not None:
        print(json.dumps(train(chosen.steps, chosen.ring, Path(chosen.train) if chosen.train else None)))
        return
    began = facts()
    tables = {"memory": measure(chosen.steps, chosen.ring)}
    finish("memory", tables, began, as_json=chosen.json, keep=chosen.keep)


if __name__ == "__main__":
    main()
