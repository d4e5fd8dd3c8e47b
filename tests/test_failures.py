"""Each line of the tables of failures in `docs/attach.md` and `docs/daemon.md`: commands end and say as it is there."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import hookrec
from hookrec import client, inject
from hookrec.cli import main as hookrec_main
from hookrec.daemon import only_one
from replay.cli import main as replay_main
from tests.live_traces import WrittenTrace
from tests.training_in_thread import Training

DOCS = Path(__file__).parents[1] / "docs"
ME = str(os.getpid())
LINES = [
    (command, case, int(status), words)
    for page in ("attach.md", "daemon.md")
    for commands, case, status, words in re.findall(
        r"^\| (`.*?) \| (.+?) \| (\d) \| (.+?) \|$", (DOCS / page).read_text(), re.MULTILINE
    )
    for command in re.findall(r"`(\w+)`", commands)
]


def case_of(words):
    def decorate(function):
        CASES[words] = contextlib.contextmanager(function)
        return function

    return decorate


CASES: dict = {}


def control_arguments(command, pid, out):
    more = {"set": ["every=2"], "trigger": ["why"], "attach": ["-o", str(out)]}
    return [command, pid, *more.get(command, [])]


@case_of("there is no such process")
def _(tmp, monkeypatch, command):
    yield control_arguments(command, "4194999", tmp / "a")


@case_of("it is another user's")
def _(tmp, monkeypatch, command):
    def refused(pid, number):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(client.os, "kill", refused)
    yield control_arguments(command, "1", tmp / "a")


@case_of("it does not listen")
def _(tmp, monkeypatch, command):
    yield control_arguments(command, ME, tmp / "a")


@case_of("it ends, or its socket goes, before it has answered")
def _(tmp, monkeypatch, command):
    hookrec.listen()
    real = client.ask

    def ask(path, request):
        if request["command"] != "status":
            path.unlink()
        return real(path, request)

    monkeypatch.setattr(client, "ask", ask)
    yield control_arguments(command, ME, tmp / "a")


@case_of("it records nothing")
def _(tmp, monkeypatch, command):
    hookrec.listen()
    yield control_arguments(command, ME, tmp / "a")


@case_of("it does not listen, and has no torch")
def _(tmp, monkeypatch, command):
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as process:
        process.stdout.readline()
        yield control_arguments(command, str(process.pid), tmp / "a")
        process.communicate(b"\n")


@case_of("it does not listen, and there is no debugger")
def _(tmp, monkeypatch, command):
    monkeypatch.setattr(inject.shutil, "which", lambda name: None)
    yield control_arguments(command, ME, tmp / "a")


@case_of("it does not listen, and may not be traced")
def _(tmp, monkeypatch, command):
    (tmp / "scope").write_text("1\n")
    monkeypatch.setattr(inject, "_PTRACE_SCOPE", tmp / "scope")
    monkeypatch.setattr(inject.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(inject, "socket_of", lambda pid: None)
    monkeypatch.setattr("hookrec.control_commands.socket_of", lambda pid: None)
    yield control_arguments(command, ME, tmp / "a")


@case_of("its Python is older than ours reaches")
def _(tmp, monkeypatch, command):
    real = Path.read_text

    def read(path, **more):
        return "7f00 /usr/bin/python3.9\n" if path.name == "maps" else real(path, **more)

    monkeypatch.setattr(Path, "read_text", read)
    yield control_arguments(command, ME, tmp / "a")


@case_of("the directory holds a trace")
def _(tmp, monkeypatch, command):
    WrittenTrace(tmp / "a").seal()
    hookrec.listen()
    with Training():
        yield control_arguments(command, ME, tmp / "a")


@case_of("the directory holds something")
def _(tmp, monkeypatch, command):
    (tmp / "a").mkdir()
    (tmp / "a/x").touch()
    (tmp / "it.py").touch()
    yield [command, "-o", str(tmp / "a"), str(tmp / "it.py")]


@case_of("there is no script")
def _(tmp, monkeypatch, command):
    yield [command, "-o", str(tmp / "a"), str(tmp / "it.py")]


@case_of("ROOT is not there")
def _(tmp, monkeypatch, command):
    yield [command, str(tmp / "root")]


@case_of("another daemon watches ROOT")
def _(tmp, monkeypatch, command):
    with only_one(tmp):
        yield [command, str(tmp)]


@case_of("ROOT may not be written")
def _(tmp, monkeypatch, command):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    yield [command, str(tmp)]


@case_of("ROOT is a trace")
def _(tmp, monkeypatch, command):
    WrittenTrace(tmp / "a").seal()
    yield [command, str(tmp / "a")]


@case_of("no daemon is running")
def _(tmp, monkeypatch, command):
    WrittenTrace(tmp / "a").seal()
    with only_one(tmp):
        result = CliRunner().invoke(replay_main, [command, str(tmp / "a")])
        assert f"a daemon watches {tmp}" in result.output
    yield [command, str(tmp / "a")]


@case_of("there is no trace")
def _(tmp, monkeypatch, command):
    yield [command, str(tmp / "a"), *([str(tmp / "logs")] if command == "tensorboard" else [])]


@case_of("the trace may not be written")
def _(tmp, monkeypatch, command):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    WrittenTrace(tmp / "a").seal()
    monkeypatch.setattr(Path, "touch", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    yield [command, str(tmp / "a")]


def test_the_tables_and_the_cases_are_the_same():
    assert {case for _, case, _, _ in LINES} == set(CASES)


@pytest.mark.parametrize(("command", "case", "status", "words"), LINES)
def test_a_failure_is_as_the_table_says(tmp_path, folder, monkeypatch, command, case, status, words):
    main = replay_main if command in ("alerts", "list") else hookrec_main

    with CASES[case](tmp_path, monkeypatch, command) as arguments:
        result = CliRunner().invoke(main, arguments)

    assert (result.exit_code, words in result.output) == (status, True), result.output
    assert isinstance(result.exception, SystemExit | None)
    assert len(result.output.splitlines()) < 6
