"""Tensors are stored in part, their first rows or in a smaller dtype, and the trace is right about it."""

import json

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from click.testing import CliRunner
from torch import nn

import hookrec
import replay
from hookrec.errors import AttachError
from hookrec.plan import plan_of
from replay.cli import main
from replay.convert import convert
from replay.verify import verify
from tests.samples import convolutional, train

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = (4, 1, 8, 8)
STATISTICS = ("numel", "n_nan", "n_zero", "min", "max", "absmax", "mean", "std", "l2")


def recorded(path, make=convolutional, steps=2, shape=SHAPE, **plan) -> replay.Trace:
    model = make()
    with hookrec.attach(model, path, keep_free=0, **plan):
        train(model, shape, steps)
    return replay.open(path)


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_first_rows_in_a_smaller_dtype_are_those_of_the_whole_tensor_whose_statistics_are_kept(tmp_path, store):
    whole = recorded(tmp_path / "a", store=store)

    part = recorded(tmp_path / "b", store=store, tensor_dtype="bfloat16", tensor_rows=2)

    ours, theirs = whole.records().to_pylist(), part.records().to_pylist()
    assert [{name: r[name] for name in r} for r in ours] == theirs
    for record in theirs:
        key = {name: record[name] for name in ("step", "layer", "kind", "call")}
        expected = whole.tensor(**key)[:2].astype(ml_dtypes.bfloat16)
        found = part.tensor(**key)
        assert found.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(found, expected)
    assert list(verify(part.path)) == []


def test_what_is_stored_is_listed_beside_what_was_recorded(tmp_path):
    part = recorded(tmp_path / "a", layers=["0", "2"], kinds=("output",), tensor_dtype="bfloat16", tensor_rows=2)
    whole = recorded(tmp_path / "b", layers="0", kinds=("output",))

    text, as_json = (CliRunner().invoke(main, ["ls", str(part.path), *more]).stdout for more in ((), ("--json",)))
    rows = part.sql("select shape, stored_dtype, stored_shape from streams order by stream").to_pylist()

    (shape,) = {tuple(r["shape"]) for r in part.records(layers="0").to_pylist()}
    words = "×".join(map(str, (2, *shape[1:])))
    header, line, _ = text.splitlines()
    assert header.split() == [
        "layer",
        "kind",
        "dtype",
        "shape",
        "stored",
        "as",
        *("records", "tensors", "first", "last"),
    ]
    assert line.split() == ["0", "output", "float32", "×".join(map(str, shape)), "bfloat16", words, "2", "2", "0", "1"]
    assert [json.loads(as_json)[0][f"stored_{name}"] for name in ("dtype", "shape")] == ["bfloat16", [2, *shape[1:]]]
    assert rows[0] == {"shape": list(shape), "stored_dtype": "bfloat16", "stored_shape": [2, *shape[1:]]}
    assert "stored as" not in CliRunner().invoke(main, ["ls", str(whole.path)]).stdout


def test_a_layout_that_is_not_contiguous_and_a_tensor_without_rows_are_stored_in_part_too(tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return x.mul(1.0).transpose(0, 1), x.sum()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
            self.odd = Odd()

        def forward(self):
            turned, total = self.odd(self.weight)
            return turned.sum() + total

    model = Model()
    with hookrec.attach(
        model, tmp_path / "a", keep_free=0, kinds="output", tensor_rows=1, tensor_dtype="float16", clock="manual"
    ) as rec:
        model()
        rec.step()

    trace = replay.open(tmp_path / "a")
    np.testing.assert_array_equal(trace.tensor(0, "odd", path="0"), np.array([[0, 3]], np.float16))
    assert trace.tensor(0, "odd", path="1") == np.float16(15)
    (turned, total) = trace.records().to_pylist()
    assert (turned["numel"], turned["shape"], turned["max"], total["shape"]) == (6, [3, 2], 5.0, [])


def test_parameters_are_stored_with_all_rows_and_integers_as_they_are(tmp_path):
    def embedding():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(5, 3))

    model = embedding()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hookrec.attach(
        model, tmp_path / "a", keep_free=0, kinds=("input", "param"), tensor_rows=1, tensor_dtype="float8_e5m2"
    ):
        model(torch.tensor([3, 1, 4])).sum().backward()
        optimizer.step()

    trace = replay.open(tmp_path / "a")
    np.testing.assert_array_equal(trace.tensor(0, "0", "input", path="0"), np.array([3]))
    weight = trace.tensor(0, "0", "param", path="weight")
    assert (weight.shape, weight.dtype) == ((5, 3), ml_dtypes.float8_e5m2)


def test_diff_compares_what_both_have_and_calls_no_rounding_of_the_store_a_difference(tmp_path):
    recorded(tmp_path / "a")
    recorded(tmp_path / "b", tensor_dtype="bfloat16", tensor_rows=3)

    found = replay.diff(tmp_path / "a", tmp_path / "b")

    rows = found.rows.to_pylist()
    assert found.equal
    assert {row["compared"] for row in rows} == {"tensors"}
    assert {(row["dtype_a"], row["dtype_b"]) for row in rows} == {("float32", "bfloat16")}
    assert "stored as bfloat16 in B" in rows[0]["note"]
    assert "the first 3 rows of the tensors, and the statistics of all" in rows[0]["note"]


