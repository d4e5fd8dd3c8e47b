"""Each kind of record against values worked out by hand, without a hook."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import hookrec
import replay
from hookrec.plan import KINDS
from tests.oracle import Key, raw, recorded

pytestmark = pytest.mark.usefixtures("one_thread")


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_all_kinds_of_a_step_are_those_of_the_formulas(tmp_path):
    """Momentum SGD on clipped gradients: .grad after the backward pass, as consumed, and what the step changed."""
    model, twin = two_layers(), two_layers()
    x = torch.randn(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hookrec.attach(model, tmp_path / "a", kinds=KINDS, keep_free=0):
        for _ in range(2):
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    want: dict[Key, bytes] = {}
    w0, b0, w2, b2 = (p.detach() for p in twin.parameters())
    for step in range(2):
        h0 = functional.linear(x, w0, b0)
        h1 = torch.tanh(h0)
        y = functional.linear(h1, w2, b2)
        gy = 2 * y
        g1 = gy @ w2
        g0 = g1 * (1 - h1 * h1)
        gx = {"0.weight": g0.t() @ x, "0.bias": g0.sum(0), "2.weight": gy.t() @ h1, "2.bias": gy.sum(0)}
        for layer, value in zip("012", (h0, h1, y), strict=True):
            want[step, layer, "output", 0, ""] = raw(value)
        for layer, value in zip("012", (x, h0, h1), strict=True):
            want[step, layer, "input", 0, "0"] = raw(value)
        for layer, value in zip("012", (g0, g1, gy), strict=True):
            want[step, layer, "grad_output", 0, ""] = raw(value)
        for layer, value in zip("12", (g0, g1), strict=True):
            want[step, layer, "grad_input", 0, "0"] = raw(value)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gx.values()]))
        clip = torch.clamp(0.5 / (norm + 1e-6), max=1.0)
        for name, parameter in (("0.weight", w0), ("0.bias", b0), ("2.weight", w2), ("2.bias", b2)):
            layer, path = name.split(".")
            want[step, layer, "param", 0, path] = raw(parameter)
            want[step, layer, "param_grad_acc", 0, path] = raw(gx[name])
            want[step, layer, "param_grad", 0, path] = raw(gx[name] * clip)
            before = parameter.clone()
            parameter.add_(gx[name] * clip, alpha=-0.1)
            want[step, layer, "update", 0, path] = raw(parameter - before)

    got = recorded(replay.open(tmp_path / "a"))
    assert got.keys() == want.keys()
    for key, value in want.items():
        one, other = np.frombuffer(got[key], "f4"), np.frombuffer(value, "f4")
        # The formulas sum in another order than autograd.
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6, err_msg=str(key))
    assert [key for key in want if key[2] == "input" and got[key] != want[key] and key[:2] == (0, "0")] == []


def test_a_share_of_an_input_that_several_layers_use_is_that_of_one_call(tmp_path):
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            h = self.first(x)
            return self.left(h) + 2 * self.right(input=h) + self.left(h)

    model = Fork()
    with hookrec.attach(model, tmp_path / "a", kinds=("grad_input", "grad_output"), clock="manual", keep_free=0):
        model(torch.ones(4, 3)).sum().backward()

    trace = replay.open(tmp_path / "a")
    ones = np.ones((4, 3), "f4")
    left, right = (getattr(model, name).weight.detach().numpy() for name in ("left", "right"))
    for call in (0, 1):
        np.testing.assert_allclose(trace.tensor(0, "left", "grad_input", call=call, path="0"), ones @ left, rtol=1e-6)
    np.testing.assert_allclose(trace.tensor(0, "right", "grad_input", path="input"), 2 * ones @ right, rtol=1e-6)
    total = 2 * ones @ left + 2 * ones @ right
    np.testing.assert_allclose(trace.tensor(0, "first", "grad_output"), total, rtol=1e-6)


def test_inputs_are_those_at_entry_also_where_the_layer_changes_them(tmp_path):
    class Doubles(nn.Module):
        def forward(self, x, *, scale):
            return x.mul_(2).add_(scale)

    model = nn.ModuleDict({"doubles": Doubles()})
    with hookrec.attach(model, tmp_path / "a", kinds=("input", "output"), clock="manual", keep_free=0):
        model["doubles"](torch.ones(3), scale=torch.tensor(5.0))

    trace = replay.open(tmp_path / "a")
    assert trace.tensor(0, "doubles", "input", path="0").tolist() == [1, 1, 1]
    assert trace.tensor(0, "doubles", "input", path="scale").tolist() == 5
    assert trace.tensor(0, "doubles").tolist() == [7, 7, 7]


def test_a_call_that_raised_is_no_call(tmp_path):
    class Fails(nn.Module):
        def forward(self, x):
            if x[0] < 0:
                raise ValueError("negative")
            return x + 1

    model = nn.Sequential(Fails())
    with hookrec.attach(model, tmp_path / "a", kinds=("input", "output"), clock="manual", keep_free=0):
        for value in (1.0, -1.0, 2.0):
            try:
                model(torch.tensor([value]))
            except ValueError:
                continue

    trace = replay.open(tmp_path / "a")
    assert [trace.tensor(0, "0", "input", call=call, path="0").item() for call in (0, 1)] == [1, 2]
    assert trace.count == 4


def test_parameters_of_containers_frozen_and_tied_ones_are_recorded_once(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.ones(3))
            self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight
            self.frozen = nn.Linear(3, 3).requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.two(self.one(x + self.token)))

    model = Net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    with hookrec.attach(model, tmp_path / "a", kinds=("param", "param_grad", "update"), keep_free=0):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    rows = replay.open(tmp_path / "a").records().to_pylist()
    assert sorted((row["layer"], row["kind"], row["path"]) for row in rows) == [
        ("", "param", "token"),
        ("", "param_grad", "token"),
        ("", "update", "token"),
        ("frozen", "param", "bias"),
        ("frozen", "param", "weight"),
        ("one", "param", "weight"),
        ("one", "param_grad", "weight"),
        ("one", "update", "weight"),
    ]


def test_accumulated_gradients_are_those_after_each_backward_pass(tmp_path):
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kinds = ("param_grad_acc", "param_grad")
    with hookrec.attach(model, tmp_path / "a", kinds=kinds, keep_free=0):
        for scale in (1.0, 2.0, 3.0):
            model(torch.full((1, 2), scale)).sum().backward()
        optimizer.step()

    trace = replay.open(tmp_path / "a")
    found = [trace.tensor(0, "0", "param_grad_acc", call=call, path="weight")[0, 0] for call in range(3)]
    assert found == [1, 3, 6]
    assert trace.tensor(0, "0", "param_grad", path="weight").tolist() == [[6, 6]]
    assert [row["micro"] for row in trace.records(kinds="param_grad_acc").to_pylist()] == [0, 1, 2]


def test_closures_and_unscaled_gradients(tmp_path):
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    kinds = ("param_grad_acc", "param_grad")
    with hookrec.attach(model, tmp_path / "a", kinds=kinds, keep_free=0):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

        def closure():
            optimizer.zero_grad()
            loss = model(torch.full((1, 2), 3.0)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    trace = replay.open(tmp_path / "a")
    assert trace.tensor(0, "0", "param_grad_acc", path="weight").tolist() == [[1024, 1024]]
    assert trace.tensor(0, "0", "param_grad", path="weight").tolist() == [[1, 1]]
    assert trace.tensor(1, "0", "param_grad", path="weight").tolist() == [[3, 3]]


def test_a_step_that_a_scaler_skips_is_a_step_that_says_so(tmp_path):
    original = torch.amp.GradScaler.step
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hookrec.attach(model, tmp_path / "a", kinds=("grad_output", "param_grad", "update"), keep_free=0):
        for x in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 2), x)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    trace = replay.open(tmp_path / "a")
    assert trace.steps == [0, 1, 2]
    assert [len(trace.records(steps=step)) for step in trace.steps] == [3, 1, 3]
    scalars = {(row["step"], row["name"]): row["value"] for row in trace.scalars().to_pylist()}
    assert [scalars[step, "hookrec/grad_scale"] for step in range(3)] == [1024, 1024, 512]
    assert [step for step in range(3) if (step, "hookrec/skipped") in scalars] == [1]
    assert trace.tensor(2, "0", "grad_output").item() == 512
    assert torch.amp.GradScaler.step is original


def test_after_detach_nothing_of_ours_is_on_the_parameters(tmp_path):
    model = two_layers()
    recorder = hookrec.attach(model, tmp_path / "a", kinds=KINDS, keep_free=0)
    model(torch.ones(2, 3)).sum().backward()
    recorder.detach()

    assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks


def test_all_kinds_leave_the_training_as_it_was(tmp_path):
    states = []
    for path in (None, tmp_path / "a"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        recorder = hookrec.attach(model, path, kinds=KINDS, containers=True, keep_free=0) if path else None
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).pow(2).mean().backward()
            optimizer.step()
        if recorder is not None:
            recorder.detach()
        states.append(model.state_dict())

    assert all(map(torch.equal, states[0].values(), states[1].values()))
