"""Tensors that are no plain arrays are recorded by what they stand for or are made of, and say so, or are named."""

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookrec
import hookrec.recorder
import replay
from hookrec import values

pytestmark = pytest.mark.usefixtures("one_thread", "no_process")


def passed_through(tmp_path, *tensors: Tensor, kinds: str = "output") -> replay.Trace:
    """A trace of a layer that was called with each of some tensors."""
    model = nn.Identity()
    with hookrec.attach(model, tmp_path / "a", kinds=kinds, clock="manual", ring="1MiB", keep_free=0):
        for tensor in tensors:
            model(tensor)
    return replay.open(tmp_path / "a")


DENSE = torch.tensor([[0.0, 2.0, 0.0, 0.0], [1.0, 0.0, 0.0, -3.0]])
REPEATED = torch.sparse_coo_tensor([[0, 1, 1, 1], [1, 3, 0, 3]], [2.0, -1.0, 1.0, -2.0], (2, 4), check_invariants=True)
HYBRID = torch.sparse_coo_tensor([[2, 0, 2]], [[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]], (3, 2), check_invariants=True)


def sparse() -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of compressed layouts torch warns that they are new
        return {
            "coo": DENSE.to_sparse(),
            "csr": DENSE.to_sparse_csr(),
            "csc": DENSE.to_sparse_csc(),
            "bsr": DENSE.to_sparse_bsr((1, 2)),
            "bsc": DENSE.to_sparse_bsc((1, 2)),
        }


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_sparse_tensor_is_recorded_as_the_dense_one(tmp_path, layout):
    trace = passed_through(tmp_path, sparse()[layout])

    assert np.array_equal(trace.tensor(0, ""), DENSE.numpy())
    assert [note["note"] for note in trace.notes] == [
        f"output: layout sparse_{layout}: the dense tensor that it stands for is recorded"
    ]


def test_repeated_indices_of_a_sparse_tensor_are_added_up(tmp_path):
    trace = passed_through(tmp_path, REPEATED, HYBRID, torch.sparse_coo_tensor(size=(0, 3), check_invariants=True))

    assert np.array_equal(trace.tensor(0, "", call=0), DENSE.numpy())
    assert trace.tensor(0, "", call=1).tolist() == [[3, 4], [0, 0], [11, 22]]
    assert trace.tensor(0, "", call=2).shape == (0, 3)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("kinds", ["output", "input"])
