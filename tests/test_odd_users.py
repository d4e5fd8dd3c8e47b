"""Odd modules, signals and processes around a recording: none of it must reach the training through us."""

import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import hookrec
import replay
from hookrec.errors import warn
from hookrec.trained import FirstCall


def train(model: nn.Module, parameters, steps: int = 2, before_step=lambda step: None) -> None:
    optimizer = torch.optim.SGD(list(parameters), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        before_step(step)
        optimizer.step()


class OddNames(nn.Module):
    """Has methods and attributes by the names of those of `nn.Module`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.modules = ["a list"]
        self.children = None

    def parameters(self, group):
        raise AssertionError("this is not for us")

    def named_modules(self):
        raise AssertionError("nor is this")

    named_children = named_parameters = named_modules

    def forward(self, x):
        return self.layer(x)


def test_a_module_may_have_other_methods_by_the_names_of_those_of_torch(tmp_path):
    model = OddNames()

    with hookrec.attach(model, tmp_path / "a", kinds=("output", "param"), ring="1MiB", keep_free=0):
        train(model, model.layer.parameters())

    trace = replay.open(tmp_path / "a")
    assert trace.steps == [0, 1]
    assert trace.layers == ["layer"]
    assert trace.kinds == ["output", "param"]


def test_a_fault_in_what_ends_steps_ends_the_recording_alone(tmp_path, monkeypatch):
    model = nn.Linear(3, 3)
    monkeypatch.setattr("hookrec.clock.Clock._is_ours", lambda *_: 1 / 0)

    with pytest.warns(hookrec.HookrecWarning, match="the training goes on. ZeroDivisionError"):
        recorder = hookrec.attach(model, tmp_path / "a", ring="1MiB", keep_free=0)
        train(model, model.parameters())
        recorder.detach()

    assert replay.open(tmp_path / "a").endings[0]["how"] == "failed"


def test_variables_of_any_class_are_around_where_models_are_found():
    class Odd:
        pass

    Odd.__module__ = None  # type: ignore[assignment]
    odd = Odd()
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizer = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], 0.1)
    found: list[list[str]] = []
    waiting = FirstCall(lambda roots: found.append(list(roots)))
    waiting.expect([optimizer])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models[0](torch.ones(1, 2))

    assert len(found[0]) == 2
    del odd


def test_what_fails_where_models_are_found_is_a_warning():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    waiting = FirstCall(lambda roots: 1 / 0)
    waiting.expect([optimizer])

    with pytest.warns(hookrec.HookrecWarning, match="not recorded, and goes on. ZeroDivisionError"):
        assert model(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize("first", ["first", "last"])
def test_two_recordings_leave_compiled_code_as_it_was(tmp_path, first):
    import torch._dynamo.eval_frame as dynamo

    before = dynamo._stance.stance
    models = [nn.Linear(3, 3), nn.Linear(3, 3)]
    recorders = [hookrec.attach(m, tmp_path / str(i), ring="1MiB", keep_free=0) for i, m in enumerate(models)]
    for model in models:
        train(model, model.parameters())
    assert dynamo._stance.stance == "force_eager"
    for recorder in recorders if first == "first" else recorders[::-1]:
        recorder.detach()

    assert dynamo._stance.stance == before


def test_a_warning_never_raises_though_standard_error_is_closed():
    code = """
import sys, warnings
from hookrec.errors import warn
sys.stderr.close()
warn("x")
warnings.simplefilter("error")
warn("y")
sys.stderr = None
warn("z")
print("went on")
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "went on\n"


def test_warnings_that_are_errors_are_printed(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn("this")

    assert capsys.readouterr().err == "hookrec: this\n"


def test_a_signal_that_ends_nothing_is_a_trigger_each_time(tmp_path):
    model = nn.Linear(3, 3)
    options = {"flight": 1, "after": 0, "trigger_rest": 1, "signals": "SIGCONT", "ring": "4MiB", "keep_free": 0}
    with hookrec.attach(model, tmp_path / "a", **options):
        train(model, model.parameters(), 9, lambda step: step in (2, 6) and os.kill(os.getpid(), signal.SIGCONT))

    assert [line["why"] for line in replay.open(tmp_path / "a").triggers] == ["SIGCONT", "SIGCONT"]
    assert signal.getsignal(signal.SIGCONT) == signal.SIG_DFL


def test_a_handler_that_is_not_of_python_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: None)

    with pytest.raises(hookrec.AttachError, match="SIGUSR1 has a handler that was not installed by Python"):
        hookrec.attach(nn.Linear(3, 3), tmp_path / "a", flight=1, signals="SIGUSR1")


def test_a_working_directory_that_is_gone_hinders_relative_paths_alone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    model = nn.Linear(3, 3)

    with pytest.raises(hookrec.AttachError, match="a is relative, and the working directory"):
        hookrec.attach(model, "a")
    with hookrec.attach(model, tmp_path / "a", ring="1MiB", keep_free=0):
        train(model, model.parameters())

    assert replay.open(tmp_path / "a").steps == [0, 1]


def test_a_rank_that_is_no_number_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(hookrec.AttachError, match="RANK='x' and WORLD_SIZE='2'"):
        hookrec.attach(nn.Linear(3, 3), tmp_path / "a")


@pytest.mark.parametrize("kernel", [True, False])
def test_what_we_compute_is_no_operation_of_the_model(tmp_path, monkeypatch, kernel):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(3, 3)

        def forward(self, x):
            return self.l(x).t()

    if not kernel:
        monkeypatch.setattr("hookrec.capture.load_native", lambda: None)
    model = nn.Sequential(Block(), Block())
    kinds = ("input", "output", "grad_output", "grad_input")
    with hookrec.attach(model, tmp_path / "a", ops="*", containers=True, kinds=kinds, ring="1MiB", keep_free=0):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(3, 3)).sum().backward()
        optimizer.step()

    assert [name for name in replay.open(tmp_path / "a").layers if "/" in name] == ["0/t#0", "1/t#0"]
