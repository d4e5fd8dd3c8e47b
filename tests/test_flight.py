"""Flight mode: the tensors around a trigger are in the trace, to the bit, and no others."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hookrec
import replay
from hookrec.flight import Fate, Flight, Part, ring_for, steps_that_fit
from tests.oracle import Oracle, differences, leaves, recorded
from tests.test_faults import ended

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDS = 6


def net(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(inplace=True), nn.Linear(width, 4))


def train(model: nn.Module, steps: int, *, nan_at=(), watching=None, recorder=None, loss_of=None, before_step=None):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for step in range(steps):
        if before_step is not None:
            before_step(step)
        optimizer.zero_grad()
        x = torch.randn(32, 8)
        weight = model[0].weight.detach().clone()
        if step in nan_at:
            x[3, 2] = float("nan")
        loss = model(x).pow(2).mean()
        loss.backward()
        if step in nan_at:
            optimizer.zero_grad()
        optimizer.step()
        assert torch.equal(model[0].weight, weight) == (step in nan_at)
        losses.append(loss.item())
        if recorder is not None and loss_of is not None:
            recorder.log(loss=loss_of(step))
        if watching is not None:
            watching.step()
    return losses


def steps_kept(path: Path) -> list[int]:
    """The steps with tensors; each must have all of them."""
    trace = ended(path)
    steps = sorted(set(trace.records(where="kept")["step"].to_pylist()))
    assert all(trace.records(steps=step)["kept"].to_pylist() == [True] * RECORDS for step in steps)
    return steps


def assert_flight(path: Path, steps: int, wanted: list[int]) -> None:
    """All statistics are there, and the tensors of some steps, equal to clones; checksums are looked at as well."""
    trace = ended(path)
    assert trace.steps == list(range(steps))
    assert trace.count == steps * RECORDS
    assert steps_kept(path) == wanted


def _nan_in_the_middle(path: Path, steps: int) -> None:
    at = steps // 2
    oracle = Oracle(leaves(twin := net()))
    train(twin, steps, nan_at=[at], watching=oracle)
    model = net()
    with hookrec.attach(model, path, flight=5, after=5, keep_free=0):
        train(model, steps, nan_at=[at])

    kept = list(range(at - 5, at + 6))
    assert_flight(path, steps, kept)
    trace = replay.open(path)
    wanted = {key: value for key, value in oracle.records.items() if key[0] in kept}
    assert differences(recorded(trace), wanted) == []
    (line,) = trace.triggers
    assert (line["step"], line["by"], line["why"], line["first_step"]) == (at, "condition", "n_nan > 0", at - 5)
    assert "layer '0', output, call 0: n_nan = 16" in line["detail"]
    assert trace.not_kept == {"flight mode: no trigger": (steps - 11) * RECORDS}


def test_the_tensors_around_a_nan_are_kept_and_no_others(tmp_path):
    _nan_in_the_middle(tmp_path / "a", 100)


@pytest.mark.slow
def test_the_tensors_around_a_nan_in_a_long_run_are_kept_and_no_others(tmp_path):
    _nan_in_the_middle(tmp_path / "a", 1000)


def test_the_training_is_the_same_bit_for_bit(tmp_path):
    bare = train(net(), 60)
    model = net()
    with hookrec.attach(model, tmp_path / "a", flight=3, keep_free=0):
        assert train(model, 60) == bare


def test_without_a_trigger_there_are_statistics_alone(tmp_path):
    model = net()
    with hookrec.attach(model, tmp_path / "a", flight=5, keep_free=0):
        train(model, 40)

    assert_flight(tmp_path / "a", 40, [])
    assert replay.open(tmp_path / "a").triggers == []


@pytest.mark.parametrize(
    ("options", "nan_at", "wanted"),
    [
        ({"flight": 2, "after": 0}, [20], [18, 19, 20]),
        ({"flight": 1, "after": 1}, [0, 39], [0, 1]),  # the second comes within the rest of the first
        ({"flight": 1, "after": 1, "trigger_rest": 5}, [0, 39], [0, 1, 38, 39]),
        ({"flight": 2, "after": 2, "trigger_rest": 0}, [10, 12], [8, 9, 10, 11, 12, 13, 14]),
        ({"flight": 2, "after": 1, "trigger_rest": 0}, range(10, 40), [8, 9, 10, 11]),  # it stays
        ({"flight": 1, "after": 0, "trigger_rest": 0, "trigger_limit": 2}, [5, 10, 15], [4, 5, 9, 10]),
        ({"flight": 1, "after": 0, "triggers": "kind == 'grad_output' and n_nan > 0"}, [7], [6, 7]),
        ({"flight": 1, "after": 0, "triggers": ["n_posinf > 0", "layer == '2' and n_nan > 0"]}, [7], [6, 7]),
        ({"flight": 1, "after": 0, "triggers": []}, [7], []),
    ],
)
def test_windows_rests_and_limits(tmp_path, options, nan_at, wanted):
    model = net()
    with hookrec.attach(model, tmp_path / "a", keep_free=0, **options):
        train(model, 40, nan_at=nan_at)

    assert_flight(tmp_path / "a", 40, wanted)


def test_steps_that_are_not_sampled_do_not_count(tmp_path):
    model = net()
    with hookrec.attach(model, tmp_path / "a", flight=2, after=1, every=10, keep_free=0) as recorder:
        train(model, 100, nan_at=[50], recorder=recorder, loss_of=float)

    assert steps_kept(tmp_path / "a") == [30, 40, 50, 60]
    assert replay.open(tmp_path / "a").steps == list(range(0, 100, 10))


@pytest.mark.parametrize("every", [1, 10])
def test_a_spike_of_the_loss_that_is_logged_after_the_step_is_a_trigger(tmp_path, every):
    model = net()
    options = {"flight": 2, "after": 1, "triggers": "loss > 3 * median(loss, 10)", "every": every, "keep_free": 0}
    with hookrec.attach(model, tmp_path / "a", **options) as recorder:
        train(model, 80, recorder=recorder, loss_of=lambda step: 50.0 if step in (5, 40) else 1.0)

    # With five values before it the first spike cannot be judged.
    assert steps_kept(tmp_path / "a") == [every * n for n in ((38, 39, 40, 41) if every == 1 else (2, 3, 4, 5))]
    (line,) = replay.open(tmp_path / "a").triggers
    assert (line["step"], line["detail"]) == (40, "loss = 50")


def test_a_spike_at_the_last_step_is_a_trigger(tmp_path):
    model = net()
    with hookrec.attach(model, tmp_path / "a", flight=2, triggers="loss > 9", keep_free=0) as recorder:
        train(model, 20, recorder=recorder, loss_of=float, before_step=lambda step: None)

    assert replay.open(tmp_path / "a").triggers[0]["step"] == 10
    model = net()
    with hookrec.attach(model, tmp_path / "b", flight=2, triggers="loss > 18", keep_free=0) as recorder:
        train(model, 20, recorder=recorder, loss_of=float)
    assert steps_kept(tmp_path / "b") == [17, 18, 19]


def test_a_number_that_is_never_logged_is_named(tmp_path):
    model = net()
    with hookrec.attach(model, tmp_path / "a", flight=1, triggers="accuracy < 0.1", keep_free=0):
        train(model, 3)

    assert "'accuracy'" in replay.open(tmp_path / "a").notes[0]["note"]


def test_the_user_may_pull_the_trigger(tmp_path):
    model = net()
    with hookrec.attach(model, tmp_path / "a", flight=2, after=1, keep_free=0) as recorder:
        train(model, 20, before_step=lambda step: recorder.trigger("I say so") if step == 11 else None)

    # Between steps it belongs to the one that ended.
    assert_flight(tmp_path / "a", 20, [8, 9, 10, 11])
    (line,) = replay.open(tmp_path / "a").triggers
    assert (line["step"], line["by"], line["why"]) == (10, "call", "I say so")


def test_without_flight_mode_a_trigger_is_a_note(tmp_path):
    model = net()
    with hookrec.attach(model, tmp_path / "a", keep_free=0) as recorder:
        train(model, 3)
        recorder.trigger("here")
    with pytest.raises(hookrec.DetachedError):
        recorder.trigger("too late")

    assert replay.open(tmp_path / "a").notes[0]["note"] == "trigger at step 2: here"


def test_an_exception_that_leaves_the_block_is_a_trigger(tmp_path):
    model = net()

    def fail(step: int) -> None:
        if step == 12:
            raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"), hookrec.attach(model, tmp_path / "a", flight=3, keep_free=0):
        train(model, 20, before_step=fail)

    assert_flight(tmp_path / "a", 12, [8, 9, 10, 11])
    (line,) = replay.open(tmp_path / "a").triggers
    assert (line["by"], line["detail"], line["first_step"]) == ("exception", "ValueError: lost", 8)


SCRIPT = """
import ctypes, os, signal, sys, time
sys.path.insert(0, sys.argv[2])
import hookrec
from tests.test_flight import net, train
model = net()
options = {{"flight": 4, "keep_free": 0, "signals": ["SIGTERM", "SIGUSR1"]}}
recorder = hookrec.attach(model, sys.argv[1], store=sys.argv[3], **options)
def last(step):
    if step == 30:
        {last}
