"""A step without any record is warned of once, by its likely cause, and the trace says so too."""

import copy
import warnings

import pytest
import torch
from torch import nn

import hookrec
import hookrec.recorder
import replay
from hookrec.plan import KINDS

pytestmark = pytest.mark.usefixtures("one_thread", "no_process")


def nothing(model: nn.Module, x: torch.Tensor) -> None:
    """Leave the model alone."""


def past_the_hooks(model: nn.Module, x: torch.Tensor) -> None:
    torch.func.vmap(model)(x)


def without_a_backward_pass(model: nn.Module, x: torch.Tensor) -> None:
    model(x)


@pytest.mark.parametrize(
    ("step", "kinds", "cause"),
    [
        (nothing, ("output", "grad_output"), "the model was not called. Is another object trained"),
        (past_the_hooks, ("output", "grad_output"), "called under torch.func"),
        (without_a_backward_pass, "grad_output", "no backward pass has reached its layers"),
        (without_a_backward_pass, "update", "no optimizer that holds its parameters"),
    ],
)
def test_the_likely_cause_is_named_once(tmp_path, step, kinds, cause):
    model = nn.Sequential(nn.Linear(3, 1))
    arguments = {"clock": "manual", "ring": "1MiB", "keep_free": 0}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with hookrec.attach(model, tmp_path / "a", kinds=kinds, **arguments) as recorder:
            for _ in range(3):
                step(model, torch.ones(2, 3))
                recorder.step()

    assert len(warned) == 1
    assert warned[0].category is hookrec.HookrecWarning
    assert "step 0 has no record: " in str(warned[0].message)
    assert cause in str(warned[0].message)
    notes = [note["note"] for note in replay.open(tmp_path / "a").notes if note["layer"] is None]
    assert len(notes) == 1
    assert cause in notes[0]


def test_layers_that_are_called_past_their_hooks_are_named(tmp_path):
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x):
            return self.linear.forward(x)

    model = Direct()
    with hookrec.attach(model, tmp_path / "a", clock="manual", ring="1MiB", keep_free=0) as recorder:
        model(torch.ones(1, 3))
        with pytest.warns(hookrec.HookrecWarning, match=r"none of the chosen layers was called.*forward\(\) directly"):
            recorder.step()


def test_an_optimizer_of_another_model_is_named_at_the_end(tmp_path):
    model = nn.Sequential(nn.Linear(3, 1))
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    recorder = hookrec.attach(model, tmp_path / "a", ring="1MiB", keep_free=0)
    trained(torch.ones(1, 3)).sum().backward()
    optimizer.step()

    with pytest.warns(hookrec.HookrecWarning, match="hold no parameter of the model"):
        recorder.detach()


def test_steps_with_records_and_those_that_are_not_sampled_are_not_warned_of(tmp_path):
    model = nn.Sequential(nn.Linear(3, 1))
    with hookrec.attach(
        model, tmp_path / "a", kinds=KINDS, every=2, clock="manual", ring="1MiB", keep_free=0
    ) as recorder:
        for step in range(4):
            if step % 2 == 0:
                model(torch.ones(1, 3))
            recorder.step()

    assert replay.open(tmp_path / "a").notes == []
