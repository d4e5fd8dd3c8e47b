"""`replay list` and what finds traces: whatever lies below a folder, each trace is a line, and only once."""

import json
import os
import sys
import time

import pytest
from click.testing import CliRunner
from torch import nn, ones

import hookrec
from replay.catalog import entry_of, find_traces
from replay.cli import main
from replay.printable import printable
from tests.live_traces import WrittenTrace


def names(root) -> list[str]:
    found = find_traces(root, lambda folder, error: pytest.fail(f"{folder}: {error}"))
    return [str(path.relative_to(root)) for path in found.traces]


def listed(root) -> dict[str, dict]:
    result = CliRunner().invoke(main, ["list", str(root), "--json"])
    assert result.exit_code == 0
    return {row["name"]: row for row in json.loads(result.stdout)}


def test_traces_are_found_at_any_depth_and_not_looked_into(tmp_path):
    WrittenTrace(tmp_path / "a")
    WrittenTrace(tmp_path / "team/b/c")
    WrittenTrace(tmp_path / "a/inside")
    (tmp_path / "empty").mkdir()

    assert names(tmp_path) == ["a", "team/b/c"]


def test_links_are_followed_without_end_and_name_nothing_twice(tmp_path):
    (tmp_path / "root/x").mkdir(parents=True)
    WrittenTrace(tmp_path / "root/z")
    WrittenTrace(tmp_path / "elsewhere/far")
    (tmp_path / "root/latest").symlink_to(tmp_path / "root/z")
    (tmp_path / "root/x/loop").symlink_to(tmp_path / "root")
    (tmp_path / "root/more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root/dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "root/itself").symlink_to(tmp_path / "root/itself")

    assert names(tmp_path / "root") == ["more/far", "z"]


def test_a_line_says_what_the_trace_holds(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with hookrec.attach(model, tmp_path / "a", clock="manual", keep_free=0) as recorder:
        for _ in range(3):
            model(ones(4, 3))
            recorder.step()

    row = listed(tmp_path)["a"]

    keys = ("status", "steps", "records", "bytes", "alerts", "pinned")
    assert [row[key] for key in keys] == ["sealed", 3, 6, 6 * 32, 0, False]
    assert all(word in row["command"] for word in (sys.orig_argv[0], sys.orig_argv[-1]))
    assert row["created"].startswith("20")


def test_live_and_torn_traces_are_counted_from_their_logs(tmp_path, monkeypatch):
    monkeypatch.setattr("replay.log.COMPACT_ROWS", 8)
    live, torn = WrittenTrace(tmp_path / "live"), WrittenTrace(tmp_path / "torn", width=2)
    for step in range(5):
        live.commit(step)
        torn.commit(step)
    torn.close()

    rows = listed(tmp_path)

    assert [rows["live"][key] for key in ("status", "steps", "records", "bytes")] == ["live", 5, 10, 0]
    assert [rows["torn"][key] for key in ("status", "steps", "records", "bytes")] == ["torn", 5, 10, 80]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("trace.json", "{"),
        ("trace.json", '{"format": "hookrec-trace", "version": 9}'),
        ("rank-00000/end.json", "[]"),
        ("rank-00000/end.json", '{"how": "died", "time": "", "books": {}}'),
        ("rank-00000/tensors-dropped.json", "{}"),
        ("rank-00000/records-00000.parquet", "PAR1"),
    ],
)
def test_a_damaged_trace_is_listed_as_damaged_and_the_others_are_listed(tmp_path, file, content):
    for name in ("a", "b"):
        trace = WrittenTrace(tmp_path / name)
        trace.commit(0)
        trace.seal()
    if file.endswith("parquet"):
        (tmp_path / "a/rank-00000/end.json").unlink()
    (tmp_path / "a" / file).write_text(content)

    result = CliRunner().invoke(main, ["list", str(tmp_path)])

    assert [line.split()[:2] for line in result.stdout.splitlines()[1:]] == [["a", "damaged"], ["b", "sealed"]]
    assert "a is damaged: " in result.stderr


def test_any_name_is_one_line(tmp_path):
    odd = ["new\nline", 'it\'s "quoted"', "层", os.fsdecode(b"\xff\xfe")]
    for name in odd:
        WrittenTrace(tmp_path / name).seal()

    result = CliRunner().invoke(main, ["list", str(tmp_path)])

    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 1 + len(odd)
    assert set(listed(tmp_path)) == set(odd)
    assert printable(odd[0]) == "new\\nline"
    assert printable(odd[3]) == "\\udcff\\udcfe"


@pytest.mark.parametrize(("root", "words"), [("nowhere", "does not exist"), ("file", "is a file")])
def test_a_root_that_is_no_folder_is_one_sentence(tmp_path, root, words):
    (tmp_path / "file").touch()

    result = CliRunner().invoke(main, ["list", str(tmp_path / root)])

    assert result.exit_code == 2
    assert words in result.stderr


def test_an_empty_root_has_no_trace(tmp_path):
    result = CliRunner().invoke(main, ["list", str(tmp_path)])

    assert (result.exit_code, result.stdout) == (0, "")
    assert "no trace" in result.stderr
    assert listed(tmp_path) == {}


def test_the_line_of_a_sealed_trace_takes_no_look_at_its_log(tmp_path, monkeypatch):
    trace = WrittenTrace(tmp_path / "a")
    trace.commit(*range(10))
    trace.seal()
    monkeypatch.setattr("replay.catalog.Log", lambda rank: pytest.fail("the log was read"))

    begin = time.perf_counter()
    entry = entry_of(tmp_path / "a", tmp_path)

    assert (entry.status, entry.steps) == ("sealed", 10)
    assert time.perf_counter() - begin < 0.05
