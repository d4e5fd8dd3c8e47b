"""`replay.diff` names the layer that differs first, and accuses nobody of rounding."""

import copy
import math
import time

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import hookrec
import replay
from replay.distance import distance
from replay.format import numpy_dtype
from replay.layout import matching_rows
from tests.handwritten import Written, write_trace

pytestmark = pytest.mark.usefixtures("one_thread")

FEATURES, BATCH = 32, 16


class Scaled(nn.Module):
    """Attention of a sequence to itself, with a scale."""

    def __init__(self, scale=FEATURES**-0.5):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return (x @ x.transpose(-1, -2) * self.scale).softmax(-1) @ x


class InBfloat16(nn.Module):
    """A layer that computes in bfloat16, where nobody asked for it, and returns float32."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x):
        return nn.functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()


class Block(nn.Module):
    """A residual block; swapped, it goes on from the normalised value."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES)
        self.swapped = False

    def forward(self, x):
        y = self.norm(x)
        return (y if self.swapped else x) + self.mlp(y)


class InOrder(nn.Module):
    """A linear layer that sums over its inputs in an order of its own."""

    def __init__(self, linear, order):
        super().__init__()
        self.weight, self.bias, self.order = linear.weight, linear.bias, order

    def forward(self, x):
        return nn.functional.linear(x[..., self.order], self.weight[:, self.order], self.bias)


class Amplifying(nn.Module):
    """A layer that makes much of a small difference."""

    def forward(self, x):
        return torch.sin(x * 3e3)


def stack(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.LayerNorm(FEATURES)),
        *middle,
        *(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 4)),
    )


def record(path, model, *, steps=2, **options):
    """Train a copy of a model, or of several by name, on data that are the same for every model."""
    models = {name: copy.deepcopy(m) for name, m in (model if isinstance(model, dict) else {"": model}).items()}
    generator = torch.Generator().manual_seed(1)
    parameters = [parameter for m in models.values() for parameter in m.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.01)
    with hookrec.attach(models if isinstance(model, dict) else models[""], path, keep_free=0, **options):
        for _ in range(steps):
            x = torch.randn((BATCH, 12, FEATURES), generator=generator)
            optimizer.zero_grad()
            dtypes = [next(m.parameters()).dtype for m in models.values()]
            sum(m(x.to(d)).pow(2).mean().double() for m, d in zip(models.values(), dtypes, strict=True)).backward()
            optimizer.step()
    return path


def transposed(model):
    model[3].weight.data = model[3].weight.data.T.contiguous()


def without_bias(model):
    model[3].bias = None


def replaced(by):
    def plant(model):
        model[3] = by(model[3])

    return plant


def changed(**attributes):
    def plant(model):
        for name, value in attributes.items():
            setattr(model[3], name, value)

    return plant


PLANTED = {
    "a missing eps": (lambda: nn.LayerNorm(FEATURES), changed(eps=0.0)),
    "a transposed weight": (lambda: nn.Linear(FEATURES, FEATURES), transposed),
    "another gelu": (nn.GELU, changed(approximate="tanh")),
    "a layer in bfloat16": (lambda: nn.Linear(FEATURES, FEATURES), replaced(InBfloat16)),
    "a missing bias": (lambda: nn.Linear(FEATURES, FEATURES), without_bias),
    "a dropout in the wrong mode": (lambda: nn.Dropout(0.1).eval(), lambda model: model[3].train()),
    "a softmax over the wrong axis": (lambda: nn.Softmax(-1), changed(dim=-2)),
    "another padding": (
        lambda: nn.Conv1d(12, 12, 3, padding=1, padding_mode="circular"),
        replaced(lambda conv: _zero_padded(conv)),
    ),
    "a wrong scale": (Scaled, changed(scale=FEATURES**-1)),
    "a swapped residual": (Block, changed(swapped=True)),
}


