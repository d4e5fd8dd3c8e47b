"""How matplotlib draws a chart: sizes, colours, marks.

The ground is white and opaque, so that a picture reads the same on a dark page. Colours are those of Okabe and Ito, or
maps that rise evenly in lightness, so that they can be told apart by the colour-blind and in print; black is what is
NaN or infinite, and in no map. Nothing of pyplot is used, nor any setting of matplotlib changed: a notebook that draws
as well is not disturbed.
"""

import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from replay.charts import Chart, Panel
from replay.errors import MissingPackage
from replay.series import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SMALLEST, _LARGEST = 1e-150, 1e150
"""Past these, values are drawn at the edge of the scale; the smallest is of logarithmic scales only."""

_PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#7f4f24")
_BROKEN = "black"
_NOTHING = "#e6e6e6"
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


def draw_lines(chart: Chart) -> "Figure":
    """Draw the rows of each panel as lines over its columns."""
    figure = _figure(chart, [max(2.4, 0.9 + 0.16 * len(panel.rows)) for panel in chart.panels], "× is")
    for axes, panel in zip(_axes(figure, len(chart.panels)), chart.panels, strict=True):
        _draw_lines(axes, panel, chart)
        axes.set_title(_plain(panel.name), fontsize=9, loc="left")
        axes.set_xlabel(chart.axes[0])
        axes.set_ylabel(chart.label)
    return figure


def _draw_lines(axes: "Axes", panel: Panel, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator

    values, steps = _fitted(panel.values, logarithmic=chart.logarithmic), np.asarray(panel.columns)
    colours = _line_colours(len(panel.rows))
    handles = []
    for row, colour in zip(values, colours, strict=True):
        known = np.isfinite(row)
        sparse = known.sum() < 40
        handles += axes.plot(steps[known], row[known], color=colour, lw=1.2, marker="." if sparse else None, ms=4)
    where_finite = panel.broken & np.isfinite(values)
    rows, columns = np.nonzero(where_finite)
    axes.plot(steps[columns], values[rows, columns], "x", color=_BROKEN, ms=6, zorder=3)
    columns = np.flatnonzero((panel.broken & ~where_finite).any(axis=0))
    if len(columns):  # nothing is finite there: at the upper edge
        edge, top = axes.get_xaxis_transform(), np.ones(len(columns))
        axes.plot(steps[columns], top, "x", color=_BROKEN, ms=6, zorder=3, transform=edge, clip_on=False)
    if chart.logarithmic and np.isfinite(values).any():
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=_NOTHING, lw=0.6)
    # Legends leave out what begins with "_", so the names are put in afterwards.
    legend = axes.legend(
        handles, ["name"] * len(handles), fontsize=_SMALL, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0)
    )
    for text, name in zip(legend.get_texts(), panel.rows, strict=True):
        text.set_text(_plain(name))


def _line_colours(count: int) -> list[Any]:
    """Return colours for lines: those of a palette while they are few, else from the first layer to the last."""
    if count <= len(_PALETTE):
        return list(_PALETTE[:count])
    return list(_map("viridis", 0.0, 0.85)(np.linspace(0, 1, count)))


def draw_images(chart: Chart) -> "Figure":
    """Draw each panel as an image."""
    tiles = chart.form == "tiles"
    across = int(np.ceil(np.sqrt(len(chart.panels)))) if tiles else 1
    down = -(-len(chart.panels) // across)
    if tiles:
        heights = [max(2.0, 5.0 / across)] * down
    else:
        highest = 12.0 if chart.axes[1] == "layer" else 4.5
        heights = [max(1.8, min(0.6 + 0.14 * len(panel.rows), highest)) for panel in chart.panels]
    nothing = [] if tiles else [f"Grey is no {'record' if chart.axes[1] == 'layer' else 'element'}."]
    figure = _figure(chart, heights, "Black is", nothing)
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

    values = _fitted(panel.values, logarithmic=chart.logarithmic)
    norm, colours = _scale(scale, logarithmic=chart.logarithmic)
    aspect: Literal["equal", "auto"] = (
        "equal" if chart.form == "tiles" and 0.2 < values.shape[0] / values.shape[1] < 5 else "auto"
    )
    image = axes.imshow(values, norm=norm, cmap=colours, aspect=aspect, interpolation="nearest")
    axes.set_facecolor(_NOTHING)
    marks = np.ma.masked_where(~panel.broken, panel.broken.astype(float))
    axes.imshow(marks, cmap=ListedColormap([_BROKEN]), aspect=aspect, interpolation="nearest", vmin=0, vmax=1)
    _name_ticks(axes.xaxis, [str(column) for column in panel.columns], 8 if chart.form == "grid" else 3)
    named = 200 if chart.axes[1] == "layer" else 12 if chart.form == "grid" else 3
    _name_ticks(axes.yaxis, [_plain(row) for row in panel.rows], named)
    return image


def _scale(values: Floats, *, logarithmic: bool) -> tuple[Any, Any]:
    """Return a norm and a map of colours: about 0 where there are both signs."""
    from matplotlib.colors import LogNorm, Normalize

    values = _fitted(values, logarithmic=logarithmic)
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (1.0, 1.0)
    if logarithmic:
        return LogNorm(low, high if low < high else low * 10), _map("viridis", 0.2, 1.0)
    if low < 0 < high:
        most = max(-low, high)
        return Normalize(-most, most), _map("RdBu_r", 0.1, 0.9)
    return Normalize(low, high if low < high else low + max(1.0, abs(low) / 1000)), _map("viridis", 0.2, 1.0)


def _fitted(values: Floats, *, logarithmic: bool) -> Floats:
    """Return values that matplotlib can draw: past the limits its arithmetic overflows.

    On a logarithmic scale 0 is half of the smallest that is positive, and NaN if there is none.
    """
    values = np.where(np.isfinite(values), np.clip(values, -_LARGEST, _LARGEST), np.nan)
    if not logarithmic:
        return values
    values = np.where(values > 0, np.maximum(values, _SMALLEST), values)
    positive = values[values > 0]
    return np.where(values > 0, values, np.where(values == 0, positive.min() / 2 if len(positive) else np.nan, np.nan))


def _past_limits(values: Floats, *, logarithmic: bool) -> bool:
    small = (values > 0) & (values < _SMALLEST) & logarithmic
    return bool(np.any(small | (np.abs(values) > _LARGEST)))


def _map(name: str, begin: float, end: float) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(name, colormaps[name](np.linspace(begin, end, 256))).with_extremes(
        bad=_NOTHING
    )


def _name_ticks(axis: Any, names: list[str], most: int) -> None:
    places = np.unique(np.linspace(0, len(names) - 1, min(most, len(names))).round().astype(int))
    axis.set_ticks(places, [names[place] for place in places], fontsize=_SMALL)


def _figure(chart: Chart, heights: list[float], mark: str, more: Sequence[str] = ()) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    notes = [*chart.notes, *more]
    if any(_past_limits(panel.values, logarithmic=chart.logarithmic) for panel in chart.panels):
        low = f"{_SMALLEST:g}" if chart.logarithmic else f"{-_LARGEST:g}"
        notes.append(f"What is past {low} and {_LARGEST:g} is drawn there.")
    if any(panel.broken.any() for panel in chart.panels):
        first = "; beside a name, × is the first such step" if chart.axes[1] == "layer" else ""
        notes.append(f"{mark} NaN or infinity among the elements{first}.")
    caption = textwrap.wrap(" ".join(notes), 130)
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
