"""How plotly draws a chart: a page of HTML with everything in it, that opens without a network, today or in ten years.

Names of layers are text of others: plotly understands some HTML and templates in what it shows, so they are escaped.
A value under the pointer is that of the trace; only what is drawn is fitted to the scale.
"""

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replay.charts import Chart, Panel
from replay.errors import MissingPackage
from replay.exponents import shown, verdict
from replay.scales import BROKEN, NOTHING, PALETTE, caption_of, fitted, line_numbers
from replay.series import Floats

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_VIRIDIS = ("#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")
_DIVERGING = ("#2166ac", "#92c5de", "#f7f7f7", "#f4a582", "#b2182b")


# Plotly's bar of buttons has one that uploads the data to a service; in a page of somebody's training there is none.
_CONFIG = {"displaylogo": False, "responsive": True, "showSendToCloud": False, "plotlyServerURL": ""}
_NO_NETWORK = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:\">"
)


def require_plotly() -> None:
    """Raise MissingPackage if plotly is not installed."""
    try:
        import plotly  # noqa: F401
    except ImportError:
        raise MissingPackage("Pictures in HTML need plotly: pip install 'hookrec[plot]'.") from None


def save(chart: Chart, path: Path) -> None:
    """Write a chart as a page of HTML."""
    page = draw(chart).to_html(include_plotlyjs=True, full_html=True, config=_CONFIG)
    head = f"<head>{_NO_NETWORK}<title>{_text(chart.title)}</title>"
    path.write_text(page.replace("<head>", head, 1), encoding="utf-8")


def draw(chart: Chart) -> "Figure":
    """Draw a chart in its form."""
    figure: Figure = {"lines": _lines, "grid": _grids, "tiles": _tiles, "bars": _bars}[chart.form](chart)
    caption = "<br>".join(map(_text, caption_of(chart)))
    figure.update_layout(
        template="plotly_white",
        title={"text": _text(chart.title), "subtitle": {"text": caption}, "x": 0.01, "y": 0.99, "yanchor": "top"},
        margin={"t": 100 + 16 * caption.count("<br>")},
        paper_bgcolor="white",  # opaque, so that it reads the same on a dark page
        legend={"groupclick": "toggleitem"},
    )
    return figure


def _lines(chart: Chart) -> "Figure":
    from plotly.graph_objects import Scatter

    figure = _subplots(chart, [max(300, 60 + 20 * (len(panel.rows) + 1)) for panel in chart.panels])
    numbers = line_numbers(chart)
    for number, panel in enumerate(chart.panels, 1):
        values, steps = fitted(panel.values, logarithmic=chart.logarithmic), np.asarray(panel.columns)
        top = np.nanmax(values) if np.isfinite(values).any() else 1.0
        names = list(map(_text, panel.whole or panel.rows))
        for row, label in enumerate(panel.rows):
            known = np.isfinite(values[row])
            line = Scatter(
                x=steps[known],
                y=values[row, known],
                customdata=panel.values[row, known],
                name=_text(label),
                meta=names[row],
                hovertemplate="step %{x}: %{customdata:.6g}<extra>%{meta}</extra>",
                mode="lines" if known.sum() > 40 else "lines+markers",
                line={"color": _colour(numbers[(panel.whole or panel.rows)[row]], len(numbers)), "width": 1.5},
                legendgroup=panel.name,
                legendgrouptitle={"text": _text(panel.name)},
            )
            figure.add_trace(line, number, 1)
        rows, columns = np.nonzero(panel.broken)
        marks = Scatter(  # what has no finite value is marked on top
            x=steps[columns],
            y=np.where(np.isfinite(values[rows, columns]), values[rows, columns], top),
            customdata=[names[row] for row in rows],
            hovertemplate="step %{x}: NaN or infinity<extra>%{customdata}</extra>",
            mode="markers",
            marker={"symbol": "x-thin", "size": 8, "line": {"width": 2, "color": BROKEN}},
            showlegend=False,
        )
        figure.add_trace(marks, number, 1)
        few = np.unique(steps) if np.ptp(steps) < 8 else None  # else plotly writes fractions of steps
        figure.update_xaxes(tickvals=few, row=number, col=1)
    figure.update_xaxes(title=chart.axes[0], tickformat="d")
    figure.update_yaxes(title=chart.label, type="log" if chart.logarithmic else "linear", exponentformat="power")
    return figure


