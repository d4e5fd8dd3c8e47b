"""What a recording is said to cost, against traces whose bytes and times are worked out by hand."""

import json
import logging
import os
import re
import time

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hookrec
import replay
from hookrec.cli import main as hookrec_main
from replay.cli import main
from replay.forecast import DISK, KEEP_FREE, MAX_BYTES, duration, forecast, size
from tests.live_traces import WrittenTrace
from tests.training_in_thread import Training


def written(path, *, steps, seconds_between, plan, width=250, rank=0) -> WrittenTrace:
    """A live trace of two layers, 1,000 bytes a tensor, whose steps come at even times."""
    trace = WrittenTrace(path, width=width, rank=rank, identity={"plan": plan})
    with (trace.rank / "scalars.jsonl").open("a") as file:
        for number, step in enumerate(steps):
            trace.commit(step)
            line = {"step": step, "time": 1000.0 + number * seconds_between, "values": {"hookrec/step_s": 0.25}}
            file.write(json.dumps(line) + "\n")
    return trace


def test_the_rate_is_that_of_the_wall_clock_whatever_the_schedule(tmp_path):
    # Two records of 1,000 bytes each tenth step, and ten steps take four seconds: 500 bytes a second.
    trace = written(
        tmp_path / "a", steps=range(0, 50, 10), seconds_between=4.0, plan={"max_bytes": 20_000, "keep_free": 0}
    )

    found = forecast(replay.open(tmp_path / "a"))

    assert (found.records, found.step_bytes, found.bytes_per_s) == (2, 2000, 500)
    assert found.ends_by == MAX_BYTES
    assert found.ends_in_s == pytest.approx((20_000 - 10_000) / 500)
    assert str(found) == (
        "2 records and 2 kB of tensors a recorded step, 500 bytes a second; max_bytes ends the tensors in 20 s"
    )
    trace.close()


def test_one_step_alone_goes_by_its_own_length(tmp_path):
    trace = written(tmp_path / "a", steps=[7], seconds_between=1.0, plan={"max_bytes": 10**15, "keep_free": 0})

    assert forecast(replay.open(tmp_path / "a")).bytes_per_s == 2000 / 0.25
    trace.close()


def test_what_is_left_free_ends_the_tensors_where_it_comes_first(tmp_path):
    plan = {"max_bytes": 10**18, "keep_free": 0.001}
    trace = written(tmp_path / "a", steps=range(5), seconds_between=1.0, plan=plan)
    disk = os.statvfs(tmp_path)

    found = forecast(replay.open(tmp_path / "a"))

    room = (disk.f_bavail - 0.001 * disk.f_blocks) * disk.f_frsize
    assert found.ends_by == KEEP_FREE
    assert found.ends_in_s == pytest.approx(room / (2000 + found.log_bytes_per_s), rel=0.05)
    trace.close()


def test_statistics_alone_go_on_until_the_disk_is_full(tmp_path):
    plan = {"max_bytes": 1, "keep_free": 0.9, "tensors": False}
    trace = written(tmp_path / "a", steps=range(5), seconds_between=1.0, plan=plan, width=0)
    log = (trace.rank / "records-00000.arrows").stat().st_size

    found = forecast(replay.open(tmp_path / "a"))

    assert (found.step_bytes, found.bytes_per_s, found.ends_by) == (0, 0, DISK)
    assert found.log_bytes_per_s == pytest.approx(log / 5)
    assert "of statistics a second; the disk is full in" in str(found)
    trace.close()


def test_ranks_fill_the_disk_together_and_their_limits_apart(tmp_path):
    plan = {"max_bytes": 20_000, "keep_free": 0}
    slow = written(tmp_path / "a", steps=range(5), seconds_between=4.0, plan=plan)
    fast = written(tmp_path / "a", steps=range(5), seconds_between=1.0, plan=plan, rank=1)

    found = forecast(replay.open(tmp_path / "a"))

    assert (found.records, found.step_bytes, found.bytes_per_s) == (4, 4000, 500 + 2000)
    assert found.ends_in_s == pytest.approx((20_000 - 10_000) / 2000)
    slow.close()
    fast.close()


@pytest.mark.parametrize("plan", [{}, {"max_bytes": "x", "keep_free": None}])
def test_a_plan_that_says_nothing_leaves_the_disk(tmp_path, plan):
    trace = written(tmp_path / "a", steps=range(3), seconds_between=1.0, plan=plan)

    assert forecast(replay.open(tmp_path / "a")).ends_by == DISK
    trace.close()


def test_a_trace_without_a_step_has_no_forecast_and_a_sealed_one_shows_none(tmp_path):
    empty = WrittenTrace(tmp_path / "empty", width=4)
    sealed = written(tmp_path / "sealed", steps=range(3), seconds_between=1.0, plan={}).seal()

    live, done = (CliRunner().invoke(main, ["info", "--json", str(t)]) for t in (tmp_path / "empty", sealed))

    assert json.loads(live.output)["forecast"] is None
    assert json.loads(done.output)["forecast"] is None
    empty.close()


