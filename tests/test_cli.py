"""The command `replay` answers, and says what is wrong in one message."""

import json

import pytest
from click.testing import CliRunner
from torch import nn, ones

import hookrec
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

    assert CliRunner().invoke(main, ["export", trace, out]).exit_code == 0
    again = CliRunner().invoke(main, ["export", trace, out])

    assert again.exit_code == 1
    assert "exists already" in again.output


def test_a_folder_that_is_no_trace_is_one_message(tmp_path):
    result = CliRunner().invoke(main, ["info", str(tmp_path)])

    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert "is no trace" in result.output
