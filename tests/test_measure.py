"""Statistics by plain torch operations, which serve on GPUs, against those of the native kernel on the CPU."""

import math

import numpy as np
import pytest
import torch

from hookrec import statistics
from hookrec.calls import DTYPE_NAMES
from hookrec.statistics import FIELDS, NATIVE_DTYPES, STATISTICS, describe, load_native, measure

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(load_native() is None, reason="the native kernel, which is the reference, was not built"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -2.5, 448.0, 6e-8]


def measured(tensor: torch.Tensor) -> tuple[float, ...]:
    return STATISTICS.unpack(measure(tensor).cpu().numpy().tobytes())


def tensor_of(dtype: torch.dtype, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    if dtype is torch.bool or not dtype.is_floating_point:
        bits = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        return bits.remainder(2).bool() if dtype is torch.bool else bits.view(dtype)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) * 3 + 7
    values[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float64)[:numel]
    return values[torch.randperm(numel, generator=generator)].to(torch.float32).to(dtype)


def assert_same(found: tuple[float, ...], tensor: torch.Tensor) -> None:
    expected = STATISTICS.unpack(describe(tensor.cpu()))
    assert found[:5] == expected[:5]
    np.testing.assert_array_equal(found[5:8], expected[5:8], err_msg=str(FIELDS[5:8]))
    np.testing.assert_allclose(found[8:], expected[8:], rtol=1e-9, atol=1e-300, err_msg=str(FIELDS[8:]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 9, 1000])
def test_both_ways_agree_on_each_dtype_with_special_values(monkeypatch, device, dtype, numel):
    monkeypatch.setattr(statistics, "_PIECE", 128)
    tensor = tensor_of(dtype, numel)

    assert_same(measured(tensor.to(device)), tensor)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "values",
    [
        [math.nan] * 300,
        [math.inf, -math.inf] * 150,
        [0.0] * 300,
        [-0.0, 5e-324] * 150,
        [1e300, -1e300, 1e308] * 100,
        [-1.7e308] + [1.7e308] * 299,
        [1e8 + i * 1e-3 for i in range(300)],
        [math.nan] * 128 + [2.0, 4.0] + [math.inf] * 170,
    ],
    ids=["nan", "inf", "zero", "subnormal", "overflow", "low outlier", "offset", "one piece finite"],
)
def test_both_ways_agree_where_sums_are_delicate(monkeypatch, device, values):
    monkeypatch.setattr(statistics, "_PIECE", 128)
    tensor = torch.tensor(values, dtype=torch.float64)

    assert_same(measured(tensor.to(device)), tensor)


@pytest.mark.parametrize("device", DEVICES)
def test_of_complex_elements_the_absolute_value_counts(device):
    tensor = torch.tensor([3 + 4j, complex(math.inf, math.nan), 0j, complex(-math.inf, 1)]).to(device)

    found = dict(zip(FIELDS, measured(tensor.conj()), strict=True))

    assert [found[name] for name in ("numel", "n_nan", "n_posinf", "n_neginf", "n_zero")] == [4, 1, 1, 0, 1]
    assert (found["absmax"], found["l2"]) == (5.0, 5.0)
    assert all(math.isnan(found[name]) for name in ("min", "max", "mean", "std"))


@pytest.mark.parametrize("device", DEVICES)
def test_layout_makes_no_difference(device):
    tensor = torch.arange(24.0).reshape(2, 3, 4).to(device)

    assert_same(measured(tensor.permute(2, 0, 1)[1:]), tensor.permute(2, 0, 1)[1:].contiguous())
    assert_same(measured(tensor[:, :1].expand(2, 5, 4)), tensor[:, :1].expand(2, 5, 4).contiguous())


def test_each_dtype_of_a_trace_is_measured():
    for dtype in DTYPE_NAMES:
        assert measured(torch.ones(3).to(dtype))[:5] == (3, 0, 0, 0, 0)