def test_a_large_sparse_tensor_is_recorded_by_its_parts(tmp_path, monkeypatch, layout, kinds):
    monkeypatch.setattr(values, "_DENSE_BYTES", 31)

    trace = passed_through(tmp_path, sparse()[layout], kinds=kinds)

    prefix = "" if kinds == "output" else "0."
    parts = {r["path"].removeprefix(prefix): torch.from_numpy(t.copy()) for r, t in trace.select().tensors()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rebuilt = (
            torch.sparse_coo_tensor(parts["indices"], parts["values"], (2, 4), check_invariants=True)
            if layout == "coo"
            else torch.sparse_compressed_tensor(
                *parts.values(), (2, 4), layout=getattr(torch, f"sparse_{layout}"), check_invariants=True
            )
        )
        assert torch.equal(rebuilt.to_dense(), DENSE)
    assert "of shape 2×4: its " in trace.notes[0]["note"]


def test_gradients_of_sparse_embeddings_are_those_of_the_formula(tmp_path):
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    kinds = ("grad_output", "param_grad", "param_grad_acc", "update")
    with hookrec.attach(model, tmp_path / "a", kinds=kinds, ring="1MiB", keep_free=0):
        (model(torch.tensor([1, 3, 1])) * torch.tensor([[1.0], [2.0], [4.0]])).sum().backward()
        optimizer.step()

    trace = replay.open(tmp_path / "a")
    rows = np.zeros((5, 2), "f4")
    rows[1], rows[3] = 5, 2
    assert trace.tensor(0, "0", "grad_output").tolist() == [[1, 1], [2, 2], [4, 4]]
    for kind, sign in (("param_grad", 1), ("param_grad_acc", 1)):
        assert np.array_equal(trace.tensor(0, "0", kind, path="weight"), sign * rows)
    np.testing.assert_allclose(trace.tensor(0, "0", "update", path="weight"), -rows, rtol=1e-6)


def test_a_nested_tensor_is_recorded_by_its_parts(tmp_path):
    parts = [torch.ones(2, 3), torch.full((1, 3), 2.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [torch.nested.nested_tensor(parts, layout=layout) for layout in (torch.jagged, torch.strided)]
    trace = passed_through(tmp_path, *tensors)

    assert trace.tensor(0, "", path="values").tolist() == [[1] * 3, [1] * 3, [2] * 3]
    assert trace.tensor(0, "", path="offsets").tolist() == [0, 2, 3]
    assert [trace.tensor(0, "", path=str(n), call=1).tolist() for n in (0, 1)] == [part.tolist() for part in parts]


def test_gradients_of_nested_tensors_are_recorded_by_their_parts(tmp_path):
    model = nn.Sequential(nn.Linear(3, 1, bias=False))
    with hookrec.attach(model, tmp_path / "a", clock="manual", ring="1MiB", keep_free=0):
        rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
        model(rows).values().mul(torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()

    assert replay.open(tmp_path / "a").tensor(0, "0", "grad_output", path="values").tolist() == [[1], [2], [3]]


def test_a_quantized_tensor_is_recorded_by_its_integers(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_tensor(torch.tensor([-1.0, 0.0, 2.5]), 0.5, 10, torch.quint8)
    trace = passed_through(tmp_path, tensor)

    assert trace.tensor(0, "").tolist() == [8, 10, 15]
    assert trace.tensor(0, "").dtype == np.uint8
    assert "with scale 0.5 and zero point 10" in trace.notes[0]["note"]


class Wrapper(Tensor):
    """A subclass that wraps a tensor, as quantization libraries have them. It has no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        unwrapped = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        return Wrapper(function(*unwrapped, **(kwargs or {})))


class Flattened(Wrapper):
    """Says what it wraps."""

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Flattened(inner["inner"])


def freed() -> Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_tensors_that_are_known_to_be_zero_have_values(tmp_path):
    assert passed_through(tmp_path, torch._efficientzerotensor(2)).tensor(0, "").tolist() == [0, 0]


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.empty(3, device="meta"), "a meta tensor"),
        (torch.sparse_coo_tensor(size=(3,), device="meta", check_invariants=True), "a meta tensor"),
        (Wrapper(torch.ones(3)), "a tensor without memory of its own"),
        (freed(), "its memory was freed"),
        (Flattened(torch.ones(3)), "a Flattened, whose values are inside of it"),
        (torch.empty(3, dtype=torch.bits8), "dtype bits8 cannot be stored"),
    ],
)
def test_what_has_no_values_is_named(tmp_path, tensor, reason):
    trace = passed_through(tmp_path, tensor)

    assert trace.count == 0
    assert reason in trace.notes[0]["note"]


class Mixed(nn.Module):
    def forward(self, x: Tensor, **more: Tensor) -> dict[object, object]:
        return {0: x, "0": 2 * x, "a.b": 3 * x, "a": {"b": 4 * x, "b~2": 5 * x}}


def test_tensors_whose_keys_are_the_same_in_words_are_told_apart(tmp_path):
    model = nn.Sequential(Mixed())
    with hookrec.attach(model, tmp_path / "a", kinds=("output", "input"), clock="manual", ring="1MiB", keep_free=0):
        model[0](torch.ones(2), **{"0": torch.zeros(2)})

    trace = replay.open(tmp_path / "a")

    expected = {"0": 1, "0~2": 2, "a.b": 3, "a.b~2": 4, "a.b~2~2": 5}
    assert {path: trace.tensor(0, "0", path=path)[0] for path in expected} == expected
    assert [trace.tensor(0, "0", "input", path=path)[0] for path in ("0", "0~2")] == [1, 0]
    assert trace.count == 7
