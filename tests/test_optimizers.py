"""Parameters and steps around optimizers, scalers and closures that are not quite the usual ones."""

import pytest
import torch
from torch import nn

import hookrec
import hookrec.recorder
import replay

pytestmark = pytest.mark.usefixtures("one_thread", "no_process")


def ones(width: int = 2) -> nn.Module:
    """One layer whose weight is one, and whose gradient is the sum of its inputs."""
    model = nn.Sequential(nn.Linear(width, 1, bias=False))
    nn.init.ones_(model[0].weight)
    return model


@pytest.mark.parametrize("after_first_step", [False, True])
def test_a_gradient_that_a_hook_of_the_optimizer_clips_is_seen_as_it_is_consumed(tmp_path, after_first_step):
    model = ones()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def clip(*_: object) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.5)

    if not after_first_step:
        optimizer.register_step_pre_hook(clip)
    with hookrec.attach(model, tmp_path / "a", kinds="param_grad", ring="1MiB", keep_free=0):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            if after_first_step:
                optimizer.register_step_pre_hook(clip)

    trace = replay.open(tmp_path / "a")
    values = [trace.tensor(step, "0", "param_grad", path="weight").tolist() for step in (0, 1)]
    assert values == [[[3, 3]] if after_first_step else [[0.5, 0.5]], [[0.5, 0.5]]]


def test_an_update_after_a_step_that_raised_is_that_of_its_own_step(tmp_path):
    class Fails(torch.optim.Optimizer):
        fail = True

        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(0.5 * parameter.grad)
            if self.fail:
                raise RuntimeError("after the parameters were changed")

    model = ones()
    optimizer = Fails(model.parameters(), {})
    with hookrec.attach(model, tmp_path / "a", kinds="update", ring="1MiB", keep_free=0):
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="after the parameters"):
            optimizer.step()
        optimizer.fail = False
        optimizer.step()

    updates = [(record["step"], tensor.tolist()) for record, tensor in replay.open(tmp_path / "a").select().tensors()]
    assert updates == [(0, [[-0.5, -0.5]])]


def test_a_step_that_calls_the_step_of_its_base_class_is_one_step(tmp_path):
    """Both have hooks, once an optimizer of the base class has been made."""

    class Warm(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            super().step(closure)

    model = ones()
    torch.optim.SGD(ones().parameters(), 0.1)
    optimizer = Warm(model.parameters(), 0.25)
    kinds = ("param", "param_grad", "update")
    with hookrec.attach(model, tmp_path / "a", kinds=kinds, ring="1MiB", keep_free=0):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    rows = replay.open(tmp_path / "a").records(kinds=["param_grad", "update"]).to_pylist()
    assert [(row["step"], row["kind"], row["max"]) for row in rows] == [
        (0, "param_grad", 1),
        (0, "update", -0.5),
        (1, "param_grad", 1),
        (1, "update", -0.5),
    ]


def test_the_scale_of_a_scaler_that_steps_another_model_is_not_logged(tmp_path):
    model, other = ones(), ones()
    optimizer, others = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    with hookrec.attach(model, tmp_path / "a", ring="1MiB", keep_free=0):
        for x in (1.0, float("inf")):
            scaler.scale(other(torch.full((1, 2), x)).sum()).backward()
            scaler.step(others)
            scaler.update()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    trace = replay.open(tmp_path / "a")
    assert trace.steps == [0, 1]
    assert not {"hookrec/grad_scale", "hookrec/skipped"} & set(trace.scalars()["name"].to_pylist())


def test_two_optimizers_of_one_model_each_consume_their_own_parameters(tmp_path):
    """As in a GAN: the first that steps ends the steps; what the second does between is in the same step."""
    model = nn.ModuleDict({"one": ones(), "two": ones()})
    first, second = (torch.optim.SGD(model[name].parameters(), 0.25) for name in ("one", "two"))
    with hookrec.attach(model, tmp_path / "a", kinds=("param_grad", "update"), ring="1MiB", keep_free=0):
        for x in (1.0, 2.0):
            for optimizer, name in ((first, "one"), (second, "two")):
                optimizer.zero_grad()
                model[name](torch.full((1, 2), x)).sum().backward()
                optimizer.step()

    rows = replay.open(tmp_path / "a").records().to_pylist()
    assert [(row["step"], row["layer"], row["kind"], row["max"]) for row in rows] == [
        (0, "one.0", "param_grad", 1),
        (0, "one.0", "update", -0.25),
        (1, "two.0", "param_grad", 1),
        (1, "two.0", "update", -0.25),
        (1, "one.0", "param_grad", 2),
        (1, "one.0", "update", -0.5),
        (2, "two.0", "param_grad", 2),
        (2, "two.0", "update", -0.5),
    ]


def test_each_evaluation_of_a_closure_is_a_call(tmp_path):
    model = ones()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3, tolerance_grad=0, tolerance_change=0)
    evaluations: list[tuple[float, list[float]]] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        output = model(torch.ones(1, 2))
        loss = output.pow(2).sum()
        loss.backward()
        evaluations.append((output.item(), model[0].weight.grad.tolist()))
        return loss

    kinds = ("output", "param_grad", "param_grad_acc")
    with hookrec.attach(model, tmp_path / "a", kinds=kinds, ring="1MiB", keep_free=0):
        optimizer.step(closure)

    trace = replay.open(tmp_path / "a")
    assert trace.steps == [0]
    assert len(evaluations) >= 3
    for call, (output, gradient) in enumerate(evaluations):
        assert trace.tensor(0, "0", call=call).item() == output
        for kind in ("param_grad", "param_grad_acc"):
            assert trace.tensor(0, "0", kind, call=call, path="weight").tolist() == gradient
    assert len(trace.records()) == 3 * len(evaluations)


def test_a_backward_pass_that_steps_each_parameter_at_once(tmp_path):
    """An optimizer in the backward pass takes the gradient away before the pass has ended."""
    model = ones()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(parameter: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    model[0].weight.register_post_accumulate_grad_hook(step)
    kinds = ("param_grad", "param_grad_acc", "update")
    with hookrec.attach(model, tmp_path / "a", kinds=kinds, ring="1MiB", keep_free=0):
        model(torch.full((1, 2), 3.0)).sum().backward()

    found = {record["kind"]: tensor.tolist() for record, tensor in replay.open(tmp_path / "a").select().tensors()}
    assert found["param_grad"] == [[3, 3]]
    assert found["update"] == [[-1.5, -1.5]]
    assert found.get("param_grad_acc", [[3, 3]]) == [[3, 3]]
