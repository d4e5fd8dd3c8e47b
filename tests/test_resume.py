"""A training that is resumed in its trace, against one that ran through: what counts is the same, to the bit."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hookrec
import replay
from hookrec.cli import main as hookrec_main
from hookrec.journal import Journal
from hookrec.watched import _seal
from replay.alerts import read_alerts
from replay.attempts import Attempt, Attempts
from replay.cli import main
from replay.convert import convert
from replay.dropping import drop, shards
from replay.follow import Follower
from replay.seal import locked
from replay.verify import verify
from tests.oracle import differences, recorded
from tests.test_daemon import Bench

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
from tests.test_resume import Training, wait_for
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
    wait_for(path, {steps.stop})
    recorder._recording._writer._process.kill()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def record_and_tear(path: Path, steps: range, save_at: int, **options) -> None:
    """Record some steps; the writer is killed, and nobody seals."""
    training = Training()
    recorder = hookrec.attach(training.model, path, keep_free=0, restart=0, **options)
    for number in steps:
        if number == save_at:
            training.save(path.parent / "checkpoint", recorder.steps)
        training.step(number, recorder)
    wait_for(path, steps.stop)
    recorder._recording._writer._process.kill()
    recorder._recording._writer._process.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder.detach()


def committed(path: Path) -> int:
    try:
        return max(replay.open(path).steps, default=-1) + 1
    except replay.ReplayError:
        return 0


def wait_for(path: Path, steps: int) -> None:
    for _ in range(3000):
        if committed(path) >= steps:
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} has {committed(path)} steps")


def scalars(trace: replay.Trace) -> list[tuple[int, float]]:
    return [(row["step"], row["value"]) for row in trace.scalars().to_pylist() if row["name"] == "loss"]


def files_in(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def before(records: dict, step: int) -> dict:
    return {key: value for key, value in records.items() if key[0] < step}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("resume") / "a"
    record(path, range(20))
    torch.set_num_threads(threads)
    trace = replay.open(path)
    return recorded(trace), scalars(trace)


@pytest.mark.parametrize(
    ("how", "store"),
    [
        ("the training", "zarr"),
        ("the writer", "hdf5"),
        pytest.param("both", "zarr", marks=pytest.mark.slow),
        pytest.param("the writer", "zarr", marks=pytest.mark.slow),
        pytest.param("the training", "hdf5", marks=pytest.mark.slow),
        pytest.param("both", "hdf5", marks=pytest.mark.slow),
    ],
)
def test_what_counts_is_what_a_training_has_that_ran_through(tmp_path, undisturbed, how, store):
    path = tmp_path / "a"
    if how == "the writer":
        record_and_tear(path, range(12), 8, store=store)
    else:
        record_and_die(path, range(12), 8, how, store=store)

    record(path, range(8, 20), checkpoint=tmp_path / "checkpoint", resume=8, store=store)

    trace = replay.open(path)
    assert (trace.status, trace.steps) == ("sealed", list(range(20)))
    assert differences(recorded(trace), undisturbed[0]) == []
    assert scalars(trace) == undisturbed[1]
    assert trace.count == len(undisturbed[0]) == trace.sql("select count(*) as n from records")["n"][0].as_py()
    assert list(verify(path)) == []
    earlier = replay.open(path, attempt=0)
    assert earlier.steps == list(range(12))
    with pytest.raises(replay.BadQuery, match="opened as of attempt 0"):
        next(replay.follow(earlier))
    assert differences(recorded(earlier), before(undisturbed[0], 12)) == []
    assert scalars(earlier) == undisturbed[1][:11]  # a number that comes after a step is sent with the next
    assert [e["how"] for e in trace.endings.values()] == ["detached"]
    assert list(earlier.endings) == ([0] if how == "the training" else [])


@pytest.fixture(scope="module")
def twice(tmp_path_factory, undisturbed):
    """Steps 0 to 11, from 8 to 14, and from 5 to 19, each attempt sealed; the second by another plan."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("twice")
    training = Training()
    for number in range(8):
        if number == 5:
            training.save(folder / "five", 5)
        training.step(number)
    training.save(folder / "eight", 8)
    record(folder / "a", range(12))
    record(folder / "a", range(8, 15), checkpoint=folder / "eight", resume=8, kinds="output")
    record(folder / "a", range(5, 20), checkpoint=folder / "five", resume=5)
    torch.set_num_threads(threads)
    return folder / "a"


