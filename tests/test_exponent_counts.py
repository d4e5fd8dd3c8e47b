"""Exponents are counted while recording, by the kernel as by plain torch, and are there where tensors are not."""

import numpy as np
import pytest
import torch
from torch import nn

import hookrec
import replay
from hookrec import capture, lanes
from hookrec.statistics import EXPONENTS, NATIVE_DTYPES, count_exponents, load_native
from replay.follow import Follower
from replay.verify import verify
from tests.slow_lane import SlowLane

pytestmark = pytest.mark.usefixtures("one_thread")
small = pytest.mark.usefixtures("no_process")

DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
SIZES = (0, 1, 7, 1023, 1024, 1025, 100_000)
"""Less than a block of the kernel, one, a little more, and several of its segments."""


def some(dtype: str, numel: int) -> torch.Tensor:
    """Elements of all sizes, with zeros of both signs, subnormal numbers, infinities and NaN."""
    torch.manual_seed(numel)
    x = torch.randn(numel, dtype=torch.float64) * torch.randint(-160, 135, (numel,)).double().exp2()
    odd = [0.0, -0.0, 2.0**-149, -(2.0**-127), 2.0**-24, 2.0**-1074, 1e308, torch.inf, -torch.inf, torch.nan, -1.5]
    x[: len(odd)] = torch.tensor(odd, dtype=torch.float64)[:numel]
    return (x.float() if dtype.startswith("float8") else x).to(getattr(torch, dtype))


def expected(tensor: torch.Tensor) -> np.ndarray:
    """What `numpy.frexp`, whose mantissa is in [1/2, 1), says of the elements."""
    x = tensor.float().double().numpy() if tensor.dtype.itemsize == 1 else tensor.double().numpy()
    x = x[np.isfinite(x) & (x != 0)]
    return np.bincount(np.clip(np.frexp(x)[1] - 1, -150, 128) + 150, minlength=279)


def natively(tensor: torch.Tensor) -> list[int]:
    counts = torch.full((len(EXPONENTS),), -1, dtype=torch.int64)
    code = NATIVE_DTYPES[tensor.dtype]
    load_native()(tensor.data_ptr(), None, tensor.numel(), code, None, 0, counts.data_ptr())
    return counts.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_are_counted_at_their_powers_of_two(dtype):
    for numel in SIZES:
        tensor = some(dtype, numel)

        assert count_exponents(tensor).tolist() == expected(tensor).tolist()
        if load_native() is not None and tensor.dtype in NATIVE_DTYPES:
            assert natively(tensor) == expected(tensor).tolist()


def test_each_float8_is_counted():
    for dtype in DTYPES[4:]:
        tensor = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype))

        assert count_exponents(tensor).tolist() == expected(tensor).tolist()


@pytest.mark.skipif(load_native() is None, reason="the native kernel was not built")
def test_subnormal_numbers_are_counted_where_the_processor_takes_them_for_0():
    tensor = torch.tensor([2.0**-149, 2.0**-127, 0.0] * 400)

    assert torch.set_flush_denormal(True)
    try:
        counts = natively(tensor)
    finally:
        torch.set_flush_denormal(False)

    assert {at - 150: count for at, count in enumerate(counts) if count} == {-149: 400, -127: 400}


class Given(nn.Module):
    """Returns what it is given, and a part of it that is not contiguous."""

    def forward(self, x):
        return x, {"part": x.t()[::2]}


def attached(path, *, steps=2, dtypes=("float32", "bfloat16"), **options):
    model = nn.ModuleDict({"a": Given(), "b": Given()})
    tensors = []
    with hookrec.attach(model, path, clock="manual", kinds="output", **({"keep_free": 0} | options)) as recorder:
        for step in range(steps):
            tensors.append([some(dtype, 50 + 10 * step).reshape(-1, 10) for dtype in dtypes])
            for tensor in tensors[-1]:
                model["a"](tensor)
            model["b"](torch.arange(3))
            recorder.step()
    return replay.open(path), tensors


def assert_counted(trace, tensors) -> None:
    for step, calls in enumerate(tensors):
        for call, tensor in enumerate(calls):
            for path, part in (("0", tensor), ("1.part", tensor.t()[::2])):
                found = trace.exponents(step, "a", call=call, path=path)
                assert found.tolist() == expected(part).tolist()


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_a_trace_of_statistics_alone_has_the_counts_of_each_record(tmp_path, store):
    trace, tensors = attached(tmp_path / "a", dtypes=DTYPES, exponents=True, tensors=False, store=store)

    assert_counted(trace, tensors)
    assert not any(trace.records()["kept"].to_pylist())
    assert list(verify(tmp_path / "a")) == []


