"""Colours, limits and captions, which are the same whatever draws a picture.

Colours are those of Okabe and Ito, so that they can be told apart by the colour-blind and in print; black is what is
NaN or infinite, and in no map of colours.
"""

import numpy as np

from replay.charts import Chart
from replay.series import Floats

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#7f4f24")
BROKEN = "black"
NOTHING = "#e6e6e6"

_SMALLEST, _LARGEST = 1e-150, 1e150
"""Past these, values are drawn at the edge of the scale; the smallest is of logarithmic scales only."""


def fitted(values: Floats, *, logarithmic: bool) -> Floats:
    """Return values that can be drawn: past the limits the arithmetic of matplotlib overflows.

    On a logarithmic scale 0 is half of the smallest that is positive, and NaN if there is none.
    """
    values = np.where(np.isfinite(values), np.clip(values, -_LARGEST, _LARGEST), np.nan)
    if not logarithmic:
        return values
    values = np.where(values > 0, np.maximum(values, _SMALLEST), values)
    positive = values[values > 0]
    return np.where(values > 0, values, np.where(values == 0, positive.min() / 2 if len(positive) else np.nan, np.nan))


def line_numbers(chart: Chart) -> dict[str, int]:
    """Return a number for the name of each line: a layer has the same colour in all panels."""
    names = dict.fromkeys(name for panel in chart.panels for name in panel.whole or panel.rows)
    return {name: number for number, name in enumerate(names)}


def caption_of(chart: Chart) -> list[str]:
    """Return the notes of a chart, and what its colours and marks mean, if they occur."""
    notes = list(chart.notes)
    of_layers = chart.axes[1] == "layer"
    if chart.form == "grid" and any((np.isnan(panel.values) & ~panel.broken).any() for panel in chart.panels):
        notes.append(f"Grey is no {'record' if of_layers else 'element'}.")
    if any(_past_limits(panel.values, logarithmic=chart.logarithmic) for panel in chart.panels):
        low = f"{_SMALLEST:g}" if chart.logarithmic else f"{-_LARGEST:g}"
        notes.append(f"What is past {low} and {_LARGEST:g} is drawn there.")
    if any(panel.broken.any() for panel in chart.panels):
        mark, first = "×" if chart.form == "lines" else "Black", ""
        if of_layers:
            first = "; beside a name, × is the first such step"
        notes.append(f"{mark} is NaN or infinity among the elements{first}.")
    return notes


def _past_limits(values: Floats, *, logarithmic: bool) -> bool:
    small = (values > 0) & (values < _SMALLEST) & logarithmic
    return bool(np.any(small | (np.abs(values) > _LARGEST)))