def test_of_several_attempts_each_view_has_what_its_last_one_had(twice, undisturbed):
    outputs = {key: value for key, value in undisturbed[0].items() if key[2] == "output" and 8 <= key[0] < 15}
    wanted = {
        0: before(undisturbed[0], 12),
        1: before(undisturbed[0], 8) | outputs,
        2: undisturbed[0],
        None: undisturbed[0],
    }
    for attempt, records in wanted.items():
        with replay.open(twice, attempt=attempt) as trace:
            assert differences(recorded(trace), records) == [], attempt
            assert trace.count == len(records)
            assert scalars(trace) == undisturbed[1][: len(trace.steps)]
    assert list(verify(twice)) == []


def test_the_seams_are_told(twice):
    trace = replay.open(twice)
    facts = [
        tuple(one[name] for name in ("attempt", "first_step", "last_step", "steps", "superseded"))
        for one in trace.attempts
    ]
    shown = CliRunner().invoke(main, ["info", str(twice)]).output

    assert facts == [(0, 0, 11, 12, 7), (1, 8, 14, 7, 7), (2, 5, 19, 15, 0)]
    assert [one["ended"]["how"] for one in trace.attempts] == ["detached"] * 3
    assert "attempt 1: steps 8 to 14, of which 7 are superseded, ended: detached" in shown
    assert any("by another plan: kinds" in note["note"] for note in trace.notes)
    assert len(trace.attempts[1]["plan"]["kinds"]) == 1


def test_commands_show_an_earlier_attempt(twice):
    def answer(*arguments: str) -> Any:
        result = CliRunner().invoke(main, [arguments[0], str(twice), *arguments[1:]])
        assert result.exit_code == 0, result.output
        return json.loads(result.output)

    query = "select max(step) as last, count(distinct step) as n from records"
    assert answer("sql", query, "--json") == [{"last": 19, "n": 20}]
    assert answer("sql", query, "--attempt", "0", "--json") == [{"last": 11, "n": 12}]
    assert answer("sql", query, "--attempt", "1", "--json") == [{"last": 14, "n": 15}]
    assert answer("first", "step >= 8", "--attempt", "1", "--json")["kind"] == "output"
    refused = CliRunner().invoke(main, ["info", str(twice), "--attempt", "3"])
    assert (refused.exit_code, "it has the attempts 0 to 2" in refused.output) == (2, True)


@pytest.mark.parametrize(
    ("attempts", "note"),
    [
        ("0", "only in B: 8 steps from 12 to 19"),
        (",0", "only in A: 8 steps from 12 to 19"),
        ("0,1", "only in B: 3 steps from 12 to 14"),
    ],
)
def test_attempts_of_a_trace_are_compared_with_each_other(twice, attempts, note):
    done = CliRunner().invoke(
        main, ["diff", str(twice), str(twice), *("--kinds", "output", "--attempt", attempts, "--json")]
    )

    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert found["compared"] == 12 * 3
    assert found["notes"] == [note]


def test_other_programs_are_told_which_attempt_a_row_is_of(twice, undisturbed):
    import zarr

    stream = zarr.open_group(str(twice / "rank-00000/tensors.zarr"), mode="r")["0/output"]
    steps = [*range(12), *range(8, 15), *range(5, 20)]

    assert stream["step"][:].tolist() == steps
    assert stream["attempt"][:].tolist() == [0] * 12 + [1] * 7 + [2] * 15
    for step, row in zip(steps, stream["data"][:], strict=True):
        assert row.tobytes() == undisturbed[0][step, "0", "output", 0, ""]