@small
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_steps": "1"},
        {"tensor_rows": 1, "tensor_dtype": "float8_e5m2"},
        {"compression": "zstd"},
        {"every": 1, "exponents": False, "rules": [{"layers": "a", "exponents": True, "tensors": False}]},
    ],
    ids=lambda options: ", ".join(options) or "tensors",
)
def test_the_counts_are_of_the_whole_tensor_whatever_is_kept_of_it(tmp_path, options):
    trace, tensors = attached(tmp_path / "a", **({"exponents": True} | options), steps=5)

    assert_counted(trace, tensors)
    assert list(verify(tmp_path / "a")) == []


@small
def test_without_the_kernel_the_counts_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(capture, "load_native", lambda: None)

    assert_counted(*attached(tmp_path / "a", exponents=True))


def test_tensors_of_a_device_are_counted_there(tmp_path, monkeypatch):
    lane = SlowLane()
    monkeypatch.setattr(lanes, "lane_of", lambda device: lane)
    monkeypatch.setattr(capture, "load_native", lambda: None)

    trace, tensors = attached(tmp_path / "a", exponents=True)
    lane.end()

    assert_counted(trace, tensors)
    assert list(verify(tmp_path / "a")) == []


@small
def test_what_has_no_exponents_has_no_counts(tmp_path):
    trace, _ = attached(tmp_path / "a", exponents=True)

    with pytest.raises(replay.NotRecorded, match=r"no exponents .*'output.0'.*it has output"):
        trace.exponents(0, "b", path="0")
    with pytest.raises(replay.StepNotCommitted):
        trace.exponents(7, "a", path="0")


@small
def test_unless_asked_for_there_are_no_counts(tmp_path):
    trace, _ = attached(tmp_path / "a")

    assert trace.kinds == ["output"]


@small
def test_questions_about_the_training_are_not_answered_with_counts(tmp_path):
    trace, _ = attached(tmp_path / "a", exponents=True)
    plain, _ = attached(tmp_path / "b")
    (followed,) = Follower(tmp_path / "a").read()
    query = "select layer, kind, path, numel from records"

    assert repr(trace.records().to_pylist()) == repr(plain.records().to_pylist())
    assert followed.num_rows == plain.count
    assert trace.first("dtype = 'int32'") is None
    assert trace.sql(query).num_rows == plain.sql(query).num_rows
    assert replay.diff(tmp_path / "a", tmp_path / "b").rows.num_rows == plain.count
    assert trace.count == plain.count == len(trace.records())
    assert len(trace.records(kinds="exponents")) == plain.sql("from records where dtype like '%float%'").num_rows


def test_in_flight_mode_there_are_counts_of_each_step_and_no_condition_is_about_them(tmp_path):
    triggers = ("numel == 279", "numel == 70")
    trace, tensors = attached(tmp_path / "a", steps=5, exponents=True, flight=1, triggers=triggers, after=0)

    assert [(line["step"], line["why"]) for line in trace.triggers] == [(2, "numel == 70")]
    assert {row["step"] for row in trace.records().to_pylist() if row["kept"]} == {1, 2}
    assert_counted(trace, tensors)
    assert list(verify(tmp_path / "a")) == []


@small
def test_counts_begin_and_end_while_recording(tmp_path):
    model = nn.ModuleDict({"a": nn.Identity()})
    with hookrec.attach(model, tmp_path / "a", clock="manual", kinds="output", keep_free=0) as recorder:
        for exponents in (True, False, True):
            model["a"](torch.ones(3))
            recorder.change({"exponents": exponents})
            recorder.step()
        model["a"](torch.ones(3))
        recorder.step()
    trace = replay.open(tmp_path / "a")

    assert trace.records()["step"].to_pylist() == [0, 1, 2, 3]
    assert trace.records(kinds="exponents")["step"].to_pylist() == [1, 3]


def test_a_training_that_is_resumed_goes_on_in_the_streams_of_the_counts(tmp_path):
    for first in (0, 1):
        trace, tensors = attached(tmp_path / "a", exponents=True, steps=1, resume=first)

    assert trace.exponents(1, "a", path="0").tolist() == expected(tensors[0][0]).tolist()
    assert len([stream for stream in trace.streams(0) if stream.kind == "exponents"]) == 2
    assert list(verify(tmp_path / "a")) == []


@small
def test_a_copy_has_the_counts(tmp_path):
    from replay.convert import convert

    _, tensors = attached(tmp_path / "a", exponents=True, tensors=False)
    convert(tmp_path / "a", tmp_path / "b", store="hdf5", compression="zstd")

    assert_counted(replay.open(tmp_path / "b"), tensors)


@pytest.mark.parametrize("wrong", ["yes", 1, None])
def test_another_thing_than_yes_or_no_is_refused(tmp_path, wrong):
    with pytest.raises(hookrec.AttachError, match="exponents"):
        hookrec.attach(nn.Linear(1, 1), tmp_path / "a", exponents=wrong)
    with pytest.raises(hookrec.AttachError, match="exponents"):
        hookrec.attach(nn.Linear(1, 1), tmp_path / "a", rules=[{"exponents": wrong}])
