"""The benchmarks run, at sizes too small to say anything, and measure each thing that they name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import replay
from benchmarks import floors, large
from benchmarks.__main__ import DEFAULT
from replay.verify import verify

ROOT = Path(__file__).parent.parent


def measured(folder: Path, module: str, *arguments: str) -> dict:
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True, timeout=170)
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout)


@pytest.mark.slow
def test_each_peer_has_a_row_or_the_reason_why_it_is_left_out(tmp_path):
    from benchmarks.peers import DEFAULT

    tables = measured(tmp_path, "peers", "mlp", "--rounds", "1", "--steps", "1")["tables"]

    there = {row["way"] for row in tables["mlp"]}
    left_out = {row["left out"] for row in tables.get("left out", ())}
    assert there | left_out == {*DEFAULT, "smdebug", "msprobe"}
    assert left_out <= {"torchlens", "nnsight", "safetensors a step", "smdebug", "msprobe"}


@pytest.mark.slow
def test_each_size_has_a_row(tmp_path):
    tables = measured(tmp_path, "linear", "--small")["tables"]

    assert [row["records a step"] for row in tables["records a step"]] == [10, 100]
    assert [row["MB a step"] for row in tables["bytes a step"]] == [1, 10]
    assert [row["steps"] for row in tables["steps"]] == [10, 100]
    assert all(row["us a record"] > 0 for row in tables["steps"])


@pytest.mark.slow
def test_each_reader_reads_what_was_recorded(tmp_path):
    from benchmarks.reading import READERS

    tables = measured(tmp_path, "reading", "--small")["tables"]

    pairs = {(store, reader) for store, readers in READERS.items() for reader in readers}
    assert {(row["store"], row["reader"]) for row in tables["one tensor of 8 KB, warm"]} == pairs
    layers = tables["one layer of 4 MB tensors"]
    assert {(row["store"], row["reader"]) for row in layers} == pairs | {(store, "dd") for store in READERS}
    assert all(row["cold GB/s"] > 0 and row["warm GB/s"] > 0 for row in layers)


@pytest.mark.slow
def test_each_question_has_its_answer_and_a_floor(tmp_path):
    tables = measured(tmp_path, "records", "--records", "160000")["tables"]

    answers = [row["what"] for row in tables["answers"]]
    assert [what for what in answers if not what.startswith("pyarrow")] == [
        "open",
        "filter by statistics",
        "filter for the one with NaN",
        "filter by layer and steps",
        "export",
    ]
    assert len(answers) == 5 + 4
    (size,) = tables["a trace of statistics"]
    assert (size["records"], size["steps"]) == (160_000, 10_000)
    assert 0 < size["by statistics"] < 160_000
    assert 20 < size["bytes a record"] < 60


@pytest.mark.slow
def test_memory_is_that_of_the_training_and_of_the_writer(tmp_path):
    (table,) = measured(tmp_path, "memory", "--steps", "20", "--ring", "64MB")["tables"].values()

    above, writer, bare = (row["MB at the end"] for row in table)
    assert above < 64
    assert writer > 5
    assert bare > 50
    assert [row["ring MB"] for row in table] == [64, 64, None]


GROWTH = """
import mmap, os
import numpy as np
from benchmarks.memory import own_bytes

before = own_bytes(os.getpid())
held = np.ones(20_000_000, np.uint8)
with mmap.mmap(-1, 20_000_000, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE):
    print(own_bytes(os.getpid()) - before)
"""


def test_the_memory_of_a_process_grows_by_what_it_holds_alone():
    # In a process of its own: one that is older has memory to give again.
    done = subprocess.run([sys.executable, "-c", GROWTH], cwd=ROOT, check=True, capture_output=True, text=True)

    assert 18_000_000 < int(done.stdout) < 22_000_000


def test_the_large_trace_is_one_that_was_recorded_whole(tmp_path, monkeypatch):
    for name, value in {"STEPS": 200, "LAYERS": 4, "WITH_TENSORS": 2, "SHAPE": (8, 8)}.items():
        monkeypatch.setattr(large, name, value)

    large.write(tmp_path / "a")

    trace = replay.open(tmp_path / "a")
    assert (trace.count, len(trace.steps), trace.nbytes) == (200 * 4 * 2, 200, 4 * 2 * 256)
    assert list(verify(tmp_path / "a")) == []
    assert np.any(trace.tensor(50, large.REAL))


def test_a_command_that_says_nothing_for_long_or_needs_much_is_seen():
    quick = large.run([sys.executable, "-c", "print('here')"], 60)
    silent = large.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.1)
    wide = large.run([sys.executable, "-c", "import time; x = b'x' * 300_000_000; time.sleep(0.5)"], 60)

    assert (quick.ended, quick.missed) == ("0", "")
    assert silent.ended == "stopped"
    assert wide.mb > 300


@pytest.mark.slow
def test_each_mode_has_a_row_with_the_floors_beside_it(tmp_path):
    tables = measured(tmp_path, "__main__", "mlp", "--rounds", "1", "--steps", "2")["tables"]

    rows = {row["mode"]: row for row in tables["mlp"]}
    assert list(rows) == list(DEFAULT["mlp"])
    assert all(row["ratio"] > 0 for row in rows.values())
    assert rows["full"]["stored"] == 1
    assert rows["copy and write"]["stored"] is None


def test_the_floor_copies_and_writes_the_bytes_of_each_output_and_gradient(tmp_path):
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Tanh())
    x, page = torch.randn(1, 1000), 4096
    expected = []
    for step in range(3):
        with torch.no_grad():
            hidden = (x + step) @ model[0].weight.T + model[0].bias
        output = hidden.tanh()
        expected += [hidden, output, torch.ones_like(output), 1 - output**2]

    with floors.written(model, tmp_path / "bytes", nbytes=5 * page) as end:  # a step takes four pages
        for step in range(3):
            model(x + step).sum().backward()
            end()

    data = np.fromfile(tmp_path / "bytes", np.float32).reshape(-1, page // 4)[:, :1000]
    np.testing.assert_allclose(data, torch.cat(expected).numpy(), rtol=1e-3, atol=1e-5)


def test_a_step_larger_than_the_floor_s_memory_is_refused(tmp_path):
    model = nn.Linear(1000, 1000)

    with pytest.raises(ValueError, match="give it more memory"), floors.written(model, tmp_path / "bytes", nbytes=4096):
        model(torch.randn(1, 1000)).sum().backward()