@pytest.mark.parametrize(
    ("store", "compression"), [("hdf5", None), pytest.param("zarr", "zstd", marks=pytest.mark.slow)]
)
def test_a_conversion_keeps_the_attempts(tmp_path, twice, store, compression):
    convert(twice, tmp_path / "b", store, compression)

    for attempt in range(3):
        one, other = (replay.open(path, attempt) for path in (twice, tmp_path / "b"))
        assert differences(recorded(other), recorded(one)) == []
        (end,), (wanted,) = other.endings.values(), one.endings.values()
        assert {**end, "bytes": None} == {**wanted, "bytes": None}  # which compression changes
    assert list(verify(tmp_path / "b")) == []


def test_a_follower_reads_each_commit_once_and_after_a_seam_steps_again(tmp_path):
    path = tmp_path / "a"
    record_and_tear(path, range(6), 4)
    follower = Follower(path)

    def steps() -> list[int]:
        return [step for table in follower.read() for step in dict.fromkeys(table["step"].to_pylist())]

    assert steps() == list(range(6))
    record(path, range(4, 9), checkpoint=tmp_path / "checkpoint", resume=4)
    assert steps() == list(range(4, 9))
    assert [s for table in Follower(path).read() for s in dict.fromkeys(table["step"].to_pylist())] == [
        *range(6),
        *range(4, 9),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [False, True])
def test_a_daemon_that_was_done_with_a_trace_looks_at_it_again(tmp_path, restarted):
    path = tmp_path / "a"
    record(path, range(3))
    bench = Bench(tmp_path, "step >= 3 and layer = '0'")
    while not bench.daemon._watched or not bench.daemon._watched[path].done:
        bench.look()
    assert read_alerts(path) == []
    if restarted:
        bench.daemon.save()
        bench = Bench(tmp_path, "step >= 3 and layer = '0'")
        bench.look()
        assert bench.daemon._watched[path].done

    training = Training()
    with hookrec.attach(training.model, path, keep_free=0, resume=True) as recorder:
        training.step(3, recorder)
    bench.look(120)

    assert {(alert.layer, alert.first_step) for alert in read_alerts(path)} == {("0", 3)}


def test_the_scripts_of_the_page_do_what_it_says(tmp_path, monkeypatch):
    """The first start is preempted before step 12."""
    page = (Path(__file__).parents[1] / "docs/resume.md").read_text()
    script, reading = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = script.replace("resume=first)", "resume=first, keep_free=0)")
    monkeypatch.chdir(tmp_path)
    exec(compile(script.replace("range(first, 20)", "range(first, 12)"), "first start", "exec"), {})
    exec(compile(script, "second start", "exec"), {})

    found: dict[str, Any] = {}
    exec(compile(reading, "reading", "exec"), found)

    assert replay.open("runs/a").steps == list(range(20))
    assert [(one["first_step"], one["superseded"]) for one in found["now"].attempts] == [(0, 4), (8, 0)]
    assert found["before"].steps == list(range(12))


@pytest.mark.slow
def test_a_script_under_hookrec_run_goes_on_in_its_trace(tmp_path):
    script = str(Path(__file__).parent / "scripts/plain.py")
    for options in ([], ["--resume"], ["--resume-at", "6"]):
        command = [
            sys.executable,
            "-m",
            "hookrec",
            "run",
            "-o",
            str(tmp_path / "a"),
            "--keep-free",
            "0",
            *options,
            script,
        ]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        assert "recorded 4 steps" in ended.stderr

    trace = replay.open(tmp_path / "a")
    assert trace.steps == list(range(10))
    assert [one["superseded"] for one in trace.attempts] == [0, 2, 0]