train(model, {steps}, before_step=last)
"""


def run(path: Path, last: str, steps: int = 31) -> subprocess.CompletedProcess:
    arguments = [str(path), os.fspath(Path(__file__).parent.parent), "zarr"]
    code = SCRIPT.format(last=last, steps=steps)
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("last", "status", "how"),
    [
        ("raise ValueError('x')", 1, "exception"),
        ("os.abort()", -signal.SIGABRT, "died"),
        ("ctypes.string_at(0)", -signal.SIGSEGV, "died"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "died"),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -signal.SIGTERM, "died"),
        ("os._exit(3)", 3, "died"),
    ],
)
def test_the_last_steps_before_an_end_of_any_kind_are_kept(tmp_path, last, status, how):
    result = run(tmp_path / "a", last)

    assert result.returncode == status, result.stderr
    assert_flight(tmp_path / "a", 30, [25, 26, 27, 28, 29])
    assert replay.open(tmp_path / "a").triggers[0]["by"] == how


def test_a_signal_is_a_trigger_and_its_handler_is_called(tmp_path):
    called = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    model = net()
    with hookrec.attach(model, tmp_path / "a", flight=2, after=1, signals="SIGUSR1", keep_free=0):
        train(model, 20, before_step=lambda step: os.kill(os.getpid(), signal.SIGUSR1) if step == 11 else None)
    after = signal.signal(signal.SIGUSR1, before)

    assert called == [signal.SIGUSR1]
    assert after.__name__ == "<lambda>"
    (line,) = replay.open(tmp_path / "a").triggers
    assert (line["by"], line["why"]) == ("signal", "SIGUSR1")
    assert steps_kept(tmp_path / "a") == list(range(line["step"] - 2, line["step"] + 2))


def _kill_the_training(path: Path, store: str, seed: int) -> None:
    arguments = [str(path), os.fspath(Path(__file__).parent.parent), store]
    code = SCRIPT.format(last="print('on', flush=True)", steps=10**9)
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(np.random.default_rng(seed).uniform(0, 0.5))
    process.kill()
    process.wait()
    process.stdout.close()

    trace = ended(path)
    last = trace.steps[-1]
    assert_flight(path, last + 1, list(range(last - 4, last + 1)))
    for step in range(last - 4, last + 1):
        assert len(list(trace.select(steps=step).tensors())) == RECORDS


@pytest.mark.parametrize(("store", "seed"), [("zarr", 0), ("zarr", 1), ("hdf5", 2)])
def test_whenever_the_training_is_killed_its_last_steps_are_kept(tmp_path, store, seed):
    _kill_the_training(tmp_path / "a", store, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 103))
@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_at_many_moments_the_training_is_killed_and_its_last_steps_are_kept(tmp_path, store, seed):
    _kill_the_training(tmp_path / "a", store, seed)


@pytest.mark.parametrize(("kill_at", "nan_at"), [(15, 20), (20, 20), (22, 20), (25, 20), (30, 20)])
def test_another_writer_goes_on_in_flight_mode(tmp_path, kill_at, nan_at):
    def before_step(step: int) -> None:
        if step == kill_at:
            time.sleep(0.2)
            recorder._recording._writer._process.kill()
            recorder._recording._writer._process.wait()

    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with hookrec.attach(model, tmp_path / "a", flight=3, after=4, keep_free=0) as recorder:
            train(model, 40, nan_at=[nan_at], before_step=before_step)

    assert_flight(tmp_path / "a", 40, list(range(17, 25)))
    assert [(line["step"], line["first_step"]) for line in replay.open(tmp_path / "a").triggers] == [(20, 17)]


@pytest.mark.parametrize("when_full", ["block", "skip"])
def test_a_writer_that_stands_still_for_seconds_delays_and_loses_nothing(tmp_path, when_full):
    def before_step(step: int) -> None:
        if step == 10:
            writer = recorder._recording._writer._process
            writer.send_signal(signal.SIGSTOP)
            threading.Timer(2, writer.send_signal, [signal.SIGCONT]).start()

    model = net()
    with hookrec.attach(model, tmp_path / "a", flight=3, after=2, when_full=when_full, keep_free=0) as recorder:
        train(model, 60, nan_at=[40], before_step=before_step)

    assert_flight(tmp_path / "a", 60, [37, 38, 39, 40, 41, 42])


def test_a_ring_too_small_warns_at_once_and_holds_what_fits(tmp_path):
    """A step of this net has four tensors of 256 KB and two of 512 bytes; the ring has 4 MiB, an eighth of it spare.

    What is promised holds for conditions on logged numbers too; those on records are judged a step earlier.
    """
    model = net(2048)
    recorder = hookrec.attach(model, tmp_path / "a", flight=9, after=1, ring="4MiB", keep_free=0)
    with pytest.warns(hookrec.HookrecWarning, match=r"flight=9 .* room for 1 before .*ring='14MB'"):
        train(model, 1)
    with recorder:
        train(model, 30, nan_at=[20])

    trace = ended(tmp_path / "a")
    assert trace.count == 31 * RECORDS
    assert steps_kept(tmp_path / "a") == [19, 20, 21, 22]
    assert trace.triggers[0]["first_step"] == 19
    assert any("flight=9" in note["note"] for note in trace.notes)


@pytest.mark.parametrize("when_full", ["block", "skip"])
def test_a_step_larger_than_the_ring_never_blocks_the_training(tmp_path, when_full):
    bare = train(net(4096), 20)
    model = net(4096)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with hookrec.attach(
            model, tmp_path / "a", flight=2, after=3, ring="1MiB", when_full=when_full, keep_free=0
        ) as recorder:
            losses = train(model, 20, before_step=lambda step: recorder.trigger("now") if step == 10 else None)

    assert losses == bare
    trace = replay.open(tmp_path / "a")
    assert trace.count == 20 * RECORDS
    assert trace.steps == list(range(20))
    if when_full == "block":  # once it is triggered, a step of any size is written
        assert {11, 12} <= set(trace.records(where="kept")["step"].to_pylist())
        assert trace.not_kept["dropped: the ring was full"] > 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"flight": 0}, "from 1"),
        ({"flight": True}, "from 1"),
        ({"flight": 5, "after": -1}, "from 0"),
        ({"flight": 5, "tensors": False}, "flight mode keeps tensors"),
        ({"triggers": "n_nan > 0"}, "pass flight="),
        ({"flight": 5, "triggers": "n_nans > 0"}, "position 1"),
        ({"flight": 5, "triggers": 3}, "several"),
        ({"flight": 5, "signals": "SIGKILL"}, "SIGKILL"),
        ({"flight": 5, "trigger_limit": 0}, "trigger_limit"),
        ({"restart": -1}, "restart"),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_left(tmp_path, options, why):
    with pytest.raises(hookrec.AttachError, match=why):
        hookrec.attach(net(), tmp_path / "a", **options)

    assert not (tmp_path / "a").exists()


@given(
    before=st.integers(1, 4),
    after=st.integers(0, 4),
    steps=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=25),
    keep=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_what_is_held_goes_out_in_order_as_a_naive_model_says(before, after, steps, keep):
    """Each step has some parts, and perhaps a trigger at it, and one at the step before that is known only now."""
    flight = Flight(before, after, 1 << 40)
    due, position, fired_at = [], 0, []
    for number, (parts, at_once, late) in enumerate(steps):
        fired = [number - 1] * (late and number > 0) + [number] * at_once
        fired_at += fired
        for part in range(parts + 1):
            position += 1
            last = part == parts
            one = Part((number, part), position, 1 if parts else 0, parts > 0, number if last else None)
            due += flight.take(one, fired if last else ())
    due += flight.finish(keep=keep)

    recorded_steps = [number for number, (parts, *_) in enumerate(steps) if parts]
    if keep and recorded_steps:
        fired_at = [*fired_at, recorded_steps[-1]]
    wanted = set()
    for at in fired_at:
        wanted |= set([n for n in recorded_steps if n <= at][-before - 1 :])
        wanted |= set([n for n in recorded_steps if n > at][:after])
    assert [part.message for part, _ in due] == [
        (n, p) for n, (parts, *_) in enumerate(steps) for p in range(parts + 1)
    ]
    assert {part.message[0] for part, fate in due if fate is Fate.KEEP and part.recorded} == wanted
    assert {part.message[0] for part, fate in due if fate is not Fate.KEEP and part.recorded} == (
        set(recorded_steps) - wanted
    )


@given(
    ring=st.integers(8, 200),
    steps=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 4), st.booleans()), max_size=30),
)
@settings(max_examples=300, deadline=None)
def test_the_training_always_gets_the_room_it_needs(ring, steps):
    flight = Flight(3, 1, ring)
    out, position, gone = [], 0, 0
    for number, (nbytes, parts, fired) in enumerate(steps):
        for part in range(parts):
            nbytes = min(nbytes, ring)
            if position + nbytes - gone > ring:
                due = flight.free(position + nbytes - ring)
                out += due
                gone = due[-1][0].position
            assert position + nbytes - gone <= ring
            position += nbytes
            last = part == parts - 1
            due = flight.take(
                Part((number, part), position, nbytes, True, number if last else None), [number] * (last and fired)
            )
            out += due
            gone = out[-1][0].position if out else 0
    out += flight.finish(keep=False)

    assert [part.message for part, _ in out] == [(n, p) for n, (_, parts, _) in enumerate(steps) for p in range(parts)]


@given(ring=st.integers(1 << 20, 1 << 34), step=st.integers(1, 1 << 30), before=st.integers(0, 50))
def test_the_ring_that_is_proposed_is_large_enough(ring, step, before):
    assert steps_that_fit(ring_for(before, step), step) >= before
    assert steps_that_fit(ring, step) >= steps_that_fit(ring, step + 1) >= -2
