"""`hookrec rerun`: a fault that was planted in a layer is found in that layer, and nothing is said of healthy ones."""

import json
import math
import shutil

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hookrec
import replay
from hookrec.cli import main
from hookrec.rerun import EXPLAINED, NOT_EXPLAINED, NOT_RUNNABLE, rerun
from tests.writer_in_process import WriterInProcess

KINDS = ("input", "output", "param")

slow = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("one_thread")


pytestmark = pytest.mark.usefixtures("no_process")


def record(path, model, *inputs, kinds=KINDS, training=True, autocast=None, **options):
    """Record two steps, of which the second has parameters that an optimizer has changed."""
    model.train(training)
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    optimizer = torch.optim.SGD(parameters or [nn.Parameter(torch.zeros(1))], 0.1)
    with hookrec.attach(model, path, kinds=kinds, keep_free=0, ring="16MB", **options):
        for _ in range(2):
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                out = model(*inputs)
            out = out[0] if isinstance(out, tuple) else out
            if parameters:
                out.float().pow(2).mean().backward()
            optimizer.step()
    return replay.open(path)


def verdicts(trace, **options):
    return {verdict.layer: verdict.verdict for verdict in rerun(trace, 1, **options)}


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(128, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10), nn.Softmax(-1)),
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, *(pytest.param(d, marks=slow) for d in (torch.float64, torch.float16))]
)
def test_healthy_layers_are_explained_in_each_dtype(dtype, tmp_path):
    trace = record(tmp_path / "a", small_net().to(dtype), torch.randn(4, 3, 8, 8).to(dtype))

    assert verdicts(trace) == {str(i): EXPLAINED for i in range(10)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_round_otherwise_are_explained(dtype, tmp_path, monkeypatch):
    trace = record(tmp_path / "a", small_net().to(dtype), torch.randn(4, 3, 8, 8).to(dtype))
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # other kernels, and no bit is taken for ours
    monkeypatch.setattr("hookrec.rerun._same_bits", lambda own, recorded: False)

    found = rerun(trace, 1)

    assert {v.verdict for v in found} == {EXPLAINED}
    assert 0 < max(v.excess for v in found) < 0.5  # there is room between rounding and a fault


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=slow)])
def test_healthy_layers_under_autocast_are_explained(dtype, tmp_path):
    trace = record(tmp_path / "a", small_net(), torch.randn(4, 3, 8, 8), autocast=dtype)

    assert trace.tensor(1, "5").dtype.name == str(dtype).removeprefix("torch.")
    assert verdicts(trace) == {str(i): EXPLAINED for i in range(10)}


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.rnn = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.gru = nn.GRU(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.bilinear = nn.Bilinear(8, 8, 3)

    def forward(self, tokens):
        x, (h, c) = self.rnn(self.embedding(tokens), (torch.ones(2, 4, 8), torch.zeros(2, 4, 8)))
        x, _ = self.gru(x)
        return self.bilinear(x, x.flip(0)).sum() + self.head(x) + h.sum() + c.sum()


def test_recurrences_tied_weights_and_nested_inputs_are_run_as_they_were(tmp_path):
    torch.manual_seed(0)

    trace = record(tmp_path / "a", Tokens(), torch.randint(0, 11, (4, 5)))

    assert verdicts(trace) == dict.fromkeys(("embedding", "rnn", "gru", "head", "bilinear"), EXPLAINED)
    assert {v.path for v in rerun(trace, 1, "rnn")} == {"0", "1.0", "1.1"}


def flip(tensor, index, bit):
    """A copy of a float32 tensor with one bit of one element flipped, as a bad device would have it."""
    bits = tensor.detach().clone().view(torch.int32)
    bits.view(-1)[index] ^= 1 << bit
    return bits.view(torch.float32)


@pytest.mark.parametrize(
    ("layer", "bit"), [(0, 12), (5, 30), *(pytest.param(*c, marks=slow) for c in ((5, 24), (8, 22)))]
)
def test_a_flipped_bit_is_found_in_the_layer_where_it_flipped(layer, bit, tmp_path):
    model = small_net()
    model[layer].register_forward_hook(lambda module, args, output: output + (flip(output, 7, bit) - output).detach())

    trace = record(tmp_path / "a", model, torch.randn(4, 3, 8, 8))
    found = rerun(trace, 0)

    assert [v.layer for v in found if v.verdict == NOT_EXPLAINED] == [str(layer)] == [found[0].layer]
    assert (found[0].where[0], found[0].where[-1]) == (0, 7)
    assert sum(v.verdict == EXPLAINED for v in found) == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_computes_with_another_weight_is_found(dtype, tmp_path):
    torch.manual_seed(0)
    factor = 1.001 if dtype is torch.float32 else 1.05
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()).to(dtype)
    linear, wrong = nn.functional.linear, iter([False, True] * 2)  # by call, over two steps

    def kernel(x, weight, bias=None):
        return linear(x, weight * factor if next(wrong) else weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", kernel)
        trace = record(tmp_path / "a", model, torch.randn(8, 16).to(dtype))

    assert verdicts(trace) == {"0": EXPLAINED, "1": EXPLAINED, "2": NOT_EXPLAINED, "3": EXPLAINED}


@pytest.fixture(params=["this device", "another"])
def device(request, monkeypatch):
    """Of what another device has computed, no bit is taken for ours."""
    if request.param == "another":
        monkeypatch.setattr("hookrec.rerun._same_bits", lambda own, recorded: False)


@pytest.mark.usefixtures("device")
def test_nan_and_infinity_that_come_from_the_input_are_explained(tmp_path):
    x = torch.tensor([[1.0, 0.0, -1.0, 3e38], [1.0, math.nan, 0.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4, bias=False), nn.Softmax(-1))
    model[1].weight.data = 10 * torch.eye(4)  # 3e39 is infinite in float32, and finite in float64

    trace = record(tmp_path / "a", model, x)

    assert {v.layer: v.verdict for v in rerun(trace, 0)} == {"0": EXPLAINED, "1": EXPLAINED, "2": EXPLAINED}
    assert math.isinf(trace.tensor(0, "1")[0, 3])


def test_nan_that_does_not_come_from_the_input_is_found(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, output: output.index_fill(0, torch.tensor(2), math.nan))

    trace = record(tmp_path / "a", model, torch.randn(3, 4))

    found = {v.layer: v for v in rerun(trace, 0)}
    assert (found["0"].verdict, found["0"].where[0], found["1"].verdict) == (NOT_EXPLAINED, 2, EXPLAINED)


def test_what_cannot_be_run_says_why(tmp_path):
    class Twice(nn.Module):
        def forward(self, x):
            return 2 * x

    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Twice(), nn.BatchNorm1d(4), nn.Dropout(0.0))
    training = rerun(record(tmp_path / "a", model, torch.randn(8, 4)), 1)
    evaluation = rerun(record(tmp_path / "b", model, torch.randn(8, 4), training=False), 1)
    bare = rerun(record(tmp_path / "c", model, torch.randn(8, 4), kinds=("output",)), 1)
    no_input = rerun(record(tmp_path / "d", model, torch.randn(8, 4), kinds=("output", "param")), 1)

    reasons = {v.layer: v.why for v in training if v.verdict == NOT_RUNNABLE}
    assert reasons.keys() == {"1", "2"}
    assert "random numbers" in reasons["1"]
    assert "--factory" in reasons["2"]
    reasons = {v.layer: v.why for v in evaluation if v.verdict == NOT_RUNNABLE}
    assert reasons.keys() == {"2", "3"}
    assert "running_mean" in reasons["3"]
    assert "'param'" in {v.layer: v.why for v in bare}["0"]
    assert "'input'" in {v.layer: v.why for v in no_input}["0"]
    assert {v.verdict for v in bare} == {NOT_RUNNABLE}


@pytest.mark.parametrize("change", ["forward", "parametrized", "function", "argument"])
def test_a_layer_that_was_changed_is_not_taken_for_one_of_its_class(change, tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4) if change != "argument" else nn.ConvTranspose1d(4, 4, 3, stride=2)

        def forward(self, x):
            return self.layer(x, output_size=(10,)) if change == "argument" else self.layer(x)

    model, x = Net(), torch.randn(8, 4)
    if change == "forward":
        model.layer.forward = lambda x: 2 * nn.functional.linear(x, model.layer.weight)
    elif change == "parametrized":
        torch.nn.utils.parametrizations.weight_norm(model.layer)
    elif change == "function":
        torch.nn.utils.parametrizations.orthogonal(model.layer)
    else:
        x = torch.randn(2, 4, 4)

    found = rerun(record(tmp_path / "a", model, x), 1, "layer")

    if change == "argument":  # the length is not in the trace, and shows
        assert (found[0].verdict, found[0].why) == (NOT_EXPLAINED, "it has the shape 2×4×10, and run again 2×4×9")
    else:
        assert found[0].verdict == NOT_RUNNABLE


def test_containers_and_operations_say_what_they_are(tmp_path):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return torch.add(x, self.linear(x))

    trace = record(tmp_path / "a", nn.Sequential(Block()), torch.randn(2, 4), containers=True, ops=("add",))

    found = {v.layer: v.why or v.verdict for v in rerun(trace, 1)}
    assert found["0.linear"] == EXPLAINED
    assert "made of other layers" in found["0"]
    assert "result of a function" in found["0/add#0"]


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_traces_of_each_store_that_are_not_sealed_are_run_again(store, tmp_path):
    trace = record(tmp_path / "a", nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), store=store)
    (tmp_path / "a/rank-00000/end.json").unlink()

    assert verdicts(replay.open(trace.path)) == {"0": EXPLAINED}


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), Scaled(), Noisy())


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.full((4,), 0.5))

    def forward(self, x):
        return x * self.scale + self.shift


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def test_a_factory_makes_the_layers_that_torch_has_not(tmp_path):
    trace = record(tmp_path / "a", make_model(), torch.randn(8, 4))

    assert verdicts(trace) == {"0": EXPLAINED, "1": NOT_RUNNABLE, "2": NOT_RUNNABLE}
    found = {v.layer: v for v in rerun(trace, 1, factory=make_model)}
    assert (found["0"].verdict, found["1"].verdict) == (EXPLAINED, EXPLAINED)
    assert "does not give the same twice" in found["2"].why