def test_what_hookrec_run_cannot_resume_is_refused_before_the_script_begins(tmp_path):
    (tmp_path / "a/rank-00000").mkdir(parents=True)
    script = str(Path(__file__).parent / "scripts/plain.py")

    def said(*options: str) -> str:
        result = CliRunner().invoke(hookrec_main, ["run", *options, script])
        assert result.exit_code == 2
        return result.output

    assert "choose one" in said("-o", str(tmp_path / "a"), "--resume", "--resume-at", "3")
    assert "resumes nothing" in said("--idle", "--resume")
    assert "go on in it by --resume" in said("-o", str(tmp_path / "a"))


def test_true_begins_a_trace_and_goes_on_after_its_last_step(tmp_path):
    path = tmp_path / "runs/a"
    record(path, range(3), resume=True)
    assert not (path / "rank-00000/attempts.jsonl").exists()

    model = Training()
    with hookrec.attach(model.model, path, keep_free=0, resume=True) as recorder:
        assert (recorder.steps, recorder.first_step) == (3, 3)
        model.step(3, recorder)
        assert recorder.steps == 4

    trace = replay.open(path)
    assert trace.steps == [0, 1, 2, 3]
    assert [one["superseded"] for one in trace.attempts] == [0, 0]
    assert trace.silent == []


def test_an_attempt_that_records_nothing_leaves_what_counts(tmp_path):
    path = tmp_path / "a"
    record(path, range(6))
    end, records = replay.open(path).endings, recorded(replay.open(path))

    hookrec.attach(Training().model, path, keep_free=0, resume=2).detach()

    trace = replay.open(path)
    assert trace.steps == list(range(6))
    assert trace.endings == end
    assert recorded(trace) == records
    assert len(trace.attempts) == 1
    assert list(verify(path)) == []


def take_up_and_die(path: Path) -> None:
    """Begin an attempt; both are gone before it has a commit."""
    recorder = hookrec.attach(Training().model, path, keep_free=0, resume=2, restart=0)
    recorder._recording._writer._process.kill()
    recorder._recording._writer._process.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder.detach()


@pytest.mark.parametrize(
    "by",
    [
        "hookrec recover",
        pytest.param("an attempt", marks=pytest.mark.slow),
        pytest.param("the daemon", marks=pytest.mark.slow),
    ],
)
def test_the_ending_of_an_attempt_outlives_later_ones_that_were_killed_before_a_commit(tmp_path, by):
    path = tmp_path / "a"
    record(path, range(6))
    rank, records = path / "rank-00000", recorded(replay.open(path))
    end, there = (rank / "end.json").read_bytes(), {file.name for file in rank.iterdir()}

    take_up_and_die(path)
    if by != "hookrec recover":
        take_up_and_die(path)
    assert replay.open(path).status == "torn"
    if by == "an attempt":
        hookrec.attach(Training().model, path, keep_free=0, resume=2).detach()
    elif by == "the daemon":
        _seal(rank, Journal())
    else:
        assert CliRunner().invoke(hookrec_main, ["recover", str(path)]).exit_code == 0

    assert (rank / "end.json").read_bytes() == end
    assert {name for name in (file.name for file in rank.iterdir()) if name.endswith(".json")} <= there
    assert (recorded(replay.open(path)), list(verify(path))) == (records, [])


@pytest.mark.slow
def test_an_attempt_that_commits_knows_the_ending_before_those_that_were_killed(tmp_path):
    path = tmp_path / "a"
    record(path, range(6), save_at=2)
    end = replay.open(path).endings[0]
    take_up_and_die(path)

    record(path, range(2, 4), checkpoint=tmp_path / "checkpoint", resume=2)

    trace = replay.open(path)
    assert [one["ended"] for one in trace.attempts] == [end, trace.endings[0]]
    assert trace.endings[0]["steps"] == 4
    assert list((path / "rank-00000").glob("end-*")) == []


