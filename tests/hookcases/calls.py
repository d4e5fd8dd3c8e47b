"""Which calls there are: odd ways to call a layer, ways that end early, layers that come and go, odd arguments."""

import collections
import contextlib
import dataclasses
import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.hookcases.case import Case, Replica, case
from tests.hookcases.in_place import Net, backward_on


@case
def forward_was_replaced_on_the_instance_before() -> Case:
    model = Net(lambda net, x: net.l1(net.l0(x)), (3, 4), (4, 1))
    original = model.l0.forward

    @functools.wraps(original)
    def patched(x):
        return original(x) * 2

    model.l0.forward = patched
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        p = replica.p
        h = replica.call("l0", lambda x: functional.linear(x, p["l0.weight"], p["l0.bias"]) * 2, x)
        replica.backward(replica.linear("l1", h).pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def forward_is_replaced_in_the_middle_of_training() -> Case:
    model = Net(lambda net, x: net.l1(net.l0(x)), (3, 4), (4, 1))
    x = torch.randn(5, 3)
    step_of = backward_on(model, x)

    def train(step: int) -> Tensor:
        if step == 1:
            model.l0.forward = lambda x: x.repeat(1, 2)[:, :4] * 1.0
        return step_of(step)

    def right(replica: Replica) -> None:
        h = (
            replica.linear("l0", x)
            if replica.step == 0
            else replica.call("l0", lambda x: x.repeat(1, 2)[:, :4] * 1.0, x)
        )
        replica.backward(replica.linear("l1", h).pow(2).sum())

    return Case(model, train, right)


@case
def a_class_calls_itself_twice_in_call() -> Case:
    class Twice(nn.Linear):
        def __call__(self, x):
            return super().__call__(super().__call__(x))

    model = Net(lambda net, x: net.twice(x), twice=Twice(3, 3))
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        replica.backward(replica.linear("twice", replica.linear("twice", x)).pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def a_class_whose_call_passes_the_hooks_by_has_no_record() -> Case:
    class Direct(nn.Linear):
        def __call__(self, x):
            return self.forward(x)

    model = Net(lambda net, x: net.l0(net.direct(x)), (3, 1), direct=Direct(3, 3))
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        h = functional.linear(x, replica.p["direct.weight"], replica.p["direct.bias"])
        replica.backward(replica.linear("l0", h).pow(2).sum())

    def also(trace) -> None:
        assert trace.silent == [("direct", "it was never called")]

    return Case(model, backward_on(model, x), right, also=also)


@case
def hooks_of_the_user_replace_inputs_and_outputs() -> Case:
    """Those put on before the recorder and those put on after it; the record is what layer and caller get."""
    model = Net(lambda net, x: net.l1(net.l0(x)), (3, 4), (4, 1))
    model.l0.register_forward_hook(lambda module, args, output: output * 2)
    model.l1.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    x = torch.randn(5, 3)
    step_of = backward_on(model, x)

    def train(step: int) -> Tensor:
        if step == 1:
            model.l0.register_forward_hook(lambda module, args, output: output.tanh())
            model.l1.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 3,), kwargs), with_kwargs=True)
        return step_of(step)

    def right(replica: Replica) -> None:
        p, later = replica.p, replica.step == 1

        def l0(x: Tensor) -> Tensor:
            h = functional.linear(x, p["l0.weight"], p["l0.bias"]) * 2
            return h.tanh() if later else h

        h = replica.call("l0", l0, x) + 1
        replica.backward(replica.linear("l1", h * 3 if later else h).pow(2).sum())

    return Case(model, train, right, hooks_change=True)


