"""Who follows a trace gets each committed record once, in order, until it is sealed."""

import json
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hookrec
import replay
from replay import following
from replay.cli import main


def record(path, steps, pause_s=0.0, value=1.0):
    with hookrec.attach(model := nn.ReLU(), path, clock="manual", keep_free=0) as recorder:
        for step in range(steps):
            model(torch.full((2,), value + step))
            recorder.step()
            time.sleep(pause_s)


def test_each_record_of_a_live_trace_comes_once_and_the_end_ends_it(tmp_path):
    training = threading.Thread(target=record, args=(tmp_path / "a", 8, 0.05))
    training.start()

    tables = list(replay.follow(tmp_path / "a", 0.02, wait_s=20))

    training.join()
    assert [step for table in tables for step in table["step"].to_pylist()] == list(range(8))
    assert len(tables) > 1
    assert replay.open(tmp_path / "a").status == "sealed"


def test_filters_apply_to_what_comes(tmp_path):
    record(tmp_path / "a", 5)

    (table,) = replay.follow(replay.open(tmp_path / "a"), kinds="output", where="absmax > 3")

    assert table["step"].to_pylist() == [3, 4]
    assert table.schema == replay.open(tmp_path / "a").records().schema


def test_several_traces_are_followed_at_once(tmp_path):
    record(tmp_path / "a", 2)
    record(tmp_path / "b", 3, value=10.0)

    found = {trace.path.name: len(table) for trace, table in replay.follow_all([tmp_path / "a", tmp_path / "b"])}

    assert found == {"a": 2, "b": 3}


def test_a_trace_that_is_not_there_is_waited_for_no_longer_than_asked(tmp_path):
    with pytest.raises(replay.TraceNotFound, match="does not exist"):
        next(replay.follow(tmp_path / "a", 0.01, wait_s=0.05))


def test_a_trace_whose_writer_is_gone_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "TORN_S", 0.1)
    record(tmp_path / "a", 2)
    (tmp_path / "a/rank-00000/end.json").unlink()

    (table,) = replay.follow(tmp_path / "a", 0.02)
    result = CliRunner().invoke(main, ["tail", str(tmp_path / "a"), "--poll", "0.02"])

    assert len(table) == 2
    assert result.exit_code == 1
    assert "is torn" in result.output


def test_tail_prints_a_line_a_step_with_the_largest_values_and_the_first_nan(tmp_path):
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    with hookrec.attach(model, tmp_path / "a", clock="manual", keep_free=0) as recorder:
        for values in ([1.0, -7.5], [2.0, np.nan]):
            model(torch.tensor(values))
            recorder.step()
    path = str(tmp_path / "a")

    text = CliRunner().invoke(main, ["tail", path])
    lines = CliRunner().invoke(main, ["tail", path, "--json", "--where", "layer = '1'"])
    records = CliRunner().invoke(main, ["tail", path, "--records"])

    assert [" ".join(line.split()) for line in text.output.splitlines()] == [
        "step 0 2 records output ≤ 7.5 (0)",
        "step 1 2 records output ≤ 2 (0) NaN or inf: output of 0",
    ]
    first = json.loads(lines.output.splitlines()[0])
    assert (first["step"], first["absmax"]) == (0, {"output": {"layer": "1", "value": 1.0}})
    assert len(records.output.splitlines()) == 4


def test_ctrl_c_ends_tail_without_a_word(tmp_path):
    with hookrec.attach(model := nn.ReLU(), tmp_path / "a", clock="manual", keep_free=0) as recorder:
        model(torch.ones(2))
        recorder.step()
        command = [sys.executable, "-c", "from replay.cli import main; main()", "tail", str(tmp_path / "a")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            line = process.stdout.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)

    assert line.startswith("step 0")
    assert (process.returncode, out, err) == (130, "", "")
