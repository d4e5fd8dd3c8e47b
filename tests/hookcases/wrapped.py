"""Models and layers that something else has a hand in: compilers, parametrizations, wrappers, fused paths, devices."""

import copy
import io
import warnings

import torch
import torch.nn.utils.parametrizations
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn import functional

from tests.hookcases.case import Case, Replica, case
from tests.hookcases.in_place import Net, backward_on


def two_linears() -> tuple[nn.Module, Tensor]:
    return Net(lambda net, x: net.l1(net.l0(x)), (3, 4), (4, 1)), torch.randn(5, 3)


def two_linears_right(x: Tensor):
    def right(replica: Replica) -> None:
        replica.backward(replica.linear("l1", replica.linear("l0", x)).pow(2).sum())

    return right


@case
def the_weight_is_normed() -> Case:
    """A parametrized layer is one leaf; what computes its weight is no layer."""
    model, x = two_linears()
    torch.nn.utils.parametrizations.weight_norm(model.l0)

    def right(replica: Replica) -> None:
        p = replica.p
        magnitude, direction = (p[f"l0.parametrizations.weight.original{number}"] for number in (0, 1))

        def l0(x: Tensor) -> Tensor:
            return functional.linear(x, torch._weight_norm(direction, magnitude, 0), p["l0.bias"])

        replica.backward(replica.linear("l1", replica.call("l0", l0, x)).pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def the_weight_is_normed_by_its_largest_singular_value() -> Case:
    """Each reading of the weight moves buffers: a recorder that read it would change the training."""
    model, x = two_linears()
    torch.nn.utils.parametrizations.spectral_norm(model.l0)
    names = ("_u", "_v")

    def right(replica: Replica) -> None:
        p = replica.p
        weight, bias = p["l0.parametrizations.weight.original"], p["l0.bias"]
        u, v = (replica.b[f"l0.parametrizations.weight.0.{name}"] for name in names)

        def l0(x: Tensor) -> Tensor:
            nonlocal u, v
            with torch.no_grad():
                u = functional.normalize(torch.mv(weight, v), dim=0, eps=1e-12)
                v = functional.normalize(torch.mv(weight.t(), u), dim=0, eps=1e-12)
            return functional.linear(x, weight / torch.vdot(u, torch.mv(weight, v)), bias)

        replica.backward(replica.linear("l1", replica.call("l0", l0, x)).pow(2).sum())

    return Case(model, backward_on(model, x), right, near=1e-5)


@case
def a_weight_is_pruned() -> Case:
    model, x = two_linears()
    torch.nn.utils.prune.random_unstructured(model.l0, "weight", 0.5)

    def right(replica: Replica) -> None:
        p = replica.p

        def l0(x: Tensor) -> Tensor:
            return functional.linear(x, p["l0.weight_orig"] * replica.b["l0.weight_mask"], p["l0.bias"])

        replica.backward(replica.linear("l1", replica.call("l0", l0, x)).pow(2).sum())

    return Case(model, backward_on(model, x), right)


@case
def a_linear_is_wrapped_by_an_adapter() -> Case:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear):
            super().__init__()
            self.base_layer = base.requires_grad_(False)
            self.lora_A, self.lora_B = nn.Linear(3, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, x):
            return self.base_layer(x) + self.lora_B(self.lora_A(x)) * 0.5

    model, x = two_linears()
    model.l0 = Adapter(model.l0)

    def right(replica: Replica) -> None:
        h = replica.linear("l0.base_layer", x)
        h = h + replica.linear("l0.lora_B", replica.linear("l0.lora_A", x)) * 0.5
        replica.backward(replica.linear("l1", h).pow(2).sum())

    kinds = ("output", "grad_output", "input", "grad_input", "param_grad_acc")
    return Case(model, backward_on(model, x), right, kinds=kinds)


def compiled(*, before: bool, in_place: bool) -> Case:
    torch.compiler.reset()  # how often one function may be compiled is limited
    model, x = two_linears()
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    def compile_() -> nn.Module:
        if in_place:
            model.compile(backend=backend)
            return model
        return torch.compile(model, backend=backend)

    if before:
        run = compile_()
        run(x)  # what is compiled by now calls no hook that comes later
    else:
        run = None

    def train(step: int) -> Tensor:
        nonlocal run
        run = run if run is not None else compile_()
        return backward_on(run, x)(step)

    def also(trace) -> None:
        assert len(compilations) == 1 if before else not compilations

    return Case(model, train, two_linears_right(x), also=also)


@case
def the_model_was_compiled_and_called_before() -> Case:
    return compiled(before=True, in_place=False)


@case
def the_model_was_compiled_in_place_before() -> Case:
    return compiled(before=True, in_place=True)


@case
def the_model_is_compiled_while_it_is_recorded() -> Case:
    return compiled(before=False, in_place=False)


@case
def a_scripted_layer_is_recorded_as_one_and_what_is_inside_is_named() -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3)))
    model = Net(lambda net, x: net.l0(net.scripted(x)), (3, 1), scripted=scripted)
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        p = replica.p
        inside = lambda x: functional.linear(x, p["scripted.0.weight"], p["scripted.0.bias"])  # noqa: E731
        replica.backward(replica.linear("l0", replica.call("scripted", inside, x)).pow(2).sum())

    def also(trace) -> None:
        assert ("scripted.0", "inside 'scripted', which is TorchScript: hooks do not run there") in trace.silent

    return Case(model, backward_on(model, x), right, also=also, near=1e-6)


