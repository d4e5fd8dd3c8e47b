"""A training that is resumed in its trace, against one that ran through: what counts is the same, to the bit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hookrec
import replay
from replay.verify import verify
from tests.oracle import differences, recorded

pytestmark = pytest.mark.usefixtures("one_thread")


class Training:
    """A small training that can be saved, and goes on to the bit: data follow from the step."""

    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3)).to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.dtype = dtype

    def step(self, number: int, recorder: hookrec.Recorder | None = None) -> float:
        generator = torch.Generator().manual_seed(number)
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 6, generator=generator).to(self.dtype)).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        if recorder is not None:
            recorder.log(loss=loss)
        return loss.item()

    def save(self, path: Path, steps: int) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": steps}, path)

    def load(self, path: Path) -> int:
        saved = torch.load(path)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        return saved["steps"]


def record(path: Path, steps: range, save_at: int | None = None, checkpoint: Path | None = None, **options) -> None:
    """Record some steps; those after the first of all go on from a checkpoint."""
    training = Training(options.pop("width", 8))
    first = training.load(checkpoint) if checkpoint is not None and checkpoint.exists() else 0
    assert first == steps.start
    with hookrec.attach(training.model, path, keep_free=0, **options) as recorder:
        for number in steps:
            if number == save_at:
                training.save(path.parent / "checkpoint", recorder.steps)
            training.step(number, recorder)


def record_and_die(path: Path, steps: range, save_at: int, how: str = "both", **options) -> None:
    """The same in a process that is killed when its steps are recorded."""
    code = f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {os.fspath(Path(__file__).parent.parent)!r})
import torch
torch.set_num_threads(1)
import hookrec
from tests.test_resume import Training, committed
path = Path({os.fspath(path)!r})
training = Training()
checkpoint = path.parent / "checkpoint"
first = training.load(checkpoint) if checkpoint.exists() else 0
assert first == {steps.start}
recorder = hookrec.attach(training.model, path, keep_free=0, **{options!r})
for number in range(first, {steps.stop}):
    if number == {save_at}:
        training.save(checkpoint, recorder.steps)
    training.step(number, recorder)
if {how!r} == "both":
    while committed(path) < {steps.stop}:
        time.sleep(0.02)
    recorder._recording._writer._process.kill()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def committed(path: Path) -> int:
    try:
        return max(replay.open(path).steps, default=-1) + 1
    except replay.ReplayError:
        return 0


def scalars(trace: replay.Trace) -> list[tuple[int, float]]:
    return [(row["step"], row["value"]) for row in trace.scalars().to_pylist() if row["name"] == "loss"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("resume") / "a"
    record(path, range(20))
    torch.set_num_threads(threads)
    trace = replay.open(path)
    return recorded(trace), scalars(trace)


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
@pytest.mark.parametrize("how", ["both", "the training"])
def test_what_counts_is_what_a_training_has_that_ran_through(tmp_path, undisturbed, store, how):
    path = tmp_path / "a"
    record_and_die(path, range(12), 8, how, store=store)
    record(path, range(8, 20), checkpoint=tmp_path / "checkpoint", resume=8, store=store)

    trace = replay.open(path)
    assert trace.status == "sealed"
    assert trace.steps == list(range(20))
    assert differences(recorded(trace), undisturbed[0]) == []
    assert scalars(trace) == undisturbed[1]
    assert trace.count == len(undisturbed[0])
    assert list(verify(path)) == []
    earlier = replay.open(path, attempt=0)
    assert earlier.steps == list(range(12))
    assert differences(recorded(earlier), {k: v for k, v in undisturbed[0].items() if k[0] < 12}) == []
