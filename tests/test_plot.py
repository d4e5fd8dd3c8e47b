"""Pictures show the numbers of the trace, and their files are whole, new and asked for."""

import math
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hookrec
import replay
from replay import charts, drawing, interactive
from replay.cli import main
from tests.written import write_trace

PNG = b"\x89PNG\r\n\x1a\n"


class Given(nn.Module):
    """Returns what it is given."""

    def forward(self, x):
        return x * 1


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A layer whose calls return a matrix, feature maps, nothing, and a complex number; step 2 has NaN and infinity."""
    path = tmp_path_factory.mktemp("traces") / "a"
    model = nn.ModuleDict({"a": Given()})
    with hookrec.attach(model, path, clock="manual", keep_free=0) as recorder:
        for step in range(3):
            matrix = torch.arange(8.0).reshape(2, 4) * (step + 1)
            if step == 2:
                matrix[0, 0], matrix[1, 3] = torch.nan, torch.inf
            model["a"](matrix)
            model["a"](torch.arange(24.0).reshape(2, 3, 2, 2))
            model["a"](torch.zeros(0, 3))
            model["a"](torch.complex(torch.tensor([3.0]), torch.tensor([-4.0])))
            recorder.step()
    return replay.open(path)


@pytest.fixture
def norms(tmp_path):
    """Two layers, 'a' with a NaN in step 1, 'b' without a record there; a gradient of 'a'."""
    records = [
        {"step": 0, "layer": "a", "l2": 1.0},
        {"step": 0, "layer": "b", "l2": 0.0},
        {"step": 0, "layer": "a", "l2": 5.0, "kind": "grad_output"},
        {"step": 1, "layer": "a", "l2": 3.0, "n_nan": 2},
        {"step": 2, "layer": "a", "l2": math.nan, "n_nan": 100},
        {"step": 2, "layer": "b", "l2": 4.0},
    ]
    return str(write_trace(tmp_path / "norms", records))


def ask(*words):
    return CliRunner().invoke(main, ["plot", *map(str, words)])


def test_a_statistic_has_a_panel_a_kind_and_a_row_a_layer(norms):
    chart = charts.statistic(replay.open(norms), "l2", None, None, None, 10)

    output, gradient = chart.panels
    assert (output.name, gradient.name) == ("output", "grad_output")
    assert output.rows == ["a  × 1", "b"]
    assert output.columns == [0, 1, 2]
    np.testing.assert_array_equal(output.values, [[1.0, 3.0, np.nan], [0.0, np.nan, 4.0]])
    assert output.broken.tolist() == [[False, True, True], [False, False, False]]
    np.testing.assert_array_equal(gradient.values, [[5.0]])
    assert chart.logarithmic
    assert chart.notes == ("0 is drawn below the smallest value.",)


@pytest.mark.parametrize("others", [1, 20])
def test_a_layer_has_the_same_colour_in_each_panel(tmp_path, others):
    records = [{"step": step, "layer": f"l{n}"} for step in range(3) for n in range(others)]
    records += [{"step": step, "layer": "x", "kind": kind} for step in range(3) for kind in ("output", "grad_output")]
    chart = charts.statistic(replay.open(write_trace(tmp_path / "a", records)), "l2", None, None, None, 50)

    output, gradient = drawing.draw(chart).axes

    from matplotlib.colors import to_hex

    def of_x(axes):
        names = [text.get_text() for text in axes.get_legend().get_texts()]
        return to_hex(axes.get_lines()[names.index("x")].get_color())

    assert of_x(output) == of_x(gradient)
    pytest.importorskip("plotly")
    page = interactive.draw(chart).data
    colours = {line.legendgroup: line.line.color for line in page if line.name == "x"}
    assert colours["output"] == colours["grad_output"]


def test_of_too_many_layers_the_broken_one_is_drawn_and_the_first_and_the_last(tmp_path):
    path = write_trace(tmp_path / "a", [{"step": 7, "layer": f"l{n}", "n_posinf": n == 31} for n in range(100)])

    chart = charts.statistic(replay.open(path), "l2", None, None, None, 4)

    assert chart.panels[0].rows == ["l0", "l31  × 7", "l50", "l99"]
    assert "4 of 100 lines of output are drawn" in chart.notes[0]


def test_where_all_layers_broke_no_more_than_the_limit_are_drawn(tmp_path):
    path = write_trace(tmp_path / "a", [{"step": n, "layer": f"l{n}", "n_nan": 1} for n in range(9)])

    chart = charts.statistic(replay.open(path), "l2", None, None, None, 4)

    assert chart.panels[0].rows == ["l0  × 0", "l1  × 1", "l2  × 2", "l8  × 8"]


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a.b.c", "a.b.d"], ["a.b.c", "a.b.d"]),
        (
            ["model.encoder.layers.0.self_attention.output_projection", "model.encoder.layers.10.mlp.up"],
            ["…0.self_attention.output_projection", "…10.mlp.up"],
        ),
        (
            [f"model.{'x' * 20}.{n}.the_only_thing_that_there_is_in_it.a_linear_layer" for n in (1, 21)],
            ["…1…", "…21…"],
        ),
        (
            ["head", "model.transformer.encoder.layers.7.self_attention.output_projection"],
            ["head", "…r.layers.7.self_attention.output_projection"],
        ),
        (["a" + "x" * 50, "b" + "x" * 50], ["a" + "x" * 21 + "…" + "x" * 21, "b" + "x" * 21 + "…" + "x" * 21]),
        (["m" * 60 + "1" + "n" * 60, "m" * 60 + "2" + "n" * 60], [f"{n} {'m' * 22}…{'n' * 21}" for n in (0, 1)]),
        (["a" * 50], ["…" + "a" * 43]),
    ],
)
def test_long_names_are_shortened_to_what_tells_them_apart(names, short):
    assert charts.shortened(names) == short


@pytest.mark.parametrize(
    ("options", "first"), [((), "records"), (("--heatmap",), "records"), (("--histogram", "a"), "1 of 6 tensors")]
)
def test_work_that_takes_longer_says_how_far_it_is(options, first, trace, tmp_path, monkeypatch):
    monkeypatch.setattr("replay.command_line.FIRST_S", 0)

    said = ask(trace.path, tmp_path / "out.png", *options)

    assert first in said.stderr.splitlines()[0]


def test_a_histogram_has_the_share_of_the_finite_elements_in_each_bin(trace):
    chart = charts.histogram(trace, "a", "output")

    panel = chart.panels[0]
    shares = panel.values
    assert panel.columns == [0, 1, 2]
    assert panel.rows[0] == "NaN, inf"
    assert panel.broken[0].tolist() == [False, False, True]
    # The finite elements go from 0 to 18 (6·3); so 80 bins are 0.225 wide, bin 0 in the last row.
    assert shares.shape == (81, 3)
    for column, elements in enumerate([range(8), range(0, 16, 2), range(3, 19, 3)]):
        rows = [80 - min(int(element / 0.225), 79) for element in elements]
        assert np.flatnonzero(~np.isnan(shares[:, column])).tolist() == sorted(rows)
        np.testing.assert_allclose(shares[rows, column], 1 / len(rows))


def test_a_matrix_is_one_image(trace):
    chart = charts.images(trace, 2, "a", "output")

    (panel,) = chart.panels
    np.testing.assert_array_equal(panel.values, [[np.nan, 3, 6, 9], [12, 15, 18, np.nan]])
    assert panel.broken.tolist() == [[True, False, False, False], [False, False, False, True]]


def test_feature_maps_of_a_sample_are_an_image_each(trace):
    chart = charts.images(trace, 0, "a", "output", call=1, sample=1)

    assert [panel.name for panel in chart.panels] == ["0", "1", "2"]
    assert [panel.values.tolist() for panel in chart.panels] == [
        [[12.0, 13.0], [14.0, 15.0]],
        [[16.0, 17.0], [18.0, 19.0]],
        [[20.0, 21.0], [22.0, 23.0]],
    ]


def test_complex_numbers_are_drawn_by_their_size(trace):
    assert charts.images(trace, 0, "a", "output", call=3).panels[0].values.tolist() == [[5.0]]


def test_elements_that_share_a_point_show_the_one_farthest_from_zero():
    image = np.array([[1.0, -9.0, 2.0], [np.nan, 3.0, np.inf]])

    values, broken = charts._pooled(image, 2, 2)

    assert values.tolist() == [[-9.0, 2.0]]
    assert broken.tolist() == [[True, True]]


@pytest.mark.parametrize(("call", "sample", "words"), [(2, 0, "no element"), (1, 2, "no sample 2"), (0, 1, "sample")])
def test_a_tensor_that_cannot_be_drawn_says_why(trace, call, sample, words):
    with pytest.raises(replay.BadQuery, match=words):
        charts.images(trace, 0, "a", "output", call=call, sample=sample)


def test_a_histogram_of_what_is_not_there_says_what_is(trace):
    with pytest.raises(replay.NotRecorded, match="has output"):
        charts.histogram(trace, "a", "grad_output")
    with pytest.raises(replay.NotRecorded, match="statistics"):
        charts.histogram(replay.open(without_tensors(trace)), "a", "output")


def without_tensors(trace):
    return write_trace(trace.path.with_name("statistics"), [{"step": 0, "layer": "a"}])


@pytest.mark.parametrize("low", [0.0, 5e-324, 1e300])
def test_bins_of_equal_values_lie_about_them(low):
    edges = charts._edges(low, low)

    assert edges[0] < low < edges[-1]
    assert np.all(np.diff(edges) > 0)


def test_bins_reach_over_the_largest_numbers_there_are():
    edges = charts._edges(-1.7e308, 1.7e308)

    assert np.isfinite(edges).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.SVG", ()),
        ("a.svg", ("--tensor", "a", "--step", "2")),
        ("a.png", ("--heatmap",)),
        ("a.png", ("--histogram", "a")),
        ("a.png", ("--exponents", "a")),
        ("a.png", ("--tensor", "a", "--call", "1")),
        ("a.HTML", ()),
        ("a.html", ("--histogram", "a")),
        ("a.html", ("--exponents", "a")),
        ("a.html", ("--tensor", "a", "--call", "1")),
    ],
)
def test_each_picture_is_a_whole_file(trace, tmp_path, name, words):
    out = tmp_path / name

    result = ask(trace.path, out, *words)

    assert result.exit_code == 0, result.output
    whole, form = out.read_bytes().rstrip(), out.suffix.lower()
    assert whole.startswith(PNG) if form == ".png" else whole.endswith(b"</%s>" % form[1:].encode())
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("words", [(), ("--heatmap",), ("--stat", "mean"), ("--stat", "n_nan", "--heatmap")])
@pytest.mark.parametrize(
    "records",
    [
        [{"step": 0, "layer": "a", "l2": 0.0}],
        [{"step": 0, "layer": "_a $x^{", "l2": np.nan, "mean": np.nan, "n_nan": 100}],
        [
            {"step": 2**40 + n, "layer": "层\n", "l2": 10.0**n, "mean": (-1e300) ** (n // 50 % 2)}
            for n in range(-300, 300, 50)
        ],
        [{"step": 0, "layer": "x" * 500, "l2": np.inf, "mean": -np.inf}],
    ],
    ids=["zero", "nan", "wide", "inf"],
)
def test_odd_names_and_values_are_drawn(tmp_path, records, words):
    trace = write_trace(tmp_path / "a", records)

    result = ask(trace, tmp_path / "a.png", *words)

    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_a_tensor_of_the_largest_numbers_is_drawn_at_the_edge_of_the_scale():
    panel = charts.Panel("", np.array([[1.7e308, -1.7e308]]), np.zeros((1, 2), bool), ["0"], [0, 1], (0, 1))
    chart = charts.Chart("tiles", "", "value", ("", ""), False, (panel,), ())

    figure = drawing.draw_images(chart)

    assert figure.axes[0].images[0].get_array().tolist() == [[1e150, -1e150]]
    assert figure.get_supxlabel() == "What is past -1e+150 and 1e+150 is drawn there."


def test_the_lines_drawn_are_the_values(norms):
    chart = charts.statistic(replay.open(norms), "l2", None, "output", None, 10)

    axes = drawing.draw_lines(chart).axes[0]

    a, b, marks, edge = (line.get_xydata().tolist() for line in axes.lines)
    assert a == [[0, 1], [1, 3]]
    assert b == [[0, 0.5], [2, 4]]  # 0 is half of the smallest positive value
    assert marks == [[1, 3]]
    assert edge == [[2, 1]]  # in units of the axes: at the upper edge
    assert axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a  × 1", "b"]


def test_a_picture_is_opaque_so_that_it_reads_on_a_dark_page(norms, tmp_path):
    from matplotlib.image import imread

    ask(norms, tmp_path / "a.png")

    pixels = imread(tmp_path / "a.png")
    assert pixels[0, 0].tolist() == [1, 1, 1, 1]
    assert np.all(pixels[..., 3] == 1)


def test_a_file_is_replaced_only_if_asked(norms, tmp_path):
    out = tmp_path / "a.png"
    out.write_text("mine")

    refused = ask(norms, out)
    kept = out.read_text()
    replaced = ask(norms, out, "--overwrite")

    assert refused.exit_code == 2
    assert "exists already" in refused.output
    assert kept == "mine"
    assert replaced.exit_code == 0
    assert out.read_bytes().startswith(PNG)


def test_nothing_is_left_where_drawing_fails(norms, tmp_path, monkeypatch):
    def half(figure, path, file_format):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drawing, "save", half)

    result = ask(norms, tmp_path / "a.png")

    assert result.exit_code == 2
    assert "No space left" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["norms"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("a.gif",), 2, "ends in .gif"),
        (("a",), 2, "ends in nothing"),
        (("no/a.png",), 2, "no is no directory"),
        (("a.png", "--heatmap", "--tensor", "a"), 2, "choose one"),
        (("a.png", "--step", "1"), 2, "--step is for --exponents and --tensor"),
        (("a.png", "--histogram", "a", "--stat", "l2"), 2, "not for --histogram"),
        (("a.png", "--exponents", "a", "--limit", "2"), 2, "not for --exponents"),
        (("a.png", "--tensor", "a", "--kinds", "x", "--kinds", "y"), 2, "draws one kind"),
        (("a.png", "--layers", "x"), 2, "there are 'a', 'b'"),
        (("a.png", "--where", "l3 > 1"), 2, "l3"),
        (("a.png", "--tensor", "x"), 2, "no output (call 0) for layer 'x'"),
        (("a.png", "--exponents", "x"), 2, "no output (call 0) for layer 'x'"),
        (("a.png", "--histogram", "x"), 2, "no output (call 0) for layer 'x'"),
        (("a.png", "--tensor", "a", "--step", "9"), 2, "no step 9"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(norms, tmp_path, monkeypatch, words, code, message):
    monkeypatch.chdir(tmp_path)

    result = ask(norms, *words)

    assert result.exit_code == code
    assert message in result.output
    assert "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["norms"]


@pytest.mark.parametrize("words", [(), ("--histogram", "a"), ("--exponents", "a"), ("--tensor", "a")])
def test_an_empty_trace_has_no_picture(tmp_path, words):
    empty = write_trace(tmp_path / "empty", [])

    result = ask(empty, tmp_path / "a.png", *words)

    assert result.exit_code == 2
    assert "no committed step" in result.output
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize(("package", "name"), [("matplotlib", "a.png"), ("plotly", "a.html")])
def test_without_the_package_it_says_what_to_install(norms, tmp_path, monkeypatch, package, name):
    monkeypatch.setitem(sys.modules, package, None)

    result = ask(norms, tmp_path / name)

    assert result.exit_code == 2
    assert f"need {package}: pip install 'hookrec[plot]'" in result.output
