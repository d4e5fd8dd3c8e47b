"""Where memory or cores are short, recording is slower, and still right and at an end."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import hookrec
import replay
from replay.verify import verify

SCRIPT = """
import os, sys
import torch
from torch import nn
import hookrec

if sys.argv[2] == "one core":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with hookrec.attach(model, sys.argv[1], ring="1MB", keep_free=0):
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(512, 64)).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("ring", "mb_a_step"),
    [("1MB", 4), pytest.param("64MB", 200, marks=pytest.mark.slow)],
)
def test_a_step_of_several_times_the_ring_waits_for_the_writer_and_is_whole(tmp_path, ring, mb_a_step):
    layers, records = 10, 20
    width = 256
    rows = mb_a_step * 10**6 // (records * 4 * width)
    model = nn.Sequential(*(nn.Dropout(0.0) for _ in range(layers)))
    x = torch.arange(rows * width, dtype=torch.float32).reshape(rows, width).requires_grad_()

    with hookrec.attach(model, tmp_path / "a", ring=ring, keep_free=0, clock="manual") as rec:
        for _ in range(3):
            model(x).sum().backward()
            rec.step()

    trace = replay.open(tmp_path / "a")
    assert (trace.steps, trace.count, trace.not_kept) == ([0, 1, 2], 3 * records, {})
    assert trace.nbytes == 3 * records * rows * width * 4
    np.testing.assert_array_equal(trace.tensor(2, "9"), x.detach().numpy())
    assert list(verify(tmp_path / "a")) == []


@pytest.mark.parametrize(("where", "threads"), [("one core", ""), ("all cores", "1"), ("one core", "1")])
def test_one_core_or_one_thread_is_enough(tmp_path, where, threads):
    environment = dict(os.environ)
    if threads:
        environment["OMP_NUM_THREADS"] = threads

    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "a"), where], env=environment, check=True, timeout=170)

    trace = replay.open(tmp_path / "a")
    assert (trace.status, trace.steps, trace.count, trace.not_kept) == ("sealed", [0, 1, 2, 3], 24, {})
    assert list(verify(tmp_path / "a")) == []
