"""Functions that are no modules: residual sums, attention by hand, activations in place, recorded on request."""

import contextlib

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.hookcases.case import Case, Replica, case
from tests.hookcases.in_place import Net, backward_on

KINDS = ("output", "grad_output")


def ops_case(model: nn.Module, train, right, *ops: str, **more) -> Case:
    return Case(model, train, right, kinds=KINDS, attach={"ops": ops, **more.pop("attach", {})}, **more)


@case
def sums_and_activations_in_place_by_whatever_name() -> Case:
    def run(net, x):
        h = net.l0(x)
        h += x
        h = functional.relu(h, inplace=True)
        h = torch.add(h, 1.0).relu_()
        h = 2.0 + h
        h = h.add(x)
        return net.l1(h)

    model = Net(run, (3, 3), (3, 1))
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        h = replica.linear("l0", x)
        h = replica.call("/add#0", lambda h: h + x, h)
        h = replica.call("/relu#0", functional.relu, h)
        h = replica.call("/add#1", lambda h: h + 1.0, h)
        h = replica.call("/relu#1", functional.relu, h)
        h = replica.call("/add#2", lambda h: 2.0 + h, h)
        h = replica.call("/add#3", lambda h: h + x, h)
        replica.backward(replica.linear("l1", h).pow(2).sum())

    return ops_case(model, backward_on(model, x), right, "__add__", "relu_")


