"""What `replay export` writes, read by the programs that it is for, and what is left when it is interrupted."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import duckdb
import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.dataset
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from click.testing import CliRunner

import replay
from replay import growing
from replay.cli import main
from replay.exported import MEANINGS
from tests.handwritten import Written
from tests.handwritten import write_trace as write_tensors
from tests.live_traces import WrittenTrace
from tests.stored import write_stored
from tests.written import write_trace

STATISTICS = ["numel", "n_nan", "n_posinf", "n_neginf", "n_zero", "min", "max", "absmax", "mean", "std", "l2"]


def ask(*arguments):
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


@pytest.fixture
def stored(tmp_path):
    """Six steps of a float32, a bfloat16 and an int64 layer; step 1 has statistics alone."""
    write_stored(tmp_path / "a")
    return tmp_path / "a"


def rows_of(trace):
    return replay.open(trace).records().to_pylist()


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_each_program_reads_the_statistics_with_their_types(format_, stored, tmp_path):
    out = tmp_path / f"out.{format_}"

    assert ask(stored, out).exit_code == 0

    expected = [row["l2"] for row in rows_of(stored)]
    if format_ == "parquet":
        frames = [pandas.read_parquet(out), polars.read_parquet(out).to_pandas()]
        frames.append(duckdb.sql(f"select * from '{out}'").df())
    else:
        frames = [pandas.read_feather(out), polars.read_ipc(out).to_pandas()]
        frames.append(pa.feather.read_table(out).to_pandas())
    for frame in frames:
        assert frame["l2"].tolist() == expected
        assert frame["layer"].tolist() == [row["layer"] for row in rows_of(stored)]
        assert not isinstance(frame["layer"].dtype, pandas.CategoricalDtype)
        assert frame["step"].dtype == np.int64
        assert [list(shape) for shape in frame["shape"]] == [row["shape"] for row in rows_of(stored)]


def test_values_are_those_of_the_tensors_and_null_where_there_are_none(stored, tmp_path):
    trace = replay.open(stored)

    for format_, read in (("parquet", pq.read_table), ("arrow", pa.feather.read_table)):
        out = tmp_path / f"out.{format_}"
        assert ask(stored, out, "--tensors", "--layers", "0").exit_code == 0
        rows = read(out).to_pylist()

        assert [row["step"] for row in rows if row["values"] is None] == [1]
        for row in rows[2:]:
            np.testing.assert_array_equal(np.float32(row["values"]), trace.tensor(row["step"], "0"))


def test_each_column_says_what_it_means(stored, tmp_path):
    for out in (tmp_path / "out.parquet", tmp_path / "out.arrow"):
        assert ask(stored, out, "--tensors", "--layers", "0").exit_code == 0
        schema = pq.read_schema(out) if out.suffix == ".parquet" else pa.feather.read_table(out).schema

        assert {field.name for field in schema} == set(MEANINGS)
        for field in schema:
            assert field.metadata[b"meaning"].decode() == MEANINGS[field.name][0] != ""
        assert schema.field("l2").metadata[b"unit"] == b"that of the tensor"


@pytest.mark.parametrize("format_", ["npz", "safetensors"])
def test_tensors_go_to_one_array_a_layer_and_kind_with_their_steps(format_, stored, tmp_path):
    out, trace = tmp_path / f"out.{format_}", replay.open(stored)

    assert ask(stored, out).exit_code == 0

    if format_ == "npz":
        with np.load(out) as file:
            arrays = dict(file)
    else:
        arrays = safetensors.torch.load_file(out)
        assert arrays["blocks.0%2Fadd#1/output/data"].dtype == torch.bfloat16
        arrays = {name: (a.float() if a.is_floating_point() else a).numpy() for name, a in arrays.items()}
    assert set(arrays) == {
        f"{layer}/output/{what}"
        for layer, what in itertools.product(("0", "blocks.0%2Fadd#1", "层"), ("data", "step", "call", "micro"))
    }
    for layer, name in (("0", "0"), ("blocks.0/add#1", "blocks.0%2Fadd#1"), ("层", "层")):
        assert arrays[f"{name}/output/step"].tolist() == [0, 2, 3, 4, 5]
        for step, values in zip((0, 2, 3, 4, 5), arrays[f"{name}/output/data"], strict=True):
            recorded = trace.tensor(step, layer)
            wide = recorded.astype(np.float32) if recorded.dtype.name == "bfloat16" else recorded
            np.testing.assert_array_equal(values, wide)


def test_safetensors_says_which_layer_an_array_is_of(stored, tmp_path):
    ask(stored, tmp_path / "out.safetensors")

    with safetensors.safe_open(tmp_path / "out.safetensors", "numpy") as file:
        described = json.loads(file.metadata()["blocks.0%2Fadd#1/output"])

    assert described == {"layer": "blocks.0/add#1", "kind": "output", "path": ""}
    header = int.from_bytes((tmp_path / "out.safetensors").read_bytes()[:8], "little")
    assert header % 8 == 0  # else arrays that are mapped into memory lie at odd addresses


@pytest.mark.parametrize("format_", ["npz", "safetensors"])
def test_empty_scalar_and_differing_shapes_have_arrays_of_their_own(format_, tmp_path):
    tensors = [np.zeros((0, 3), np.float32), np.float32(2.5), np.ones((2,), np.float32), np.ones((3,), np.float32)]
    write_tensors(tmp_path / "a", *(Written("0", np.asarray(tensor), step) for step, tensor in enumerate(tensors)))
    out = tmp_path / f"out.{format_}"

    assert ask(tmp_path / "a", out).exit_code == 0

    if format_ == "npz":
        with np.load(out) as file:
            arrays = dict(file)
    else:
        arrays = safetensors.numpy.load_file(out)
    shapes = [arrays[f"0/output{variant}/data"].shape for variant in ("", "~2", "~3", "~4")]
    assert shapes == [(1, 0, 3), (1,), (1, 2), (1, 3)]


@pytest.mark.parametrize(("dtype", "fits"), [("complex64", True), ("complex128", False)])
def test_what_safetensors_lacks_is_refused_by_name(dtype, fits, tmp_path):
    write_tensors(tmp_path / "a", Written("0", np.ones(3, dtype), 0))

    answer = ask(tmp_path / "a", tmp_path / "out.safetensors")

    assert answer.exit_code == (0 if fits else 2)
    assert fits or ("complex128, which safetensors lacks" in answer.output and not list(tmp_path.glob("out*")))


def test_parts_by_layer_are_a_dataset_whose_layers_stay_text(tmp_path):
    layers = ("0", "1", "", "(root)", "a/b", "=%x", "_hidden", "层", "l" * 300)
    write_trace(tmp_path / "a", [{"step": s, "layer": layer, "l2": s + 0.5} for s in range(3) for layer in layers])
    out = tmp_path / "out"

    assert ask(tmp_path / "a", out, "--partition", "layer").exit_code == 0

    assert len(list(out.iterdir())) == len(layers)
    for frame in (
        pandas.read_parquet(out),
        pa.dataset.dataset(out, partitioning="hive").to_table().to_pandas(),
        duckdb.sql(f"select * from read_parquet('{out}/*/*.parquet', hive_partitioning=true)").df(),
        polars.scan_parquet(f"{out}/*/*.parquet", hive_partitioning=True).collect().to_pandas(),
    ):
        assert sorted(frame["layer"]) == sorted(layers * 3)
        assert frame.groupby("layer")["l2"].sum().tolist() == [4.5] * len(layers)


def test_parts_by_steps_have_their_steps_and_no_others(tmp_path):
    write_trace(tmp_path / "a", [{"step": step, "layer": "0"} for step in (0, 1, 99, 100, 250, 2**40)])
    out = tmp_path / "out"

    assert ask(tmp_path / "a", out, "--partition", "step:100").exit_code == 0

    steps = {path.name: pq.read_table(path / "part-0.parquet")["step"].to_pylist() for path in out.iterdir()}
    assert steps == {
        "from_step=0": [0, 1, 99],
        "from_step=100": [100],
        "from_step=200": [250],
        f"from_step={2**40 // 100 * 100}": [2**40],
    }
    found = duckdb.sql(
        f"select step from read_parquet('{out}/*/*.parquet', hive_partitioning=true) where from_step=200"
    )
    assert found.fetchall() == [(250,)]


@pytest.mark.parametrize("partition", ["layer", "step:2"])
@pytest.mark.parametrize("tensors", [(), ("--tensors", "--where", "dtype <> 'int64'")])
def test_what_is_divided_in_many_parts_is_the_whole(partition, tensors, tmp_path, monkeypatch):
    for name in ("rank._PART_ROWS", "log.COMPACT_ROWS", "partitions._PART_ROWS", "exported._PART_ROWS"):
        monkeypatch.setattr(f"replay.{name}", 3)
    for rank in (0, 1):
        write_stored(tmp_path / "a", rank=rank)
    assert ask(tmp_path / "a", tmp_path / "whole.parquet", *tensors).exit_code == 0
    whole = pq.read_table(tmp_path / "whole.parquet").to_pylist()

    assert ask(tmp_path / "a", tmp_path / "out", "--partition", partition, *tensors).exit_code == 0

    files = list((tmp_path / "out").iterdir())
    assert len(files) == (2 if tensors and partition == "layer" else 3)
    found = 0
    for file in files:
        rows = pq.read_table(file / "part-0.parquet").to_pylist()
        of_file = (lambda row: row["layer"]) if partition == "layer" else (lambda row: row["step"] // 2)
        assert rows == [row for row in whole if of_file(row) == of_file(rows[0])]
        found += len(rows)
    assert found == len(whole)


@pytest.mark.parametrize(
    ("out", "options"),
    [
        ("out.parquet", ()),
        ("out.parquet", ("--where", "step > 1")),
        ("out.parquet", ("--tensors",)),
        ("out.arrow", ()),
        ("out.npz", ()),
        ("out.safetensors", ()),
        ("out", ("--partition", "layer")),
    ],
)
def test_work_that_takes_longer_says_how_far_it_is(out, options, stored, tmp_path, monkeypatch):
    monkeypatch.setattr("replay.command_line.FIRST_S", 0)

    said = ask(stored, tmp_path / out, "--layers", "0", *options)

    assert said.exit_code == 0
    (first, *_) = said.stderr.splitlines()
    done, total = re.fullmatch(r"([\d,]+) of ([\d,]+) records", first).groups()
    assert 0 < int(done) <= int(total) <= 18


def test_nothing_is_not_divided(tmp_path):
    write_trace(tmp_path / "a", [{"step": 0, "layer": "0"}])

    refused = ask(tmp_path / "a", tmp_path / "out", "--partition", "layer", "--where", "step > 9")

    assert refused.exit_code == 2
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("partition", ["layers", "step", "step:0", "step:-1", "step:x", "layer:3", ""])
def test_a_partition_that_is_none_is_refused(partition, tmp_path):
    write_trace(tmp_path / "a", [{"step": 0, "layer": "0"}])

    refused = ask(tmp_path / "a", tmp_path / "out", "--partition", partition)

    assert refused.exit_code == 2
    assert "A partition is 'layer', or 'step:100'" in refused.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("out.npz", "--format", "parquet"), "Name it"),
        (("out.csv",), "would hold Parquet"),
        (("out", "--partition", "layer", "--format", "npz"), "is of Parquet"),
        (("out", "--partition", "layer", "--overwrite"), "replaces a file"),
        (("out", "--partition", "layer", "--follow"), "takes no --partition"),
        (("there", "--partition", "layer"), "exists already"),
        (("there", "--follow"), "something else in it"),
        (("missing/out", "--partition", "layer"), "cannot be written"),
        (("missing/out", "--follow"), "cannot be written"),
        (("a/trace.json", "--follow"), "cannot be written"),
        (("out.npz", "--layers", "0"), "No tensor of this selection"),
    ],
)
def test_what_does_not_go_together_is_refused_and_nothing_is_written(arguments, words, tmp_path):
    write_trace(tmp_path / "a", [{"step": 0, "layer": "0"}])
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    before = sorted(tmp_path.rglob("*"))

    refused = ask(tmp_path / "a", tmp_path / arguments[0], *arguments[1:])

    assert refused.exit_code in (1, 2)
    assert words in refused.output
    assert sorted(tmp_path.rglob("*")) == before


class Following:
    """A live trace and an export that follows it in this process: a look each time one is asked for."""

    def __init__(self, tmp_path, monkeypatch, **options):
        self.trace = WrittenTrace(tmp_path / "live", width=3)
        self.out = tmp_path / "out"
        self.options = options
        self._monkeypatch = monkeypatch

    def begin(self):
        looks = itertools.count()

        def sleep(seconds):  # a second look without new records is where this test takes over
            raise _Pause(next(looks))

        self._monkeypatch.setattr(growing.time, "sleep", sleep)
        with pytest.raises(_Pause):
            list(growing.grow(replay.open(self.trace.path), self.out, **self.options))

    def steps(self):
        return pq.read_table(self.out)["step"].to_pylist() if list(self.out.glob("*.parquet")) else []


class _Pause(Exception):
    pass


def test_an_export_that_goes_on_has_each_record_once(tmp_path, monkeypatch):
    following = Following(tmp_path, monkeypatch, layers="1", tensors=True)

    for step in range(4):
        following.trace.commit(2 * step, 2 * step + 1)
        following.begin()
    following.trace.seal()
    monkeypatch.undo()
    assert list(growing.grow(replay.open(tmp_path / "live"), following.out, layers="1", tensors=True)) == []

    assert following.steps() == list(range(8))
    frame = duckdb.sql(f"select step, values from '{following.out}/*.parquet' order by step").fetchall()
    assert frame == [(step, [float(step)] * 3) for step in range(8)]
    assert len(pandas.read_parquet(following.out)) == len(polars.read_parquet(f"{following.out}/*.parquet")) == 8


def test_looks_without_a_fitting_record_leave_no_file(tmp_path, monkeypatch):
    following = Following(tmp_path, monkeypatch, where="n_nan > 0")

    following.trace.commit(0, 1)
    following.begin()
    assert list(following.out.iterdir()) == []
    following.trace.commit(2, n_nan={"1": 5})
    following.begin()

    assert following.steps() == [2]


@pytest.mark.parametrize("other", [{"layers": "0"}, {"tensors": True}, {"where": "l2 >= 0"}])
def test_an_export_does_not_go_on_with_another_question(other, tmp_path, monkeypatch):
    following = Following(tmp_path, monkeypatch)
    following.trace.commit(0)
    following.begin()

    with pytest.raises(replay.BadQuery, match=f"begun with another {next(iter(other))}"):
        list(growing.grow(replay.open(following.trace.path), following.out, **other))


def test_an_export_does_not_go_on_behind_files_that_are_missing_or_another_s(tmp_path, monkeypatch):
    following = Following(tmp_path, monkeypatch)
    for step in range(2):
        following.trace.commit(step)
        following.begin()
    first, second = sorted(following.out.iterdir())

    moved = first.rename(tmp_path / "moved")
    with pytest.raises(replay.BadQuery, match="something else in it"):
        following.begin()
    moved.rename(first)
    pq.write_table(pa.table({"a": [1]}), second)
    with pytest.raises(replay.BadQuery, match="was not written by"):
        following.begin()
    second.write_bytes(b"PAR1")
    with pytest.raises(replay.BadQuery, match="was not written by"):
        following.begin()


def test_two_exports_do_not_write_to_one_folder(tmp_path, monkeypatch):
    following = Following(tmp_path, monkeypatch)
    following.trace.commit(0)
    opened = replay.open(following.trace.path)
    monkeypatch.setattr(growing.time, "sleep", lambda seconds: pytest.fail("it found nothing wrong"))

    first = growing.grow(opened, following.out)
    next(first)
    with pytest.raises(replay.BadQuery, match="is being written by another export"):
        next(growing.grow(opened, following.out))
    first.close()
    following.begin()

    assert following.steps() == [0, 0]


def test_values_that_the_first_file_cannot_hold_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(growing, "TORN_S", 0.0)
    narrow, wide = np.ones(2, np.float32), np.full(2, 1 / 3)
    write_tensors(tmp_path / "a", Written("0", narrow, 0), sealed=False)
    list(growing.grow(replay.open(tmp_path / "a"), tmp_path / "out", tensors=True))
    shutil.rmtree(tmp_path / "a")
    write_tensors(tmp_path / "a", Written("0", narrow, 0), Written("0", wide, 1), sealed=False)

    with pytest.raises(replay.BadQuery, match="Values of float64 come"):
        list(growing.grow(replay.open(tmp_path / "a"), tmp_path / "out", tensors=True))


def test_a_growing_folder_holds_what_counts_of_a_training_that_was_resumed(tmp_path, monkeypatch):
    following = Following(tmp_path, monkeypatch, layers="1")
    seen = []
    for commits in ([0, 1], [2], [3, 4], "resume 2", [2], [3], "resume 0", [0], "resume 5", [5]):
        if isinstance(commits, str):
            following.trace.resume(int(commits.split()[1]))
        else:
            following.trace.commit(*commits)
        following.begin()
        seen.append(following.steps())

    assert seen == [
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3, 4],
        [0, 1],  # taken back from 2 on, and not recorded again yet
        [0, 1, 2],
        [0, 1, 2, 3],
        [],
        [0],
        [0],
        [0, 5],
    ]
    assert [path.name for path in sorted(following.out.iterdir())] == [f"part-{n:05}.parquet" for n in range(7)]
    assert polars.read_parquet(f"{following.out}/*.parquet")["step"].to_list() == [0, 5]
    assert duckdb.sql(f"select step from '{following.out}/*.parquet' order by 1").fetchall() == [(0,), (5,)]
    assert pandas.read_parquet(following.out)["step"].tolist() == [0, 5]


def test_a_growing_folder_that_is_begun_late_holds_what_counts(tmp_path, monkeypatch):
    following = Following(tmp_path, monkeypatch, layers="1")
    following.trace.commit(0, 1, 2)
    following.trace.resume(1)
    following.trace.commit(1)
    following.trace.resume(1)

    following.begin()
    following.trace.commit(1, 2)
    following.begin()

    assert following.steps() == [0, 1, 2]


def test_values_of_a_growing_folder_are_those_of_the_attempt_that_counts(tmp_path, monkeypatch):
    following = Following(tmp_path, monkeypatch, layers="1", tensors=True)
    following.trace.commit(0, 1)
    following.begin()
    following.trace.commit(2, 3)
    following.trace.resume(1)
    following.trace.commit(1, 2)

    following.begin()

    rows = pq.read_table(following.out).select(["step", "values"]).to_pylist()
    assert [(row["step"], row["values"]) for row in rows] == [(0, [0.0] * 3), (1, [101.0] * 3), (2, [102.0] * 3)]


def test_steps_are_taken_back_of_the_rank_that_was_resumed_alone(tmp_path, monkeypatch):
    following = Following(tmp_path, monkeypatch)
    other = WrittenTrace(following.trace.path, ("0",), rank=1)
    for trace in (following.trace, other):
        trace.commit(0, 1)
    following.begin()
    other.resume(1)
    following.begin()

    rows = pq.read_table(following.out).select(["rank", "step"]).to_pylist()

    assert sorted((row["rank"], row["step"]) for row in rows) == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0)]


_KILLED = """
import itertools, os, signal, sys
from pathlib import Path
import replay
from replay import growing

