"""Tensors of a device reach the trace while the training goes on: on a slow thread for a device, and on a GPU.

What is `gpu` runs where there is a CUDA device. The slow lane shows order, bounds and ends, and nothing of CUDA itself.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookrec
import replay
from hookrec import capture, device_copies, lanes, ring
from replay.verify import verify
from tests.oracle import recorded
from tests.samples import SAMPLES, convolutional, train
from tests.slow_lane import SlowLane

pytestmark = pytest.mark.usefixtures("one_thread")
needs_gpu = pytest.mark.gpu
small = pytest.mark.usefixtures("no_process")


@pytest.fixture
def lane(monkeypatch):
    """Send each tensor of the CPU through a slow lane."""
    slow = SlowLane()
    monkeypatch.setattr(lanes, "lane_of", lambda device: slow)
    monkeypatch.setattr(capture, "load_native", lambda: None)
    yield slow
    slow.end()


class InPlace(nn.Module):
    """Changes what its layer returned as soon as it has it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layer = nn.Identity()
        self.width = width

    def forward(self, value: float) -> torch.Tensor:
        x = self.layer(torch.full((self.width,), value))
        return x.mul_(0).sub_(1)


def steps_of(path, model, values, **options):
    with hookrec.attach(model, path, keep_free=0, kinds="output", layers="layer", clock="manual", **options) as rec:
        for value in values:
            model(value)
            rec.step()
    return replay.open(path)


def assert_values(trace, values, kept=True) -> None:
    assert trace.records()["step"].to_pylist() == list(range(len(values)))
    assert trace.records()["mean"].to_pylist() == pytest.approx(values)
    if kept:
        for step, value in enumerate(values):
            assert set(trace.tensor(step, "layer").tolist()) == {value}
        assert list(verify(trace.path)) == []


@small
@pytest.mark.parametrize("make", SAMPLES)
def test_a_slow_lane_records_what_the_cpu_does(tmp_path, monkeypatch, lane, make):
    lane.delay_s = 0.0003
    kinds = ("output", "grad_output", "input", "grad_input", "param", "param_grad", "update")

    def losses(path) -> list[float]:
        with hookrec.attach(model := make(), path, keep_free=0, kinds=kinds) as recorder:
            return train(model, SAMPLES[make], 2, recorder)

    slow = losses(tmp_path / "a")
    monkeypatch.undo()
    cpu = losses(tmp_path / "b")

    assert slow == cpu
    ours, theirs = (replay.open(tmp_path / name) for name in "ab")
    assert recorded(ours) == recorded(theirs)
    one, other = ours.records(), theirs.records()
    for name in one.column_names:
        if name in ("mean", "std", "l2"):
            np.testing.assert_allclose(one[name].to_numpy(), other[name].to_numpy(), rtol=1e-9, atol=1e-15)
        else:
            assert one[name].to_pylist() == other[name].to_pylist()
    assert list(verify(tmp_path / "a")) == []


@small
def test_a_change_right_after_the_hook_changes_no_record(tmp_path, lane):
    values = [1.0, 2.0, 3.0, 4.0]

    assert_values(steps_of(tmp_path / "a", InPlace(), values), values)


@small
def test_a_step_is_not_sent_before_the_device_is_done_and_is_then_by_the_next(tmp_path, lane):
    lane.going.clear()
    model = InPlace()
    with hookrec.attach(model, tmp_path / "a", keep_free=0, kinds="output", layers="layer", clock="manual") as rec:
        held = rec._recording._ring
        for value in (1.0, 2.0):
            model(value)
            rec.step()
        assert held.held == 2
        lane.going.set()
        deadline = time.monotonic() + 20
        while held.held and time.monotonic() < deadline:
            rec.step()  # without a record
            time.sleep(0.005)
        assert held.held == 0

    trace = replay.open(tmp_path / "a")
    assert trace.records()["mean"].to_pylist() == [1.0, 2.0]


