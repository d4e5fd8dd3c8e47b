"""Timelines have the numbers that were recorded, and `replay trend` draws them in a line."""

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner

import replay
from replay.cli import main
from replay.sparklines import distribution, sparkline
from replay.timelines import gridded, timelines
from tests.written import write_trace


@pytest.fixture
def trace(tmp_path):
    """Two layers; 'a' is called twice a step, 'b' has nothing in step 1 and nothing finite in step 2."""
    records = [
        {"step": 0, "layer": "a", "l2": 1.0, "mean": -5.0},
        {"step": 0, "layer": "a", "l2": 2.0, "mean": 3.0, "call": 1},
        {"step": 0, "layer": "b", "l2": 7.0},
        {"step": 0, "layer": "a", "l2": 0.5, "kind": "grad_output"},
        {"step": 1, "layer": "a", "l2": 6.0, "mean": 1.0},
        {"step": 1, "layer": "a", "l2": 4.0, "mean": 2.0, "call": 1, "n_posinf": 1},
        {"step": 2, "layer": "a", "l2": 0.0, "mean": 0.0},
        {"step": 2, "layer": "b", "l2": math.nan, "n_nan": 100},
    ]
    return replay.open(write_trace(tmp_path / "a", records))


def test_a_timeline_has_the_value_farthest_from_zero_of_each_step(trace):
    norms = timelines(trace, "l2", "a", "output")[0]
    means = timelines(trace, "mean", "a", "output")[0]

    assert norms.steps.tolist() == [0, 1, 2]
    assert norms.values.tolist() == [2.0, 6.0, 0.0]
    assert norms.broken.tolist() == [False, True, False]
    assert norms.several
    assert means.values.tolist() == [-5.0, 2.0, 0.0]


def test_each_place_has_a_timeline_in_the_order_of_layers(trace):
    found = timelines(trace, "l2")

    assert [(line.layer, line.kind, line.several) for line in found] == [
        ("a", "output", True),
        ("a", "grad_output", False),
        ("b", "output", False),
    ]
    assert found[2].steps.tolist() == [0, 2]
    np.testing.assert_array_equal(found[2].values, [7.0, math.nan])


def test_a_norm_of_no_finite_element_is_no_zero(tmp_path):
    broken = {"step": 0, "layer": "a", "l2": math.nan, "n_nan": 60, "n_posinf": 40}
    records = [broken, {"step": 1, "layer": "a", "l2": 0.0}]
    trace = replay.open(write_trace(tmp_path / "a", records))

    norms, counts = timelines(trace, "l2")[0], timelines(trace, "n_nan")[0]

    np.testing.assert_array_equal(norms.values, [math.nan, 0.0])
    assert counts.values.tolist() == [60, 0]


def test_a_statistic_that_is_infinite_is_marked(tmp_path):
    trace = replay.open(write_trace(tmp_path / "a", [{"step": 0, "layer": "a", "l2": math.inf}]))

    assert timelines(trace, "l2")[0].broken.tolist() == [True]


def test_ranks_and_paths_have_timelines_of_their_own(tmp_path):
    for rank in (0, 1):
        both = [{"step": 0, "layer": "a", "path": path, "l2": 10.0 * rank + n} for n, path in enumerate(("w", "b"))]
        write_trace(tmp_path / "a", both, rank=rank)

    found = timelines(replay.open(tmp_path / "a"), "l2")

    assert [(line.rank, line.path, line.values.tolist()) for line in found] == [
        (0, "w", [0.0]),
        (0, "b", [1.0]),
        (1, "w", [10.0]),
        (1, "b", [11.0]),
    ]


def test_a_timeline_is_the_same_in_however_many_parts_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("replay.log.COMPACT_ROWS", 8)
    monkeypatch.setattr("replay.log_parquet._GROUP_ROWS", 3)
    monkeypatch.setattr("replay.search._LOOKED_AT", 4)
    for rank in (0, 1):
        records = [{"step": s, "layer": layer, "l2": s + 10.0 * rank} for s in range(9) for layer in ("a", "b")]
        write_trace(tmp_path / "a", records, rank=rank)
    trace = replay.open(tmp_path / "a")
    several = "step in (select step from records where l2 between 2 and 4)"

    for where, wanted in ((None, range(9)), ("step > 3", range(4, 9)), (several, range(2, 5))):
        found = timelines(trace, "l2", where=where)

        assert [(line.rank, line.layer, line.steps.tolist(), line.values.tolist()) for line in found] == [
            (rank, layer, list(wanted), [step + 10.0 * rank for step in wanted]) for rank in (0, 1) for layer in "ab"
        ]


def test_a_column_for_several_steps_shows_the_value_farthest_from_zero_and_every_mark(tmp_path):
    means = [1.0, -4.0, 3.0, 2.0, 5.0]
    records = [{"step": 10 * n, "layer": "a", "mean": mean, "n_nan": n == 3} for n, mean in enumerate(means)]
    line = timelines(replay.open(write_trace(tmp_path / "a", records)), "mean")

    columns, values, broken, width = gridded(line, 3)

    assert width == 2
    assert columns.tolist() == [0, 20, 40]
    assert values.tolist() == [[-4.0, 3.0, 5.0]]
    assert broken.tolist() == [[False, True, False]]


def test_a_grid_is_nan_where_a_line_has_no_record(trace):
    _, values, broken, width = gridded(timelines(trace, "l2", kinds="output"), 100)

    assert width == 1
    np.testing.assert_array_equal(values, [[2.0, 6.0, 0.0], [7.0, math.nan, math.nan]])
    assert broken.tolist() == [[False, True, False], [False, False, True]]