@case
def passes_without_grad_in_inference_mode_and_in_eval_mode() -> Case:
    class Frozen(nn.Linear):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    model = Net(lambda net, x: net.l1(net.drop(net.l0(x)) + net.still(x)), (3, 4), (4, 1), drop=nn.Dropout(0.4))
    model.still = Frozen(3, 4)
    x = torch.randn(5, 3)
    step_of = backward_on(model, x)

    def train(step: int) -> Tensor:
        model.eval()
        with torch.inference_mode():
            model(x)
        model.train()
        loss = step_of(step)
        with torch.no_grad():
            model(x)
        return loss

    def forward(replica: Replica, drop: float) -> Tensor:
        h = replica.call("drop", lambda x: functional.dropout(x, drop) if drop else x * 1.0, replica.linear("l0", x))
        still = replica.linear("still", x).detach()
        return replica.linear("l1", h + still)

    def right(replica: Replica) -> None:
        for p in replica.p:
            if p.startswith("still"):
                replica.p[p].requires_grad_(False)
        with torch.no_grad():
            forward(replica, 0)
        loss = forward(replica, 0.4).pow(2).sum()
        with torch.no_grad():
            forward(replica, 0.4)
        replica.backward(loss)

    def also(trace) -> None:
        rows = trace.records("l0", "output", 0).to_pylist()
        assert [(row["call"], row["micro"], row["mode"]) for row in rows] == [
            (0, 0, "eval"),
            (1, 1, "train"),
            (2, 2, "train"),
        ]

    return Case(model, train, right, also=also)