def test_a_factory_need_not_tie_what_was_tied(tmp_path):
    trace = record(tmp_path / "a", Tokens(), torch.randint(0, 11, (4, 5)))

    found = rerun(trace, 1, factory=Tokens)

    assert {v.layer: v.verdict for v in found} == dict.fromkeys(verdicts(trace), EXPLAINED)


def test_random_numbers_of_the_caller_are_left_alone(tmp_path):
    trace, made = record(tmp_path / "a", make_model(), torch.randn(8, 4)), make_model()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    rerun(trace, 1, factory=lambda: made)

    assert torch.equal(torch.rand(3), expected)


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    path = tmp_path_factory.mktemp("linear") / "a"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hookrec.recorder.WriterProcess", WriterInProcess)
        record(path, nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    return path


def ask(*arguments):
    return CliRunner().invoke(main, ["rerun", *map(str, arguments)])


def test_the_exit_status_is_the_answer(tmp_path):
    healthy, broken, bare = small_net(), small_net(), nn.Sequential(nn.Linear(4, 4))
    broken[5].register_forward_hook(lambda module, args, output: output + 0.1)
    x = torch.randn(4, 3, 8, 8)
    record(tmp_path / "healthy", healthy, x)
    record(tmp_path / "broken", broken, x)
    record(tmp_path / "bare", bare, torch.randn(2, 4), kinds=("output",))

    assert ask(tmp_path / "healthy").exit_code == 0
    assert ask(tmp_path / "broken").exit_code == 1
    assert ask(tmp_path / "broken", "--layer", "[0-4]").exit_code == 0
    assert ask(tmp_path / "broken", "--tolerance", "10").exit_code == 0
    assert ask(tmp_path / "bare").exit_code == 3
    first = ask(tmp_path / "broken").output.splitlines()[1].split()
    assert first[:4] == ["5", "0", "not", "explained"]
    rows = json.loads(ask(tmp_path / "broken", "--json").output)
    assert [row["layer"] for row in rows if row["verdict"] == NOT_EXPLAINED] == ["5"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--step", "7"), "has no step 7"),
        (("--layer", "nine"), "does not have an output of a layer 'nine'"),
        (("--rank", "3"), "has no rank 3"),
        (("--factory", "nowhere"), "is not like my_model:make"),
        (("--factory", "no_such_module:make"), "cannot be imported"),
        (("--factory", "math:nan"), "is no function"),
        (("--factory", "math:floor"), "The factory raised TypeError"),
        (("--factory", "os:getcwd"), "returned a str"),
        (("--tolerance", "nan"), "tolerance is nan"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(arguments, words, linear):
    refused = ask(linear, *arguments)

    assert refused.exit_code == 2
    assert words in refused.output
    assert "Traceback" not in refused.output


LARGE = 10**9
"""Sizes of a Linear do not matter to what it computes; the recorded parameters do. They must not cost memory."""


@pytest.mark.parametrize(
    ("entry", "verdict"),
    [
        ({"class": "os.system"}, NOT_RUNNABLE),
        ({"class": "torch.nn.modules.linear.functional"}, NOT_RUNNABLE),
        ({"class": "torch.nn.modules.linear.Module"}, NOT_RUNNABLE),
        ({"settings": {"in_features": LARGE, "out_features": LARGE, "bias": True}}, EXPLAINED),
        ({"settings": {"in_features": "x", "out_features": {}, "bias": True}}, NOT_RUNNABLE),
        ({"settings": {"nobody": 1}}, NOT_RUNNABLE),
        ({"settings": "all"}, NOT_RUNNABLE),
        ({"parameters": [{"name": "weight", "tied_to": 3}]}, NOT_RUNNABLE),
    ],
)
def test_a_trace_does_not_choose_what_is_run(entry, verdict, linear, tmp_path):
    trace = replay.open(shutil.copytree(linear, tmp_path / "a"))
    file = tmp_path / "a/rank-00000/model.json"
    model = json.loads(file.read_text())
    model["modules"][1].update(entry)
    file.write_text(json.dumps(model))

    (found,) = rerun(trace, 1)

    assert found.verdict == verdict
