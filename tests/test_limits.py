"""What the system has no more of, files, memory or processes, costs the recording alone; what cannot be is refused."""

import os
import resource
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hookrec
import hookrec.cli
import replay
import replay.cli

TOO_LONG = "x" * 300


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 4)).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def limits():
    """Set soft limits for the length of a test."""
    before = {}

    def limit(what: int, value: int) -> None:
        before.setdefault(what, resource.getrlimit(what))
        resource.setrlimit(what, (value, before[what][1]))

    yield limit
    for what, values in before.items():
        resource.setrlimit(what, values)


def open_files() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("ring", ["900TB", "9000000000TB"])
def test_a_ring_that_cannot_be_is_refused_and_leaves_nothing(tmp_path, ring):
    files = open_files()

    with pytest.raises(hookrec.AttachError, match="cannot be made"):
        hookrec.attach(nn.Linear(4, 4), tmp_path / "a", ring=ring, keep_free=0)

    assert open_files() == files
    assert not (tmp_path / "a").exists()


def test_a_limit_of_file_sizes_refuses_the_ring(tmp_path, limits):
    limits(resource.RLIMIT_FSIZE, 1_000_000)

    with pytest.raises(hookrec.AttachError, match="shared memory cannot be made"):
        hookrec.attach(nn.Linear(4, 4), tmp_path / "a", keep_free=0)


def test_wherever_files_run_out_attaching_is_refused_and_leaves_none_open(tmp_path, limits, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", refuse)  # the last of what needs files, and the slowest
    model = nn.Linear(4, 4)
    files = open_files()
    free = max(files)  # it is that of the folder, which is closed again

    for spare in range(8):
        limits(resource.RLIMIT_NOFILE, free + spare)
        with pytest.raises(hookrec.AttachError):
            hookrec.attach(model, tmp_path / "a", ring="1MiB", keep_free=0)

        limits(resource.RLIMIT_NOFILE, free + 100)
        assert open_files() == files
        assert not (tmp_path / "a").exists()


def refuse(*_, **__):
    raise BlockingIOError(11, "Resource temporarily unavailable")


@pytest.mark.parametrize("when", ["while it trains", "at the end"])
def test_a_writer_that_finds_no_process_to_follow_it_costs_the_recording_alone(tmp_path, monkeypatch, when):
    torch.manual_seed(0)
    bare = train(nn.Linear(4, 4), 60)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    recorder = hookrec.attach(model, tmp_path / "a", ring="1MiB", keep_free=0)
    writer = recorder._recording._writer._process
    losses = train(model, 1)
    monkeypatch.setattr(subprocess, "Popen", refuse)

    if when == "while it trains":
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        with pytest.warns(hookrec.HookrecWarning, match="another could not go on: .*temporarily unavailable"):
            losses += train(model, 59)
            recorder.detach()
    else:
        os.kill(writer.pid, signal.SIGSTOP)
        losses += train(model, 59)
        timer = threading.Timer(0.5, os.kill, [writer.pid, signal.SIGKILL])  # while the training waits for it
        timer.start()
        with pytest.warns(hookrec.HookrecWarning):
            recorder.detach()
        timer.join()

    assert losses == bare


@pytest.mark.parametrize("path", [TOO_LONG, "a\0b"])
def test_a_path_that_no_file_can_have_is_refused(tmp_path, path):
    with pytest.raises(hookrec.AttachError, match=r"File name too long|null byte"):
        hookrec.attach(nn.Linear(4, 4), tmp_path / path, keep_free=0)
    with pytest.raises(replay.errors.TraceNotFound):
        replay.open(tmp_path / path)


@pytest.mark.parametrize("command", ["info", "stats", "verify", "list", "alerts", "check"])
def test_a_path_that_is_too_long_is_one_sentence(tmp_path, command):
    done = CliRunner().invoke(replay.cli.main, [command, str(tmp_path / TOO_LONG)])

    assert done.exit_code == 2
    assert "File name too long" in done.output or "does not exist" in done.output


@pytest.mark.parametrize("command", [["recover"], ["pin"], ["daemon"], ["convert", "a"]])
def test_a_path_that_is_too_long_is_one_sentence_to_hookrec_too(tmp_path, command):
    done = CliRunner().invoke(hookrec.cli.main, [*command, str(tmp_path / TOO_LONG)])

    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