@case
def a_scripted_model_is_recorded_as_one() -> Case:
    plain = nn.Sequential(nn.Linear(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(plain)
    x = torch.randn(5, 3)

    def right(replica: Replica) -> None:
        inside = lambda x: functional.linear(x, replica.p["0.weight"], replica.p["0.bias"])  # noqa: E731
        replica.backward(replica.call("", inside, x).pow(2).sum())

    return Case(model, backward_on(model, x), right, near=1e-6)


def encoder_layer(*, training: bool) -> Case:
    """The attention is a leaf in effect, also where it says that it has a child."""
    model = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    model.train(training)
    x = torch.randn(2, 3, 4)

    def train(step: int) -> Tensor:
        if training:
            return backward_on(model, x)(step)
        with torch.no_grad():
            return model(x)

    def right(replica: Replica) -> None:
        p = replica.p
        heads = nn.MultiheadAttention(4, 2, batch_first=True)
        weights = {name: p[f"self_attn.{name}"] for name, _ in heads.named_parameters()}

        def attend(x: Tensor) -> Tensor:
            return torch.func.functional_call(heads, weights, (x, x, x), {"need_weights": False})

        def norm(name: str):
            return lambda x: functional.layer_norm(x, (4,), p[f"{name}.weight"], p[f"{name}.bias"])

        with torch.set_grad_enabled(training):
            h = x + replica.call("dropout1", lambda x: x * 1.0, replica.call("self_attn", attend, x)[0])
            h = replica.call("norm1", norm("norm1"), h)
            f = replica.call("dropout", lambda x: x * 1.0, functional.relu(replica.linear("linear1", h)))
            f = replica.call("dropout2", lambda x: x * 1.0, replica.linear("linear2", f))
            y = replica.call("norm2", norm("norm2"), h + f)
        if training:
            replica.backward(y.pow(2).sum())

    def also(trace) -> None:
        assert [layer for layer, _ in trace.silent] == ["self_attn.out_proj"]

    return Case(model, train, right, kinds=("output", "grad_output"), near=1e-5, also=also)


@case
def an_encoder_layer_in_training() -> Case:
    return encoder_layer(training=True)


@case
def an_encoder_layer_in_evaluation() -> Case:
    """Without hooks on its children one fused kernel would compute it; with them PyTorch calls each."""
    return encoder_layer(training=False)


@case
def the_model_is_copied_saved_and_loaded_in_the_middle() -> Case:
    """As exponential moving averages and checkpoints do; the copies are trained too, and have no record."""
    model, x = two_linears()
    step_of = backward_on(model, x)

    def train(step: int) -> Tensor:
        twin = copy.deepcopy(model)
        twin(x).sum().backward()
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        average(x)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        model.load_state_dict(torch.load(file))
        assert set(model.state_dict()) == {"l0.weight", "l0.bias", "l1.weight", "l1.bias"}
        return step_of(step)

    return Case(model, train, two_linears_right(x))


@case
def tensors_are_made_on_another_device_by_default() -> Case:
    model, x = two_linears()
    step_of = backward_on(model, x)

    def train(step: int) -> Tensor:
        with torch.device("meta"):
            torch.set_default_dtype(torch.float64)
            try:
                return step_of(step)
            finally:
                torch.set_default_dtype(torch.float32)

    return Case(model, train, two_linears_right(x))


@case
def a_dry_run_on_tensors_without_values() -> Case:
    model, x = two_linears()
    step_of = backward_on(model, x)

    def train(step: int) -> Tensor:
        if step == 1:
            from torch._subclasses.fake_tensor import FakeTensorMode

            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                functional.linear(mode.from_tensor(x), torch.empty(4, 3))
                model.l0(mode.from_tensor(x))
        return step_of(step)

    def right(replica: Replica) -> None:
        two_linears_right(x)(replica)
        if replica.step == 1:  # the dry run is a call, the first, without a value
            moved = {}
            for (step, layer, kind, call, path), value in replica.records.items():
                moved[step, layer, kind, call + (layer == "l0"), path] = value
            replica.records = moved

    return Case(model, train, right, kinds=("output", "grad_output"), note="a fake tensor, which has no values")


@case
def data_parallel_on_one_device() -> Case:
    """Without a GPU it calls what it wraps; its prefix is no part of the names."""
    inner, x = two_linears()
    model = nn.DataParallel(inner)

    def right(replica: Replica) -> None:
        replica.p = {name.removeprefix("module."): p for name, p in replica.p.items()}
        two_linears_right(x)(replica)

    return Case(model, backward_on(model, x), right)


@case
def a_tensor_of_a_subclass_flows_through() -> Case:
    class Tagged(Tensor):
        pass

    model, x = two_linears()

    def train(step: int) -> Tensor:
        loss = model(x.as_subclass(Tagged)).pow(2).sum()
        loss.backward()
        model.zero_grad()
        return loss.as_subclass(Tensor)

    return Case(model, train, two_linears_right(x))
