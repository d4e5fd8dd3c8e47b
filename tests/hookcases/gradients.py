"""Backward passes of all sorts: several, nested, recomputed, in other threads and dtypes, changed on their way."""

import threading

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.hookcases.case import Case, Replica, case
from tests.hookcases.in_place import Net, backward_on


def two_linears() -> tuple[nn.Module, Tensor]:
    return Net(lambda net, x: net.l1(net.l0(x)), (3, 4), (4, 1)), torch.randn(5, 3)


@case
def a_hook_of_the_user_changes_a_gradient() -> Case:
    """The record is the gradient that arrives at the output; what the user makes of it goes on to the layer."""

    def run(net, x):
        h = net.l0(x)
        h.register_hook(lambda gradient: gradient * 0.5)
        return net.l1(h)

    model = Net(run, (3, 4), (4, 1))
    x = torch.randn(5, 3)

    class Halve(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 0.5

    def right(replica: Replica) -> None:
        p = replica.p

        def l0(x: Tensor) -> Tensor:
            return Halve.apply(functional.linear(x, p["l0.weight"], p["l0.bias"]))

        replica.backward(replica.linear("l1", replica.call("l0", l0, x)).pow(2).sum())

    return Case(model, backward_on(model, x), right, kinds=("output", "grad_output", "grad_input", "param_grad_acc"))


@case
def gradients_are_retained_by_the_user() -> Case:
    def run(net, x):
        h = net.l0(x)
        h.retain_grad()
        net.kept.append(h)
        return net.l1(h)

    model = Net(run, (3, 4), (4, 1))
    model.kept = []
    x = torch.randn(5, 3)
    step_of = backward_on(model, x)

    def train(step: int) -> Tensor:
        step_of(step)
        return model.kept.pop().grad

    def right(replica: Replica) -> None:
        replica.backward(replica.linear("l1", replica.linear("l0", x)).pow(2).sum())

    return Case(model, train, right)


@case
def gradients_are_asked_for_without_a_backward_pass() -> Case:
    model, x = two_linears()

    def train(step: int) -> Tensor:
        given = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(given).pow(2).sum(), given)
        return gradient

    def right(replica: Replica) -> None:
        given = x.clone().requires_grad_()
        replica.backward(replica.linear("l1", replica.linear("l0", given)).pow(2).sum())

    return Case(model, train, right)


@case
def a_penalty_on_the_gradient_of_the_input() -> Case:
    """The gradient is differentiated again, which brings each layer a second one."""
    model = Net(lambda net, x: net.l1(net.act(net.l0(x))), (3, 4), (4, 1), act=nn.Tanh())
    x = torch.randn(5, 3)

    def train(step: int) -> Tensor:
        given = x.clone().requires_grad_()
        loss = model(given).sum()
        (gradient,) = torch.autograd.grad(loss, given, create_graph=True)
        gradient.pow(2).sum().backward()
        model.zero_grad()
        return gradient

    def right(replica: Replica) -> None:
        p = replica.p
        given = x.clone().requires_grad_()
        h = replica.linear("l0", given)
        t = replica.call("act", torch.tanh, h)
        y = replica.linear("l1", t)
        replica.backward(y.sum())
        # The penalty by a formula: y has one column, so dy/dx is ((1 - t^2) * w1) @ w0, and t is a function of h.
        h = functional.linear(x, p["l0.weight"], p["l0.bias"]).detach().requires_grad_()
        gradient = ((1 - torch.tanh(h) ** 2) * p["l1.weight"]) @ p["l0.weight"]
        (of_h,) = torch.autograd.grad(gradient.pow(2).sum(), h, retain_graph=True)
        t = torch.tanh(h.detach()).requires_grad_()
        gradient = ((1 - t**2) * p["l1.weight"]) @ p["l0.weight"]
        (of_t,) = torch.autograd.grad(gradient.pow(2).sum(), t)
        replica.put("l0", "grad_output", 0, "", of_h)
        replica.put("act", "grad_output", 0, "", of_t)

    return Case(model, train, right, kinds=("output", "grad_output"), near=1e-5)


