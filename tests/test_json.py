"""What the commands that write something say of it with --json, against what lies on the disk."""

import json
from pathlib import Path

import click
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import hookrec.cli
import replay.cli
from replay import growing
from tests.live_traces import WrittenTrace
from tests.stored import write_stored
from tests.written import write_trace

PROGRAMS = {"replay": replay.cli.main, "hookrec": hookrec.cli.main}


def ask(program, *words, exit_code=0):
    ended = CliRunner().invoke(PROGRAMS[program], [*map(str, words), "--json"])
    assert ended.exit_code == exit_code, ended.output
    return ended


def answer(program, *words, exit_code=0):
    ended = ask(program, *words, exit_code=exit_code)
    assert ended.stderr == ""
    return json.loads(ended.stdout)


@pytest.mark.parametrize(
    ("program", "name"),
    # Of `hookrec run`, the output is that of the script.
    [(p, name) for p, group in PROGRAMS.items() for name in group.list_commands(None) if name != "run"],
)
def test_each_command_answers_in_json(program, name):
    command = PROGRAMS[program].get_command(click.Context(PROGRAMS[program]), name)

    assert "--json" in {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize(
    ("name", "options", "format_", "records"),
    [
        ("out.parquet", (), "parquet", 18),
        ("out.parquet", ("--layers", "0", "--where", "step > 1"), "parquet", 4),
        ("out.arrow", (), "arrow", 18),
        ("out.npz", ("--layers", "0"), "npz", 5),
        ("out.safetensors", ("--layers", "0"), "safetensors", 5),
    ],
)
def test_an_export_says_what_it_wrote(name, options, format_, records, tmp_path):
    write_stored(tmp_path / "a")
    out = tmp_path / name

    found = answer("replay", "export", tmp_path / "a", out, *options)

    nbytes = out.stat().st_size
    assert found == {"path": str(out), "format": format_, "records": records, "files": 1, "bytes": nbytes}


def test_an_export_into_parts_says_how_many_there_are(tmp_path):
    write_trace(tmp_path / "a", [{"step": step, "layer": "0"} for step in range(5)])

    found = answer("replay", "export", tmp_path / "a", tmp_path / "out", "--partition", "step:2")

    files = list((tmp_path / "out").rglob("*.parquet"))
    assert (found["records"], found["files"], len(files)) == (5, 3, 3)
    assert found["bytes"] == sum(file.stat().st_size for file in files)


def test_a_growing_export_says_a_line_a_file(tmp_path, monkeypatch):
    trace, out = WrittenTrace(tmp_path / "a"), tmp_path / "out"
    changes = iter([lambda: trace.commit(2), lambda: trace.resume(1), lambda: trace.commit(1), trace.seal])
    trace.commit(0, 1)
    monkeypatch.setattr(growing.time, "sleep", lambda seconds: next(changes)())

    lines = [json.loads(line) for line in ask("replay", "export", tmp_path / "a", out, "--follow").stdout.splitlines()]

    first, second, third = (f"{out}/part-0000{n}.parquet" for n in range(3))
    files = [(line["path"], line["records"], line["taken_back"]) for line in lines]
    assert files == [(first, 4, 0), (second, 2, 0), (first, 2, 2), (second, 0, 2), (third, 2, 0)]
    assert {line["format"] for line in lines} == {"parquet"}
    for line in lines[2:]:  # the other two were written anew
        assert line["bytes"] == Path(line["path"]).stat().st_size
        assert line["records"] == pq.read_metadata(line["path"]).num_rows


def test_a_picture_of_a_statistic_says_what_is_drawn(tmp_path):
    records = [{"step": step, "layer": layer} for step in (3, 7) for layer in ("a", "b.c")]
    records += [{"step": 5, "layer": "a", "kind": "grad_output"}, {"step": 7, "layer": "a", "call": 1}]
    write_trace(tmp_path / "a", records)

    found = answer("replay", "plot", tmp_path / "a", tmp_path / "out.SVG", "--stat", "mean")

    assert found == {
        "path": str(tmp_path / "out.SVG"),
        "format": "svg",
        "bytes": (tmp_path / "out.SVG").stat().st_size,
        "drawn": [
            {"kind": "output", "layers": ["a", "b.c"], "steps": [3, 7]},
            {"kind": "grad_output", "layers": ["a"], "steps": [5, 5]},
        ],
        "notes": ["Where a layer has several records in a step, the one farthest from 0 is drawn."],
    }


def test_a_picture_of_more_steps_than_it_has_columns_says_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr("replay.charts.COLUMNS", 2)
    write_trace(tmp_path / "a", [{"step": step, "layer": "a"} for step in range(2, 9)])

    found = answer("replay", "plot", tmp_path / "a", tmp_path / "out.svg", "--heatmap")

    assert found["drawn"] == [{"kind": "output", "layers": ["a"], "steps": [2, 8]}]


@pytest.mark.parametrize(
    ("options", "steps"),
    [(("--histogram", "0"), [0, 5]), (("--exponents", "0"), [5, 5]), (("--tensor", "0", "--step", "3"), [3, 3])],
)
def test_a_picture_of_a_tensor_says_of_which(options, steps, tmp_path):
    write_stored(tmp_path / "a")

    found = answer("replay", "plot", tmp_path / "a", tmp_path / "out.svg", *options)

    assert found["drawn"] == [{"kind": "output", "layers": ["0"], "steps": steps}]


def test_a_pin_says_whether_it_is_there(tmp_path):
    WrittenTrace(tmp_path / "a").seal()

    for command, pinned in (("pin", True), ("unpin", False)):
        assert answer("hookrec", command, tmp_path / "a") == {"trace": str(tmp_path / "a"), "pinned": pinned}


def test_a_recovery_says_what_each_rank_was(tmp_path):
    traces = [WrittenTrace(tmp_path / "a", rank=rank) for rank in range(3)]
    for trace in traces:
        trace.commit(4, 5)
    traces[0].close()
    traces[1].seal()

    found = answer("hookrec", "recover", tmp_path / "a")

    states = [{"rank": 0, "found": "torn"}, {"rank": 1, "found": "sealed"}, {"rank": 2, "found": "live"}]
    assert found == {"trace": str(tmp_path / "a"), "ranks": states, "steps": 2, "first_step": 4, "last_step": 5}


def test_a_conversion_says_what_is_not_in_the_copy(tmp_path):
    write_stored(tmp_path / "a")
    shard = tmp_path / "a/rank-00000/tensors.zarr/0/output/data/c/0/0"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    (tmp_path / "a/mine.txt").write_text("mine")

    found = answer("hookrec", "convert", tmp_path / "a", tmp_path / "b", "--store", "hdf5", exit_code=3)

    paths = {"path": str(tmp_path / "b"), "trace": str(tmp_path / "a")}
    assert found == {**paths, "store": "hdf5", "compression": "none", "damaged": 1, "left_out": ["mine.txt"]}


def test_an_export_for_tensorboard_says_how_many_numbers_there_are(tmp_path):
    pytest.importorskip("tensorboard")
    write_trace(tmp_path / "a", [{"step": step, "layer": "0"} for step in range(5)])

    found = answer("hookrec", "tensorboard", tmp_path / "a", tmp_path / "logs", "--stat", "l2")

    assert found == {"path": str(tmp_path / "logs"), "trace": str(tmp_path / "a"), "numbers": 5}
