"""What runs in a pause is left out, and steps go on."""

import pytest
import torch
from torch import nn

import hookrec
import replay
from tests.loops import SMALL, scalars

pytestmark = pytest.mark.usefixtures("no_process")


def test_a_pause_leaves_calls_out_and_the_step_goes_on(tmp_path):
    net = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with hookrec.attach(net, tmp_path / "a", **SMALL, kinds=("input", "output", "grad_output", "param")) as recording:
        for _ in range(2):
            net(torch.ones(3, 2)).sum().backward()
            with recording.pause():
                net(torch.ones(7, 2))
                assert not net[0]._forward_hooks
            net(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            recording.pause()
            net(torch.ones(9, 2))
            recording.log(evaluated=1.0)
            recording.resume()
            recording.resume()
    with pytest.raises(hookrec.DetachedError):
        recording.pause()

    trace = replay.open(tmp_path / "a")
    rows = trace.records(kinds="output").to_pylist()
    assert [(row["step"], row["call"], row["micro"], row["shape"][0]) for row in rows] == [
        (step, call, call, 3) for step in (0, 1) for call in (0, 1)
    ]
    assert len(trace.records(kinds="param")) == 2 * 2
    assert scalars(trace)["evaluated"] == {0: 1.0, 1: 1.0}


def test_a_pause_outlasts_steps_and_keeps_those_that_are_not_sampled_free_of_hooks(tmp_path):
    net = nn.Linear(2, 2)
    with hookrec.attach(net, tmp_path / "a", **SMALL, clock="manual", every=2) as recording:
        net(torch.ones(1, 2))
        recording.pause()
        recording.step()
        recording.step()
        net(torch.ones(5, 2))
        recording.step()
        recording.resume()
        assert not net._forward_hooks  # of step 3, which is not sampled
        recording.step()
        net(torch.ones(1, 2))
        recording.step()

    assert replay.open(tmp_path / "a").records(kinds="output")["step"].to_pylist() == [0, 4]


def test_a_pause_of_a_clock_that_counts_forward_passes_ends_no_step(tmp_path):
    net = nn.Linear(2, 2)
    with hookrec.attach(net, tmp_path / "a", **SMALL, clock="forward") as recording:
        net(torch.ones(1, 2))
        with recording.pause():
            net(torch.ones(5, 2))
            net(torch.ones(5, 2))
        net(torch.ones(1, 2))
        assert recording.steps == 1