@small
@pytest.mark.parametrize("tensors", [True, False])
def test_no_more_parts_are_under_way_than_is_said(tmp_path, lane, monkeypatch, tensors):
    monkeypatch.setattr(ring, "PARTS_UNDER_WAY", 3)
    most = []
    model, values = InPlace(), [float(i) for i in range(20)]
    with hookrec.attach(
        model, tmp_path / "a", keep_free=0, kinds="output", layers="layer", clock="manual", tensors=tensors
    ) as rec:
        for value in values:
            model(value)
            rec.step()
            most.append(rec._recording._ring.held)

    assert 1 <= max(most) <= 3
    assert_values(replay.open(tmp_path / "a"), values, tensors)


@small
def test_a_full_buffer_is_used_again_only_when_what_was_there_is_out(tmp_path, lane, monkeypatch):
    monkeypatch.setattr(device_copies, "BUFFER_BYTES", 4096)
    values = [float(i) for i in range(30)]

    trace = steps_of(tmp_path / "a", InPlace(400), values)

    assert_values(trace, values)
    assert lane.holds > 0
    assert lane.most_under_way <= 4096


@small
def test_a_tensor_larger_than_the_buffer_goes_by_itself(tmp_path, lane, monkeypatch):
    monkeypatch.setattr(device_copies, "BUFFER_BYTES", 1024)

    assert_values(steps_of(tmp_path / "a", InPlace(1000), [1.0, 2.0]), [1.0, 2.0])


@pytest.mark.slow
@pytest.mark.parametrize("when_full", ["block", "skip"])
def test_a_ring_smaller_than_what_is_under_way_comes_to_no_standstill(tmp_path, lane, when_full):
    values = [float(i) for i in range(12)]

    trace = steps_of(tmp_path / "a", InPlace(100_000), values, ring="1MiB", when_full=when_full)

    assert_values(trace, values, kept=when_full == "block")


@small
def test_a_part_of_a_tensor_is_stored_and_its_statistics_are_of_the_whole(tmp_path, lane):
    model = nn.Sequential(nn.Identity())
    with hookrec.attach(
        model, tmp_path / "a", keep_free=0, kinds="output", clock="manual", tensor_rows=1, tensor_dtype="float16"
    ):
        model(torch.arange(6.0).reshape(3, 2).T)

    trace = replay.open(tmp_path / "a")
    np.testing.assert_array_equal(trace.tensor(0, "0"), np.array([[0, 2, 4]], np.float16))
    assert trace.records()["max"].to_pylist() == [5.0]


@small
def test_nothing_is_lost_with_work_under_way_when_recording_ends(tmp_path, lane):
    lane.delay_s = 0.05

    assert_values(steps_of(tmp_path / "a", InPlace(), [1.0, 2.0]), [1.0, 2.0])
    assert lane.pinned == []


@small
def test_a_device_that_fails_ends_the_recording_and_not_the_training(tmp_path, lane):
    model, done = InPlace(), []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with hookrec.attach(model, tmp_path / "a", keep_free=0, kinds="output", layers="layer", clock="manual") as rec:
            for value in (1.0, 2.0, 3.0, 4.0):
                if value == 3.0:
                    rec._recording._ring.send_held(most=0)
                    lane.broken = True
                model(value)
                rec.step()
                done.append(value)

    trace = replay.open(tmp_path / "a")
    assert done == [1.0, 2.0, 3.0, 4.0]
    assert trace.records()["mean"].to_pylist() == [1.0, 2.0]
    assert (trace.status, trace.endings[0]["how"]) == ("sealed", "failed")
    assert "illegal memory access" in trace.endings[0]["detail"]
    assert any("illegal memory access" in str(warning.message) for warning in warned)


@small
def test_a_device_that_stands_still_ends_the_recording(tmp_path, lane, monkeypatch):
    monkeypatch.setattr(ring, "_DEVICE_S", 0.2)
    lane.going.clear()

    trace = steps_of(tmp_path / "a", InPlace(), [1.0])

    assert trace.endings[0]["how"] == "failed"
    assert "no further" in trace.endings[0]["detail"]
    assert len(trace.records()) == 0
    assert lane.pinned, "a device may still write there"


