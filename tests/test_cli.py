"""The command `replay` answers, and says what is wrong in one message."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch import nn, ones

import hookrec
import replay
from hookrec.cli import main as hookrec_main
from replay.cli import main


@pytest.fixture
def trace(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    model.add_module("idle", nn.ModuleList([nn.Linear(2, 2)]))
    with hookrec.attach(model, tmp_path / "a", clock="manual", keep_free=0):
        model[1](model[0](ones(4, 3)))
    return str(tmp_path / "a")


def test_info_names_what_never_fired(trace):
    result = CliRunner().invoke(main, ["info", trace, "--json"])

    assert result.exit_code == 0
    facts = json.loads(result.output)
    assert facts["status"] == "sealed"
    assert facts["layers"] == 2
    assert facts["silent"] == ["idle.0: it was never called"]


def test_stats_filters_by_a_condition(trace):
    result = CliRunner().invoke(main, ["stats", trace, "--where", "layer = '1'", "--json"])

    assert [row["layer"] for row in json.loads(result.output)] == ["1"]


def test_export_does_not_overwrite_unasked(trace, tmp_path):
    out = str(tmp_path / "out.parquet")

    once = CliRunner().invoke(main, ["export", trace, out])
    again = CliRunner().invoke(main, ["export", trace, out])

    assert (once.exit_code, "2 records" in once.stderr) == (0, True)
    assert again.exit_code == 2
    assert "exists already" in again.output


def test_ls_has_a_line_a_stream(trace):
    result = CliRunner().invoke(main, ["ls", trace])

    assert result.exit_code == 0
    assert [line.split() for line in result.output.splitlines()] == [
        ["layer", "kind", "dtype", "shape", "records", "tensors", "first", "last"],
        ["0", "output", "float32", "4×2", "1", "1", "0", "0"],
        ["1", "output", "float32", "4×2", "1", "1", "0", "0"],
    ]


def test_first_tells_by_its_exit_status_whether_there_is_one(trace):
    found = CliRunner().invoke(main, ["first", trace, "n_nan = 0 and layer = '1'", "--json"])
    nothing = CliRunner().invoke(main, ["first", trace, "n_nan > 0"])

    assert json.loads(found.output)["layer"] == "1"
    assert found.exit_code == 0
    assert nothing.exit_code == 1
    assert "No record" in nothing.output


def test_show_prints_the_values_of_a_tensor(trace):
    expected = replay.open(trace).tensor(0, "0")

    result = CliRunner().invoke(main, ["show", trace, "0", "--json"])

    assert json.loads(result.output)["values"] == expected.tolist()
    assert CliRunner().invoke(main, ["show", trace, "7"]).output.startswith("Error: Step 0 of")


def test_show_has_curves_on_a_terminal(trace, monkeypatch):
    plain = CliRunner().invoke(main, ["show", trace, "0"]).output
    monkeypatch.setattr("replay.cli.on_terminal", lambda: True)

    drawn = CliRunner().invoke(main, ["show", trace, "0"]).output

    assert [line.split()[0] for line in drawn.splitlines() if line not in plain.splitlines()] == ["over", "elements"]


def test_info_in_words_says_how_it_ended_and_what_it_cost(trace):
    result = CliRunner().invoke(main, ["info", trace])

    for words in (r"status +sealed", "rank 0: detached", "of the recorded steps", "idle.0: it was never called"):
        assert re.search(words, result.output), result.output


def test_recover_seals_a_trace_whose_writer_was_killed(trace):
    rank = Path(trace) / "rank-00000"
    (rank / "end.json").unlink()
    assert replay.open(trace).status == "torn"

    result = CliRunner().invoke(hookrec_main, ["recover", trace])

    assert "rank 0 is recovered" in result.output
    assert replay.open(trace).status == "sealed"
    assert "sealed already" in CliRunner().invoke(hookrec_main, ["recover", trace]).output


def test_a_folder_that_is_no_trace_is_one_message(tmp_path):
    result = CliRunner().invoke(main, ["info", str(tmp_path)])

    assert result.exit_code == 2
    assert result.output.startswith("Error: ")
    assert "is no trace" in result.output


def test_stats_says_how_many_more_there_are(trace):
    some = CliRunner().invoke(main, ["stats", trace, "--limit", "1"])
    every = CliRunner().invoke(main, ["stats", trace, "--limit", "2"])

    assert (len(some.stdout.splitlines()), some.stderr) == (2, "1 more; --limit shows them.\n")
    assert (len(every.stdout.splitlines()), every.stderr) == (3, "")