@case
def parameters_are_given_by_functional_call() -> Case:
    model = Net(lambda net, x: net.l1(net.l0(x)), (3, 4), (4, 1))
    x = torch.randn(5, 3)

    def train(step: int) -> Tensor:
        given = {name: (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, given, (x,)).pow(2).sum()
        loss.backward()
        return loss

    def right(replica: Replica) -> None:
        replica.p = {name: (p.detach() * 2).requires_grad_() for name, p in replica.p.items()}
        replica.backward(replica.linear("l1", replica.linear("l0", x)).pow(2).sum())

    return Case(model, train, right)


@case
def parameters_lie_in_a_list() -> Case:
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.items = nn.ParameterList([torch.ones(4), torch.full((4,), 2.0)])
            self.by_name = nn.ParameterDict({"shift": torch.zeros(4)})

        def forward(self, x):
            return x * self.items[0] * self.items[1] + self.by_name["shift"]

    model = Net(lambda net, x: net.bag(x), bag=Bag())
    x = torch.randn(5, 4)

    def right(replica: Replica) -> None:
        p = replica.p
        y = x * p["bag.items.0"] * p["bag.items.1"] + p["bag.by_name.shift"]
        replica.backward(y.pow(2).sum())

    return Case(model, backward_on(model, x), right, kinds=("param_grad_acc",))


class Stop(BaseException):
    """Stands for KeyboardInterrupt, which would end the tests as well."""


@case
def a_forward_pass_ends_in_the_middle_and_is_tried_again() -> Case:
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.errors = [ValueError, Stop]

        def forward(self, x):
            if self.errors:
                raise self.errors.pop(0)
            return x * 2

    model = Net(lambda net, x: net.l1(net.fails(net.l0(x))), (3, 4), (4, 1), fails=Fails())
    x = torch.randn(5, 3)

    def train(step: int) -> Tensor:
        while True:
            with contextlib.suppress(ValueError, Stop):
                loss = model(x).pow(2).sum()
                break
        loss.backward()
        model.zero_grad()
        return loss

    def right(replica: Replica) -> None:
        tries = 3 if replica.step == 0 else 1
        h = [replica.linear("l0", x) for _ in range(tries)][-1]
        h = replica.call("fails", lambda x: x * 2, h)
        replica.backward(replica.linear("l1", h).pow(2).sum())

    return Case(model, train, right)


@case
def a_backward_pass_ends_in_the_middle_and_is_tried_again() -> Case:
    class Fails(torch.autograd.Function):
        errors = 1

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            if Fails.errors:
                Fails.errors -= 1
                raise ValueError
            return gradient * 2

    model = Net(lambda net, x: net.l1(Fails.apply(net.l0(x))), (3, 4), (4, 1))
    x = torch.randn(5, 3)

    def train(step: int) -> Tensor:
        Fails.errors = 1
        with contextlib.suppress(ValueError):
            model(x).pow(2).sum().backward()
        model.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        model.zero_grad()
        return loss

    def right(replica: Replica) -> None:
        first = replica.linear("l0", x)
        doubled = first.detach().mul(2).requires_grad_()
        replica.backward(replica.linear("l1", doubled).pow(2).sum())  # the pass that got no further
        again = replica.linear("l0", x)
        replica.backward(replica.linear("l1", again * 2).pow(2).sum())

    # The gradient of the parameters of the layer that failed is not reached in the first pass.
    return Case(model, train, right, kinds=("output", "grad_output", "input"))


@case
def layers_are_replaced_added_and_removed() -> Case:
    def run(net, x):
        for layer in net.layers:
            x = layer(x)
        return x

    model = Net(run, layers=nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]))
    x = torch.randn(5, 3)
    step_of = backward_on(model, x)

    def change(step: int) -> None:
        if step == 1:
            model.layers[0] = nn.Linear(3, 3, bias=False)
        if step == 2:
            model.layers.append(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
        if step == 3:
            del model.layers[2]

    def train(step: int) -> Tensor:
        change(step)
        return step_of(step)

    names = {2: ("0", "1", "2.0", "2.1")}
    weights: list[dict[str, Tensor]] = []

    def right(replica: Replica) -> None:
        torch.manual_seed(100 + replica.step)
        change(replica.step)  # the same random numbers make the same weights
        h = x
        state = {**dict(model.named_parameters())}
        replica.p = {name: p.detach().clone().requires_grad_() for name, p in state.items()}
        for name in names.get(replica.step, ("0", "1")):
            h = replica.linear(f"layers.{name}", h)
        replica.backward(h.pow(2).sum())
        weights.append(replica.p)

    return Case(model, train, right, steps=4)


@case
def a_parameter_is_replaced() -> Case:
    model = Net(lambda net, x: net.l0(x), (3, 2))
    x = torch.randn(5, 3)
    step_of = backward_on(model, x)

    def change(step: int) -> None:
        if step == 1:
            model.l0.weight = nn.Parameter(torch.full((4, 3), 0.5))
            model.l0.bias = nn.Parameter(torch.zeros(4))

    def train(step: int) -> Tensor:
        change(step)
        return step_of(step)

    def right(replica: Replica) -> None:
        change(replica.step)
        replica.p = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        for name, p in replica.p.items():
            replica.put("l0", "param", 0, name.removeprefix("l0."), p)
        replica.backward(replica.linear("l0", x).pow(2).sum())

    return Case(model, train, right, kinds=("output", "grad_output", "param", "param_grad_acc"))


@case
def a_lazy_layer_gets_its_parameters_in_the_first_step() -> Case:
    model = nn.Sequential(nn.LazyLinear(4, bias=False))
    x = torch.ones(2, 3)

    def train(step: int) -> Tensor:
        if step == 0:
            torch.manual_seed(7)
        loss = model(x).sum()
        loss.backward()
        model.zero_grad()
        return loss

    def right(replica: Replica) -> None:
        replica.put("0", "param_grad_acc", 0, "weight", torch.full((4, 3), 2.0))

    return Case(model, train, right, kinds=("param_grad_acc",), hooks_change=True)


@case
def a_layer_is_called_under_torch_func() -> Case:
    model = Net(lambda net, x: net.l0(x), (3, 2))
    x = torch.randn(5, 3)
    step_of = backward_on(model, x)

    def train(step: int) -> Tensor:
        torch.func.vmap(model.l0)(x)
        torch.func.grad(lambda x: model.l0(x).sum())(x)
        return step_of(step)

    def right(replica: Replica) -> None:
        replica.backward(replica.linear("l0", x).pow(2).sum())

    return Case(model, train, right, note="called under torch.func")


@dataclasses.dataclass
class Made:
    logits: Tensor
    rest: tuple[Tensor | None, ...]
    name: str = "x"


Pair = collections.namedtuple("Pair", "one two")


@case
def nested_arguments_and_outputs_of_all_sorts() -> Case:
    class All(nn.Module):
        def forward(self, pair, *more, table, flag=True, made=None):
            sum_ = pair.one + pair.two[0] + more[0] + table["a"][1] + made.logits
            return {
                "made": Made(sum_ * 2, (None, sum_ * 3)),
                7: Pair(sum_ * 4, ()),
                "deep": [[{"x": (sum_ * 5,)}]],
                "number": 3,
            }

    def run(net, x):
        h = net.l0(x)
        pair, table = Pair(h * 1.0, [h * 2.0]), {"a": [None, h * 3.0]}
        found = net.all(pair, h * 4.0, table=table, made=Made(h * 5.0, ()))
        total = found["made"].logits + found["made"].rest[1] + found[7].one
        return total + found["deep"][0][0]["x"][0]

    model = Net(run, (3, 4), all=All())
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        h = replica.linear("l0", x)
        pair, table = Pair(h * 1.0, [h * 2.0]), {"a": [None, h * 3.0]}
        found = replica.call("all", All(), pair, h * 4.0, table=table, made=Made(h * 5.0, ()))
        total = found["made"].logits + found["made"].rest[1] + found[7].one
        replica.backward((total + found["deep"][0][0]["x"][0]).pow(2).sum())

    # l0 has five consumers, whose gradients come in another order.
    return Case(model, backward_on(model, x), right, near=1e-6)


@case
def packed_sequences_through_recurrent_layers() -> Case:
    lengths = torch.tensor([4, 2])
    pack, pad = nn.utils.rnn.pack_padded_sequence, nn.utils.rnn.pad_packed_sequence

    def run(net, x):
        packed, hidden = net.rnn(pack(net.l0(x), lengths, batch_first=True))
        return net.l1(pad(packed, batch_first=True)[0]) + hidden.sum()

    model = Net(run, (3, 4), (4, 1), rnn=nn.GRU(4, 4, batch_first=True))
    x = torch.randn(2, 4, 3)

    def right(replica: Replica) -> None:
        gru = nn.GRU(4, 4, batch_first=True)
        weights = {name: replica.p[f"rnn.{name}"] for name, _ in gru.named_parameters()}
        packed = pack(replica.linear("l0", x), lengths, batch_first=True)

        def rnn(packed):
            return torch.func.functional_call(gru, weights, (packed,))

        packed, hidden = replica.call("rnn", rnn, packed)
        replica.backward((replica.linear("l1", pad(packed, batch_first=True)[0]) + hidden.sum()).pow(2).sum())

    return Case(model, backward_on(model, x), right, near=1e-6, kinds=("output", "grad_output", "grad_input"))


@case
def outputs_in_which_no_tensor_is_found_are_named() -> Case:
    class Counts(nn.Module):
        def forward(self, x):
            return (part for part in x)

    model = Net(lambda net, x: net.l0(torch.stack(list(net.counts(x)))), (3, 2), counts=Counts())
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        replica.put("counts", "input", 0, "0", x)
        replica.backward(replica.linear("l0", x).pow(2).sum())

    return Case(model, backward_on(model, x), right, note="returned a generator, in which no tensor was found")


@case
def containers_and_the_root_are_recorded_on_request() -> Case:
    block = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    model = Net(lambda net, x: net.block(net.block(x)) * 2, block=block)
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        def called(x: Tensor) -> Tensor:
            return replica.call("block.1", functional.relu, replica.linear("block.0", x))

        def root(x: Tensor) -> Tensor:
            return replica.call("block", called, replica.call("block", called, x)) * 2

        replica.backward(replica.call("", root, x).pow(2).sum())

    return Case(model, backward_on(model, x), right, attach={"containers": True})


@case
def one_of_two_models_is_recorded() -> Case:
    model = Net(lambda net, x: net.l0(x), (3, 2))
    other = Net(lambda net, x: net.l0(x), (3, 3))
    x = torch.randn(5, 3)

    def train(step: int) -> Tensor:
        loss = model(other(x)).pow(2).sum()
        loss.backward()
        model.zero_grad()
        return loss

    def right(replica: Replica) -> None:
        replica.backward(replica.linear("l0", other(x)).pow(2).sum())

    return Case(model, train, right)
