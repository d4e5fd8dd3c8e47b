"""Exponents are counted, and what narrower dtypes lose is what they lose in a conversion."""

import numpy as np
import pytest
import torch
from torch import nn

import hookrec
import replay
from replay import drawing
from replay.exponents import exponents, shown, verdict

ELEMENTS = [0.0, 1.0, -1.5, 2.0, 2.0**-14, 2.0**-15, 2.0**-26, 500.0, 1e5, torch.nan, -torch.inf]
FINITE = 8
"""Of the elements, those that have an exponent."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "a"
    model = nn.ModuleDict({"a": nn.Identity(), "zeros": nn.Identity(), "float64": nn.Identity()})
    with hookrec.attach(model, path, clock="manual", keep_free=0) as recorder:
        model["a"](torch.tensor(ELEMENTS))
        model["zeros"](torch.tensor([0.0, torch.nan]))
        model["float64"](torch.tensor([5e-324, 1e308], dtype=torch.float64))
        recorder.step()
    return replay.open(path)


def test_each_element_is_counted_at_its_power_of_two(trace):
    chart = exponents(trace, 0, "a", "output")

    (panel,) = chart.panels
    # 1 and 1.5 have 0; 2 has 1; 500 has 8, since 256 <= 500 < 512; 1e5 has 16, since 65536 <= 1e5 < 131072.
    counts = {-26: 1, -15: 1, -14: 1, 0: 2, 1: 1, 8: 1, 16: 1}
    assert list(panel.columns) == list(range(-26, 17))
    np.testing.assert_allclose(panel.values, [[counts.get(n, 0) / FINITE for n in range(-26, 17)]])
    assert chart.notes == (
        "Shares are of the 8 elements that are neither 0 nor NaN nor infinite.",
        "1 of 11 are 0.",
        "2 of 11 are NaN or infinite.",
    )


@pytest.mark.parametrize(
    ("name", "subnormal", "normal", "lost", "coarse", "over"),
    [
        # The limits are those of the formats: IEEE 754 and the OCP 8-bit floating point specification.
        ("bfloat16", -133, (-126, 127), 0, 0, 0),
        ("float16", -24, (-14, 15), 1, 1, 1),  # 2**-26 is 0, 2**-15 subnormal and 2**-14 not, 1e5 above 65504
        ("float8_e5m2", -16, (-14, 15), 1, 1, 1),  # likewise, and 1e5 above 57344
        ("float8_e4m3fn", -9, (-6, 8), 3, 0, 2),  # the three small ones are 0; 500 and 1e5 are above 448
    ],
)
def test_a_dtype_loses_what_is_out_of_its_range(trace, name, subnormal, normal, lost, coarse, over):
    found = next(reach for reach in exponents(trace, 0, "a", "output").reaches if reach.name == name)

    assert (found.subnormal, found.normal) == (subnormal, normal)
    assert (found.lost, found.coarse, found.over) == tuple(n / FINITE for n in (lost, coarse, over))


def test_without_the_tensor_the_counts_of_the_recording_are_drawn(trace, tmp_path):
    model = nn.ModuleDict({"a": nn.Identity(), "zeros": nn.Identity()})
    with hookrec.attach(model, tmp_path / "a", clock="manual", keep_free=0, tensors=False, exponents=True) as recorder:
        model["a"](torch.tensor(ELEMENTS))
        model["zeros"](torch.tensor([0.0, torch.nan]))
        recorder.step()
    counted = replay.open(tmp_path / "a")

    chart, exact = exponents(counted, 0, "a", "output"), exponents(trace, 0, "a", "output")
    np.testing.assert_array_equal(chart.panels[0].values, exact.panels[0].values)
    assert chart.notes[:-1] == exact.notes
    assert "middle of its power of two" in chart.notes[-1]
    # 500 is too large for float8_e4m3fn, and 384, the middle of its power of two, is not.
    assert chart.reaches[:-1] == exact.reaches[:-1]
    assert (chart.reaches[-1].lost, chart.reaches[-1].over) == (3 / FINITE, 1 / FINITE)
    with pytest.raises(replay.BadQuery, match="2 elements, of which 1 are 0 and none has an exponent"):
        exponents(counted, 0, "zeros", "output")


def test_what_is_lost_is_said_in_words(trace):
    by_name = {reach.name: verdict(reach) for reach in exponents(trace, 0, "a", "output").reaches}

    assert by_name["bfloat16"] == "all in range"
    assert by_name["float16"] == "12.5% become 0, 12.5% subnormal, 12.5% too large"
    assert by_name["float8_e4m3fn"] == "37.5% become 0, 25.0% too large"


def test_the_range_of_half_precision_is_always_shown(trace):
    assert shown(exponents(trace, 0, "a", "output")) == (-29, 19)
    assert shown(exponents(trace, 0, "float64", "output")) == (-1077, 1026)


def test_a_tensor_without_an_exponent_says_so(trace):
    with pytest.raises(replay.BadQuery, match="2 elements, of which 1 are 0 and none has an exponent"):
        exponents(trace, 0, "zeros", "output")


def test_the_bars_drawn_are_the_shares(trace):
    bars, ranges = drawing.draw(exponents(trace, 0, "a", "output")).axes

    heights = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in bars.patches}
    assert heights[0] == pytest.approx(2 / FINITE)
    assert heights[16] == pytest.approx(1 / FINITE)
    spans = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in ranges.patches]
    assert spans[2:4] == [(-24.5, -14.5), (-14.5, 15.5)]  # float16