@pytest.mark.parametrize(
    ("values", "curve"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([7, -7, math.nan], "█▁ "),
        ([3, 3], "▅▅"),
        ([math.nan], " "),
        ([1, math.inf, -math.inf, 2], "▁█▁█"),
        ([-1.7e308, 1.7e308], "▁█"),
        ([], ""),
    ],
)
def test_a_curve_goes_from_the_smallest_value_to_the_largest(values, curve):
    assert sparkline(np.array(values, float), np.zeros(len(values), bool), logarithmic=False) == curve


def test_a_logarithmic_curve_has_equal_heights_for_equal_ratios():
    values = np.array([1e-30, 1e-10, 1e10, 1e30, 0.0])

    assert sparkline(values, np.array([0, 0, 0, 0, 0], bool), logarithmic=True) == "▁▃▆█▁"


def test_a_norm_that_hardly_changes_is_level_and_one_that_more_than_doubles_is_not():
    broken = np.zeros(3, bool)

    assert sparkline(np.array([1.0, 1.01, 0.99]), broken, logarithmic=True) == "▅▅▅"
    assert sparkline(np.array([1.0, 2.1, 1.0]), broken, logarithmic=True) == "▁█▁"


@pytest.mark.parametrize(
    ("elements", "curve"),
    [
        (
            [0.0, 1.0, 1.0, 1.0, 1.0, 8.0],
            "0 ▄█     ▄ 8",
        ),  # 1, 4 and, in the last bin, 1: heights 8·√(1/4), 8
        ([1.0, np.nan], "all 1"),
        ([np.inf], "no finite element"),
        ([-1.7e308, 1.7e308], "-1.7e+308 █      █ 1.7e+308"),
        ([3 + 4j, 0j], "0 █      █ 5"),
    ],
)
def test_a_distribution_has_a_bar_for_each_eighth_between_the_ends(elements, curve):
    assert distribution(np.array(elements), 8) == curve


def test_stats_and_show_have_curves_on_a_terminal_alone(trace, monkeypatch):
    words = ["stats", str(trace.path), "--layers", "a", "--kinds", "output", "--step", "0"]
    plain = CliRunner().invoke(main, words)
    monkeypatch.setattr("replay.cli.on_terminal", lambda: True)

    drawn = CliRunner().invoke(main, words)
    as_json = CliRunner().invoke(main, [*words, "--json"])

    assert "l2 over steps" not in plain.output
    assert drawn.output.splitlines()[0].endswith("l2 over steps")
    assert [line.split()[-1] for line in drawn.output.splitlines()[1:]] == ["▁×▁", "▁×▁"]
    assert set(json.loads(as_json.output)[0]) >= {"l2", "layer"}
    assert "over steps" not in as_json.output


def test_a_curve_of_zeros_is_level():
    assert sparkline(np.zeros(2), np.zeros(2, bool), logarithmic=True) == "▅▅"


def test_what_is_broken_is_marked_whatever_the_value():
    curve = sparkline(np.array([1.0, 2.0, math.nan]), np.array([False, True, True]), logarithmic=True)

    assert curve == "▁××"


def test_trend_prints_a_line_a_layer_and_kind(trace):
    result = CliRunner().invoke(main, ["trend", str(trace.path), "--kinds", "output"])

    assert result.exit_code == 0
    assert [line.split() for line in result.output.splitlines()] == [
        ["layer", "kind", "trend", "first", "last"],
        ["a", "output", "▁×▁", "2", "0"],
        ["b", "output", "▅", "×", "7", "nan"],
    ]


def test_trend_gives_all_values_as_json(trace):
    result = CliRunner().invoke(main, ["trend", str(trace.path), "--layers", "b", "--json"])

    assert json.loads(result.output) == [
        {
            "rank": 0,
            "layer": "b",
            "kind": "output",
            "path": "",
            "first": 7.0,
            "last": None,
            "broken_steps": [2],
            "steps": [0, 2],
            "values": [7.0, None],
        }
    ]


def test_trend_says_what_is_there_where_nothing_is_so(trace, tmp_path):
    empty = write_trace(tmp_path / "empty", [])

    none = CliRunner().invoke(main, ["trend", str(trace.path), "--where", "numel > 1e9"])
    nothing = CliRunner().invoke(main, ["trend", str(empty)])

    assert none.exit_code == nothing.exit_code == 0
    assert "steps 0 to 2, layers such as 'a', 'b', kinds output, grad_output." in none.stderr
    assert "no committed step" in nothing.output


def test_a_name_with_a_line_break_stays_on_its_line(tmp_path):
    path = write_trace(tmp_path / "a", [{"step": 0, "layer": "a\nb"}])

    result = CliRunner().invoke(main, ["trend", str(path)])

    assert len(result.output.splitlines()) == 2
    assert "a\\nb" in result.output


def test_lines_past_the_limit_are_counted(trace):
    result = CliRunner().invoke(main, ["trend", str(trace.path), "--limit", "1"])

    assert "2 more; --limit shows them." in result.stderr


def test_it_says_how_far_it_is(trace, monkeypatch):
    monkeypatch.setattr("replay.command_line.FIRST_S", 0)

    result = CliRunner().invoke(main, ["trend", str(trace.path)])

    assert result.stderr.startswith("8 of 8 records\n")
