"""What replay and its commands refuse is refused by one message, and nothing that was there is touched."""

import json
import os
import shutil

import pyarrow.parquet
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import hookrec
import replay
from replay.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("recorded") / "a"
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with hookrec.attach(model, path, clock="manual", keep_free=0) as recorder:
        for _ in range(2):
            model(torch.ones(4, 3)).sum().backward()
            recorder.step()
    return path


@pytest.fixture
def trace(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "a")


def ask(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def assert_is_one_message(result: Result, *words: str) -> None:
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert [line.startswith("Error: ") for line in result.output.splitlines()].count(True) == 1, result.output
    for word in words:
        assert word in result.output


def test_a_device_file_is_not_replaced_by_an_export(trace, tmp_path):
    """A pipe stands for /dev/null here, so that a failure of this test does no harm."""
    device = tmp_path / "device"
    os.mkfifo(device)

    assert_is_one_message(ask("export", trace, device, "--overwrite"), "is no file of data")
    assert_is_one_message(ask("export", trace, tmp_path / "out.csv"), "would hold Parquet. Name it so")

    assert device.is_fifo()
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a", "device"]


@pytest.mark.parametrize("command", [("ls",), ("stats",), ("show", "0")])
@pytest.mark.parametrize("cut", [None, 30])
def test_a_table_of_streams_that_is_missing_or_cut_is_named(trace, command, cut):
    file = trace / "rank-00000/streams.jsonl"
    text = file.read_text()
    file.unlink()
    if cut is not None:
        file.write_text(text[:cut])

    result = ask(command[0], trace, *command[1:])

    assert_is_one_message(result)
    assert "lines of streams.jsonl are missing" in result.output or command[0] == "show"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("file/out.parquet", "is no directory"),
        ("missing/out.parquet", "is no directory"),
        ("x" * 300, "cannot be written"),
        (".", "is a directory"),
    ],
)
def test_an_export_to_where_no_file_can_be_is_one_message(trace, tmp_path, target, words):
    (tmp_path / "file").write_text("mine")

    assert_is_one_message(ask("export", trace, tmp_path / target), words)

    assert (tmp_path / "file").read_text() == "mine"
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("where", ["n_nan > 0; select 1", "", "(", "nothing > 1"])
def test_a_condition_that_is_more_or_less_than_a_condition_is_refused(trace, where):
    assert_is_one_message(ask("first", trace, where), "cannot be understood")


def test_a_condition_reaches_no_file(trace, tmp_path):
    (tmp_path / "secret.csv").write_text("a\n1\n")

    result = ask("first", trace, f"exists (select * from read_csv('{tmp_path}/secret.csv'))")

    assert_is_one_message(result, "cannot be understood")


@pytest.mark.parametrize("step", ["99999999999999999999", "-1", "one", "1.5"])
@pytest.mark.parametrize("command", [("stats",), ("show", "0")])
def test_a_step_that_is_none_is_refused(trace, command, step):
    assert_is_one_message(ask(command[0], trace, *command[1:], "--step", step), "--step")


@pytest.mark.parametrize("steps", [2**63, -(2**63) - 1, slice(-2, None), slice(0, 3, -1)])
def test_steps_that_are_none_are_refused(trace, steps):
    with pytest.raises(replay.BadQuery, match="count from 0"):
        replay.open(trace).records(steps=steps)


def test_no_column_is_made_that_would_round_an_integer(tmp_path):
    model = nn.ModuleDict({"whole": nn.Identity(), "real": nn.Identity()})
    with hookrec.attach(model, tmp_path / "a", clock="manual", keep_free=0):
        model["whole"](torch.tensor([2**53 + 1]))
        model["real"](torch.tensor([0.5]))
    out = tmp_path / "out.parquet"

    refused = ask("export", tmp_path / "a", out, "--tensors")
    alone = ask("export", tmp_path / "a", out, "--tensors", "--layers", "whole")

    assert_is_one_message(refused, "no column holds all of them exactly")
    assert alone.exit_code == 0
    import pyarrow.parquet

    assert pyarrow.parquet.read_table(out)["values"].to_pylist() == [[2**53 + 1]]


def test_a_directory_that_is_no_trace_is_told_from_one_inside_or_above_it(trace, tmp_path):
    (tmp_path / "empty").mkdir()

    assert_is_one_message(ask("info", tmp_path / "empty"), "is no trace", "given to hookrec.attach()")
    assert_is_one_message(ask("info", tmp_path), "Traces are inside, such as")
    assert_is_one_message(ask("info", trace / "rank-00000"), "The trace is the directory above", str(trace))


