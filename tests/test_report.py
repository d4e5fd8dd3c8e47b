"""The page of benchmarks, made of results that are written by hand."""

import pytest

from benchmarks.bars import BARS, one
from benchmarks.report import PARTS, main, render

MACHINE = {
    "processor": "A processor",
    "cores": 2,
    "memory_gb": 24.0,
    "kernel": "6.1",
    "python": "3.11.9",
    "packages": {"torch": "2.13.0"},
    "command": "python -m benchmarks.reading",
    "time": "2026-01-01T00:00:00Z",
    "load": 0.1,
}


def reading(us: float, of_dd: float) -> dict:
    small = [{"store": "zarr", "reader": "replay", "us": us}, {"store": "zarr", "reader": "zarr-python", "us": 900.0}]
    large = [
        {"store": "zarr", "reader": "replay", "cold GB/s": of_dd * 2, "cold, to dd": of_dd},
        {"store": "zarr", "reader": "dd", "cold GB/s": 2.0, "cold, to dd": 1.0},
    ]
    return MACHINE | {"tables": {"one tensor of 8 KB, warm": small, "one layer of 4 MB tensors": large}}


def test_a_bar_that_is_missed_has_the_floor_beside_it(tmp_path):
    page = render({"reading": reading(us=61.0, of_dd=0.5)}, tmp_path)

    assert "| `trace.tensor` of 8 KB, warm, µs | ≤ 60 | 61 | missed | zarr-python 900 |" in page
    assert "| one layer of 4 MB over 200 steps, cold, of `dd` | ≥ 0.8 | 0.5 | missed | dd 2 GB/s |" in page


def test_a_bar_that_is_reached_just_so_or_by_far_says_so(tmp_path):
    page = render({"reading": reading(us=59.0, of_dd=0.8)}, tmp_path)

    assert "| `trace.tensor` of 8 KB, warm, µs | ≤ 60 | 59 | reached | zarr-python 900 |" in page
    assert "| one layer of 4 MB over 200 steps, cold, of `dd` | ≥ 0.8 | 0.8 | reached | dd 2 GB/s |" in page


def test_what_was_not_measured_is_named(tmp_path):
    page = render({"reading": reading(us=60.0, of_dd=0.5)}, tmp_path)

    assert page.count("| not measured |") == len(BARS) - 2
    assert page.count("\nNot measured.\n") == len(PARTS) - 1


def test_each_part_says_by_which_command_and_on_what_it_was_measured(tmp_path):
    page = render({"reading": reading(us=1.0, of_dd=1.0)}, tmp_path)

    for fact in ("`python -m benchmarks.reading`", "2026-01-01T00:00:00Z", "A processor, 2 cores", "torch 2.13.0"):
        assert fact in page


def test_a_line_of_growth_has_a_picture_that_the_page_shows(tmp_path):
    rows = {
        "records a step": [{"records a step": n, "us a record": 10.0} for n in (10, 100)],
        "bytes a step": [{"MB a step": n, "step GB/s": 2.0} for n in (1, 10)],
        "steps": [{"steps": n, "us a record": 10.0} for n in (10, 100)],
    }

    page = render({"linear": MACHINE | {"tables": rows}}, tmp_path / "pictures")

    drawn = sorted(file.name for file in (tmp_path / "pictures").iterdir())
    assert drawn == ["linear-bytes-a-step.svg", "linear-records-a-step.svg", "linear-steps.svg"]
    assert all(f"(pictures/{name})" in page for name in drawn)


@pytest.mark.parametrize("rows", [[], [{"way": "a", "x": 1}, {"way": "a", "x": 2}]])
def test_a_row_that_is_not_the_only_one_is_no_figure(rows):
    with pytest.raises(LookupError):
        one(rows, "x", way="a")


@pytest.mark.parametrize("options", [[], ["--page", "page.md"], ["--results", "results"]])
def test_small_figures_never_take_the_place_of_kept_ones(monkeypatch, capsys, options):
    monkeypatch.setattr("sys.argv", ["report", "--small", "--render", *options])

    with pytest.raises(SystemExit):
        main()

    assert "--results and --page of its own" in capsys.readouterr().err
