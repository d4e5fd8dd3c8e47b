"""An alert does to its training what it was told to, once, and to no other."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

import hookrec
import replay
from hookrec.actions import action
from hookrec.cli import main
from hookrec.delivery import NotSent, Outbox
from hookrec.errors import DaemonError
from hookrec.journal import Journal
from replay.alerts import AlertFile, read_sent
from tests.test_alerts import alert
from tests.training_in_thread import Training


def document(trace, rule="n_nan > 0") -> bytes:
    return json.dumps({"trace": str(trace), "rule": rule, "message": "found", "id": "x"}).encode()


def act(line: str, trace) -> str:
    said = io.StringIO()
    action(line, Journal(said))(document(trace))
    return said.getvalue()


def test_set_changes_the_plan_of_the_training_that_the_alert_is_about_and_of_no_other(tmp_path, folder):
    one, two = Training(), Training()
    with (
        hookrec.attach(one.model, tmp_path / "a", every=5, keep_free=0, ring="4MB") as first,
        hookrec.attach(two.model, tmp_path / "b", every=5, keep_free=0, ring="4MB") as second,
        one,
        two,
    ):
        said = act("set every=1 layers=0", tmp_path / "a")
        plans = [recorder.facts()["plan"] for recorder in (first, second)]

    assert [(plan["every"], plan["layers"]) for plan in plans] == [(1, ("0",)), (5, ("*",))]
    assert f"action: {tmp_path / 'a'}: set every=1 layers=0, because of n_nan > 0" in said


@pytest.mark.slow
def test_trigger_writes_the_alert_into_the_trace(tmp_path, folder):
    training = Training()
    with hookrec.attach(training.model, tmp_path / "a", flight=2, keep_free=0, ring="4MB"), training:
        act("trigger", tmp_path / "a")

    assert [trigger["why"] for trigger in replay.open(tmp_path / "a").triggers] == ["n_nan > 0: found"]


@pytest.mark.slow
def test_detach_seals_the_trace_and_the_training_goes_on(tmp_path, folder):
    with Training() as training:
        hookrec.attach(training.model, tmp_path / "a", keep_free=0, ring="4MB")
        act("detach", tmp_path / "a")
        steps = training.steps
        while training.steps < steps + 3 or replay.open(tmp_path / "a").status != "sealed":
            time.sleep(0.001)

    assert replay.open(tmp_path / "a").endings[0]["how"] == "detached"


@pytest.mark.slow
def test_a_trace_is_known_by_another_name_of_it(tmp_path, folder):
    training = Training()
    (tmp_path / "link").symlink_to(tmp_path)
    with hookrec.attach(training.model, tmp_path / "a", every=5, keep_free=0, ring="4MB") as recorder, training:
        act("set every=1", tmp_path / "link/a")
        assert recorder.facts()["plan"]["every"] == 1


@pytest.mark.slow
def test_a_training_that_makes_no_step_has_the_request_waiting(tmp_path, folder, monkeypatch):
    monkeypatch.setattr("hookrec.actions._STEP_S", 0.1)
    training = Training()
    with hookrec.attach(training.model, tmp_path / "a", every=5, keep_free=0, ring="4MB") as recorder:
        act("set every=1", tmp_path / "a")
        training.step()
        assert recorder.facts()["plan"]["every"] == 1


def test_what_is_refused_or_has_nobody_to_do_it_says_so(tmp_path, folder):
    with pytest.raises(NotSent, match="no process of this user") as nobody:
        act("stop", tmp_path / "a")
    training = Training()
    with (
        hookrec.attach(training.model, tmp_path / "a", keep_free=0, ring="4MB"),
        training,
        pytest.raises(NotSent, match="keeps no past steps"),
    ):
        act("trigger", tmp_path / "a")

    assert nobody.value.for_good


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "is no action; there are 'trigger'"),
        ("explode", "is no action"),
        ("stop now", "is no action"),
        ("set", "is no action"),
        ("set every", "is no assignment"),
        ("set every=0", "every is 0"),
        ("set ring=1GB", "cannot be changed while recording"),
        ("set 'every=1", "cannot be split into words"),
    ],
)
def test_what_is_no_action_is_refused_before_the_daemon_begins(tmp_path, line, words):
    with pytest.raises(DaemonError, match=words):
        action(line, Journal(io.StringIO()))


@pytest.mark.parametrize("rule", ["n_nan > 1", "non-finit"])
def test_an_action_for_a_rule_that_nobody_has_is_refused(tmp_path, rule):
    result = CliRunner().invoke(main, ["daemon", str(tmp_path), "--when", "n_nan > 0", "--then", rule, "stop"])

    assert result.exit_code == 1
    assert f"--then '{rule}' …: there is no such rule" in result.output
    assert ("non-finite" if rule == "non-finit" else "n_nan > 0") in result.output


def test_only_the_first_alert_of_its_rule_goes_that_way(tmp_path):
    sent = []
    alerts = [alert("0", rule="other"), alert("0"), alert("1"), alert("2")]
    AlertFile(tmp_path).append(alerts)
    outbox = Outbox("do", sent.append, Journal(io.StringIO()), rule="n_nan > 0", at_most=1)
    for number, one in zip((1, 1, 2, 3), alerts, strict=True):
        outbox.put(tmp_path, number, one)
    outbox.close()

    assert [json.loads(one)["layer"] for one in sent] == ["0"]
    assert read_sent(tmp_path) == {(alerts[1].id, "do")}


@pytest.mark.slow
def test_a_daemon_stops_the_training_whose_loss_of_numbers_it_sees(tmp_path, folder):
    code = """
import sys, torch, hookrec
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
hookrec.attach(net, sys.argv[1], keep_free=0, ring="4MB")
for step in range(10**6):
    net(torch.full((2, 3), float("nan") if step > 50 else 1.0)).sum().backward(); optimizer.step()
    import time; time.sleep(0.005)
"""
    (tmp_path / "runs").mkdir()
    command = [sys.executable, "-m", "hookrec.cli", "daemon", str(tmp_path / "runs"), "--json", "--no-rules"]
    command += ["--when", "n_nan > 0", "--then", "n_nan > 0", "stop", "--poll", "0.2"]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as daemon,
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "runs/a")], env=os.environ) as training,
    ):
        status = training.wait(60)
        time.sleep(0.3)
        daemon.terminate()
        said = [json.loads(line) for line in daemon.stderr]

    assert status == -signal.SIGTERM
    assert [event["message"] for event in said if event["event"] == "action"] == [
        f"{tmp_path / 'runs/a'}: stop, because of n_nan > 0"
    ]
    assert replay.open(tmp_path / "runs/a").endings[0]["how"] == "died"
