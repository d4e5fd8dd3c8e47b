"""The daemon as a process: in time, alone, and right after any kill."""

import json
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from hookrec.cli import main as hookrec_main
from hookrec.delivery import AT_MOST
from replay.alerts import read_alerts
from tests.live_traces import WrittenTrace
from tests.test_daemon import layers


class Process:
    """`hookrec daemon` as a process."""

    def __init__(self, root: Path, *options: str):
        command = [sys.executable, "-m", "hookrec.cli", "daemon", str(root), "--json", *options]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.pid = self._process.pid

    def event(self, kind: str) -> dict:
        """Wait for an event."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            event = json.loads(line)
            if event["event"] == kind:
                return event
        raise AssertionError(f"it ended without {kind}")

    def end(self, number: int) -> int:
        self._process.send_signal(number)
        status = self._process.wait(20)
        assert self._process.stderr is not None
        self._process.stderr.close()
        return status


@pytest.mark.parametrize("options", [(), ("--poll", "3600")])
def test_an_alert_arrives_within_two_seconds_of_the_commit(tmp_path, options):
    daemon = Process(tmp_path, "--when", "n_nan > 0", *options)
    daemon.event("begin")
    time.sleep(0.3)
    trace = WrittenTrace(tmp_path / "folder/a")
    trace.commit(0)
    time.sleep(0.7)

    trace.commit(1, n_nan={"1": 1})
    committed = time.time()
    event = daemon.event("alert")
    seconds = time.time() - committed
    status = daemon.end(signal.SIGTERM)

    assert event["alert"]["layer"] == "1"
    assert seconds < 2
    assert status == 0


def test_what_came_before_a_folder_was_watched_is_found_without_an_event(tmp_path):
    daemon = Process(tmp_path, "--when", "n_nan > 0", "--no-rules", "--poll", "3600")
    daemon.event("begin")
    time.sleep(0.3)
    for depth in range(4):
        WrittenTrace(tmp_path / f"{depth}{'/x' * depth}/a").commit(0, n_nan={"0": 1})
        time.sleep(0.1)

    begin = time.monotonic()
    found = {daemon.event("alert")["trace"] for _ in range(4)}
    seconds = time.monotonic() - begin
    daemon.end(signal.SIGTERM)

    assert found == {str(tmp_path / f"{depth}{'/x' * depth}/a") for depth in range(4)}
    assert seconds < 3


def test_a_second_daemon_is_refused_by_the_number_of_the_first(tmp_path):
    daemon = Process(tmp_path)
    daemon.event("begin")

    second = CliRunner().invoke(hookrec_main, ["daemon", str(tmp_path)])

    assert second.exit_code == 2
    assert f"watched already, by process {daemon.pid} on {platform.node()}" in second.output
    assert daemon.end(signal.SIGINT) == 0
    third = Process(tmp_path)
    third.event("begin")
    third.end(signal.SIGKILL)


@pytest.mark.parametrize("lives", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_daemon_that_is_killed_again_and_again_neither_misses_nor_repeats_an_alert(tmp_path, lives):
    root, sent = tmp_path / "root", tmp_path / "sent"
    root.mkdir()
    names = tuple(str(number) for number in range(3 * lives))
    trace = WrittenTrace(root / "a", names)
    options = ("--when", "n_nan > 0", "--no-rules", "--poll", "0.05", "--run", f"tee -a {sent}")
    step = 0
    for life in range(lives):
        daemon = Process(root, *options)
        daemon.event("begin")
        for _ in range(3):
            trace.commit(step, n_nan={names[step]: 1, names[step // 2]: 1})
            step += 1
            time.sleep(0.011 * (life % 7))
        daemon.end(signal.SIGKILL)

    daemon = Process(root, *options)
    daemon.event("begin")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and len(read_alerts(root / "a")) < len(names):
        time.sleep(0.1)
    time.sleep(0.5)
    daemon.end(signal.SIGTERM)

    assert Counter(layers(root / "a")) == dict.fromkeys(names, 1)
    went = [json.loads(line)["id"] for line in sent.read_text().replace("}{", "}\n{").splitlines()]
    assert set(went) == {alert.id for alert in read_alerts(root / "a")[:AT_MOST]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "does not exist"),
        (["file"], "is a file"),
        (["trace"], "is a trace. Name the folder above"),
        ([".", "--when", "norm > 1"], "cannot be understood"),
        ([".", "--when", "1) or (select"], "cannot be understood"),
        ([".", "--webhook", "example.org"], "no address"),
        ([".", "--run", "'"], "--run"),
        ([".", "--quota", "much"], "no size"),
    ],
)
def test_what_cannot_begin_is_one_sentence(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    WrittenTrace(tmp_path / "trace").seal()

    result = CliRunner().invoke(hookrec_main, ["daemon", *arguments])

    assert result.exit_code == 2
    assert result.output.startswith("Error: ")
    assert words in result.output


def test_a_root_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)

    result = CliRunner().invoke(hookrec_main, ["daemon", str(tmp_path)])

    assert result.exit_code == 2
    assert "cannot be written to (Permission denied)" in result.output


def test_what_the_rules_of_replay_find_is_an_alert(tmp_path):
    daemon = Process(tmp_path, "--poll", "0.05")
    daemon.event("begin")
    trace = WrittenTrace(tmp_path / "a", ("x", "y"))
    trace.commit(0, 1)
    trace.commit(2, n_nan={"y": 1})

    daemon.event("alert")
    daemon.end(signal.SIGTERM)

    alert = next(iter(read_alerts(tmp_path / "a")))
    assert (alert.rule, alert.layer, alert.first_step) == ("non-finite", "y", 2)
