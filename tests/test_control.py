"""A training can be looked at and controlled from outside, and is never the worse for it."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from torch import nn

import hookrec
import replay
from hookrec import client, control, inject, sockets
from hookrec.cli import main
from tests.training_in_thread import Training

PID = str(os.getpid())
SCHEMA = json.loads((Path(__file__).parent.parent / "schemas/control.schema.json").read_text())


def command(*arguments):
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_status_shows_the_trace_the_step_and_the_plan(tmp_path, folder):
    training = Training()
    with hookrec.attach(training.model, tmp_path / "a", every=3, keep_free=0):
        for _ in range(5):
            training.step()
        facts = json.loads(command("status", PID, "--json").output)[0]
        words = command("status").output

    recorder = facts["recorders"][0]
    assert (facts["pid"], recorder["trace"], recorder["step"]) == (os.getpid(), str(tmp_path / "a"), 5)
    assert recorder["plan"]["every"] == 3
    assert "every=3" in words
    assert list(folder.iterdir()) == []
    assert "does not listen" in command("status", PID).output


def test_a_changed_plan_holds_from_the_next_step_and_is_noted_in_the_trace(tmp_path, folder):
    training = Training()
    with hookrec.attach(training.model, tmp_path / "a", every=5, tensors=False, keep_free=0) as recorder, training:
        result = command("set", PID, "every=1", "layers=0", "kinds=output,update", "tensors=true")
        until = recorder.steps + 5
        while recorder.steps < until:
            time.sleep(0.001)

    assert result.exit_code == 0, result.output
    trace = replay.open(tmp_path / "a")
    note = trace.notes[0]
    assert (note["plan"]["every"], note["plan"]["layers"]) == (1, ["0"])
    assert str(note["step"]) in result.output
    after = trace.records(steps=slice(note["step"], note["step"] + 2)).to_pylist()
    assert {(row["layer"], row["kind"], row["path"]) for row in after} == {
        ("0", "output", ""),
        ("0", "update", "weight"),
        ("0", "update", "bias"),
    }
    assert all(row["kept"] for row in after)
    assert {row["step"] % 5 for row in trace.records(steps=slice(0, note["step"])).to_pylist()} == {0}
    assert trace.tensor(note["step"], "0").shape == (2, 8)


def test_a_plan_may_be_changed_at_any_step_and_the_records_are_right(tmp_path, folder):
    training = Training()
    rows = []
    with hookrec.attach(training.model, tmp_path / "a", keep_free=0) as recorder:
        for changes in (
            {"kinds": ["input", "param_grad"]},
            {"tensors": False},
            {"kinds": ["output"], "tensors": True},
            {"kinds": ["param"], "layers": "2"},
        ):
            recorder.at_boundary(lambda changes=changes: rows.append(recorder.change(changes)))
            training.step()
            before = training.model[0].weight.detach().clone(), training.model[2].weight.detach().clone()
            training.step()
        training.step()

    trace = replay.open(tmp_path / "a")
    kinds = [set(trace.records(steps=step)["kind"].to_pylist()) for step in trace.steps]
    assert kinds[1:8] == [{"input", "param_grad"}] * 2 + [{"input", "param_grad"}] * 2 + [{"output"}] * 2 + [{"param"}]
    assert (trace.tensor(7, "2", "param", path="weight") == before[1].numpy()).all()
    assert len(rows) == 4


def test_detach_seals_the_trace_and_leaves_the_training(tmp_path, folder):
    with Training() as training:
        recorder = hookrec.attach(training.model, tmp_path / "a", keep_free=0)
        result = command("detach", PID)
        steps = training.steps
        while training.steps < steps + 5:
            time.sleep(0.001)
        again = command("detach", PID)
        recorder.detach()

    assert result.exit_code == 0, result.output
    assert (again.exit_code, "Nothing is being recorded" in again.output) == (1, True)
    trace = replay.open(tmp_path / "a")
    assert (trace.status, trace.endings[0]["how"]) == ("sealed", "detached")
    assert not training.model[0]._forward_hooks


def test_a_training_that_is_detached_from_outside_may_go_on_to_log(tmp_path, folder):
    with Training() as training, hookrec.attach(training.model, tmp_path / "a", keep_free=0) as recorder:
        command("detach", PID)
        while replay.open(tmp_path / "a").status != "sealed":
            time.sleep(0.001)
        recorder.log(loss=1.0)
        recorder.trigger("too late")
        recorder.step()

    with pytest.raises(hookrec.DetachedError):
        recorder.log(loss=1.0)
    assert "loss" not in replay.open(tmp_path / "a").scalars()["name"].to_pylist()


def test_a_recorder_that_leaves_twice_closes_nothing_for_who_comes_between(tmp_path, folder, monkeypatch):
    recorder = hookrec.attach(nn.Linear(2, 2), tmp_path / "a", keep_free=0)
    recorder.detach()
    opened = control.Listener._open

    def open_and_meanwhile(self):
        opened(self)
        leaving.start()
        leaving.join(0.1)

    leaving = threading.Thread(target=control.unheard, args=(recorder,))
    monkeypatch.setattr(control.Listener, "_open", open_and_meanwhile)

    hookrec.listen()
    leaving.join()

    assert len(list(folder.iterdir())) == 1


def test_attach_finds_the_model_in_a_process_that_only_listens(tmp_path, folder):
    hookrec.listen()
    with Training() as training:
        idle = json.loads(command("status", PID, "--json").output)[0]
        result = command("attach", PID, "-o", tmp_path / "a", "--every", "2", "--only-socket", "--keep-free", "0")
        steps = training.steps
        while training.steps < steps + 6:
            time.sleep(0.001)
        second = command("attach", PID, "-o", tmp_path / "a")
        command("detach", PID)

    assert idle["recorders"] == []
    assert result.exit_code == 0, result.output
    assert second.exit_code == 1
    trace = replay.open(tmp_path / "a")
    assert trace.layers == ["0", "1", "2"]
    assert set(trace.steps) >= {0, 2}
    assert len(trace.records(steps=0)) == 6


def test_what_was_done_is_said_in_json(tmp_path, folder):
    def answer(*arguments):
        result = command(*arguments, "--json")
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        return json.loads(result.stdout)

    hookrec.listen()
    with Training() as training:
        flight = ("--flight", "2", "--only-socket", "--keep-free", "0")
        said = [
            answer("attach", PID, "-o", tmp_path / "a", *flight),
            answer("set", PID, "every=2"),
            answer("trigger", PID, "by hand"),
            answer("detach", PID),
        ]
        steps = training.steps
        while training.steps < steps + 2:
            time.sleep(0.001)

    assert {(line["pid"], line["trace"]) for line in said} == {(os.getpid(), str(tmp_path / "a"))}
    words = ("recording into", "every", "triggered: by hand", "is finished")
    for line, word in zip(said, words, strict=True):
        assert set(line) == {"pid", "trace", "message"}
        assert word in line["message"]


def test_a_listener_puts_no_hook_on_optimizers_until_it_is_asked(folder):
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_post_hooks)
    hookrec.listen()

    assert len(optimizer._global_optimizer_post_hooks) == before


def test_trigger_is_refused_where_there_is_nothing_to_trigger(tmp_path, folder):
    with hookrec.attach(nn.Linear(1, 1), tmp_path / "a", keep_free=0):
        result = command("trigger", PID, "why")

    assert (result.exit_code, "nothing to trigger" in result.output) == (1, True), result.output


def test_trigger_keeps_the_steps_that_flight_mode_holds(tmp_path, folder):
    training = Training()
    with hookrec.attach(training.model, tmp_path / "a", flight=1, after=0, keep_free=0):
        for _ in range(4):
            training.step()
        command("trigger", PID, "by hand", "--wait", "0.1")
        for _ in range(4):
            training.step()

    trace = replay.open(tmp_path / "a")
    assert [(trigger["by"], trigger["why"]) for trigger in trace.triggers] == [("call", "by hand")]
    kept = trace.records(where="kept")["step"].to_pylist()
    assert set(kept) == set(range(trace.triggers[0]["step"] - 1, trace.triggers[0]["step"] + 1))


def test_a_request_that_waits_when_the_recording_ends_is_answered(tmp_path, folder):
    training = Training()
    hookrec.listen()
    with hookrec.attach(training.model, tmp_path / "a", keep_free=0):
        command("set", PID, "every=2", "--wait", "0.1")

    facts = json.loads(command("status", PID, "--json").output)[0]
    assert (facts["waiting"], facts["recorders"]) == ([], [])


def test_of_two_recorders_one_is_chosen_by_its_trace(tmp_path, folder):
    one, two = Training(), Training()
    with (
        hookrec.attach(one.model, tmp_path / "a", keep_free=0),
        hookrec.attach(two.model, tmp_path / "b", keep_free=0),
        two,
    ):
        unclear = command("set", PID, "every=2")
        wrong = command("set", PID, "every=2", "--trace", tmp_path / "c")
        right = command("set", PID, "every=2", "--trace", tmp_path / "b")

    assert (unclear.exit_code, wrong.exit_code, right.exit_code) == (1, 1, 0)
    assert "Choose one by --trace" in unclear.output
    assert "every 1 -> 2" in right.output


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["set", PID, "every=0"], 1, "every is 0"),
        (["set", PID, "ring=1MB"], 1, "cannot be changed while recording"),
        (["set", PID, "colour=red"], 1, "There is no 'colour'"),
        (["set", PID, "layers=zz"], 1, "matches none of"),
        (["set", PID, "every"], 2, "is no assignment"),
        (["set", PID], 2, "Missing argument"),
        (["detach", "4194999"], 3, "There is no process"),
        (["attach", "4194999", "-o", "a"], 3, "There is no process"),
        (["detach", str(os.getppid())], 3, "does not listen"),
        (["attach", str(os.getppid()), "-o", "a"], 3, "Process"),
        (["attach", PID, "-o", "a", "--kinds", "zz"], 2, "There is no kind"),
    ],
)
def test_each_command_says_what_is_wrong(tmp_path, folder, arguments, status, words):
    with Training() as training, hookrec.attach(training.model, tmp_path / "a", keep_free=0):
        result = command(*arguments)

    assert (result.exit_code, words in result.output) == (status, True), result.output


def test_a_training_that_makes_no_step_keeps_the_request(tmp_path, folder):
    training = Training()
    with hookrec.attach(training.model, tmp_path / "a", keep_free=0):
        result = command("set", PID, "every=2", "--wait", "0.1")
        waiting = json.loads(command("status", PID, "--json").output)[0]["waiting"]
        training.step()
        after = json.loads(command("status", PID, "--json").output)[0]

    assert (result.exit_code, len(waiting)) == (4, 1), result.output
    assert (after["waiting"], after["recorders"][0]["plan"]["every"]) == ([], 2)


def test_what_a_dead_process_has_left_is_removed(folder):
    folder.mkdir(mode=0o700)
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(folder / "12345.sock"))
    left.close()

    assert list(client.listening()) == []
    assert list(folder.iterdir()) == []


def test_a_name_that_is_taken_by_a_living_process_is_left_to_it(folder):
    folder.mkdir(mode=0o700)
    other = socket.socket(socket.AF_UNIX)
    other.bind(str(folder / f"{PID}.sock"))
    other.listen()

    hookrec.listen()

    assert sorted(path.name for path in folder.iterdir()) == [f"{PID}.2.sock", f"{PID}.sock"]
    other.close()


def test_a_folder_that_others_may_enter_is_not_used(folder, monkeypatch):
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    monkeypatch.setattr(sockets, "folders", lambda: [folder])

    with pytest.warns(hookrec.HookrecWarning, match="not a folder of this user's alone"):
        hookrec.listen()


def test_only_the_user_may_use_the_socket(folder, monkeypatch):
    hookrec.listen()
    path = next(folder.iterdir())

    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(sockets.os, "geteuid", lambda: 12345)
    with pytest.raises(sockets.NoSocket, match="is user"):
        sockets.connect(path, 1)


@pytest.mark.parametrize("junk", [b"", b"x\n", b"[]\n", b'{"hookrec": "a"}\n', b'{"hookrec": 1}\n', b"\xff" * 3000000])
def test_junk_at_the_socket_ends_neither_the_listener_nor_the_training(folder, junk):
    hookrec.listen()
    path = next(folder.iterdir())
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        try:
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
        except BrokenPipeError:
            pass

    assert client.ask(path, {"command": "status"})["pid"] == os.getpid()


def test_a_newer_protocol_is_refused(folder):
    hookrec.listen()

    with pytest.raises(hookrec.HookrecError, match="speaks version 1"):
        client.ask(next(folder.iterdir()), {"command": "status", "hookrec": 2})


def test_messages_fit_the_schema(tmp_path, folder, monkeypatch):
    seen = []

    def watch(module, side):
        def send(connection, message):
            seen.append((side, {"hookrec": 1, **message}))
            sockets.send(connection, message)

        monkeypatch.setattr(module, "send", send)

    watch(client, "request")
    watch(control, "answer")
    hookrec.listen()
    with Training():
        command("attach", PID, "-o", tmp_path / "a")
        command("set", PID, "every=2")
        command("trigger", PID, "why")
        command("status", PID)
        command("set", PID, "every=x")
        command("detach", PID)

    assert {message.get("command") for side, message in seen if side == "request"} == {
        *("attach", "set", "trigger", "status", "detach", "result")
    }
    for side, message in seen:
        jsonschema.validate(message, {**SCHEMA, "$ref": f"#/$defs/{side}"})


def test_a_forked_child_does_not_answer_for_its_parent(folder):
    hookrec.listen()
    child = os.fork()
    if not child:
        os._exit(0 if control._listener._socket is None and len(list(folder.iterdir())) == 1 else 1)

    assert os.waitpid(child, 0)[1] == 0
    assert len(list(client.listening())) == 1


def test_the_variable_makes_a_process_listen_that_imports_hookrec_and_torch(folder):
    code = "import hookrec, sys; print(len(sys.argv)); import torch; print('ready', flush=True); sys.stdin.read()"
    environment = {**os.environ, "HOOKREC_LISTEN": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        while "ready" not in process.stdout.readline():
            pass
        found = [facts["pid"] for _, facts in client.listening()]
        process.stdin.close()

    assert found == [process.pid]
    assert list(folder.iterdir()) == []


def test_a_process_without_torch_is_left_alone(folder):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        time.sleep(0.2)
        with pytest.raises(client.Unreachable, match="has not loaded torch"):
            inject.make_listen(process.pid, 1, None, print)
        process.communicate(b"\n")

    assert process.returncode == 0


def test_without_a_debugger_the_refusal_says_what_to_do(monkeypatch):
    monkeypatch.setattr(inject.shutil, "which", lambda name: None)

    with pytest.raises(client.Unreachable, match="gdb or lldb is not installed"):
        inject._working_debugger(None, print)


def test_a_debugger_that_does_harm_is_not_used(tmp_path, monkeypatch):
    harmful = tmp_path / "gdb"
    harmful.write_text('#!/bin/sh\nfor word; do case "$word" in "attach "*) kill ${word#attach };; esac; done\n')
    harmful.chmod(0o755)
    monkeypatch.setattr(inject, "_installed", lambda name: [str(harmful)] if name == "gdb" else [])
    said = []

    with pytest.raises(client.Unreachable, match="without harm"):
        inject._working_debugger(None, said.append)
    assert "is not used" in said[0]


def test_the_injected_code_listens_keeps_silent_and_leaves_no_name(folder):
    names = dict.fromkeys(["__name__"], "x")

    exec(inject.code_to_listen(), names)

    assert set(names) == {"__name__", "__builtins__"}
    assert len(list(folder.iterdir())) == 1
    exec(inject.code_to_listen().replace(".listen()", ".nothing()"), {})


NEVER_HEARD_OF_US = """
import select, sys, time, torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
losses = []
print("ready", flush=True)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    loss = net(torch.randn(4, 3)).pow(2).mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
    if int(sys.argv[2]): time.sleep(0.004)
    del loss