def test_diff_sees_a_difference_in_rows_that_are_not_stored(tmp_path):
    class LastRow(nn.Module):
        def __init__(self, more):
            super().__init__()
            self.more = more

        def forward(self, x):
            return x + self.more * (torch.arange(len(x)) == len(x) - 1).float()[:, None]

    def made(more):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), LastRow(more))

    for name, more in (("a", 0.0), ("b", 5.0)):
        recorded(tmp_path / name, lambda more=more: made(more), steps=1, shape=(4, 3), kinds="output", tensor_rows=2)

    found = replay.diff(tmp_path / "a", tmp_path / "b")

    assert not found.equal
    assert [row["layer_a"] for row in found.rows.to_pylist() if not row["within"]] == ["1"]


def test_parts_survive_a_conversion_and_an_export_and_are_read_by_others(tmp_path):
    recorded(tmp_path / "a", tensor_dtype="float16", tensor_rows=1)

    convert(tmp_path / "a", tmp_path / "b", store="zarr", compression="zstd")

    trace = replay.open(tmp_path / "b")
    assert list(verify(tmp_path / "b")) == []
    array = zarr.open_array(tmp_path / "a/rank-00000/tensors.zarr/0/output/data", mode="r")
    assert (array.shape, array.dtype) == ((2, 1, 4, 6, 6), np.float16)
    np.testing.assert_array_equal(trace.tensor(1, "0"), array[1])
    trace.select(layers="0", kinds="output").to_parquet(tmp_path / "out.parquet", tensors=True)
    values = pq.read_table(tmp_path / "out.parquet")["values"].to_pylist()
    assert values[1] == array[1].ravel().tolist()


def test_info_and_show_say_what_is_stored(tmp_path):
    recorded(tmp_path / "a", tensor_rows=1, tensor_dtype="bfloat16")

    info = CliRunner().invoke(main, ["info", str(tmp_path / "a")]).output
    show = CliRunner().invoke(main, ["show", str(tmp_path / "a"), "4"]).output

    assert "output of 0: bfloat16 1×4×6×6 of float32 4×4×6×6" in info
    assert "stored    bfloat16 1×3 of it, shown below" in show


def test_lengths_of_batches_share_a_place_when_they_are_stored_in_part(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = [torch.randn(rows, 3) for rows in range(1, 7)]

    with hookrec.attach(model, tmp_path / "a", keep_free=0, kinds="input", tensor_rows=2):
        for batch in batches:
            model(batch).sum().backward()
            optimizer.step()

    trace = replay.open(tmp_path / "a")
    assert list(verify(tmp_path / "a")) == []
    for step, batch in enumerate(batches):
        np.testing.assert_array_equal(trace.tensor(step, "0", "input", path="0"), batch[:2])
    assert [r["numel"] for r in trace.records().to_pylist()] == [3 * len(batch) for batch in batches]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_dtype": "int8"}, "no tensor_dtype 'int8'"),
        ({"tensor_rows": 0}, "tensor_rows is 0"),
        ({"tensor_rows": True}, "tensor_rows is True"),
        ({"tensor_rows": 2, "tensors": False}, "tensor_rows says what is kept"),
    ],
)
def test_what_is_no_part_is_refused(options, said):
    with pytest.raises(AttachError, match=said):
        plan_of(**options)


def test_a_line_that_stores_more_rows_than_there_were_is_named(tmp_path):
    recorded(tmp_path / "a", steps=1, tensor_rows=2)
    table = tmp_path / "a/rank-00000/streams.jsonl"
    lines = [json.loads(line) for line in table.read_text().splitlines()]
    lines[0]["of_shape"][0] = 1
    table.write_text("".join(json.dumps(line) + "\n" for line in lines))

    problems = list(verify(tmp_path / "a"))

    assert any("no first rows of" in problem.message for problem in problems)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"tensor_rows": 2}, {"tensor_rows": 2}),
        pytest.param({"tensor_rows": 2, "tensor_dtype": "float16"}, {}, marks=pytest.mark.slow),
        pytest.param({}, {"tensor_rows": 2, "tensor_dtype": "float16"}, marks=pytest.mark.slow),
        pytest.param({"tensor_dtype": "bfloat16"}, {"tensor_dtype": "float16"}, marks=pytest.mark.slow),
    ],
)
def test_a_training_that_is_resumed_tells_a_whole_tensor_from_a_part_of_that_shape(tmp_path, before, after):
    """What is stored of 3, 4 and 5 rows is alike, and so are 2 rows that are the whole; each shape comes twice."""
    lengths, path = (4, 2, 3, 5), tmp_path / "a"

    for first, plan in ((0, before), (4, after)):
        model = nn.Sequential(nn.Identity())
        with hookrec.attach(model, path, keep_free=0, kinds="output", clock="manual", resume=first, **plan) as recorder:
            for length in lengths:
                model(torch.full((length, 3), 1 / 3))
                recorder.step()

    trace = replay.open(path)
    assert list(verify(path)) == []
    assert [record["shape"] for record in trace.records().to_pylist()] == [[length, 3] for length in lengths * 2]
    for step, length in enumerate(lengths * 2):
        plan = before if step < 4 else after
        stored = torch.full((min(length, plan.get("tensor_rows", 5)), 3), 1 / 3)
        expected = stored.to(getattr(torch, plan.get("tensor_dtype", "float32"))).float()
        np.testing.assert_array_equal(trace.tensor(step, "0").astype(np.float32), expected)
    if before == after:
        assert len((path / "rank-00000/streams.jsonl").read_text().splitlines()) == len(lengths)