@pytest.mark.slow
def test_a_step_beyond_the_last_leaves_a_gap_and_one_at_zero_supersedes_all(tmp_path):
    path, model = tmp_path / "a", Training()
    record(path, range(2))
    with hookrec.attach(model.model, path, keep_free=0, resume=10, every=2):
        model.step(10)
        model.step(11)
    assert replay.open(path).steps == [0, 1, 10]
    with hookrec.attach(model.model, path, keep_free=0, resume=0):
        model.step(0)

    trace = replay.open(path)
    assert trace.steps == [0]
    assert [replay.open(path, attempt=n).steps for n in range(3)] == [[0, 1], [0, 1, 10], [0]]


@pytest.mark.slow
def test_a_model_that_changed_has_new_streams_and_its_tensors_are_right(tmp_path):
    path, model = tmp_path / "a", Training(width=16)
    record(path, range(3))
    with hookrec.attach(model.model, path, keep_free=0, resume=2) as recorder:
        model.step(2, recorder)

    trace = replay.open(path)
    assert trace.tensor(1, "0").shape == (4, 8)
    assert trace.tensor(2, "0").shape == (4, 16)
    assert replay.open(path, attempt=0).tensor(2, "0").shape == (4, 8)
    assert trace.steps == [0, 1, 2]
    assert list(verify(path)) == []


@pytest.mark.slow
def test_tensors_that_a_quota_dropped_stay_dropped_and_new_ones_are_there(tmp_path, undisturbed):
    path = tmp_path / "a"
    record(path, range(12), save_at=8)
    rank = path / "rank-00000"
    drop(rank, shards(rank)[:2], "the quota of 1 bytes", "2026-12-02T12:00:00.000+00:00")

    record(path, range(8, 20), checkpoint=tmp_path / "checkpoint", resume=8)

    trace = replay.open(path)
    assert list(verify(path)) == []
    kept = {record["step"] for record in trace.records("0", "output", where="kept").to_pylist()}
    assert kept == set(range(8, 20))
    assert differences(recorded(trace), {k: undisturbed[0][k] for k in recorded(trace)}) == []
    attributes = json.loads((rank / "tensors.zarr/0/output/data/zarr.json").read_text())["attributes"]
    assert attributes["dropped_rows"] > 0


@pytest.mark.slow
def test_triggers_fire_again_in_another_attempt(tmp_path):
    path, model = tmp_path / "a", Training()
    flight = {"flight": 1, "after": 0, "triggers": ["step == 4"], "keep_free": 0}
    for first in (0, 2):
        with hookrec.attach(model.model, path, resume=first, **flight) as recorder:
            for number in range(first, 7):
                model.step(number, recorder)

    trace = replay.open(path)
    assert [(line["step"], line.get("attempt", 0)) for line in trace.triggers] == [(4, 1)]
    assert [line["step"] for line in replay.open(path, attempt=0).triggers] == [4]
    assert {record["step"] for record in trace.records(where="kept").to_pylist()} == {3, 4}
    assert list(verify(path)) == []


@pytest.mark.slow
def test_another_writer_goes_on_with_the_attempt(tmp_path, undisturbed):
    path, training = tmp_path / "a", Training()
    record(path, range(12), save_at=8)
    training.load(tmp_path / "checkpoint")
    with (
        pytest.warns(hookrec.HookrecWarning, match="another goes on"),
        hookrec.attach(training.model, path, keep_free=0, resume=8) as recorder,
    ):
        for number in range(8, 20):
            if number == 13:
                recorder._recording._writer._process.kill()
            training.step(number, recorder)

    trace = replay.open(path)
    assert differences(recorded(trace), undisturbed[0]) == []
    assert scalars(trace) == undisturbed[1]
    assert len(trace.attempts) == 2
    assert list(verify(path)) == []


@pytest.fixture(scope="module")
def torn(tmp_path_factory):
    path = tmp_path_factory.mktemp("torn") / "a"
    record_and_tear(path, range(3), 0)
    return path