print("done", sorted(name for name in globals() if not name.startswith("__")))
print(*losses)
"""


@pytest.fixture
def debugger():
    if not (inject._installed("gdb") or inject._installed("lldb")):
        pytest.skip("no debugger is installed")
    try:
        return inject._working_debugger(None, print)
    except client.Unreachable as error:
        pytest.skip(str(error))


def run_unaware(steps: int, *, slowly: bool) -> subprocess.Popen:
    command = [sys.executable, "-c", NEVER_HEARD_OF_US, str(steps), str(int(slowly))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("times", [20])
def test_a_process_that_never_heard_of_us_is_attached_to_by_a_debugger(tmp_path, folder, debugger, times):
    """Recorded for a hundred steps, detached, and the training is bit for bit what it would have been."""
    steps = 3000
    bare, errors = run_unaware(steps, slowly=False).communicate()
    assert errors == ""
    for number in range(times):
        process = run_unaware(steps, slowly=True)
        path = tmp_path / str(number)
        attached = command("attach", process.pid, "-o", path, "--debugger", Path(debugger).name.partition("-")[0])
        while len(replay.open(path).steps) < 100 and process.poll() is None:
            time.sleep(0.05)
        detached = command("detach", process.pid)
        out, errors = process.communicate()

        assert (attached.exit_code, detached.exit_code) == (0, 0), attached.output + detached.output
        assert (process.returncode, errors) == (0, "")
        assert out == bare
        trace = replay.open(path)
        assert trace.steps == list(range(len(trace.steps)))
        assert len(trace.steps) >= 100
        assert len(trace.records(steps=slice(1, 100))) == 99 * 8
        assert trace.endings[0]["how"] == "detached"


@pytest.mark.slow
def test_a_wrong_number_leaves_the_training_alone_that_a_debugger_could_reach(tmp_path, folder, debugger):
    process = run_unaware(100, slowly=True)
    wrong = command("attach", os.getppid() if os.getppid() > 1 else 1, "-o", tmp_path / "a")
    _, errors = process.communicate()

    assert wrong.exit_code == 3
    assert (process.returncode, errors) == (0, "")
    assert not (tmp_path / "a").exists()
