"""How matplotlib draws a chart: sizes, colours, marks.

The ground is white and opaque, so that a picture reads the same on a dark page. Nothing of pyplot is used, nor any
setting of matplotlib changed: a notebook that draws as well is not disturbed.
"""

import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from replay.charts import Chart, Panel
from replay.errors import MissingPackage
from replay.exponents import shown, verdict
from replay.scales import BROKEN, NOTHING, PALETTE, caption_of, fitted, line_numbers
from replay.series import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SMALL = 7
_HIGHEST = 30.0
"""Inches of a figure."""


def require_matplotlib() -> None:
    """Raise MissingPackage if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingPackage("Pictures need matplotlib: pip install 'hookrec[plot]'.") from None


def save(figure: "Figure", path: Path, file_format: str) -> None:
    """Write a figure to a file, whatever its name."""
    metadata = {"Date": None} if file_format == "svg" else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # names may have characters that the font lacks
        figure.savefig(path, format=file_format, dpi=150, metadata=metadata)


def draw(chart: Chart) -> "Figure":
    """Draw a chart in its form."""
    return {"lines": draw_lines, "bars": draw_bars}.get(chart.form, draw_images)(chart)


def draw_lines(chart: Chart) -> "Figure":
    """Draw the rows of each panel as lines over its columns."""
    figure = _figure(chart, [max(2.4, 0.9 + 0.16 * len(panel.rows)) for panel in chart.panels])
    numbers = line_numbers(chart)
    colours = _line_colours(len(numbers))
    for axes, panel in zip(_axes(figure, len(chart.panels)), chart.panels, strict=True):
        _draw_lines(axes, panel, chart, [colours[numbers[name]] for name in panel.whole or panel.rows])
        axes.set_title(_plain(panel.name), fontsize=9, loc="left")
        axes.set_xlabel(chart.axes[0])
        axes.set_ylabel(chart.label)
    return figure


def _draw_lines(axes: "Axes", panel: Panel, chart: Chart, colours: list[Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    values, steps = fitted(panel.values, logarithmic=chart.logarithmic), np.asarray(panel.columns)
    handles = []
    for row, colour in zip(values, colours, strict=True):
        known = np.isfinite(row)
        sparse = known.sum() < 40
        handles += axes.plot(steps[known], row[known], color=colour, lw=1.2, marker="." if sparse else None, ms=4)
    where_finite = panel.broken & np.isfinite(values)
    rows, columns = np.nonzero(where_finite)
    axes.plot(steps[columns], values[rows, columns], "x", color=BROKEN, ms=6, zorder=3)
    columns = np.flatnonzero((panel.broken & ~where_finite).any(axis=0))
    if len(columns):  # nothing is finite there: at the upper edge
        edge, top = axes.get_xaxis_transform(), np.ones(len(columns))
        axes.plot(steps[columns], top, "x", color=BROKEN, ms=6, zorder=3, transform=edge, clip_on=False)
    if chart.logarithmic and np.isfinite(values).any():
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(color=NOTHING, lw=0.6)
    # Legends leave out what begins with "_", so the names are put in afterwards.
    legend = axes.legend(
        handles, ["name"] * len(handles), fontsize=_SMALL, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0)
    )
    for text, name in zip(legend.get_texts(), panel.rows, strict=True):
        text.set_text(_plain(name))


def _line_colours(count: int) -> list[Any]:
    """Return colours for lines: those of a palette while they are few, else from the first layer to the last."""
    if count <= len(PALETTE):
        return list(PALETTE[:count])
    return list(_map("viridis", 0.0, 0.85)(np.linspace(0, 1, count)))


def draw_bars(chart: Chart) -> "Figure":
    """Draw a bar an exponent, and below them the range of each dtype."""
    figure = _figure(chart, [3.4, 0.5 + 0.34 * len(chart.reaches)])
    bars, ranges = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3.4, 0.34 * len(chart.reaches)]})
    (panel,) = chart.panels
    bars.bar(panel.columns, panel.values[0], width=0.9, color=PALETTE[0])
    bars.set_ylabel(chart.label)
    bars.grid(axis="y", color=NOTHING, lw=0.6)
    bars.set_axisbelow(True)
    low, high = shown(chart)
    for row, reach in enumerate(chart.reaches):
        first, last = reach.normal
        # An exponent stands for the numbers up to the next: its bar is as wide as that above.
        ranges.barh(row, first - reach.subnormal, left=reach.subnormal - 0.5, color="#a6cee3", height=0.6)
        ranges.barh(row, last + 1 - first, left=first - 0.5, color=PALETTE[2], height=0.6)
        ranges.text(1.01, row, verdict(reach), fontsize=_SMALL, va="center", transform=ranges.get_yaxis_transform())
    ranges.set_yticks(range(len(chart.reaches)), [reach.name for reach in chart.reaches], fontsize=_SMALL)
    ranges.set_ylim(len(chart.reaches) - 0.4, -0.6)
    ranges.set_xlim(low - 0.5, high + 0.5)
    ranges.set_xlabel("exponent e: 2^e ≤ |x| < 2^(e+1). Green is of full precision, light blue subnormal.", fontsize=8)
    return figure


def draw_images(chart: Chart) -> "Figure":
    """Draw each panel as an image."""
    tiles = chart.form == "tiles"
    across = int(np.ceil(np.sqrt(len(chart.panels)))) if tiles else 1
    down = -(-len(chart.panels) // across)
    if tiles:
        heights = [max(1.6, 5.0 / across)] * down
    else:
        highest = 12.0 if chart.axes[1] == "layer" else 4.5
        heights = [max(1.8, min(0.6 + 0.14 * len(panel.rows), highest)) for panel in chart.panels]
    figure = _figure(chart, heights)
    every = _axes(figure, down, across)
    shared = np.concatenate([panel.values.ravel() for panel in chart.panels]) if tiles else None
    image = None
    for axes, panel, height in zip(every, chart.panels, heights * across, strict=False):
        image = _draw_image(axes, panel, chart, panel.values if shared is None else shared)
        axes.set_title(_plain(panel.name), fontsize=_SMALL if tiles else 9, loc="left")
        axes.set_xlabel(chart.axes[0])
        axes.set_ylabel(chart.axes[1])
        if not tiles:
            figure.colorbar(image, ax=axes, label=chart.label, aspect=8 * height)
    for axes in every[len(chart.panels) :]:
        axes.set_axis_off()
    if tiles and image is not None:
        figure.colorbar(image, ax=every, label=chart.label, aspect=30)
    return figure


def _draw_image(axes: "Axes", panel: Panel, chart: Chart, scale: Floats) -> Any:
    from matplotlib.colors import ListedColormap

    values = fitted(panel.values, logarithmic=chart.logarithmic)
    norm, colours = _scale(scale, logarithmic=chart.logarithmic)
    aspect: Literal["equal", "auto"] = (
        "equal" if chart.form == "tiles" and 0.2 < values.shape[0] / values.shape[1] < 5 else "auto"
    )
    image = axes.imshow(values, norm=norm, cmap=colours, aspect=aspect, interpolation="nearest")
    axes.set_facecolor(NOTHING)
    marks = np.ma.masked_where(~panel.broken, panel.broken.astype(float))
    axes.imshow(marks, cmap=ListedColormap([BROKEN]), aspect=aspect, interpolation="nearest", vmin=0, vmax=1)
    _name_ticks(axes.xaxis, [str(column) for column in panel.columns], 8 if chart.form == "grid" else 3)
    named = 200 if chart.axes[1] == "layer" else 12 if chart.form == "grid" else 3
    _name_ticks(axes.yaxis, [_plain(row) for row in panel.rows], named)
    return image


def _scale(values: Floats, *, logarithmic: bool) -> tuple[Any, Any]:
    """Return a norm and a map of colours: about 0 where there are both signs."""
    from matplotlib.colors import LogNorm, Normalize

    values = fitted(values, logarithmic=logarithmic)
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (1.0, 1.0)
    if logarithmic:
        return LogNorm(low, high if low < high else low * 10), _map("viridis", 0.2, 1.0)
    if low < 0 < high:
        most = max(-low, high)
        return Normalize(-most, most), _map("RdBu_r", 0.1, 0.9)
    return Normalize(low, high if low < high else low + max(1.0, abs(low) / 1000)), _map("viridis", 0.2, 1.0)


def _map(name: str, begin: float, end: float) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(name, colormaps[name](np.linspace(begin, end, 256))).with_extremes(
        bad=NOTHING
    )


def _name_ticks(axis: Any, names: list[str], most: int) -> None:
    places = np.unique(np.linspace(0, len(names) - 1, min(most, len(names))).round().astype(int))
    axis.set_ticks(places, [names[place] for place in places], fontsize=_SMALL)


def _figure(chart: Chart, heights: list[float]) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    caption = textwrap.wrap(" ".join(caption_of(chart)), 130)
    size = 9.0, min(_HIGHEST, sum(heights) + 0.6 + 0.15 * len(caption))
    figure = Figure(size, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_plain(chart.title), fontsize=11)
    if caption:
        figure.supxlabel(_plain("\n".join(caption)), fontsize=_SMALL, color="#444444")
    return figure


def _axes(figure: "Figure", down: int, across: int = 1) -> "list[Axes]":
    return list(figure.subplots(down, across, squeeze=False).ravel())


def _plain(text: str) -> str:
    """Return a text that is no formula, whatever dollars are in it."""
    return text.replace("$", r"\$")