def _grids(chart: Chart) -> "Figure":
    most = 1600 if chart.axes[1] == "layer" else 480
    heights = [max(240, 70 + min(20 * len(panel.rows), most)) for panel in chart.panels]
    figure = _subplots(chart, heights)
    total, done = sum(heights), 0
    for number, (panel, height) in enumerate(zip(chart.panels, heights, strict=True), 1):
        bar = {"title": chart.label, "len": 0.9 * height / total, "y": 1 - (done + height / 2) / total}
        done += height
        names = list(map(_text, panel.whole or panel.rows))
        said = [
            [f"{name}<br>{'NaN or infinity' if mark else ''}" for mark in marks]
            for name, marks in zip(names, panel.broken, strict=True)
        ]
        places = np.arange(len(panel.rows))
        shown_value = {"customdata": panel.values.tolist(), "text": said}
        hover = (
            f"{chart.axes[0]} %{{x}}<br>{chart.axes[1]} %{{text}}<br>{chart.label} %{{customdata:.6g}}<extra></extra>"
        )
        image = _image(panel, chart, panel.values, bar) | shown_value | {"hovertemplate": hover}
        steps = list(map(str, panel.columns))
        for trace in (image, _marks(panel)):
            figure.add_heatmap(**trace, x=steps, y=places, row=number, col=1)
        named = places if chart.axes[1] == "layer" else places[:: max(1, len(places) // 12)]
        labels = [_text(panel.rows[place]) for place in named]
        figure.update_yaxes(tickvals=named, ticktext=labels, row=number, col=1)
    figure.update_xaxes(title=chart.axes[0], type="category", nticks=12, tickangle=0)
    figure.update_yaxes(title=chart.axes[1], autorange="reversed", automargin=True, ticks="outside")
    figure.update_layout(plot_bgcolor=NOTHING)
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False, zeroline=False)
    return figure


def _tiles(chart: Chart) -> "Figure":
    from plotly.subplots import make_subplots

    across = int(np.ceil(np.sqrt(len(chart.panels))))
    down = -(-len(chart.panels) // across)
    titles = [_text(panel.name) for panel in chart.panels]
    figure = make_subplots(down, across, subplot_titles=titles, horizontal_spacing=0.02, vertical_spacing=0.25 / down)
    scale = np.concatenate([panel.values.ravel() for panel in chart.panels])
    for number, panel in enumerate(chart.panels):
        row, column = divmod(number, across)
        at = {"x": list(panel.columns), "y": list(map(int, panel.rows)), "row": row + 1, "col": column + 1}
        image = _image(panel, chart, scale, {"title": chart.label} if not number else None)
        hover = f"{panel.name} [%{{y}}, %{{x}}]: %{{z:.6g}}<extra></extra>"
        figure.add_heatmap(**image, hovertemplate=hover, **at)
        figure.add_heatmap(**_marks(panel), **at)
        if 0.2 < len(panel.rows) / len(panel.columns) < 5:
            anchor = f"x{number + 1}" if number else "x"
            figure.update_yaxes(scaleanchor=anchor, constrain="domain", row=row + 1, col=column + 1)
    figure.update_xaxes(constrain="domain", showgrid=False, nticks=4)
    figure.update_yaxes(autorange="reversed", showgrid=False, zeroline=False, nticks=4)
    figure.update_layout(height=max(720, 150 + 170 * down))
    return figure


def _bars(chart: Chart) -> "Figure":
    from plotly.subplots import make_subplots

    (panel,) = chart.panels
    figure = make_subplots(2, 1, shared_xaxes=True, row_heights=[0.7, 0.3], vertical_spacing=0.05)
    hover = "2^%{x} ≤ |x| < 2^(%{x}+1): %{y:.3%}<extra></extra>"
    columns = list(panel.columns)
    figure.add_bar(x=columns, y=panel.values[0], marker_color=PALETTE[0], hovertemplate=hover, row=1, col=1)
    names = [f"{reach.name}: {verdict(reach)}" for reach in chart.reaches]
    normal = np.array([reach.normal for reach in chart.reaches])
    tiny = np.array([reach.subnormal for reach in chart.reaches])
    ranges = (
        ("subnormal", "#a6cee3", tiny, normal[:, 0]),
        ("full precision", PALETTE[2], normal[:, 0], normal[:, 1] + 1),
    )
    for name, colour, low, high in ranges:
        figure.add_bar(
            base=low - 0.5,
            x=high - low,
            y=names,
            orientation="h",
            marker_color=colour,
            hovertemplate=f"{name} from 2^%{{customdata[0]}} to below 2^%{{customdata[1]}}<extra></extra>",
            customdata=np.stack([low, high], axis=1).tolist(),
            row=2,
            col=1,
        )
    first, last = shown(chart)
    figure.update_xaxes(range=[first - 0.5, last + 0.5])
    figure.update_xaxes(
        title="exponent e: 2^e ≤ |x| < 2^(e+1). Green is of full precision, light blue subnormal.", row=2
    )
    figure.update_yaxes(title=chart.label, row=1)
    figure.update_yaxes(autorange="reversed", automargin=True, row=2)
    figure.update_layout(barmode="overlay", showlegend=False, height=560)
    return figure


def _subplots(chart: Chart, heights: list[int]) -> "Figure":
    from plotly.subplots import make_subplots

    total = sum(heights)
    figure = make_subplots(
        len(heights),
        1,
        subplot_titles=[_text(panel.name) for panel in chart.panels],
        row_heights=heights,
        vertical_spacing=min(70 / total, 1 / len(heights)),
    )
    figure.update_layout(height=total + 150)
    return figure


def _image(panel: Panel, chart: Chart, scale: Floats, bar: dict[str, Any] | None) -> dict[str, Any]:
    """Return a heat map; of a logarithmic scale it is of powers of ten, since plotly's colours have none."""
    values, scale = (fitted(part, logarithmic=chart.logarithmic) for part in (panel.values, scale))
    bar = dict(bar) if bar else None
    if chart.logarithmic:
        values, scale = np.log10(values), np.log10(scale)
    scale = scale[np.isfinite(scale)]
    low, high = (float(scale.min()), float(scale.max())) if len(scale) else (0.0, 1.0)
    diverging = low < 0 < high and not chart.logarithmic
    if diverging:
        low, high = min(low, -high), max(high, -low)
    elif not low < high:
        high = low + max(1.0, abs(low) / 1000)
    if bar is not None and chart.logarithmic:
        powers = range(int(np.ceil(low)), int(np.floor(high)) + 1)
        ticks = list(powers[:: max(1, len(powers) // 8)]) if len(powers) > 1 else [low, (low + high) / 2, high]
        bar |= {"tickvals": ticks, "ticktext": [f"{10.0**tick:.3g}" for tick in ticks]}
    colours = _DIVERGING if diverging else _VIRIDIS
    # Half of the file: no screen shows more than these digits as a colour.
    shown_values = values.astype(np.float32) if max(abs(low), abs(high)) < 1e37 else values
    return {
        "z": shown_values,
        "zmin": low,
        "zmax": high,
        "colorscale": list(colours),
        "colorbar": bar,
        "showscale": bar is not None,
        "hoverongaps": False,
    }


def _marks(panel: Panel) -> dict[str, Any]:
    """Return a heat map of black where something is broken."""
    z = np.where(panel.broken, 1.0, np.nan).astype(np.float32)
    return {"z": z, "colorscale": [BROKEN, BROKEN], "showscale": False, "hoverinfo": "skip"}


def _colour(row: int, count: int) -> str:
    from plotly.colors import sample_colorscale

    return PALETTE[row] if count <= len(PALETTE) else str(sample_colorscale("Viridis", 0.85 * row / (count - 1))[0])


def _text(text: str) -> str:
    """Return a text that is neither HTML nor, in a template, a variable."""
    return html.escape(text).replace("%", "&#37;")