def _zero_padded(conv):
    other = nn.Conv1d(12, 12, 3, padding=1)
    other.load_state_dict(conv.state_dict())
    return other


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The ten models in one trace, and in another the same with a fault each."""
    torch.manual_seed(0)
    models = {name: stack(make()) for name, (make, _) in PLANTED.items()}
    for model in models.values():
        for parameter in model.parameters():
            parameter.data += 0.05  # so that no bias is zero
    ports = copy.deepcopy(models)
    for name, (_, plant) in PLANTED.items():
        plant(ports[name])
    path = tmp_path_factory.mktemp("planted")
    torch.manual_seed(0)
    return record(path / "a", models, containers=True), record(path / "b", ports, containers=True)


@pytest.mark.parametrize("fault", PLANTED)
def test_the_layer_with_a_planted_fault_is_named(planted, fault):
    diff = replay.diff(*planted, layers=[fault, f"{fault}.*"])

    assert (diff.first.step, diff.first.layer, diff.first.kind) == (0, f"{fault}.3", "output")
    assert not diff.equal


@pytest.fixture(scope="module")
def changed_weight(tmp_path_factory):
    """Fifty layers, and three in each other precision, of which one has a weight that is changed by 0.01."""
    torch.manual_seed(0)
    models = {"50": nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(50)))}
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        models[str(dtype)] = nn.Sequential(*(nn.Linear(FEATURES, FEATURES, dtype=dtype) for _ in range(3)))
    ports = copy.deepcopy(models)
    for name, port in ports.items():
        port[31 if name == "50" else 1].weight.data[7, 20] += 0.01
    path = tmp_path_factory.mktemp("changed")
    return record(path / "a", models, steps=1, kinds="param"), record(path / "b", ports, steps=1, kinds="param")


def test_a_weight_changed_by_a_hundredth_in_one_of_fifty_layers_is_found(changed_weight):
    diff = replay.diff(*changed_weight, kinds="param", layers="50.*")

    assert (diff.first.layer, diff.first.path, diff.first.where) == ("50.31", "weight", (7, 20))
    assert diff.first.max_abs == pytest.approx(0.01, rel=1e-4)
    assert diff.rows.to_pandas().query("not within").layer_a.tolist() == ["50.31"]


@pytest.mark.parametrize("dtype", ["torch.float64", "torch.float16", "torch.bfloat16"])
def test_a_changed_weight_is_found_in_each_precision(changed_weight, dtype):
    assert replay.diff(*changed_weight, layers=f"{dtype}.*").first.layer == f"{dtype}.1"


def reordered(model, seed):
    """The same model, whose linear layers sum in another order."""
    generator = torch.Generator().manual_seed(seed)
    port = copy.deepcopy(model)
    for index, layer in enumerate(port):
        if isinstance(layer, nn.Linear):
            port[index] = InOrder(layer, torch.randperm(layer.in_features, generator=generator))
    return port


def test_another_order_of_summation_is_no_divergence(tmp_path):
    torch.manual_seed(0)
    model = stack(*(layer for _ in range(10) for layer in (nn.Linear(FEATURES, FEATURES), nn.Tanh())))
    a = record(tmp_path / "a", model, steps=3)
    b = record(tmp_path / "b", reordered(model, 1), steps=3)

    diff = replay.diff(a, b)

    assert max(diff.rows["max_abs"].to_pylist()) > 0
    assert diff.first is None
    assert diff.equal


def test_what_a_second_run_shows_is_noise_and_what_is_more_is_not(tmp_path):
    torch.manual_seed(0)
    model = stack(nn.Linear(FEATURES, FEATURES), Amplifying(), nn.Linear(FEATURES, FEATURES), nn.Tanh())
    faulty = reordered(model, 2)
    faulty[6].register_forward_hook(lambda module, args, output: output * 1.1)
    a = record(tmp_path / "a", model, steps=1)
    second = record(tmp_path / "a2", reordered(model, 1), steps=1)
    b = record(tmp_path / "b", reordered(model, 2), steps=1)
    c = record(tmp_path / "c", faulty, steps=1)

    assert replay.diff(a, b).first.layer == "4"
    assert replay.diff(a, b, noise=second).equal
    assert replay.diff(a, c, noise=second).first.layer == "6"


def noisy(size, *, step=0):
    """Records of which the second differs from run to run by `size`."""
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((2, 50)).astype(np.float32)
    return Written("x", x, step), Written("y", y * np.float32(1 + size), step), Written("z", x + y, step)


def test_noise_of_one_layer_does_not_hide_another(tmp_path):
    a = write_trace(tmp_path / "a", *noisy(0))
    second = write_trace(tmp_path / "a2", *noisy(1e-2))
    x, y, z = noisy(5e-2)
    b = write_trace(tmp_path / "b", x, y, z)
    c = write_trace(tmp_path / "c", x, y, z._replace(values=z.values * np.float32(1.001)))

    assert replay.diff(a, b).first.layer == "y"
    assert replay.diff(a, b, noise=second).equal
    assert replay.diff(a, c, noise=second).first.layer == "z"


def test_a_difference_beyond_ten_times_the_noise_is_none(tmp_path):
    a, second = write_trace(tmp_path / "a", *noisy(0)), write_trace(tmp_path / "a2", *noisy(1e-3))
    more = write_trace(tmp_path / "b", *noisy(2e-2))

    assert replay.diff(a, more, noise=second).first.layer == "y"


def test_measures_are_those_of_their_formulas(tmp_path):
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((2, 9, 2000)).astype(np.float32)  # more than a block
    a, b = (
        write_trace(tmp_path / "a", Written("x", x[:, :1000])),
        write_trace(tmp_path / "b", Written("x", y[:, :1000])),
    )

    row = replay.diff(a, b).rows.to_pylist()[0]
    far = distance(x, y, 1.0)

    x, y = x.astype(np.longdouble), y.astype(np.longdouble)
    for found, p, q in ((row, x[:, :1000], y[:, :1000]), (vars(far), x, y)):
        assert found["max_abs"] == pytest.approx(float(abs(p - q).max()))
        assert tuple(found["where"]) == np.unravel_index(np.argmax(abs(p - q)), p.shape)
        assert found["relative"] == pytest.approx(float(np.linalg.norm((p - q).ravel()) / np.linalg.norm(p.ravel())))
        cosine = np.dot(p.ravel(), q.ravel()) / np.linalg.norm(p.ravel()) / np.linalg.norm(q.ravel())
        assert found["cosine"] == pytest.approx(float(cosine))


@pytest.mark.parametrize(
    ("dtype", "a", "b", "ulps"),
    [
        ("float32", 1.0, np.nextafter(np.float32(1), np.float32(2)), 1),
        ("float32", -1e-45, 1e-45, 2),  # the smallest subnormals on both sides of zero
        ("float32", -0.0, 0.0, 0),
        ("float64", 1.0, 1 + 3 * 2**-52, 3),
        ("float16", 1.0, 1 - 2**-11, 1),
        ("bfloat16", 1.0, 1 + 2**-7, 1),
        ("float8_e4m3fn", 1.0, 1.25, 2),
        ("float8_e8m0fnu", 1.0, 4.0, 2),
    ],
)
def test_ulps_are_counted(dtype, a, b, ulps):
    one, other = (np.array([7.0, value]).astype(numpy_dtype(dtype)) for value in (a, b))

    # The seven of float8_e8m0fnu is eight, in both.
    assert distance(one, other, 1.0).max_ulp == ulps


def test_large_integers_that_are_the_same_float64_differ():
    found = distance(np.array([1, 2**60]), np.array([1, 2**60 + 1]), 1.0)

    assert (found.max_abs, found.where) == (1.0, (1,))
    assert found.spread > 0


def written(path, *layers, **options):
    """A trace of one step, in which layers returned what is given by name."""
    return write_trace(path, *(Written(name, np.asarray(values)) for name, values in layers), **options)


def test_nan_is_equal_to_nan_at_the_same_place(tmp_path):
    values = np.array([1.0, math.nan, math.inf, -math.inf])
    a, b = written(tmp_path / "a", ("x", values)), written(tmp_path / "b", ("x", values + 0.0))
    c = written(tmp_path / "c", ("x", values[[1, 0, 2, 3]]))

    assert replay.diff(a, b).equal
    assert replay.diff(a, c).rows["unlike"].to_pylist() == [2]


@pytest.mark.parametrize("other", [3.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("one", [2.0, math.inf, math.nan])
def test_a_number_that_is_not_finite_in_one_of_them_is_a_divergence(tmp_path, one, other):
    a = written(tmp_path / "a", ("x", [[1.0, 5.0], [one, 5.0]]))
    b = written(tmp_path / "b", ("x", [[1.0, 5.0], [other, 5.0]]))

    diff = replay.diff(a, b)

    if one == other or (math.isnan(one) and math.isnan(other)):
        assert diff.equal
    else:
        assert diff.first.where == (1, 0)
    if not math.isfinite(one + other) and not diff.equal:
        assert "at [1, 0]" in str(diff.first)
        assert diff.rows["unlike"].to_pylist() == [1]


def test_integers_and_booleans_are_compared_exactly(tmp_path):
    a = written(tmp_path / "a", ("i", np.arange(1000)), ("b", [True, False]))
    b = written(tmp_path / "b", ("i", np.arange(1000) + (np.arange(1000) == 999)), ("b", [True, True]))

    diff = replay.diff(a, b, tolerance=0.1)

    assert diff.first.where == (999,)
    assert diff.rows["within"].to_pylist() == [False, False]


def test_shapes_that_hold_other_numbers_of_elements_are_said(tmp_path):
    a = written(tmp_path / "a", ("x", np.ones((2, 3))))
    b = written(tmp_path / "b", ("x", np.ones((2, 4))))

    diff = replay.diff(a, b)

    assert "shape 2×3 in A, 2×4 in B" in str(diff.first)
    assert diff.rows["compared"].to_pylist() == ["shapes"]


def test_exchanged_axes_are_seen_through_and_said(tmp_path):
    values = np.random.default_rng(0).standard_normal((3, 4, 5))
    a = written(tmp_path / "a", ("x", values), ("y", values), ("z", values))
    one, two, three = values.transpose(1, 0, 2), values.reshape(12, 5), values.transpose(2, 0, 1) * 2
    b = written(tmp_path / "b", ("x", one), ("y", two), ("z", three))

    diff = replay.diff(a, b)

    assert diff.rows["within"].to_pylist() == [True, True, False]
    assert (
        diff.rows["note"].to_pylist()[0] == "shape 3×4×5 in A, 4×3×5 in B, with B's axes in the order 1, 0, 2 they fit"
    )
    assert diff.rows["note"].to_pylist()[1] == "shape 3×4×5 in A, 12×5 in B"


def test_whether_inputs_and_parameters_agree_is_said(tmp_path):
    generator = np.random.default_rng(0)
    x, y, weight = generator.standard_normal((3, 8, 8))

    def trace(name, weight):
        given, parameter = Written("l", x, kind="input", path="0"), Written("l", weight, kind="param", path="weight")
        return write_trace(tmp_path / name, given, Written("l", x @ weight), parameter, Written("m", y))

    a, transposed, scaled = trace("a", weight), trace("b", weight.T), trace("c", weight * 2)
    same = write_trace(tmp_path / "d", Written("l", x, kind="input", path="0"), Written("l", y))

    first = replay.diff(a, transposed)

    assert "its inputs agree, its parameters differ (weight)" in str(first.first)
    notes = {row["kind"]: row["note"] for row in first.rows.to_pylist()}
    assert notes == {"input": "", "output": "", "param": "with B's axes in the order 1, 0 they fit"}
    assert replay.diff(a, scaled).first.parameters == "differ (weight)"
    assert replay.diff(a, same).first.parameters == "were not recorded"
    assert replay.diff(a, same).first.inputs == "agree"


def test_other_dtypes_are_compared_by_the_lower_precision_and_said(tmp_path):
    values = np.random.default_rng(0).standard_normal((100, 100)).astype(np.float32)
    a = written(tmp_path / "a", ("x", values), ("y", values))
    b = written(
        tmp_path / "b", ("x", values.astype(ml_dtypes.bfloat16)), ("y", (values * 1.05).astype(ml_dtypes.bfloat16))
    )

    diff = replay.diff(a, b)

    assert diff.rows["within"].to_pylist() == [True, False]
    assert diff.rows["max_ulp"].to_pylist() == [None, None]
    assert diff.notes == ["another dtype in B: 2 layers and kinds, the first 'x' (output): float32 in A, bfloat16 in B"]


def test_complex_numbers_are_compared(tmp_path):
    values = np.random.default_rng(0).standard_normal((4, 3, 2)).astype(np.float32).view(np.complex64)[..., 0]
    other = values.copy()
    other[2, 1] += 0.5j
    a, b = written(tmp_path / "a", ("x", values)), written(tmp_path / "b", ("x", other))

    diff = replay.diff(a, b)

    assert replay.diff(a, a).equal
    assert diff.first.where == (2, 1)
    assert diff.first.max_abs == pytest.approx(0.5)


def test_scalars_and_empty_tensors_are_compared(tmp_path):
    a = written(tmp_path / "a", ("x", 1.0), ("y", np.ones((0, 3))), ("z", np.zeros(2)))
    b = written(tmp_path / "b", ("x", 2.0), ("y", np.ones((0, 3))), ("z", np.ones(2)))

    diff = replay.diff(a, b)

    assert diff.rows["within"].to_pylist() == [False, True, False]
    assert diff.rows["where"].to_pylist() == [[], None, [0]]
    assert diff.rows["relative"].to_pylist() == [1.0, 0.0, math.inf]


def test_what_has_no_partner_is_listed_on_both_sides(tmp_path):
    one = np.ones(2)
    a = write_trace(tmp_path / "a", *(Written(name, one, call=call) for call in range(2) for name in ("x", "gone")))
    b = written(tmp_path / "b", ("x", one), ("new", one))

    diff = replay.diff(a, b)

    assert diff.first is None
    assert not diff.equal
    assert [(row["layer"], row["records"]) for row in diff.only_a.to_pylist()] == [("gone", 2), ("x", 1)]
    assert [(row["layer"], row["records"]) for row in diff.only_b.to_pylist()] == [("new", 1)]


def test_a_tensor_is_paired_with_a_tuple_of_one_and_a_parameter_with_none_but_its_own(tmp_path):
    records = [Written("x", np.ones(2)), Written("x", np.ones(2), kind="param", path="weight")]
    a = write_trace(tmp_path / "a", *records)
    b = write_trace(tmp_path / "b", *(record._replace(path="other") for record in records))

    diff = replay.diff(a, b)

    assert diff.rows["note"].to_pylist() == ["path '' in A, 'other' in B"]
    assert diff.only_a["path"].to_pylist() == ["weight"]
    assert diff.only_b["path"].to_pylist() == ["other"]


MAPS = {
    "prefix": {"model.layers": "transformer.h", "model.head": "out"},
    "wildcards": ["model.layers.*=transformer.h.*", "model.head=out"],
    "two after each other": [
        "model.*=transformer.*",
        "transformer.layers.?.*=transformer.h.?.*",
        "transformer.head=out",
    ],
    "regular expression": {r"re:model\.layers\.(\d+)\.(.*)": r"transformer.h.\1.\2", "model.head": "out"},
}


@pytest.fixture
def renamed(tmp_path):
    generator = np.random.default_rng(0)
    values = {f"{number}.{name}": generator.standard_normal(5) for number in range(3) for name in ("fc", "act")}
    head = ("head", np.ones(3))
    a = written(
        tmp_path / "a", *((f"model.layers.{name}", v) for name, v in values.items()), (f"model.{head[0]}", head[1])
    )
    values["1.fc"] = values["1.fc"] * 2
    b = written(tmp_path / "b", *((f"transformer.h.{name}", v) for name, v in values.items()), ("out", head[1]))
    return a, b


@pytest.mark.parametrize("rules", MAPS.values(), ids=MAPS)
def test_layers_are_renamed_by_a_map(renamed, rules):
    diff = replay.diff(*renamed, map=rules)

    assert (diff.first.layer, diff.first.layer_b) == ("model.layers.1.fc", "transformer.h.1.fc")
    assert "layer 'model.layers.1.fc', 'transformer.h.1.fc' in B" in str(diff.first)
    assert len(diff.only_a) == len(diff.only_b) == 0


def test_two_names_can_be_swapped(tmp_path):
    one, two = np.ones(2), np.zeros(3)
    a = written(tmp_path / "a", ("x", one), ("y", two))
    b = written(tmp_path / "b", ("y", one), ("x", two))

    assert replay.diff(a, b, map={"x": "y", "y": "x"}).equal


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (None, r"No layer of .* is in .*--map"),
        ({"nothing.*": "x.*"}, "'nothing.*' of the map matches no layer"),
        ({"*": "one"}, "the same name 'one' in B"),
        ({"model": "b.*"}, "wildcard in the new name alone"),
        ({"model.*": "*.*.*"}, "more wildcards in the new name"),
        ({"re:(": "x"}, "no regular expression"),
        ({"re:(model).*": r"\2"}, "cannot be applied"),
        ({"model": 3}, "no table of names"),
        ("no_such_file.toml", "no such file"),
    ],
)
def test_a_map_that_will_not_do_is_one_message(renamed, rules, message):
    with pytest.raises(replay.BadQuery, match=message):
        replay.diff(*renamed, map=rules)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("map.toml", '"model.layers.*" = "transformer.h.*"\n"model.head" = "out"\n'),
        ("map.json", '{"model.layers.*": "transformer.h.*", "model.head": "out"}'),
    ],
)
def test_a_map_may_be_a_file(renamed, tmp_path, name, text):
    (tmp_path / name).write_text(text)

    assert replay.diff(*renamed, map=str(tmp_path / name)).first.layer == "model.layers.1.fc"
    (tmp_path / name).write_text("{")
    with pytest.raises(replay.BadQuery, match="cannot be read as"):
        replay.diff(*renamed, map=str(tmp_path / name))


def batches(path, order, *, factor=1.0, shift=0.0, steps=2):
    """Two layers, of which the second multiplies, on the same samples in a given order."""
    generator = np.random.default_rng(0)
    records = []
    for step in range(steps):
        x = generator.standard_normal((16, 5, 4)).astype(np.float32)[order] + np.float32(shift)
        y = x * np.float32(factor)
        gradient = Written("m", y / 7, step, kind="grad_output")
        records += [
            Written("position", np.ones((1, 5, 4)), step),
            Written("l", x, step),
            Written("m", y, step),
            gradient,
        ]
    return write_trace(path, *records)


IN_ORDER, OTHERWISE = np.arange(16), np.random.default_rng(1).permutation(16)


def test_batches_in_another_order_are_refused_and_no_layer_is_accused(tmp_path):
    a, b = batches(tmp_path / "a", IN_ORDER), batches(tmp_path / "b", OTHERWISE)

    with pytest.raises(replay.BadQuery, match="At step 0 the batches are in another order: the rows of layer 'l'"):
        replay.diff(a, b)


def test_rows_in_another_order_are_paired_by_their_values(tmp_path):
    a, b = batches(tmp_path / "a", IN_ORDER), batches(tmp_path / "b", OTHERWISE)
    faulty = batches(tmp_path / "c", OTHERWISE, factor=1.001)

    assert replay.diff(a, b, pair="rows").equal
    assert replay.diff(a, faulty, pair="rows").first.layer == "m"
    assert replay.diff(a, a, pair="rows").equal
    with pytest.raises(replay.BadQuery, match="pair is 'columns'"):
        replay.diff(a, b, pair="columns")


def test_other_data_are_not_taken_for_another_order(tmp_path):
    a, b = batches(tmp_path / "a", IN_ORDER), batches(tmp_path / "b", IN_ORDER, shift=0.5)

    assert replay.diff(a, b).first.layer == "l"
    assert replay.diff(a, b, pair="rows").first.layer == "l"


def test_many_rows_are_told_apart_in_spite_of_rounding():
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((5000, 8)).astype(np.float32)
    order = generator.permutation(5000)
    exchanged = np.empty_like(rows)
    exchanged[order] = rows * (1 + generator.standard_normal(rows.shape).astype(np.float32) * 1e-6)

    assert np.array_equal(matching_rows(rows, exchanged, 1e-3), order)
    assert matching_rows(rows, rows, 1e-3) is None
    assert matching_rows(rows, exchanged + 1, 1e-3) is None


def training(path, *, steps=4, fault_at=None, **options):
    """Three layers of a few steps; from a step on the second is wrong."""
    generator = np.random.default_rng(0)
    records = []
    for step in range(steps):
        x = generator.standard_normal((3, 4)).astype(np.float32)
        y = x * np.float32(1.01 if fault_at is not None and step >= fault_at else 1)
        records += [Written("x", x, step), Written("y", y, step), Written("z", y / 3, step)]
        records += [Written(layer, y / 5, step, "grad_output") for layer in ("z", "y")]
    return write_trace(path, *records, **options)


def test_steps_that_only_one_has_are_said_and_may_be_shifted(tmp_path):
    a, b = training(tmp_path / "a"), training(tmp_path / "b", steps=2)

    shifted = replay.diff(a, b, steps=1, shift=-1)

    assert replay.diff(a, b).equal
    assert replay.diff(a, b).notes == ["only in A: 2 steps from 2 to 3"]
    assert replay.diff(b, a).notes == ["only in B: 2 steps from 2 to 3"]
    assert set(shifted.rows["step"].to_pylist()) == {1}
    assert shifted.first.layer == "x"
    with pytest.raises(replay.BadQuery, match="no step in common"):
        replay.diff(a, b, steps=slice(2, None))
    with pytest.raises(replay.BadQuery, match="none of the steps"):
        replay.diff(a, b, steps=9)


def test_the_first_divergence_is_that_of_the_first_step(tmp_path):
    a, b = training(tmp_path / "a"), training(tmp_path / "b", fault_at=2)

    diff, stopped = replay.diff(a, b), replay.diff(a, b, stop=True)

    assert (diff.first.step, diff.first.layer) == (2, "y")
    assert stopped.first == diff.first
    assert sorted(set(diff.rows["step"].to_pylist())) == [0, 1, 2, 3]
    assert sorted(set(stopped.rows["step"].to_pylist())) == [0, 1, 2]


def test_windows_of_steps_do_not_show(tmp_path, monkeypatch):
    a, b = training(tmp_path / "a", steps=9), training(tmp_path / "b", steps=9, fault_at=5)
    whole = replay.diff(a, b, steps=slice(0, None, 3))

    monkeypatch.setattr("replay.alignment._WINDOW", 12)
    monkeypatch.setattr("replay.diff_rows._ROWS_A_BATCH", 5)
    parts = replay.diff(a, b, steps=[0, 3, 6])

    assert parts.rows.to_pylist() == whole.rows.to_pylist()
    assert len(parts.rows) == 15
    assert parts.first == whole.first


def test_what_is_said_does_not_depend_on_whether_rows_are_kept(tmp_path):
    a, b = training(tmp_path / "a"), training(tmp_path / "b", fault_at=2)

    kept, told = replay.diff(a, b), replay.diff(a, b, rows=False)

    assert len(told.rows) == 0
    assert told.rows.schema == kept.rows.schema
    assert (told.first, told.worst, told.compared, told.notes) == (kept.first, kept.worst, kept.compared, kept.notes)
    assert told.compared == len(kept.rows)


def test_of_each_layer_and_kind_the_worst_record_is_told(tmp_path):
    found = replay.diff(training(tmp_path / "a"), training(tmp_path / "b", fault_at=2))

    by_layer = {}
    for row in found.rows.to_pylist():
        by_layer.setdefault((row["layer_a"], row["kind"], row["path"]), []).append(row)
    assert {(worst["layer"], worst["kind"], worst["path"]) for worst in found.worst} == set(by_layer)
    assert {worst["within"] for worst in found.worst} == {True, False}
    assert found.worst == sorted(found.worst, key=lambda worst: (worst["within"], -worst["error"]))
    for worst in found.worst:
        rows = by_layer[worst["layer"], worst["kind"], worst["path"]]
        outside = [row for row in rows if not row["within"]]
        assert (worst["records"], worst["outside"]) == (len(rows), len(outside))
        assert worst["error"] == max(row["error"] for row in outside or rows)
        assert worst["error"] == next(row["error"] for row in rows if row["step"] == worst["step"])


def test_progress_goes_from_0_to_1(tmp_path):
    a = training(tmp_path / "a")
    told = []

    replay.diff(a, a, progress=told.append)

    assert told == sorted(told)
    assert len(told) == 20
    assert told[-1] == pytest.approx(1)


def test_statistics_are_compared_where_no_tensor_was_kept(tmp_path):
    a, same = training(tmp_path / "a", tensors=False), training(tmp_path / "same")
    b = training(tmp_path / "b", fault_at=1)

    equal, diff = replay.diff(a, same), replay.diff(a, b)

    assert equal.equal
    assert equal.notes == ["20 of 20 records compared by their statistics alone"]
    assert (diff.first.step, diff.first.layer) == (1, "y")
    assert "statistics alone: l2" in str(diff.first)
    assert math.isnan(diff.first.max_abs)


def test_a_nan_shows_in_statistics(tmp_path):
    a = written(tmp_path / "a", ("x", np.ones(5)), ("y", [math.nan, math.nan]), tensors=False)
    b = written(tmp_path / "b", ("x", [1, 1, math.nan, 1, 1]), ("y", np.ones(2)))

    diff = replay.diff(a, b)

    assert "n_nan 0 in A, 1 in B" in str(diff.first)
    assert diff.rows["within"].to_pylist() == [False, False]
    assert replay.diff(a, a).equal


def test_a_damaged_tensor_is_replaced_by_its_statistics_and_named(tmp_path):
    a, b = training(tmp_path / "a"), training(tmp_path / "b")
    shard = b / "rank-00000/tensors.zarr/y/output/data/c/0/0/0"
    data = bytearray(shard.read_bytes())
    data[5] ^= 16
    shard.write_bytes(data)

    diff = replay.diff(a, b)

    assert diff.first is None
    found = [(row["layer_a"], row["step"]) for row in diff.rows.to_pylist() if row["compared"] == "statistics"]
    assert found == [("y", 0)]
    assert "checksum differs" in diff.notes[-1]


def test_tensors_that_are_gone_are_replaced_by_their_statistics(tmp_path):
    a, b = training(tmp_path / "a"), training(tmp_path / "b")
    for shard in (b / "rank-00000/tensors.zarr").glob("*/*/data/c/0/0/0"):
        shard.unlink()

    diff = replay.diff(a, b)

    assert diff.first is None
    assert set(diff.rows["compared"].to_pylist()) == {"statistics"}
    assert diff.notes[-1].startswith("20 damaged tensors")
    assert diff.damaged == 20
    assert not diff.equal


def test_of_a_nan_no_size_of_a_difference_is_told(tmp_path):
    a = written(tmp_path / "a", ("x", [[1.0, math.nan]]))
    b = written(tmp_path / "b", ("x", [[1.0, 5.0]]))

    sentence = str(replay.diff(a, b).first)

    assert "nan in A and 5.0 in B at [0, 1]" in sentence
    assert "max abs" not in sentence


def test_traces_that_have_no_record_in_common_cannot_be_compared(tmp_path):
    a = write_trace(tmp_path / "a", Written("x", np.ones(3)))
    b = write_trace(tmp_path / "b", Written("x", np.ones(3), kind="input"))

    with pytest.raises(replay.BadQuery, match="No record of A has a partner in B"):
        replay.diff(a, b)


def test_a_log_that_cannot_be_read_is_damage(tmp_path):
    a, b = training(tmp_path / "a"), training(tmp_path / "b")
    log = next((b / "rank-00000").glob("records-*.parquet"))
    log.write_bytes(log.read_bytes()[:200])

    with pytest.raises(replay.TraceDamaged):
        replay.diff(a, b)


def test_a_trace_without_a_step_is_one_message(tmp_path):
    a, empty = training(tmp_path / "a"), write_trace(tmp_path / "b")

    for pair in ((a, empty), (empty, a), (empty, empty)):
        with pytest.raises(replay.BadQuery, match="no committed step yet"):
            replay.diff(*pair)


def test_a_live_trace_is_compared_as_far_as_it_is_committed(tmp_path):
    torch.manual_seed(0)
    model = stack()
    a = record(tmp_path / "a", model, steps=3)
    generator = torch.Generator().manual_seed(1)
    with hookrec.attach(model, tmp_path / "b", keep_free=0, clock="manual") as recorder:
        model(torch.randn((BATCH, 12, FEATURES), generator=generator)).pow(2).mean().backward()
        recorder.step()
        b = replay.open(tmp_path / "b")
        deadline = time.monotonic() + 20
        while not b.refresh().steps and time.monotonic() < deadline:
            time.sleep(0.05)
        diff = replay.diff(a, b)
        assert b.status == "live"

    assert diff.equal
    assert len(diff.rows) == 2 * len(model)


def test_ranks_of_a_trace_are_compared_with_each_other(tmp_path):
    a = training(tmp_path / "a")
    training(a, fault_at=3, rank=1)
    b = training(tmp_path / "b")

    diff = replay.diff(a, ranks=(0, 1))

    assert (diff.first.step, diff.first.layer, diff.first.rank) == (3, "y", 0)
    assert replay.diff(a, ranks=(1, 1)).equal
    assert replay.diff(b, a, ranks=(0, 1)).first == diff.first
    assert replay.diff(b, a).notes == ["rank 1 is only in B"]
    assert len(replay.diff(a, a).rows) == 2 * len(diff.rows)
    with pytest.raises(replay.BadQuery, match="has no rank 7; it has 0, 1"):
        replay.diff(a, ranks=(0, 7))
    with pytest.raises(replay.BadQuery, match="or two ranks of one"):
        replay.diff(a)


def test_of_several_ranks_the_first_in_the_order_of_execution_counts(tmp_path):
    a, b = (training(tmp_path / name) for name in "ab")
    training(a, rank=1)
    training(b, rank=1, fault_at=2)

    assert (replay.diff(a, b).first.rank, replay.diff(a, b).first.step) == (1, 2)


def test_layers_and_kinds_are_chosen_by_globs(tmp_path):
    a, b = training(tmp_path / "a"), training(tmp_path / "b", fault_at=0)

    diff = replay.diff(a, b, layers=["x", "z"], kinds="grad_*", steps=1)

    assert [(row["layer_a"], row["kind"], row["step"]) for row in diff.rows.to_pylist()] == [("z", "grad_output", 1)]
    with pytest.raises(replay.BadQuery, match="no layer 'w'"):
        replay.diff(a, b, layers="w")
    with pytest.raises(replay.BadQuery, match="no kind 'param'"):
        replay.diff(a, b, kinds="param")


@pytest.mark.parametrize("given", [-1.0, math.nan, math.inf, {"float3": 1e-3}, {"float32": "1"}, True])
def test_a_tolerance_that_is_none_is_refused(tmp_path, given):
    a = written(tmp_path / "a", ("x", np.ones(2)))

    with pytest.raises(replay.BadQuery, match="tolerance"):
        replay.diff(a, a, tolerance=given)


def test_a_tolerance_may_be_given_by_dtype(tmp_path):
    one = np.ones(2, np.float32)
    a = written(tmp_path / "a", ("x", one), ("y", np.ones(2)))
    b = written(tmp_path / "b", ("x", one * np.float32(1.001)), ("y", np.ones(2) * 1.001))

    assert replay.diff(a, b, tolerance=0.01).equal
    assert replay.diff(a, b, tolerance={"float32": 0.01}).first.layer == "y"
    assert replay.diff(a, b, tolerance={"float64": 0.01}).first.layer == "x"
    assert replay.diff(a, a, tolerance=0).equal