@case
def two_losses_go_back_one_after_the_other() -> Case:
    model, x = two_linears()

    def train(step: int) -> Tensor:
        y = model(x)
        y.sum().backward(retain_graph=True)
        y.pow(2).sum().backward()
        model.zero_grad()
        return y

    def right(replica: Replica) -> None:
        y = replica.linear("l1", replica.linear("l0", x))
        replica.backward(y.sum())
        replica.backward(y.pow(2).sum())

    return Case(model, train, right, kinds=("output", "grad_output", "grad_input", "param_grad_acc"))


@case
def a_generator_and_a_discriminator_take_turns() -> Case:
    """The second pass through the discriminator has the parameters that its optimizer made in mid-step."""
    model = nn.ModuleDict({"generator": nn.Linear(2, 3), "discriminator": nn.Linear(3, 1)})
    noise, real = torch.randn(5, 2), torch.randn(5, 3)
    optimizers = {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in model.items()}

    def train(step: int) -> Tensor:
        fake = model["generator"](noise)
        optimizers["discriminator"].zero_grad()
        (model["discriminator"](fake.detach()).exp() - model["discriminator"](real)).sum().backward()
        optimizers["discriminator"].step()
        optimizers["generator"].zero_grad()
        loss = -model["discriminator"](fake).pow(2).sum()
        loss.backward()
        optimizers["generator"].step()
        return loss

    def right(replica: Replica) -> None:
        fake = replica.linear("generator", noise)
        judged = replica.linear("discriminator", fake.detach())
        replica.backward((judged.exp() - replica.linear("discriminator", real)).sum())
        replica.descend("discriminator", 0.1)
        replica.backward(-replica.linear("discriminator", fake).pow(2).sum())

    return Case(model, train, right)


@case
def a_backward_pass_that_reaches_only_some_parameters() -> Case:
    model, x = two_linears()

    def train(step: int) -> Tensor:
        loss = model(x).pow(2).sum()
        loss.backward(inputs=[model.l1.weight])
        gradient = model.l1.weight.grad.clone()
        model.zero_grad()
        return gradient

    def right(replica: Replica) -> None:
        h = replica.linear("l0", x)
        y = replica.linear("l1", h)
        weight = replica.p["l1.weight"]
        (of_y,) = torch.autograd.grad(y.pow(2).sum(), y, retain_graph=True)
        (of_weight,) = torch.autograd.grad(y.pow(2).sum(), weight, retain_graph=True)
        replica.put("l1", "grad_output", 0, "", of_y)
        replica.put("l1", "param_grad_acc", 0, "weight", of_weight)

    return Case(model, train, right, kinds=("output", "grad_output", "param_grad_acc"))


@case
def micro_batches_whose_backward_passes_come_in_another_order() -> Case:
    model, x = two_linears()

    def train(step: int) -> Tensor:
        losses = [model(x * (number + 1)).pow(2).sum() for number in range(3)]
        for number in (2, 0, 1):
            losses[number].backward()
        model.zero_grad()
        return losses[0]

    def right(replica: Replica) -> None:
        losses = [replica.linear("l1", replica.linear("l0", x * (n + 1))).pow(2).sum() for n in range(3)]
        for number in (2, 0, 1):
            replica.backward(losses[number])

    return Case(model, train, right, kinds=("output", "grad_output", "input", "grad_input", "param_grad_acc"))


@case
def the_backward_pass_comes_a_step_later() -> Case:
    """Gradients belong to the step of their forward pass, whenever they arrive."""
    model, x = two_linears()
    late: list[Tensor] = []

    def train(step: int) -> None:
        late.append(model(x * (step + 1)).pow(2).sum())
        if step:
            late.pop(0).backward()

    def right(replica: Replica) -> None:
        y = replica.linear("l1", replica.linear("l0", x * (replica.step + 1)))
        if replica.step < 2:
            replica.backward(y.pow(2).sum())

    return Case(model, train, right, steps=3, kinds=("output", "grad_output"))