@pytest.mark.parametrize(
    ("case", "options", "words"),
    [
        ("another store", {"store": "hdf5"}, "in the store 'zarr'"),
        ("more ranks", {}, "recorded by 1 process, and this training has 2"),
        ("a damaged log", {}, "it is damaged: .* `replay verify"),
        pytest.param("a damaged table", {}, "it is damaged: .* `replay verify", marks=pytest.mark.slow),
        pytest.param("a newer version", {}, "version 99", marks=pytest.mark.slow),
        ("somebody writes it", {}, "another process writes to it"),
    ],
)
def test_what_cannot_be_resumed_is_refused_and_stays_as_it_was(tmp_path, monkeypatch, torn, case, options, words):
    path = Path(shutil.copytree(torn, tmp_path / "a"))
    rank = path / "rank-00000"
    monkeypatch.setattr("hookrec.recorder._WAIT_S", 0.2)
    with contextlib.ExitStack() as stack:
        if case == "more ranks":
            monkeypatch.setenv("RANK", "0")
            monkeypatch.setenv("WORLD_SIZE", "2")
        elif case == "a damaged log":
            data = bytearray((rank / "records-00000.arrows").read_bytes())
            data[len(data) // 2] ^= 0xFF
            (rank / "records-00000.arrows").write_bytes(data)
        elif case == "a damaged table":
            (rank / "streams.jsonl").write_text("{}\n")
        elif case == "a newer version":
            identity = json.loads((path / "trace.json").read_text())
            (path / "trace.json").write_text(json.dumps({**identity, "version": 99}))
        elif case == "somebody writes it":
            stack.enter_context(locked(rank))
        there = files_in(path)

        with pytest.raises(hookrec.AttachError, match=words):
            hookrec.attach(Training().model, path, keep_free=0, resume=2, **options)

        assert files_in(path) == there


@pytest.mark.slow
def test_each_rank_goes_on_in_its_own_folder_from_a_step_that_all_are_told(tmp_path, monkeypatch):
    path = tmp_path / "a"
    monkeypatch.setenv("WORLD_SIZE", "2")

    def rank(number: int, steps: range, **options: Any) -> None:
        monkeypatch.setenv("RANK", str(number))
        training = Training()
        with hookrec.attach(training.model, path, keep_free=0, **options) as recorder:
            for step in steps:
                training.step(step, recorder)

    rank(0, range(4), resume=True)
    rank(1, range(3), resume=True)
    with pytest.raises(hookrec.AttachError, match="Say where the training goes on, by resume=STEP"):
        rank(1, range(0), resume=True)
    rank(1, range(2, 6), resume=2)
    live = replay.open(path)
    assert live.steps == list(range(6))
    assert live.tensor(3, "0", rank=0).shape == (4, 8)
    rank(0, range(2, 6), resume=2)

    trace = replay.open(path)
    assert [(one["rank"], one["attempt"], one["superseded"]) for one in trace.attempts] == [
        *((0, 0, 2), (0, 1, 0), (1, 0, 1), (1, 1, 0)),
    ]
    assert trace.count == 2 * 6 * 6
    assert replay.open(path, attempt=0).count == (4 + 3) * 6
    assert list(verify(path)) == []


@pytest.mark.slow
def test_a_trace_that_is_open_sees_the_seam_when_it_is_refreshed(tmp_path):
    path = tmp_path / "a"
    record(path, range(6), save_at=4)
    trace = replay.open(path)
    old = trace.tensor(4, "0")
    training = Training(width=8)  # at its beginning, so that step 4 is another one

    with hookrec.attach(training.model, path, keep_free=0, resume=4) as recorder:
        training.step(4, recorder)
        wait_for(path, 5)
        assert trace.tensor(5, "0").shape == (4, 8)  # as long as nobody asks for news
        for _ in range(1000):
            if trace.refresh().steps == list(range(5)):
                break
            time.sleep(0.01)
        assert trace.steps == list(range(5))
        assert trace.status == "live"
        assert trace.tensor(4, "0").tobytes() != old.tobytes()
    assert trace.refresh().status == "sealed"
    assert replay.open(path, attempt=0).tensor(4, "0").tobytes() == old.tobytes()


@pytest.mark.parametrize("resume", [-1, None, "1000", 1.5, 2**62])
def test_what_is_no_step_is_refused(tmp_path, resume):
    with pytest.raises(hookrec.AttachError, match="it takes the step that comes next"):
        hookrec.attach(Training().model, tmp_path / "a", resume=resume)
    assert not (tmp_path / "a").exists()


def test_without_resume_a_trace_is_refused_and_the_message_names_the_way(torn):
    with pytest.raises(hookrec.AttachError, match="resume=True goes on in it"):
        hookrec.attach(Training().model, torn)
    with pytest.raises(hookrec.AttachError, match="is no trace"):
        hookrec.attach(Training().model, torn.parent, resume=True)


def test_which_records_count_is_what_a_naive_model_says():
    """Each attempt in turn throws away what is there from its first step on, and adds its own."""
    rng = random.Random(0)
    for _ in range(300):
        attempts = [Attempt(n, rng.randrange(12), 2 * n, "", {}, {}, None) for n in range(1, rng.randrange(1, 6))]
        ran = {0: range(rng.randrange(12))}
        ran |= {a.number: range(a.first_step, a.first_step + rng.randrange(8)) for a in attempts}
        for shown in range(len(ran)):
            there: dict[int, int] = {}
            for number in range(shown + 1):
                if number:
                    there = {step: by for step, by in there.items() if step < ran[number].start}
                there |= dict.fromkeys(ran[number], number)
            found = Attempts(attempts, shown)
            got = {step: number for number, steps in ran.items() for step in steps if found.shows(number, step)}
            assert got == there
            pairs = np.array([(number, step) for number, steps in ran.items() for step in steps], np.int64).reshape(
                -1, 2
            )
            assert found.mask(pairs[:, 0], pairs[:, 1]).tolist() == [found.shows(n, s) for n, s in pairs.tolist()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_attempts_that_are_killed_at_random_moments_lose_and_double_nothing(tmp_path, undisturbed, seed, store):
    """Each goes on from the last checkpoint, of which there is one every third step, until one comes to the end."""
    rng, path = random.Random(seed), tmp_path / "a"
    for _ in range(6):
        process = subprocess.Popen([sys.executable, "-c", RESTARTS, str(path), store])
        for _ in range(500):
            if process.poll() is not None or (path / "rank-00000/attempts.jsonl").exists() or committed(path):
                break
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.4))
        process.kill()
        process.wait()
        if rng.random() < 0.5:  # else the next one meets the writer of this one
            time.sleep(1)
        trace = replay.open(path) if (path / "trace.json").exists() and any(path.glob("rank-*")) else None
        if trace is not None and trace.steps:
            got = recorded(trace)
            assert differences(got, {k: v for k, v in undisturbed[0].items() if k in got}) == []
            assert trace.steps == list(range(len(trace.steps)))
    subprocess.run([sys.executable, "-c", RESTARTS, str(path), store, "20"], check=True, timeout=300)

    trace = replay.open(path)
    assert (trace.status, trace.steps) == ("sealed", list(range(20)))
    assert differences(recorded(trace), undisturbed[0]) == []
    assert scalars(trace) == undisturbed[1]
    assert list(verify(path)) == []


RESTARTS = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {os.fspath(Path(__file__).parent.parent)!r})
import torch
torch.set_num_threads(1)
import hookrec
from tests.test_resume import Training
path, store = Path(sys.argv[1]), sys.argv[2]
training, checkpoint = Training(), path.parent / "checkpoint"
first = training.load(checkpoint) if checkpoint.exists() else 0
with hookrec.attach(training.model, path, keep_free=0, resume=first, store=store) as recorder:
    for number in range(first, 20):
        if number % 3 == 0:
            training.save(checkpoint.with_suffix(".new"), recorder.steps)
            checkpoint.with_suffix(".new").replace(checkpoint)
        training.step(number, recorder)
        if len(sys.argv) < 4:
            time.sleep(0.03)
"""
