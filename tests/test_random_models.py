"""Random models have no hazard in the hooks that was not thought of: sharing, in-place changes, views, nested outputs.

The hooks report to a dictionary here, without ring, writer and trace, so that thousands of models take a minute.
"""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hookrec.calls import Call, Named
from hookrec.guard import Guard
from hookrec.hooks import Hooks
from hookrec.layers import choose, layers_of
from hookrec.statistics import describe
from tests.oracle import Key, Oracle, raw

WIDTH = 6
pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ("output", "grad_output", "input", "grad_input")


class Memory:
    """Takes what the hooks report."""

    def __init__(self) -> None:
        self.records: dict[Key, bytes] = {}
        self.step_number = 0

    def micro(self, root: int) -> int:
        return 0

    def take(self, layer: Named, kind: str, path: str, tensor: Tensor, call: Call) -> bytes:
        key = (call.step, layer.name, kind, call.call, path)
        assert key not in self.records, f"{key} is reported twice"
        self.records[key] = raw(tensor)
        return describe(tensor)

    def fingerprint(self, tensor: Tensor) -> bytes:
        return describe(tensor)

    def note(self, layer: str, note: str) -> None:
        raise AssertionError((layer, note))

    def fault(self, error: Exception) -> None:
        raise error


class Halves(nn.Module):
    """Two views of one tensor, in a nested output."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        left, right = x.chunk(2, -1)
        return {"left": left, "rest": (right,)}


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
        return x * self.scale + shift


class Block(nn.Module):
    """A container with layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    """Runs a program: a list of (operation, number of the layer that it uses)."""

    def __init__(self, program: list[tuple[str, int]]) -> None:
        super().__init__()
        self.program = program
        torch.manual_seed(0)
        self.linear = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.ModuleList((nn.LayerNorm(WIDTH), nn.Dropout(0.3)))
        self.in_place = nn.ModuleList((nn.ReLU(inplace=True), nn.ELU(inplace=True)))
        self.shape = nn.ModuleList((nn.Flatten(0, 1), nn.Identity()))
        self.keyword = nn.ModuleList(Keyword() for _ in range(2))
        self.halves = nn.ModuleList(Halves() for _ in range(2))
        self.block = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = x * 1.5  # not x itself, which the oracle would hand on as a clone
        for operation, number in self.program:
            layers = getattr(self, operation, None)
            if operation == "keep":
                kept = x * 1.5
            elif operation == "add":
                x = x + kept.reshape(x.shape)
            elif operation == "add in place":
                x += kept.reshape(x.shape)
            elif operation == "slice in place":
                x[..., :2] *= 0.5
            elif operation == "keyword":
                x = layers[number](x, shift=kept.reshape(x.shape))
            elif operation == "halves":
                halves = layers[number](x)
                x = torch.cat([halves["rest"][0], halves["left"]], -1)
            elif operation == "twice":
                x = self.linear[number](self.linear[number](x)) + self.linear[number](x)
            elif operation == "no grad":
                with torch.no_grad():
                    target = self.linear[number](x)
                x = x - target
            else:
                x = layers[number](x) if operation != "shape" or number == 0 else layers[number](x) * 2.0
        return x


OPERATIONS = (
    *("linear", "norm", "in_place", "shape", "keyword", "halves", "block"),
    *("keep", "add", "add in place", "slice in place", "twice", "no grad"),
)
PROGRAMS = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 1)), min_size=1, max_size=10)


def run(model: Model, after: Any) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 3, WIDTH).requires_grad_() * 1.0).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after()
    return losses


def check(program: list[tuple[str, int]]) -> bool:
    """Hold a program's records to the oracle's; return whether it is a program that PyTorch runs."""
    model = Model(program)
    try:
        bare = run(model, lambda: None)
    except (RuntimeError, IndexError):
        return False  # an in-place change of what the backward pass needs, or a shape that does not fit
    model, memory = Model(program), Memory()
    layers = layers_of({"": model})
    hooks = Hooks(choose(layers, ("*",), containers=False), memory, KINDS, Guard(memory.fault))
    hooks.install()
    model.register_forward_hook(lambda *_: hooks.settle_all())

    def end_step() -> None:
        hooks.end_step()
        memory.step_number += 1

    assert run(model, end_step) == bare
    hooks.close()

    twin = Model(program)
    oracle = Oracle({layer.name: twin.get_submodule(layer.name) for layer in layers if layer.leaf}, inputs=True)
    run(twin, oracle.step)
    assert memory.records.keys() == oracle.records.keys()
    for key, value in oracle.records.items():
        one, other = np.frombuffer(memory.records[key], "f4"), np.frombuffer(value, "f4")
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6 * (1 + np.abs(other).max()), err_msg=str(key))
    return True


@pytest.mark.parametrize("examples", [150, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_random_models_are_recorded_as_clones_have_them(examples):
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(PROGRAMS)
    def holds(program: list[tuple[str, int]]) -> None:
        outcomes.append(check(program))

    outcomes: list[bool] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holds()
    assert sum(outcomes) > len(outcomes) / 2