def test_a_recording_that_is_being_begun_is_told_from_what_is_no_trace(tmp_path):
    (tmp_path / "a/rank-00001").mkdir(parents=True)

    assert_is_one_message(ask("info", tmp_path / "a"), "has no trace.json yet", "Look again in a few seconds")


@pytest.mark.parametrize("command", [("ls",), ("stats",)])
def test_an_answer_without_a_record_says_what_there_is(trace, command):
    result = ask(*command, trace, "--where", "l2 > 1e30")

    assert result.exit_code == 0
    assert "No record is so" in result.output
    assert "steps 0 to 1" in result.output
    assert "output, grad_output" in result.output


def test_a_note_without_a_layer_is_named_as_damage(trace):
    (trace / "rank-00000/notes.jsonl").write_text(json.dumps({"step": 0, "note": "something"}) + "\n")

    assert_is_one_message(ask("info", trace), "notes.jsonl has no 'layer'")


def test_a_note_on_all_layers_has_none(trace):
    (trace / "rank-00000/notes.jsonl").write_text(json.dumps({"step": 0, "layer": None, "note": "something"}) + "\n")

    assert "all layers, step 0: something" in ask("info", trace).output


@pytest.mark.parametrize("place", ["rank-00000/records-00001.parquet", "rank-00000/x/y.parquet", "pinned", "rank-7"])
@pytest.mark.parametrize("more", [(), ("--overwrite",), ("--partition", "layer"), ("--follow",)])
def test_nothing_is_exported_to_where_it_would_be_a_part_of_a_trace(trace, tmp_path, place, more):
    before = sorted(trace.rglob("*"))
    (tmp_path / "link").symlink_to(trace)

    for folder in (trace, tmp_path / "link"):
        assert_is_one_message(ask("export", trace, folder / place, *more), "it would be a part of the trace")

    assert sorted(trace.rglob("*")) == before
    assert replay.open(trace).count == 8


def test_a_picture_may_lie_beside_the_ranks_of_a_trace(trace):
    assert ask("export", trace, trace / "all.parquet").exit_code == 0
    assert replay.open(trace).count == 8


@pytest.mark.parametrize("more", [(), ("--overwrite",), ("--partition", "layer")])
def test_of_two_who_write_the_same_one_is_refused_and_the_other_is_whole(trace, tmp_path, monkeypatch, more):
    out = tmp_path / "out.parquet"
    parts = replay.Trace.record_parts

    def slowly(self, *args):
        monkeypatch.setattr(replay.Trace, "record_parts", parts)
        assert_is_one_message(ask("export", trace, out, *more), "is being written by another process")
        yield from parts(self, *args)

    monkeypatch.setattr(replay.Trace, "record_parts", slowly)
    assert ask("export", trace, out, *more).exit_code == 0

    assert pyarrow.parquet.read_table(out, partitioning=None).num_rows == 8
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a", "out.parquet"]


def test_what_came_while_a_file_was_written_is_not_replaced(trace, tmp_path, monkeypatch):
    out = tmp_path / "out.parquet"
    parts = replay.Trace.record_parts

    def slowly(self, *args):
        out.write_text("somebody's")
        yield from parts(self, *args)

    monkeypatch.setattr(replay.Trace, "record_parts", slowly)
    assert_is_one_message(ask("export", trace, out), "exists already")

    assert out.read_text() == "somebody's"
    assert not (tmp_path / "out.parquet.partial").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "/"])
def test_what_is_no_name_is_not_written_to(trace, name):
    assert_is_one_message(ask("export", trace, name))
    assert_is_one_message(ask("export", trace, name, "--partition", "layer"))


@pytest.mark.parametrize(
    "command", [("stats", "--where"), ("ls", "--where"), ("first",), ("sql",), ("trend", "--where")]
)
def test_a_condition_that_is_no_text_is_refused(trace, command):
    result = ask(command[0], trace, *command[1:], "layer = '\udcff'")

    assert_is_one_message(result, "UTF-8")
    assert result.exit_code == 2


@pytest.mark.parametrize("steps", [str(2**63), f"0,{2**63}", f"{2**63}:", f"0:{2**62},1"])
def test_steps_that_no_trace_can_have_are_refused(trace, steps):
    assert_is_one_message(ask("diff", trace, trace, "--steps", steps))


def test_steps_beyond_the_largest_number_are_as_many_as_there_are(trace):
    opened = replay.open(trace)

    assert opened.records(steps=slice(1, 2**64)).equals(opened.records(steps=1))
    assert len(opened.records(steps=slice(2**64, None))) == 0
    with pytest.raises(replay.BadQuery, match="is no step"):
        opened.records(steps=[0, 2**63])