def test_info_says_what_a_live_recording_costs(tmp_path):
    trace = written(tmp_path / "a", steps=range(5), seconds_between=1.0, plan={"max_bytes": 20_000, "keep_free": 0})

    text, as_json = (CliRunner().invoke(main, ["info", str(tmp_path / "a"), *more]).output for more in ([], ["--json"]))

    assert "forecast     2 records and 2 kB of tensors a recorded step, 2 kB a second; max_bytes ends" in text
    assert json.loads(as_json)["forecast"]["bytes_per_s"] == 2000
    trace.close()


def test_status_says_what_a_recording_costs(tmp_path, folder):
    training = Training()
    with hookrec.attach(training.model, tmp_path / "a", keep_free=0):
        training.step()
        while not replay.open(tmp_path / "a").steps:
            time.sleep(0.01)
        as_json, text = (CliRunner().invoke(hookrec_main, ["status", *more]).output for more in (["--json"], []))

    # Three layers of a batch of two: 8, 8 and 1 float32, and as many of their gradients.
    assert json.loads(as_json)[0]["recorders"][0]["forecast"]["step_bytes"] == 2 * (2 * (8 + 8 + 1) * 4)
    assert "cost     6 records and 272 bytes of tensors a recorded step" in text


def test_status_does_without_a_trace_that_is_gone(tmp_path, folder):
    training = Training()
    with hookrec.attach(training.model, tmp_path / "a", keep_free=0):
        (tmp_path / "a").rename(tmp_path / "b")
        result = CliRunner().invoke(hookrec_main, ["status", "--json"])
        (tmp_path / "b").rename(tmp_path / "a")

    assert json.loads(result.output)[0]["recorders"][0]["forecast"] is None


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (size(0), "0 bytes"),
        (size(999), "999 bytes"),
        (size(197e6), "197 MB"),
        (size(2.5e12), "2.5 TB"),
        (duration(1.5), "1.5 s"),
        (duration(600), "10.0 min"),
        (duration(3 * 86400), "3.0 days"),
        (duration(1e12), "more than 10,000 days"),
    ],
)
def test_figures_are_said_in_units_that_fit(what, words):
    assert what == words


def recorded_cost(path, monkeypatch, *, free_blocks=10**6, first=True, **plan) -> str | None:
    """Record a step that has two records, of 4,096 float32 each; return what it is said to cost."""
    model = nn.Sequential(nn.Linear(64, 64))
    disk = os.statvfs_result((4096, 4096, 2 * 10**6, free_blocks, free_blocks, 0, 0, 0, 0, 255))
    with hookrec.attach(model, path, clock="manual", ring="1MiB", **plan) as recorder:
        monkeypatch.setattr("hookrec.remarks.os.statvfs", lambda _: disk)
        assert recorder.cost is None
        model(torch.ones(64, 64)).sum().backward()
        recorder.step()
        monkeypatch.undo()
        return recorder.cost


def test_the_first_recorded_step_says_for_how_many_like_it_there_is_room(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "hookrec")

    # The real disk counts too, for the writer process: little of it is to stay free.
    by_limit = recorded_cost(tmp_path / "a", monkeypatch, max_bytes="1MB", keep_free=0.001)
    # Of 2,000,000 blocks of 4,096 bytes 2,000 are to stay free, and a million is: 998,000 blocks, of 8 for each step.
    by_disk = recorded_cost(tmp_path / "b", monkeypatch, max_bytes="1000TB", keep_free=0.001)
    full = recorded_cost(tmp_path / "c", monkeypatch, free_blocks=10, keep_free=0.001)
    statistics = recorded_cost(tmp_path / "d", monkeypatch, tensors=False)

    begin = r"step 0: 2 records and 32\.8 kB of tensors, in [0-9.e-]+ s"
    for said, room in (
        (by_limit, "30 such steps, until max_bytes=1,000,000"),
        (by_disk, "124,750 such steps, until keep_free=0.001"),
        (full, "0 such steps, until keep_free=0.001"),
    ):
        assert re.fullmatch(f"{begin}; there is room for {re.escape(room)} ends the tensors\\.", said)
    assert re.fullmatch(r"step 0: 2 records and 0\.0 kB of tensors, in [0-9.e-]+ s\.", statistics)
    assert [record.message for record in caplog.records] == [by_limit, by_disk, full, statistics]


def test_a_step_that_is_passed_by_has_no_cost_and_a_resumed_trace_tells_of_no_room(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    for resume, said in ((False, r"step 2: 1 records .* such steps.*"), (3, r"step 4: 1 records and [^;]*")):
        with hookrec.attach(
            model, tmp_path / "a", clock="manual", kinds="output", every=2, steps="2:", resume=resume, keep_free=0
        ) as recorder:
            while recorder.steps < (resume or 0) + 2:
                assert recorder.cost is None
                model(torch.ones(1, 4))
                recorder.step()
            model(torch.ones(1, 4))
            recorder.step()

            assert re.fullmatch(said, recorder.cost)