calls, real = itertools.count(1), Path.replace

def replace(self, target):
    if next(calls) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, target)

Path.replace = replace
growing.TORN_S = 0
list(growing.grow(replay.open(Path(sys.argv[1])), Path(sys.argv[2])))
"""


@pytest.mark.parametrize(
    ("kill_at", "between"),
    [
        (1, [0, 1, 2, 3, 4, 5]),  # before the first of the two files that are written anew
        (2, [0, 1, 2, 3]),
        pytest.param(3, [0, 1, 2], marks=pytest.mark.slow),  # before the new file
    ],
)
def test_a_kill_while_steps_are_taken_back_leaves_no_step_twice_and_the_next_export_goes_on(
    kill_at, between, tmp_path, monkeypatch
):
    following = Following(tmp_path, monkeypatch)
    for steps in ([0, 1], [2, 3], [4, 5]):
        following.trace.commit(*steps)
        following.begin()
    following.trace.resume(3)
    following.trace.commit(3, 4)

    ended = subprocess.run([sys.executable, "-c", _KILLED, following.trace.close(), following.out, str(kill_at)])

    assert ended.returncode == -signal.SIGKILL
    assert following.steps() == [step for step in between for _ in "01"]
    following.begin()
    assert following.steps() == [step for step in (0, 1, 2, 3, 4) for _ in "01"]
    assert replay.open(following.trace.path).records()["step"].to_pylist() == following.steps()
    assert not list(following.out.glob("*.partial"))


@pytest.mark.parametrize("mounted", [False, True])
def test_readers_of_a_growing_folder_meet_no_file_that_is_half_written(mounted, tmp_path, monkeypatch):
    following = Following(tmp_path, monkeypatch, layers="1", tensors=True)
    following.trace.commit(0, 1)
    following.begin()
    monkeypatch.setattr("pathlib.Path.is_mount", lambda path: mounted)
    left = following.out / ".partial" if mounted else tmp_path / "out.partial"
    left.mkdir()
    (left / "part-00000.parquet").write_text("left by one that was killed")
    seen, tensor = [], replay.Trace.tensor

    def read_by_others(self, **key):
        seen.append(pq.read_table(following.out)["step"].to_pylist())
        seen.append(pandas.read_parquet(following.out)["step"].tolist())
        seen.append(polars.read_parquet(f"{following.out}/*.parquet")["step"].to_list())
        if not mounted:  # beside a mounted folder, nothing can be renamed into it
            seen.append(polars.read_parquet(following.out)["step"].to_list())
        return tensor(self, **key)

    monkeypatch.setattr(replay.Trace, "tensor", read_by_others)
    following.trace.commit(2)
    following.begin()

    assert seen == [[0, 1]] * (3 if mounted else 4)
    assert following.steps() == [0, 1, 2]
    assert not left.exists()


def test_whoever_has_a_file_open_reads_it_to_its_end_while_steps_are_taken_back(tmp_path, monkeypatch):
    following = Following(tmp_path, monkeypatch)
    following.trace.commit(0, 1)
    following.begin()
    (file,) = following.out.iterdir()
    with pq.ParquetFile(file) as opened:
        following.trace.resume(0)
        following.begin()

        assert opened.read()["step"].to_pylist() == [0, 0, 1, 1]
    assert following.steps() == []


def test_a_trace_whose_writer_is_gone_ends_with_1(tmp_path, monkeypatch):
    monkeypatch.setattr(growing, "TORN_S", 0.05)
    trace = WrittenTrace(tmp_path / "a")
    trace.commit(0)
    trace.close()

    ended = ask(tmp_path / "a", tmp_path / "out", "--follow", "--poll", "0.02")

    assert ended.exit_code == 1
    assert "is torn" in ended.output
    assert pq.read_table(tmp_path / "out")["step"].to_pylist() == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_interrupted_export_leaves_whole_files_and_goes_on(number, tmp_path):
    trace = WrittenTrace(tmp_path / "a", width=3)
    trace.commit(0)
    command = [sys.executable, "-m", "replay.cli", "export", tmp_path / "a", tmp_path / "out"]
    command += ["--follow", "--tensors", "--poll", "0.01"]
    following = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for step in range(1, 4):
        assert following.stderr.readline().startswith(f"{tmp_path}/out/part-")
        trace.commit(step)

    os.kill(following.pid, number)
    said = following.communicate()[1]

    assert following.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in said
    for file in (tmp_path / "out").glob("*.parquet"):
        pq.read_table(file)
    trace.seal()
    assert ask(tmp_path / "a", tmp_path / "out", "--follow", "--tensors").exit_code == 0
    assert sorted(pq.read_table(tmp_path / "out")["step"].to_pylist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not list((tmp_path / "out").glob("*.partial"))


@pytest.mark.parametrize("options", [("out.parquet",), ("out.npz",), ("out", "--partition", "layer")])
def test_ctrl_c_leaves_nothing_half_written(options, stored, tmp_path, monkeypatch):
    def interrupted(self, *arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(replay.Trace, "tensor", interrupted)
    tensors = () if options[0].endswith("npz") else ("--tensors", "--layers", "0")

    ended = ask(stored, tmp_path / options[0], *options[1:], *tensors, "--layers", "0")

    assert (ended.exit_code, ended.stderr.strip()) == (1, "Aborted!")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
