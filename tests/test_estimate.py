"""What `hookrec estimate` says a plan would write is what a recording by it writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hookrec
import replay
from hookrec.cli import main
from hookrec.estimate import LOG_ROW_BYTES, Measured, measured
from hookrec.plan import plan_of
from replay.format import Stream

SCRIPT = """
import pathlib, torch
from torch import nn
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
step = 0
try:
    while True:
        step += 1
        net(torch.ones(16, 4)).sum().backward()
        optimizer.step()
        assert step < 50
finally:
    pathlib.Path("left").write_text(str(step))
"""


def train(path, **plan) -> replay.Trace:
    """Three steps of a net of a float32 layer, called twice, and a float64 one."""
    model = nn.ModuleDict({"a": nn.Linear(4, 8), "b": nn.Linear(8, 2).double()})
    with hookrec.attach(model, path, clock="manual", keep_free=0, **plan) as recorder:
        for _ in range(3):
            for _ in range(2):
                hidden = model["a"](torch.ones(16, 4))
            model["b"](hidden.double()).sum().backward()
            recorder.step()
    return replay.open(path)


@pytest.mark.parametrize(
    ("plan", "step_bytes"),
    [
        # Two calls of a: 16×8 float32, of which the second has a gradient; b: 16×2 float64 and its gradient.
        ({}, 3 * (16 * 8 * 4) + 2 * (16 * 2 * 8)),
        ({"tensor_rows": 2}, 3 * (2 * 8 * 4) + 2 * (2 * 2 * 8)),
        ({"tensor_dtype": "bfloat16"}, 3 * (16 * 8 * 2) + 2 * (16 * 2 * 2)),
        ({"kinds": ("output", "param"), "layers": "b"}, 16 * 2 * 8 + (2 * 8 + 2) * 8),
        ({"tensor_steps": "::2", "kinds": "output"}, 2 * (16 * 8 * 4) + 16 * 2 * 8),
    ],
)
def test_the_bytes_are_those_that_a_recording_by_the_plan_writes(tmp_path, no_process, plan, step_bytes):
    alone = {name: value for name, value in plan.items() if not name.startswith("tensor_")}

    found = measured(train(tmp_path / "statistics", tensors=False, **alone)).cost("", plan_of(**plan), tmp_path)

    assert found.step_bytes == step_bytes
    recorded = train(tmp_path / "whole", **plan)
    steps_with_tensors = 2 if "tensor_steps" in plan else 3
    assert recorded.nbytes == step_bytes * steps_with_tensors
    assert recorded.count == found.records * 3


def summed(layer, kind, tensor):
    return tensor.sum(0) if kind == "output" else None


WHOLE = 3 * (16 * 8 * 4) + 2 * (16 * 2 * 8)
COUNTS = 279 * 4


@pytest.mark.parametrize(
    ("plan", "records", "step_bytes"),
    [
        ({"rules": [{"layers": "a", "tensors": False}]}, 5, 2 * (16 * 2 * 8)),
        ({"rules": [{"layers": "b", "tensor_rows": 1}]}, 5, 3 * (16 * 8 * 4) + 2 * (2 * 8)),
        ({"rules": [{"kinds": "grad_output", "record": False}]}, 3, 2 * (16 * 8 * 4) + 16 * 2 * 8),
        ({"tensors": False, "rules": [{"layers": "b", "tensors": True}]}, 5, 2 * (16 * 2 * 8)),
        ({"exponents": True}, 10, WHOLE + 5 * COUNTS),
        ({"exponents": True, "tensors": False}, 10, 5 * COUNTS),
        ({"rules": [{"layers": "a", "exponents": True}]}, 8, WHOLE + 3 * COUNTS),
        ({"transform": {"a": summed}}, 7, WHOLE + 2 * (8 * 4)),
        ({"transform": {"a": summed}, "rules": [{"layers": "a", "record": False}]}, 2, 2 * (16 * 2 * 8)),
        ({"transform": {"a": summed}, "rules": [{"layers": "a*", "tensors": False}]}, 7, 2 * (16 * 2 * 8)),
        (
            {"transform": {"a": summed}, "rules": [{"tensors": False}, {"layers": "*/summed", "tensors": True}]},
            7,
            2 * (8 * 4),
        ),
    ],
)
def test_rules_counts_and_functions_are_reckoned_as_they_are_recorded(tmp_path, no_process, plan, records, step_bytes):
    alone = {name: value for name, value in plan.items() if name == "transform"}

    steps = measured(train(tmp_path / "statistics", tensors=False, **alone))
    found = steps.cost("", plan_of(**plan), tmp_path)

    assert (found.records, found.step_bytes) == (records, step_bytes)
    recorded = train(tmp_path / "whole", **plan)
    assert len(recorded.records(kinds="*")) == records * 3  # also of kind `exponents`
    assert recorded.nbytes == step_bytes * 3


def test_a_rule_has_a_rate_of_its_own(tmp_path):
    # Ten records of 1,000 bytes a step, in each of two layers; a step takes 0.5 s.
    streams = [(Stream(n, name, "output", "", "uint8", (1000,), None), 20) for n, name in enumerate("ab")]
    rules = [{"layers": "a", "every": 5}, {"layers": "b", "tensor_steps": "::50"}]

    found = Measured(2, 0.5, streams).cost("", plan_of(every=10, rules=rules, keep_free=0), tmp_path)

    assert found.bytes_per_s == pytest.approx(10 * 1000 / 5 / 0.5 + 10 * 1000 / 50 / 0.5)
    assert found.log_bytes_per_s == pytest.approx(10 * LOG_ROW_BYTES / 5 / 0.5 + 10 * LOG_ROW_BYTES / 10 / 0.5)


def test_rates_and_limits_go_by_the_schedule(tmp_path):
    # Ten records of 1,000 bytes in a step of 0.5 s.
    streams = [(Stream(0, "a", "output", "", "uint8", (1000,), None), 20)]
    steps = Measured(2, 0.5, streams)

    every_ten = steps.cost("", plan_of(every=10, max_bytes=10**6, keep_free=0), tmp_path)
    seldom = steps.cost("", plan_of(tensor_steps="::100", max_bytes=10**6, keep_free=0), tmp_path)
    flight = steps.cost("", plan_of(flight=5, keep_free=0), tmp_path)
    too_large = steps.cost("", plan_of(ring=10**6), tmp_path)

    assert (every_ten.bytes_per_s, every_ten.log_bytes_per_s) == (2000, 2 * LOG_ROW_BYTES)
    assert (every_ten.ends_in_s, every_ten.ends_by) == (500, "max_bytes")
    assert (seldom.bytes_per_s, seldom.log_bytes_per_s) == (200, 20 * LOG_ROW_BYTES)
    assert (flight.step_bytes, flight.bytes_per_s) == (10_000, 0)
    assert too_large.step_bytes == 10_000


def test_a_tensor_that_has_no_room_in_the_ring_is_not_counted(tmp_path):
    steps = Measured(1, 0.5, [(Stream(0, "a", "output", "", "uint8", (10**8,), None), 1)])

    assert steps.cost("", plan_of(ring=10**6), tmp_path).step_bytes == 0
    assert steps.cost("", plan_of(ring=10**6, tensor_dtype="float16"), tmp_path).step_bytes == 0
    assert steps.cost("", plan_of(ring="200MB"), tmp_path).step_bytes == 10**8


def estimate(tmp_path, *arguments) -> subprocess.CompletedProcess:
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-m", "hookrec", "estimate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=150)


def test_a_script_is_stopped_after_its_steps_and_nothing_of_ours_is_left(tmp_path):
    (tmp_path / "it.py").write_text(SCRIPT)

    result = estimate(tmp_path, "--json", "-n", "2", "--tensor-rows", "4", "it.py")

    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["steps"] == 2
    by_layer = {(line["layer"], line["kind"]): line["bytes"] for line in found["layers"]}
    assert by_layer[("0", "output")] == 4 * 8 * 4
    assert by_layer[("2", "grad_output")] == 4 * 1 * 4
    assert {plan["plan"]: plan["step_bytes"] for plan in found["plans"]} == {
        "as given": 2 * (4 * 8 * 4 + 4 * 8 * 4 + 4 * 1 * 4),
        "every=10": 2 * (4 * 8 * 4 + 4 * 8 * 4 + 4 * 1 * 4),
        "tensor_rows=1": 2 * (8 * 4 + 8 * 4 + 4),
        "tensors=False": 0,
    }
    assert (tmp_path / "left").read_text() == "2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it.py", "left", "tmp"]
    assert list((tmp_path / "tmp").glob("*hookrec*")) == []


@pytest.mark.slow
def test_a_script_that_holds_on_is_killed(tmp_path):
    (tmp_path / "it.py").write_text(SCRIPT + "\n")
    text = SCRIPT.replace("finally:", "except SystemExit:\n    import time\n    time.sleep(600)\nfinally:")
    (tmp_path / "it.py").write_text(text)

    result = estimate(tmp_path, "it.py")

    assert result.returncode == 0, result.stderr
    assert "Of 3 steps" in result.stdout
    assert not (tmp_path / "left").exists()
    assert list((tmp_path / "tmp").glob("*hookrec*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("text", ["raise ValueError('on purpose')", "print('nothing')", "def"])
def test_a_script_without_a_step_is_said_to_have_none(tmp_path, text):
    (tmp_path / "it.py").write_text(text)

    result = estimate(tmp_path, "it.py")

    assert (result.returncode, result.stdout) == (1, "")
    assert "No step of it.py was recorded" in result.stderr
    assert list((tmp_path / "tmp").glob("*hookrec*")) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], "There is no script nowhere.py"),
        (["--nonsense", "x.py"], "There is no option --nonsense"),
        (["--kinds", "zz", __file__], "There is no kind 'zz'"),
        (["-n", "0", __file__], "0 is not in the range"),
        ([], "Missing argument 'TARGET'"),
    ],
)
def test_wrong_uses_are_refused_before_the_script_begins(arguments, words):
    result = CliRunner().invoke(main, ["estimate", *arguments])

    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.slow
def test_a_place_that_cannot_be_is_taken_for_the_folder_above_it(tmp_path):
    (tmp_path / "it.py").write_text(SCRIPT)

    result = estimate(tmp_path, "-o", "x" * 300, "it.py")

    assert result.returncode == 0, result.stderr
    assert "as given" in result.stdout