@pytest.mark.slow
def test_a_writer_that_dies_is_followed_by_one_that_gets_what_was_held(tmp_path, lane):
    model, values = InPlace(), [float(i) for i in range(12)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that another goes on
        with hookrec.attach(
            model, tmp_path / "a", keep_free=0, kinds="output", layers="layer", clock="manual", restart=1
        ) as rec:
            for value in values:
                if value == 6:
                    lane.going.clear()
                if value == 8:
                    rec._recording._writer._process.kill()
                    rec._recording._writer._process.wait()
                    lane.going.set()
                model(value)
                rec.step()

    assert_values(replay.open(tmp_path / "a"), values)


@small
def test_a_recomputation_is_told_by_statistics_on_the_device(tmp_path, lane):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(self.second, self.first(x), use_reentrant=True)

    model = Model()
    with hookrec.attach(model, tmp_path / "a", keep_free=0, clock="manual") as rec:
        model(torch.randn(2, 4)).sum().backward()
        rec.step()

    records = replay.open(tmp_path / "a").records().to_pylist()
    assert [(r["layer"], r["kind"], r["call"]) for r in records] == [
        ("first", "output", 0),
        ("second", "output", 0),
        ("second", "grad_output", 0),
        ("first", "grad_output", 0),
    ]


@needs_gpu
@pytest.mark.parametrize("make", SAMPLES)
def test_a_gpu_records_what_its_layers_returned(tmp_path, make):
    """Against clones that a plain hook makes; the losses are those of a run without a recorder."""

    def run(path) -> tuple[list[float], dict[tuple[int, str], np.ndarray]]:
        model, seen, losses = make().cuda(), {}, []
        step = 0

        def hook(name: str):
            return lambda module, args, output: seen.update({(step, name): output.detach().clone()})

        for name, layer in model.named_children():
            layer.register_forward_hook(hook(name))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with contextlib.ExitStack() as stack:
            if path is not None:
                stack.enter_context(hookrec.attach(model, path, keep_free=0))
            for step in range(20):
                torch.manual_seed(step)
                optimizer.zero_grad()
                loss = model(torch.randn(SAMPLES[make], device="cuda")).pow(2).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return torch.stack(losses).tolist(), {key: tensor.cpu().numpy() for key, tensor in seen.items()}

    bare, _ = run(None)
    losses, seen = run(tmp_path / "a")

    assert losses == bare
    trace = replay.open(tmp_path / "a")
    assert len(seen) == len(trace.records(kinds="output"))
    for (step, name), values in seen.items():
        np.testing.assert_array_equal(trace.tensor(step, name), values)
    assert list(verify(tmp_path / "a")) == []


@needs_gpu
def test_a_gpu_is_never_waited_for_by_a_hook(tmp_path):
    model = convolutional().cuda()
    x = torch.randn(4, 1, 8, 8, device="cuda")
    with hookrec.attach(model, tmp_path / "a", keep_free=0, clock="manual") as rec:
        model(x).sum().backward()  # what is made at the first use may wait
        rec.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                model(x).sum().backward()
                rec.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert replay.open(tmp_path / "a").steps[-1] == 5


@needs_gpu
def test_a_gpu_that_is_far_behind_gets_no_record_of_a_later_change(tmp_path):
    class Behind(InPlace):
        def forward(self, value):
            x = self.layer(torch.full((1 << 20,), value, device="cuda"))
            torch.cuda._sleep(20_000_000)
            return x.mul_(0).sub_(1)

    values = [float(i) for i in range(40)]

    assert_values(steps_of(tmp_path / "a", Behind(), values, ring="64MB"), values)


KILLED = """
import sys, os, signal, torch
from torch import nn
import hookrec
from hookrec import capture, lanes
from tests.slow_lane import SlowLane
slow = SlowLane()
lanes.lane_of = lambda device: slow
capture.load_native = lambda: None
model = nn.Sequential(nn.Identity())
rec = hookrec.attach(model, sys.argv[1], keep_free=0, kinds="output", clock="manual")
for step in range(6):
    if step == 4:
        rec._recording._ring.send_held(most=0)
        slow.going.clear()
    model(torch.full((64,), float(step)))
    rec.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_training_that_is_killed_leaves_the_steps_that_its_device_had_done(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "a"], env=os.environ, timeout=100, check=False)

    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while (trace := replay.open(tmp_path / "a")).status != "sealed" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert trace.records()["mean"].to_pylist() == [0.0, 1.0, 2.0, 3.0]
