"""A page of HTML has the numbers of the trace, whole names, and nothing that reaches for a network."""

import re

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

import replay
from replay import charts, interactive
from tests.written import write_trace

LONG = "model.transformer.encoder.layers.{}.attention.output.dense"


@pytest.fixture
def trace(tmp_path):
    """Two layers with long names, one of them with NaN in step 1, and a third that is not what it seems."""
    records = [{"step": step, "layer": LONG.format(n), "l2": 10.0**-n * 2**step} for step in range(3) for n in (0, 1)]
    records[2] |= {"n_nan": 3}
    records.append({"step": 2, "layer": "</script><b>%{x}", "l2": 0.0})
    return replay.open(write_trace(tmp_path / "a", records))


def chart_of(trace, form="lines"):
    return charts.statistic(trace, "l2", None, None, None, 10, form)


def test_the_lines_are_the_values(trace):
    first, second, odd, marks = interactive.draw(chart_of(trace)).data

    assert (first.x.tolist(), first.y.tolist()) == ([0, 1, 2], [1.0, 2.0, 4.0])
    np.testing.assert_allclose(second.y, [0.1, 0.2, 0.4])
    assert odd.y.tolist() == [0.05]  # 0, drawn at half of the smallest positive value
    assert odd.customdata.tolist() == [0.0]  # and told as what it is
    assert (marks.x.tolist(), marks.y.tolist()) == ([1], [2.0])


def test_a_name_is_whole_under_the_pointer_and_never_html_or_a_template(trace):
    first, _, odd, _ = interactive.draw(chart_of(trace)).data

    assert first.meta == LONG.format(0)
    assert len(first.name) < len(LONG)
    assert odd.meta == odd.name == "&lt;/script&gt;&lt;b&gt;&#37;{x}"


def test_a_heat_map_has_powers_of_ten_as_colours_and_the_values_under_the_pointer(trace):
    image, marks = interactive.draw(chart_of(trace, "grid")).data

    np.testing.assert_allclose(image.z[0], np.log10([1, 2, 4]), rtol=1e-6)
    assert list(image.customdata[0]) == [1.0, 2.0, 4.0]
    assert np.argwhere(marks.z == 1).tolist() == [[0, 1]]
    assert image.text[0][1].endswith("NaN or infinity")


def test_the_page_is_whole_and_has_no_address_that_a_browser_would_load(trace, tmp_path):
    interactive.save(chart_of(trace), tmp_path / "a.html")

    page = (tmp_path / "a.html").read_text()
    ours = page.replace(get_plotlyjs(), "")
    assert len(ours) < 50_000 < len(page)
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)", ours)
    assert "default-src 'none'" in page
    assert "</script><b>" not in ours


def test_the_page_has_no_button_that_uploads(trace, tmp_path):
    interactive.save(chart_of(trace), tmp_path / "a.html")

    assert '"showSendToCloud": false' in (tmp_path / "a.html").read_text()


def test_images_share_a_scale_about_zero_where_there_are_both_signs():
    values = (np.array([[1.0, -9.0]]), np.array([[2.0, np.nan]]))
    panels = tuple(charts.Panel(str(n), v, np.isnan(v), ["0"], [0, 1], (0, 1)) for n, v in enumerate(values))

    images = interactive.draw(charts.Chart("tiles", "", "value", ("", ""), False, panels, ())).data[::2]

    assert [(image.zmin, image.zmax) for image in images] == [(-9, 9), (-9, 9)]
    assert [image.showscale for image in images] == [True, False]


@pytest.mark.parametrize("form", ["lines", "grid"])
@pytest.mark.parametrize(
    "records",
    [
        [{"step": 5, "layer": "a", "l2": 0.0}],
        [{"step": 0, "layer": "a", "l2": np.nan, "n_nan": 100}],
        [{"step": 2**40 + n, "layer": f"l{n}", "l2": 10.0 ** (30 * n)} for n in range(-10, 10)],
    ],
    ids=["zero", "nan", "wide"],
)
def test_odd_values_are_drawn(tmp_path, form, records):
    trace = replay.open(write_trace(tmp_path / "a", records))

    interactive.save(chart_of(trace, form), tmp_path / "a.html")

    assert (tmp_path / "a.html").read_text().endswith("</html>")