@case
def attention_by_matmul_and_by_the_fused_function() -> Case:
    def run(net, x):
        q, k, v = net.qkv(x).chunk(3, -1)
        by_hand = functional.softmax(q @ k.transpose(-2, -1) / 2.0, -1) @ v
        return net.l0(by_hand + functional.scaled_dot_product_attention(q, k, v))

    model = Net(run, (4, 1), qkv=nn.Linear(4, 12))
    x = torch.randn(2, 3, 4)

    def right(replica: Replica) -> None:
        q, k, v = replica.linear("qkv", x).chunk(3, -1)
        scores = replica.call("/matmul#0", torch.matmul, q, k.transpose(-2, -1))
        weights = replica.call("/softmax#0", lambda s: functional.softmax(s, -1), scores / 2.0)
        by_hand = replica.call("/matmul#1", torch.matmul, weights, v)
        fused = functional.scaled_dot_product_attention
        total = by_hand + replica.call("/scaled_dot_product_attention#0", fused, q, k, v)
        replica.backward(replica.linear("l0", total).pow(2).sum())

    ops = ("matmul", "softmax", "scaled_dot_product_attention")
    return ops_case(model, backward_on(model, x), right, *ops, near=1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        h = functional.gelu(self.inner(x))
        return x + h + h * 2


@case
def operations_are_counted_within_a_call_of_the_innermost_module() -> Case:
    """A block that is called twice has its operations once, with two calls each; those between belong to the model."""
    model = Net(lambda net, x: net.block(net.block(x) + 1.0).tanh() + net.l0(x), (3, 3), block=Block())
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        def block(x: Tensor) -> Tensor:
            h = replica.call("block/gelu#0", functional.gelu, replica.linear("block.inner", x))
            first = replica.call("block/add#0", lambda x, h: x + h, x, h)
            return replica.call("block/add#1", lambda x, h: x + h, first, h * 2)

        between = replica.call("/add#0", lambda h: h + 1.0, block(x))
        h = block(between).tanh()
        last = replica.call("/add#1", lambda x, h: x + h, h, replica.linear("l0", x))
        replica.backward(last.pow(2).sum())

    # Gradients of tensors with several consumers are added up in another order.
    return ops_case(model, backward_on(model, x), right, "add", "gelu", near=1e-6)


@case
def the_layers_of_torch_are_not_recorded_a_second_time() -> Case:
    """`nn.ReLU` calls `F.relu`, and returns it; a Linear of the user's own calls `F.linear`, and does more."""

    class Shifted(nn.Linear):
        def forward(self, x):
            return functional.linear(x, self.weight) + self.bias

    model = Net(lambda net, x: net.l0(net.act(net.own(x))), (4, 1), own=Shifted(3, 4), act=nn.ReLU())
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        p = replica.p

        def own(x: Tensor) -> Tensor:
            product = replica.call("own/linear#0", lambda x: functional.linear(x, p["own.weight"]), x)
            return product + p["own.bias"]

        h = replica.call("act", functional.relu, replica.call("own", own, x))
        replica.backward(replica.linear("l0", h).pow(2).sum())

    return ops_case(model, backward_on(model, x), right, "relu", "linear")


@case
def operations_on_views_that_are_changed_in_place() -> Case:
    def run(net, x):
        h = net.l0(x)
        h[:, :2].neg_()
        parts = h.view(5, 2, 2)
        parts.mul_(2.0)
        return net.l1(h)

    model = Net(run, (3, 4), (4, 1))
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        h = replica.linear("l0", x)
        left = replica.call("/neg#0", torch.neg, h[:, :2])
        parts = replica.call("/mul#0", lambda h: h * 2.0, torch.cat([left, h[:, 2:]], 1).view(5, 2, 2))
        replica.backward(replica.linear("l1", parts.view(5, 4)).pow(2).sum())

    return ops_case(model, backward_on(model, x), right, "neg", "mul")


def checkpointed(reentrant: bool) -> Case:
    model = Net(lambda net, x: net.l0(checkpoint(net.block, x * 1.0, use_reentrant=reentrant)), (3, 1), block=Block())
    x = torch.randn(5, 3).requires_grad_()

    def right(replica: Replica) -> None:
        h = replica.call("block/gelu#0", functional.gelu, replica.linear("block.inner", x * 1.0))
        first = replica.call("block/add#0", lambda x, h: x + h, x * 1.0, h)
        second = replica.call("block/add#1", lambda x, h: x + h, first, h * 2)
        replica.backward(replica.linear("l0", second).pow(2).sum())

    return ops_case(model, backward_on(model, x), right, "add", "gelu", near=1e-6)


@case
def operations_that_are_computed_again() -> Case:
    return checkpointed(False)


@case
def operations_that_are_computed_again_by_reentering() -> Case:
    return checkpointed(True)


@case
def a_pass_with_operations_ends_in_the_middle() -> Case:
    """By an error and by an interrupt, with a mode of the user about it, which has to be in order afterwards."""

    class Stop(BaseException):
        pass

    errors = [ValueError, Stop]

    def run(net, x):
        h = net.block(x) + 1.0
        if errors:
            raise errors.pop(0)
        return net.l0(h)

    model = Net(run, (3, 1), block=Block())
    x = torch.randn(5, 3)

    def train(step: int) -> Tensor:
        while True:
            with contextlib.suppress(ValueError, Stop), torch.device("cpu"):
                loss = model(x).pow(2).sum()
                break
        assert all(map(torch.is_tensor, (x + 1.0, functional.relu(x))))  # outside of the model: no record
        assert torch._C._len_torch_function_stack() == 0
        loss.backward()
        model.zero_grad()
        return loss

    def right(replica: Replica) -> None:
        for _ in range(3 if replica.step == 0 else 1):
            h = replica.call("block/gelu#0", functional.gelu, replica.linear("block.inner", x))
            first = replica.call("block/add#0", lambda x, h: x + h, x, h)
            second = replica.call("block/add#1", lambda x, h: x + h, first, h * 2)
            last = replica.call("/add#0", lambda h: h + 1.0, second)
        replica.backward(replica.linear("l0", last).pow(2).sum())

    return ops_case(model, train, right, "add", "gelu", "relu", near=1e-6)


@case
def operations_of_a_model_that_was_compiled_before() -> Case:
    model = Net(lambda net, x: net.block(x).tanh(), block=Block())
    x = torch.randn(5, 3)
    torch.compiler.reset()
    compiled = torch.compile(model, backend=lambda graph, inputs: graph.forward)
    compiled(x)

    def right(replica: Replica) -> None:
        h = functional.gelu(replica.linear("block.inner", x))
        y = replica.call("/tanh#0", torch.tanh, x + h + h * 2)
        replica.backward(y.pow(2).sum())

    return ops_case(model, backward_on(compiled, x), right, "tanh", near=1e-6)


@case
def operations_only_inside_of_the_layers_that_were_asked_for() -> Case:
    model = Net(lambda net, x: net.l0(net.block(x) + 1.0), (3, 1), block=Block())
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        h = replica.call("block/gelu#0", functional.gelu, replica.linear("block.inner", x))
        replica.backward(functional.linear(x + h + h * 2 + 1.0, replica.p["l0.weight"], replica.p["l0.bias"]).sum())

    def train(step: int) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        model.zero_grad()
        return loss

    return ops_case(model, train, right, "gelu", near=1e-6, attach={"layers": "block*"})


@case
def a_part_of_the_model_is_called_without_its_root() -> Case:
    model = Net(lambda net, x: net.block(x), block=Block())
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        h = replica.call("block/gelu#0", functional.gelu, replica.linear("block.inner", x))
        replica.backward((x + h + h * 2).pow(2).sum())

    return ops_case(model, backward_on(model.block, x), right, "gelu", near=1e-6)
