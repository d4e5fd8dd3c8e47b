"""The writer process may die at any moment: the training does not notice, and another loses and doubles nothing."""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import hookrec
import replay
from replay.verify import verify
from tests.oracle import differences, recorded

pytestmark = pytest.mark.usefixtures("one_thread")


def net(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(inplace=True), nn.Linear(width, 8))


def train(recorder, model: nn.Module, steps: int, before_step=lambda step: None, shapes: int = 1) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for step in range(steps):
        before_step(step)
        optimizer.zero_grad()
        loss = model(torch.randn(64 + step % shapes, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if recorder is not None:
            recorder.log(loss=losses[-1])
    return losses


def record(path: Path, steps: int, width: int = 32, **options) -> tuple[list[float], list[str]]:
    """Train under a recorder; return the losses and the warnings."""
    before_step = options.pop("before_step", lambda recorder, step: None)
    shapes = options.pop("shapes", 1)
    model = net(width)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with hookrec.attach(model, path, **{"keep_free": 0, **options}) as recorder:
            losses = train(recorder, model, steps, lambda step: before_step(recorder, step), shapes)
    return losses, [str(warning.message) for warning in warned]


def process_of(recorder: hookrec.Recorder):
    return recorder._recording._writer._process


def kill_at(step: int):
    """Kill the writer before a step, and wait until it is gone."""

    def before_step(recorder, now: int) -> None:
        if now == step:
            process_of(recorder).kill()
            process_of(recorder).wait()

    return before_step


def assert_whole(path: Path, steps: int, reference: Path) -> None:
    """Each step is there once, as in a recording that nobody disturbed, with its loss, and the trace is sealed."""
    trace, undisturbed = replay.open(path), replay.open(reference)
    assert trace.status == "sealed"
    assert trace.endings[0]["how"] == "detached"
    assert trace.steps == list(range(steps))
    assert trace.count == undisturbed.count
    losses = [row for row in trace.scalars().to_pylist() if row["name"] == "loss"]
    assert [row["step"] for row in losses] == list(range(steps))
    assert differences(recorded(trace), recorded(undisturbed)) == []


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("restart") / "reference"
    losses, warned = record(path, 300)
    assert warned == []
    return path, losses


def _kill_at_a_random_moment(tmp_path, reference, seed: int) -> None:
    path, losses = reference
    delay = random.Random(seed).uniform(0, 0.5)
    timers = []

    def before_step(recorder, step: int) -> None:
        if step == 0:
            timers.append(threading.Timer(delay, process_of(recorder).kill))
            timers[0].start()

    got, warned = record(tmp_path / "a", 300, before_step=before_step)
    timers[0].join()

    assert got == losses
    assert len(warned) <= 1, warned
    assert_whole(tmp_path / "a", 300, path)


@pytest.mark.parametrize("seed", range(5))
def test_a_writer_killed_at_a_random_moment_costs_nothing(tmp_path, reference, seed):
    _kill_at_a_random_moment(tmp_path, reference, seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(5, 105))
def test_a_writer_killed_at_any_of_many_random_moments_costs_nothing(tmp_path, reference, seed):
    _kill_at_a_random_moment(tmp_path, reference, seed)


def test_another_writer_goes_on_and_the_user_is_told_once(tmp_path, reference):
    path, losses = reference

    got, warned = record(tmp_path / "a", 300, before_step=kill_at(150))

    assert got == losses
    assert len(warned) == 1
    assert "killed by SIGKILL" in warned[0]
    assert "another goes on" in warned[0]
    assert_whole(tmp_path / "a", 300, path)
    assert any("another goes on" in note["note"] for note in replay.open(tmp_path / "a").notes)


def test_a_writer_that_dies_after_the_last_step_is_followed_by_one_that_seals(tmp_path, reference):
    path, losses = reference
    model = net(32)
    recorder = hookrec.attach(model, tmp_path / "a", keep_free=0)
    process_of(recorder).send_signal(signal.SIGSTOP)
    got = train(recorder, model, 300)
    timer = threading.Timer(0.3, process_of(recorder).kill)
    timer.start()
    with pytest.warns(hookrec.HookrecWarning, match="another goes on"):
        recorder.detach()
    timer.join()

    assert got == losses
    assert_whole(tmp_path / "a", 300, path)


@pytest.mark.parametrize("restart", [0, 1])
def test_when_no_other_may_be_started_the_training_goes_on_with_one_warning_more(tmp_path, reference, restart):
    def before_step(recorder, step: int) -> None:
        if step in (50, 100):
            process_of(recorder).kill()
            process_of(recorder).wait()

    losses, warned = record(tmp_path / "a", 300, restart=restart, before_step=before_step)

    assert losses == reference[1]
    stopped = [message for message in warned if "the training goes on" in message]
    assert len(stopped) == 1
    assert "killed by SIGKILL" in stopped[0]
    trace = replay.open(tmp_path / "a")
    deadline = time.monotonic() + 30
    while trace.status == "live" and time.monotonic() < deadline:
        time.sleep(0.01)  # a process that was killed holds its lock until the system has taken it down
    assert trace.status == "torn"
    assert trace.steps == list(range(len(trace.steps)))
    assert len(trace.steps) <= 50 * (1 + restart)


def test_many_writers_may_follow_each_other(tmp_path, reference):
    def before_step(recorder, step: int) -> None:
        if step % 100 == 50:
            process_of(recorder).kill()

    losses, _ = record(tmp_path / "a", 300, restart=3, before_step=before_step)

    assert losses == reference[1]
    assert_whole(tmp_path / "a", 300, reference[0])


def test_another_writer_goes_on_in_the_places_that_shapes_share(tmp_path):
    """Packed tensors of 2 KB to 3 KB, and, since they are larger than 64 KB, such on page borders."""
    record(tmp_path / "reference", 120, width=256, shapes=30)

    def before_step(recorder, step: int) -> None:
        if step in (20, 50, 80):
            process_of(recorder).kill()  # in the middle of what follows

    record(tmp_path / "a", 120, width=256, shapes=30, restart=3, before_step=before_step)

    assert_whole(tmp_path / "a", 120, tmp_path / "reference")
    assert list(verify(tmp_path / "a")) == []


def test_a_step_that_was_committed_and_not_acknowledged_is_not_doubled(tmp_path):
    """As if the writer had been killed between the commit and its acknowledgement."""
    record(tmp_path / "reference", 20)

    def before_step(recorder, step: int) -> None:
        control = recorder._recording._ring.control
        if step == 5:
            for _ in range(200):
                if control.committed == 5:
                    break
                time.sleep(0.02)
            assert control.committed == 5
            process_of(recorder).kill()
            process_of(recorder).wait()
            control.committed = 2

    record(tmp_path / "a", 20, before_step=before_step)

    assert_whole(tmp_path / "a", 20, tmp_path / "reference")


def test_lines_and_batches_that_were_torn_are_cut_off(tmp_path):
    record(tmp_path / "reference", 20)

    def before_step(recorder, step: int) -> None:
        if step == 5:
            time.sleep(0.3)
            process_of(recorder).kill()
            process_of(recorder).wait()
            for file in (tmp_path / "a/rank-00000").glob("*"):
                if file.suffix in (".jsonl", ".arrows"):
                    with file.open("ab") as torn:
                        torn.write(b'{"torn')

    record(tmp_path / "a", 20, before_step=before_step)

    assert_whole(tmp_path / "a", 20, tmp_path / "reference")
    for name in ("streams", "scalars"):
        for line in (tmp_path / f"a/rank-00000/{name}.jsonl").read_text().splitlines():
            json.loads(line)


@pytest.mark.parametrize("ring", ["1MiB", "8MiB"])
def test_of_a_step_that_the_ring_could_not_keep_the_statistics_stay(tmp_path, ring):
    """Six tensors of 256 KB and two of 2 KB a step: in the larger ring nothing is lost."""
    record(tmp_path / "reference", 60, width=1024)

    def before_step(recorder, step: int) -> None:
        if step in (10, 30):
            process_of(recorder).kill()  # in the middle of what follows

    losses, _ = record(tmp_path / "a", 60, width=1024, ring=ring, restart=2, before_step=before_step)

    trace, undisturbed = replay.open(tmp_path / "a"), replay.open(tmp_path / "reference")
    assert len(losses) == 60
    assert trace.steps == list(range(60))
    assert trace.count == undisturbed.count
    got = recorded(trace)
    want = {key: value for key, value in recorded(undisturbed).items() if key in got}
    assert differences(got, want) == []
    assert set(trace.not_kept) <= ({"lost: the writer process died before the commit"} if ring == "1MiB" else set())


def test_a_writer_that_gives_up_is_not_followed(tmp_path):
    def before_step(recorder, step: int) -> None:
        if step == 5:
            resource.prlimit(process_of(recorder).pid, resource.RLIMIT_FSIZE, (40_000, 40_000))

    _, warned = record(tmp_path / "a", 300, before_step=before_step)

    assert not any("another goes on" in message for message in warned)


def test_another_writer_keeps_to_the_limits(tmp_path):
    """A step has 36,864 bytes; those that the first writer has written count."""

    def before_step(recorder, step: int) -> None:
        time.sleep(0.05)
        if step == 5:
            process_of(recorder).kill()

    _, warned = record(tmp_path / "a", 20, max_bytes=8 * 36_864, before_step=before_step)

    trace = replay.open(tmp_path / "a")
    assert any("only statistics" in message for message in warned)
    assert trace.steps == list(range(20))
    assert trace.nbytes < 15 * 36_864
    assert not any(trace.records(steps=19)["kept"].to_pylist())


def test_both_may_be_killed_and_what_was_committed_stays(tmp_path):
    code = f"""
import os, signal, sys, time
sys.path.insert(0, {os.fspath(Path(__file__).parent.parent)!r})
import hookrec
from tests.test_restart import net, process_of, train
model = net(32)
recorder = hookrec.attach(model, sys.argv[1], keep_free=0)
train(recorder, model, 50)
time.sleep(0.5)
process_of(recorder).kill()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True)

    trace = replay.open(tmp_path / "a")
    deadline = time.monotonic() + 30
    while trace.status == "live" and time.monotonic() < deadline:
        time.sleep(0.01)  # a process that was killed holds its lock until the system has taken it down
    assert trace.status == "torn"
    assert trace.steps == list(range(50))
    assert recorded(trace)


@pytest.mark.parametrize(
    ("tensors", "killed_at"),
    [(True, None), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, None), (True, 9), (False, 5)))],
)
@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_tensors_may_be_switched_off_and_on_again_and_again(tmp_path, tensors, killed_at, store):
    """Four lengths, of which two share a place; they are switched every fourth step."""
    path, model = tmp_path / "a", nn.Sequential(nn.Identity())
    kept = [step for step in range(24) if (step // 4 % 2 == 0) == tensors]
    with (
        contextlib.nullcontext()
        if killed_at is None
        else pytest.warns(hookrec.HookrecWarning, match="another goes on"),
        hookrec.attach(
            model, path, store=store, keep_free=0, kinds="output", clock="manual", tensors=tensors
        ) as recorder,
    ):
        for step in range(24):
            if step == killed_at:
                process_of(recorder).kill()
                process_of(recorder).wait()
            if step % 4 == 3:
                wanted = step + 1 in kept
                recorder.at_boundary(lambda wanted=wanted: recorder.change({"tensors": wanted}))
            model(torch.full((1 + step % 4, 3), float(step)))
            recorder.step()

    trace = replay.open(path)
    assert list(verify(path)) == []
    assert trace.steps == list(range(24))
    assert trace.records(where="kept")["step"].to_pylist() == kept
    assert all(trace.tensor(step, "0").tolist() == [[step] * 3] * (1 + step % 4) for step in kept)


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
@pytest.mark.parametrize("deed", ["set then kill", "set and kill before the commit", "kill then set"])
def test_a_change_of_the_plan_and_a_death_of_the_writer_lose_nothing(tmp_path, deed, store):
    """Tensors are asked for from step 6 on, so all streams begin anew there."""
    record(tmp_path / "reference", 12, store=store)

    def before_step(recorder, step: int) -> None:
        if step == 5:
            recorder.at_boundary(lambda: recorder.change({"tensors": True}))
        if step == {"set then kill": 9, "kill then set": 3}.get(deed):
            time.sleep(0.3)
            process_of(recorder).kill()
            process_of(recorder).wait()
        if deed == "set and kill before the commit":
            if step == 3:
                time.sleep(0.3)
                process_of(recorder).send_signal(signal.SIGSTOP)
            if step == 8:
                process_of(recorder).kill()
                process_of(recorder).wait()

    losses, warned = record(tmp_path / "a", 12, tensors=False, store=store, before_step=before_step)

    assert len(warned) == 1, warned
    trace, undisturbed = replay.open(tmp_path / "a"), replay.open(tmp_path / "reference")
    assert (trace.status, trace.steps, trace.count) == ("sealed", list(range(12)), undisturbed.count)
    assert {record["step"] for record in trace.records(where="kept").to_pylist()} == set(range(6, 12))
    assert trace.not_kept == {"statistics only, as the plan says": undisturbed.count // 2}
    whole = recorded(undisturbed)
    assert differences(recorded(trace), {key: whole[key] for key in recorded(trace)}) == []
    assert len(losses) == 12


def test_tensors_that_are_switched_off_before_the_commit_of_earlier_ones_are_kept(tmp_path):
    def before_step(recorder, step: int) -> None:
        if step == 3:
            time.sleep(0.3)
            process_of(recorder).send_signal(signal.SIGSTOP)
        if step == 5:
            recorder.at_boundary(lambda: recorder.change({"tensors": False}))
        if step == 8:
            process_of(recorder).kill()
            process_of(recorder).wait()

    record(tmp_path / "a", 12, shapes=12, before_step=before_step)

    trace = replay.open(tmp_path / "a")
    assert trace.steps == list(range(12))
    assert {record["step"] for record in trace.records(where="kept").to_pylist()} == set(range(6))
    assert set(trace.not_kept) == {"statistics only, as the plan says"}


def test_notes_that_say_the_same_again_are_kept_by_another_writer(tmp_path):
    wanted = {2: 2, 9: 1, 12: 2}

    def before_step(recorder, step: int) -> None:
        if step in wanted:
            recorder.at_boundary(lambda: recorder.change({"every": wanted[step]}))
        if step == 6:
            time.sleep(0.3)
            process_of(recorder).kill()
            process_of(recorder).wait()

    record(tmp_path / "a", 20, before_step=before_step)

    notes = [note["note"] for note in replay.open(tmp_path / "a").notes if "plan was changed" in note["note"]]
    assert [note.partition(": ")[2] for note in notes] == ["every 1 -> 2", "every 2 -> 1", "every 1 -> 2"]


def test_notes_that_were_written_and_not_acknowledged_are_not_doubled(tmp_path):
    def before_step(recorder, step: int) -> None:
        control = recorder._recording._ring.control
        if step == 2:
            recorder.at_boundary(lambda: recorder.change({"containers": True}))
        if step == 5:
            time.sleep(0.5)
            assert control.committed == 5
            process_of(recorder).kill()
            process_of(recorder).wait()
            control.committed = 1

    record(tmp_path / "a", 10, before_step=before_step)

    notes = [note["note"] for note in replay.open(tmp_path / "a").notes]
    assert sum("plan was changed" in note for note in notes) == 1


def test_the_death_of_a_writer_that_fails_by_itself_is_told_in_its_own_words(tmp_path):
    """It has closed its socket and takes a while to end."""
    process = "import sys, time; time.sleep(0.3); print('out of luck', file=sys.stderr)"

    def before_step(recorder, step: int) -> None:
        if step == 5:
            writer = recorder._recording._writer
            process_of(recorder).kill()
            process_of(recorder).wait()
            writer._process = subprocess.Popen([sys.executable, "-c", process], stderr=writer._words)

    _, warned = record(tmp_path / "a", 10, before_step=before_step)

    assert len(warned) == 1
    assert "out of luck" in warned[0]
    assert "SIGKILL" not in warned[0]


def test_a_number_of_a_stream_that_is_not_the_next_ends_the_recording_and_mislabels_nothing(tmp_path):
    def before_step(recorder, step: int) -> None:
        if step == 5:
            time.sleep(0.3)
            for facts in list(recorder._recording._ring.streams.values())[-1:]:
                recorder._recording._ring.streams["skipped"] = {**facts, "id": facts["id"] + 1 + 1}
        if step == 6:
            time.sleep(0.3)

    _, warned = record(tmp_path / "a", 20, before_step=before_step)

    assert len(warned) == 1
    assert "was announced where stream" in warned[0]
    trace = replay.open(tmp_path / "a")
    assert trace.steps == list(range(5))
    assert trace.endings[0]["how"] == "failed"
    assert "was announced where stream" in trace.endings[0]["detail"]
