"""The three workloads of the benchmarks: not a bit of the training changes, and each record is what was computed."""

import contextlib

import pytest
import torch

import hookrec
import replay
from benchmarks.workloads import RECORDS, WORKLOADS, train_step
from tests.oracle import Oracle, differences, leaves, recorded

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_losses_and_parameters_are_bit_identical_over_20_steps(tmp_path, workload):
    losses, states = [], []
    for path in (None, tmp_path / "a"):
        model, loss = WORKLOADS[workload]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        recorder = hookrec.attach(model, path, keep_free=0) if path else contextlib.nullcontext()
        with recorder:
            losses.append([train_step(loss, optimizer).item() for _ in range(20)])
        states.append(model.state_dict())

    assert losses[0] == losses[1]
    assert all(map(torch.equal, states[0].values(), states[1].values()))
    trace = replay.open(tmp_path / "a")
    assert trace.steps == list(range(20))
    assert trace.count == 20 * RECORDS[workload]
    assert not trace.not_kept


@pytest.mark.parametrize("workload", WORKLOADS)
def test_each_record_equals_a_clone_taken_independently(tmp_path, workload):
    model, loss = WORKLOADS[workload]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with hookrec.attach(model, tmp_path / "a", keep_free=0):
        for _ in range(2):
            train_step(loss, optimizer)

    model, loss = WORKLOADS[workload]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    oracle = Oracle(leaves(model))
    for _ in range(2):
        train_step(loss, optimizer)
        oracle.step()

    assert len(oracle.records) == 2 * RECORDS[workload]
    assert differences(recorded(replay.open(tmp_path / "a")), oracle.records) == []