def checkpointed(reentrant: bool, *, nested: bool = False) -> Case:
    def block(net, x):
        return net.drop(net.act(net.l0(x)))

    def run(net, x):
        if nested:
            inner = lambda x: checkpoint(block, net, x, use_reentrant=reentrant)  # noqa: E731
            return net.l1(checkpoint(inner, x * 1.0, use_reentrant=reentrant))
        return net.l1(checkpoint(block, net, x * 1.0, use_reentrant=reentrant))

    model = Net(run, (3, 4), (4, 1), act=nn.ReLU(inplace=True), drop=nn.Dropout(0.4))
    x = torch.randn(5, 3).requires_grad_()

    def right(replica: Replica) -> None:
        h = replica.call("act", functional.relu, replica.linear("l0", x * 1.0))
        h = replica.call("drop", lambda x: functional.dropout(x, 0.4), h)
        replica.backward(replica.linear("l1", h).pow(2).sum())

    return Case(model, backward_on(model, x), right, kinds=("output", "grad_output", "input", "param_grad_acc"))


@case
def a_block_is_computed_again_without_reentering() -> Case:
    return checkpointed(False)


@case
def a_block_is_computed_again_by_reentering() -> Case:
    return checkpointed(True)


@case
def checkpoints_inside_of_checkpoints() -> Case:
    return checkpointed(False, nested=True)


@case
def checkpoints_inside_of_checkpoints_by_reentering() -> Case:
    return checkpointed(True, nested=True)


