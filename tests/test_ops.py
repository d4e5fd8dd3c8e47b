"""Recording operations costs nothing when it is off, changes nothing when it is on, and leaves nothing behind."""

import contextlib
import copy
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

import hookrec
import hookrec.recorder
import replay

pytestmark = pytest.mark.usefixtures("one_thread", "no_process")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.during = None

    def forward(self, x):
        x = x + functional.dropout(functional.gelu(self.linear(x)), 0.3, self.training)
        if self.during is not None:
            self.during()
        return functional.relu(x)


def modes() -> int:
    return torch._C._len_torch_function_stack()


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def train(model: nn.Module, steps: int) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3)).pow(2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_training_is_the_bare_one(tmp_path):
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Residual(), Residual())

    bare, recorded = model(), model()
    losses = train(bare, 5)
    with hookrec.attach(recorded, tmp_path / "a", ops="*", ring="1MiB", keep_free=0):
        assert train(recorded, 5) == losses

    assert all(map(torch.equal, bare.state_dict().values(), recorded.state_dict().values()))
    layers = replay.open(tmp_path / "a").layers
    assert {"0/gelu#0", "0/dropout#0", "0/add#0", "0/relu#0"} <= set(layers)
    assert not {layer for layer in layers if layer.startswith("0.linear/")}


def test_without_it_there_is_no_mode_and_no_further_hook(tmp_path):
    model = nn.Sequential(Residual())
    found = []
    model[0].during = lambda: found.append((modes(), hooks_on(model)))
    with hookrec.attach(model, tmp_path / "a", ring="1MiB", keep_free=0):
        train(model, 1)

    assert found == [(0, 4)]  # two on the Linear, two on the root


def test_a_step_that_is_not_sampled_has_no_mode(tmp_path):
    model = nn.Sequential(Residual())
    found = []
    model[0].during = lambda: found.append(modes())
    with hookrec.attach(model, tmp_path / "a", ops="gelu", every=2, ring="1MiB", keep_free=0):
        train(model, 3)

    assert found == [1, 0, 1]
    assert modes() == 0
    assert replay.open(tmp_path / "a").steps == [0, 2]


@pytest.mark.parametrize("where", ["inside", "another thread", "after an interrupt", "after an error"])
def test_after_detach_no_mode_and_no_hook_is_left(tmp_path, where):
    model = nn.Sequential(Residual())
    recorder = hookrec.attach(model, tmp_path / "a", ops="*", clock="manual", ring="1MiB", keep_free=0)

    def end() -> None:
        if where == "inside":
            recorder.detach()
        elif where == "another thread":
            thread = threading.Thread(target=recorder.detach)
            thread.start()
            thread.join()
        else:
            raise KeyboardInterrupt if where == "after an interrupt" else ValueError

    model[0].during = end
    with contextlib.suppress(KeyboardInterrupt, ValueError):
        model(torch.ones(1, 3))
    recorder.detach()

    assert modes() == 0
    assert hooks_on(model) == 0
    assert "0/gelu#0" in replay.open(tmp_path / "a").layers


def test_a_fault_of_ours_in_an_operation_ends_the_recording_alone(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("a fault")

    model = nn.Sequential(Residual())
    twin = copy.deepcopy(model)
    monkeypatch.setattr("hookrec.ops.Counted", fail)
    with pytest.warns(hookrec.HookrecWarning, match="a fault"):
        recorder = hookrec.attach(model, tmp_path / "a", ops="gelu", ring="1MiB", keep_free=0)
        assert train(model, 2) == train(twin, 2)
        recorder.detach()

    assert modes() == 0
    assert hooks_on(model) == 0


def test_a_module_that_gets_another_name_while_hooks_are_on_is_left_without_one(tmp_path):
    model = nn.Sequential(Residual(), Residual())
    with hookrec.attach(model, tmp_path / "a", ops="relu", kinds="output", clock="manual", keep_free=0) as rec:
        for _ in range(2):
            model(torch.ones(1, 3))
            model.insert(0, Residual())
            model(torch.ones(1, 3))
            rec.step()

    assert hooks_on(model) == 0
    rows = replay.open(tmp_path / "a").records("*/relu#0").to_pylist()
    assert sorted((row["step"], row["layer"], row["call"]) for row in rows) == [
        *((0, f"{name}/relu#0", call) for name, call in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))),
        *((1, f"{name}/relu#0", call) for name, call in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0))),
    ]


def test_each_thread_has_operations_of_its_own(tmp_path):
    models = {name: nn.Sequential(Residual()) for name in "ab"}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with hookrec.attach(models, tmp_path / "a", ops="add", kinds="output", clock="manual", keep_free=0):
            threads = [threading.Thread(target=model, args=(torch.ones(1, 3),)) for model in models.values()]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)

    rows = replay.open(tmp_path / "a").records("*/*").to_pylist()
    assert sorted((row["layer"], row["call"]) for row in rows) == [("a.0/add#0", 0), ("b.0/add#0", 0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ops": "sofmax"}, "ops='sofmax' is no function of torch; there are, for example, softmax"),
        ({"ops": "add", "kinds": "param"}, "kinds has neither"),
        ({"ops": 3}, "ops is 3"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path, arguments, message):
    with pytest.raises(hookrec.AttachError, match=message):
        hookrec.attach(Residual(), tmp_path / "a", **arguments)

    assert not (tmp_path / "a").exists()
