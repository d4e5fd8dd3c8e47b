"""Tensors that are changed in place after, before or while a layer works on them, views of one another, and aliases."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.hookcases.case import Case, Replica, case


class Net(nn.Module):
    """Some Linears, and a forward that is given."""

    def __init__(self, run, *sizes: tuple[int, int], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for number, size in enumerate(sizes):
            self.add_module(f"l{number}", nn.Linear(*size))
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Tensor) -> Tensor:
        return self.run(self, *args)


def backward_on(model: nn.Module, *inputs: Tensor):
    """A step that is a forward pass and a backward pass."""

    def train(step: int) -> Tensor:
        loss = model(*(x.clone() if x.is_floating_point() else x for x in inputs)).pow(2).sum()
        loss.backward()
        model.zero_grad()
        return loss

    return train


@case
def a_view_of_the_input_is_changed_while_the_input_is_used_again() -> Case:
    def run(net, x):
        h = net.l0(x)
        flat = net.flat(h)
        flat.mul_(2)
        return net.l1(h.reshape(2, -1)) + net.l1(flat)

    model = Net(run, (3, 4), (8, 1), flat=nn.Flatten())
    x = torch.randn(2, 2, 3)

    def right(replica: Replica) -> None:
        h = replica.linear("l0", x)
        # What was handed to both consumers is the changed tensor; the flattened one is a part of its way.
        flat = replica.call("flat", lambda h: h.reshape(2, -1), h) * 2
        first = replica.linear("l1", flat)
        replica.backward((first + replica.linear("l1", flat)).pow(2).sum())

    return Case(model, backward_on(model, x), right, kinds=("output", "grad_output", "input"))


@case
def two_slices_of_one_tensor_are_changed_by_the_layer_that_gets_them() -> Case:
    class Both(nn.Module):
        def forward(self, one, other):
            return one.add_(other.mul_(2.0))

    def run(net, x):
        h = net.l0(x)
        return net.l1(net.both(h[:, :2], h[:, 2:]))

    model = Net(run, (3, 4), (2, 1), both=Both())
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        h = replica.linear("l0", x)
        total = replica.call("both", lambda one, other: one + other * 2.0, h[:, :2], h[:, 2:])
        replica.backward(replica.linear("l1", total).pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def an_output_is_changed_through_view_as_real() -> Case:
    class Complex(nn.Module):
        def forward(self, x):
            return torch.complex(x, x * 2)

    def run(net, x):
        z = net.complex(net.l0(x))
        torch.view_as_real(z).mul_(3.0)
        return net.l1(z.real + z.imag)

    model = Net(run, (3, 4), (4, 1), complex=Complex())
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        z = replica.call("complex", lambda x: torch.complex(x, x * 2), replica.linear("l0", x))
        z = torch.view_as_complex(torch.view_as_real(z) * 3.0)
        replica.backward(replica.linear("l1", z.real + z.imag).pow(2).sum())

    return Case(model, backward_on(model, x), right, kinds=("output", "grad_output"))


@case
def an_output_is_detached_in_place() -> Case:
    def run(net, x):
        h = net.l0(x)
        h.detach_()
        return net.l1(h)

    model = Net(run, (3, 4), (4, 1))
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        replica.backward(replica.linear("l1", replica.linear("l0", x).detach()).pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def some_elements_of_an_output_are_set() -> Case:
    def run(net, x):
        h = net.l0(x)
        h[0] = 1.0
        h[:, 1].zero_()
        return net.l1(h)

    model = Net(run, (3, 4), (4, 1))
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        h = replica.linear("l0", x)
        keep, one = torch.ones(5, 4, dtype=torch.bool), torch.zeros(5, 4)
        keep[0] = keep[:, 1] = False
        one[0, [0, 2, 3]] = 1.0
        replica.backward(replica.linear("l1", torch.where(keep, h, one)).pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def an_output_is_changed_after_another_layer_has_used_it() -> Case:
    def run(net, x):
        h = net.l0(x)
        y = h * 3.0
        h.add_(1.0)
        return net.l1(h) + net.l1(y)

    model = Net(run, (3, 4), (4, 1))
    x = torch.randn(5, 2, 3)  # the output is a view

    def right(replica: Replica) -> None:
        h = replica.linear("l0", x)
        y = h * 3.0
        first = replica.linear("l1", h + 1.0)
        replica.backward((first + replica.linear("l1", y)).pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def outputs_are_copied_into_a_buffer_made_beforehand() -> Case:
    def run(net, x):
        rows = torch.zeros(2, 5, 4)
        for number in range(2):
            rows[number].copy_(net.l0(x * (number + 1)))
        return net.l1(rows)

    model = Net(run, (3, 4), (4, 1))
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        rows = torch.stack([replica.linear("l0", x * (number + 1)) for number in range(2)])
        replica.backward(replica.linear("l1", rows).pow(2).sum())

    return Case(model, backward_on(model, x), right)


class DoublesInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@case
def a_custom_function_changes_its_input() -> Case:
    class Doubles(nn.Module):
        def forward(self, x):
            return DoublesInPlace.apply(x)

    model = Net(lambda net, x: net.l1(net.doubles(net.l0(x))), (3, 4), (4, 1), doubles=Doubles())
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        h = replica.call("doubles", lambda x: x * 2, replica.linear("l0", x))
        replica.backward(replica.linear("l1", h).pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def dropout_in_place_on_a_view() -> Case:
    model = Net(lambda net, x: net.l1(net.drop(net.l0(x))), (3, 4), (4, 1), drop=nn.Dropout(0.4, inplace=True))
    x = torch.randn(5, 2, 3)

    def right(replica: Replica) -> None:
        h = replica.call("drop", lambda x: functional.dropout(x, 0.4), replica.linear("l0", x))
        replica.backward(replica.linear("l1", h).pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def the_same_buffer_is_returned_by_each_call() -> Case:
    class Bank(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("memory", torch.zeros(4))

        def forward(self, x):
            return self.memory.copy_(x.detach().mean(0))

    model = Net(lambda net, x: net.l0(x) + net.bank(x * 2) + net.bank(x), (4, 4), bank=Bank())
    x = torch.randn(5, 4)

    def right(replica: Replica) -> None:
        h = replica.linear("l0", x)
        replica.call("bank", lambda x: x.mean(0), x * 2)
        last = replica.call("bank", lambda x: x.mean(0), x)  # both calls returned one tensor, which holds this now
        # The sum was made call by call: the first summand was read before the second call changed it.
        replica.backward((h + (x * 2).mean(0) + last).pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def a_layer_returns_its_own_parameter() -> Case:
    class Token(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self):
            return self.weight

    model = Net(lambda net, x: net.l1(net.l0(x) + net.token()), (3, 4), (4, 1), token=Token())
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        h = replica.linear("l0", x)
        token = replica.p["token.weight"] * 1.0
        replica.backward(replica.linear("l1", h + replica.call("token", lambda: token)).pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def a_layer_returns_a_part_of_its_input() -> Case:
    class First(nn.Module):
        def forward(self, x):
            return x[:, 0]

    model = Net(lambda net, x: net.l1(net.first(net.l0(x))), (3, 4), (4, 1), first=First())
    x = torch.randn(5, 2, 3)

    def right(replica: Replica) -> None:
        h = replica.call("first", lambda x: x[:, 0], replica.linear("l0", x))
        replica.backward(replica.linear("l1", h).pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def lists_that_the_caller_and_the_layer_change_afterwards() -> Case:
    class Takes(nn.Module):
        def forward(self, features):
            last = features.pop()
            return [last * 2, features[0]]

    def run(net, x):
        features = [net.l0(x), net.l0(x + 1)]
        found = net.takes(features)
        found[0] = found[0] * 0
        found.append(x)
        return net.l1(found[0] + found[1])

    model = Net(run, (3, 4), (4, 1), takes=Takes())
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        features = [replica.linear("l0", x), replica.linear("l0", x + 1)]
        found = replica.call("takes", lambda f: [f[1] * 2, f[0] * 1.0], features)
        replica.backward(replica.linear("l1", found[0] * 0 + found[1]).pow(2).sum())

    return Case(model, backward_on(model, x), right)