@case
def a_chain_of_checkpoints() -> Case:
    def run(net, x):
        return checkpoint_sequential(net.layers, 2, x * 1.0, use_reentrant=False)

    model = Net(run, layers=nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))))
    x = torch.randn(5, 3).requires_grad_()

    def right(replica: Replica) -> None:
        h = x * 1.0
        for number in range(4):
            h = replica.linear(f"layers.{number}", h)
        replica.backward(h.pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def a_checkpoint_whose_random_state_is_not_kept() -> Case:
    """Without its random state the recomputation drops other elements; that is the training, and not ours to mend."""

    def run(net, x):
        return net.l1(checkpoint(lambda x: net.l0(x), x * 1.0, use_reentrant=False, preserve_rng_state=False))

    model = Net(run, (3, 4), (4, 1))
    x = torch.randn(5, 3).requires_grad_()

    def right(replica: Replica) -> None:
        replica.backward(replica.linear("l1", replica.linear("l0", x * 1.0)).pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def saved_tensors_are_packed_away() -> Case:
    model = Net(lambda net, x: net.l1(net.act(net.l0(x))), (3, 4), (4, 1), act=nn.ReLU(inplace=True))
    x = torch.randn(5, 3)
    step_of = backward_on(model, x)

    def train(step: int) -> Tensor:
        packed = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy)
        with packed if step == 0 else torch.autograd.graph.save_on_cpu():
            return step_of(step)

    def right(replica: Replica) -> None:
        h = replica.call("act", functional.relu, replica.linear("l0", x))
        replica.backward(replica.linear("l1", h).pow(2).sum())

    return Case(model, train, right)


@case
def anomalies_are_looked_for() -> Case:
    model, x = two_linears()
    step_of = backward_on(model, x)

    def train(step: int) -> Tensor:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            return step_of(step)

    def right(replica: Replica) -> None:
        replica.backward(replica.linear("l1", replica.linear("l0", x)).pow(2).sum())

    return Case(model, lambda step: quietly(train, step), right)


def quietly(function, *args):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


@case
def layers_run_under_autocast() -> Case:
    model = Net(lambda net, x: net.l1(net.norm(net.l0(x))), (3, 4), (4, 1), norm=nn.LayerNorm(4))
    x = torch.randn(5, 3)

    def train(step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        loss = y.float().pow(2).sum()
        loss.backward()
        model.zero_grad()
        return loss

    def right(replica: Replica) -> None:
        p = replica.p

        def low(layer: str):
            def linear(x: Tensor) -> Tensor:
                return functional.linear(x.bfloat16(), p[f"{layer}.weight"].bfloat16(), p[f"{layer}.bias"].bfloat16())

            return linear

        h = replica.call("l0", low("l0"), x)
        # On a CPU autocast leaves this function alone, which takes both precisions.
        h = replica.call("norm", lambda h: functional.layer_norm(h, (4,), p["norm.weight"], p["norm.bias"]), h)
        replica.backward(replica.call("l1", low("l1"), h).float().pow(2).sum())

    return Case(model, train, right)


@case
def double_precision_and_complex_numbers() -> Case:
    class Phase(nn.Module):
        def __init__(self):
            super().__init__()
            self.turn = nn.Parameter(torch.polar(torch.ones(4), torch.arange(4.0)))

        def forward(self, x):
            return x * self.turn

    model = Net(lambda net, x: net.phase(net.l0(x)).abs(), phase=Phase())
    model.l0 = nn.Linear(3, 4, dtype=torch.float64)
    x = torch.randn(5, 3, dtype=torch.float64)

    def right(replica: Replica) -> None:
        z = replica.call("phase", lambda x: x * replica.p["phase.turn"], replica.linear("l0", x))
        replica.backward(z.abs().pow(2).sum())

    kinds = ("output", "grad_output", "input", "grad_input", "param_grad_acc")
    return Case(model, backward_on(model, x), right, kinds=kinds)


@case
def the_backward_pass_runs_in_another_thread() -> Case:
    model, x = two_linears()

    def train(step: int) -> Tensor:
        loss = model(x).pow(2).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        model.zero_grad()
        return loss

    def right(replica: Replica) -> None:
        replica.backward(replica.linear("l1", replica.linear("l0", x)).pow(2).sum())

    return Case(model, train, right)


@case
def a_frozen_layer_between_two_that_learn() -> Case:
    model = Net(lambda net, x: net.l2(net.l1(net.l0(x))), (3, 4), (4, 4), (4, 1))
    model.l1.requires_grad_(False)
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        h = replica.linear("l1", replica.linear("l0", x))
        replica.backward(replica.linear("l2", h).pow(2).sum())

    kinds = ("output", "grad_output", "input", "grad_input", "param_grad_acc")
    return Case(model, backward_on(model, x), right, kinds=kinds)


@case
def an_output_of_several_that_the_loss_does_not_use() -> Case:
    class Split(nn.Module):
        def forward(self, x):
            return x * 2, x * 3, x.detach() * 4

    model = Net(lambda net, x: net.l1(net.split(net.l0(x))[0]), (3, 4), (4, 1), split=Split())
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        used, _, _ = replica.call("split", lambda x: (x * 2, x * 3, x.detach() * 4), replica.linear("l0", x))
        replica.backward(replica.linear("l1", used).pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def integers_into_an_embedding_and_zero_elements() -> Case:
    model = Net(lambda net, i, e: net.l0(net.embed(i)).sum() + net.l0(e).sum(), (4, 1), embed=nn.Embedding(7, 4))
    i, e = torch.tensor([[1, 1, 6]]), torch.empty(0, 4)

    def right(replica: Replica) -> None:
        h = replica.call("embed", lambda i: functional.embedding(i, replica.p["embed.weight"]), i)
        loss = replica.linear("l0", h).sum() + replica.linear("l0", e).sum()
        replica.backward(loss.pow(2).sum())

    return Case(model, backward_on(model, i, e), right)


@case
def two_inputs_are_the_same_tensor() -> Case:
    model = Net(lambda net, x: net.l1(net.bi(h := net.l0(x), h)), (3, 4), (2, 1), bi=nn.Bilinear(4, 4, 2))
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        p = replica.p

        def bilinear(one: Tensor, other: Tensor) -> Tensor:
            return functional.bilinear(one, other, p["bi.weight"], p["bi.bias"])

        h = replica.linear("l0", x)
        replica.backward(replica.linear("l1", replica.call("bi", bilinear, h, h)).pow(2).sum())

    return Case(model, backward_on(model, x), right, near=1e-6, kinds=("output", "grad_output", "input"))
