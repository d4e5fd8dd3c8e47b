"""`replay trend`: a statistic over the steps as a small curve in a line of text, one a layer and kind."""

from pathlib import Path
from typing import Any

import click

import replay
from replay.command_line import (
    attempt_option,
    filter_options,
    json_option,
    limit_option,
    print_json,
    print_rows,
    progress,
    say,
    say_if_empty,
    trace_argument,
)
from replay.format import STATISTICS
from replay.sparklines import sparkline
from replay.timelines import LOGARITHMIC, Timeline, gridded, timelines

_WIDTH = 40


@click.command()
@trace_argument
@filter_options
@click.option("--stat", default="l2", show_default=True, type=click.Choice(STATISTICS), help="The statistic.")
@limit_option
@attempt_option
@json_option
def trend(
    trace: Path,
    layers: tuple[str, ...],
    kinds: tuple[str, ...],
    where: str | None,
    stat: str,
    limit: int,
    attempt: int | None,
    as_json: bool,
) -> None:
    """Print how a statistic of each layer and kind went over the steps, as a small curve a line.

    A curve goes from the smallest value of its line to the largest. Those of absmax, std and l2 are logarithmic, and
    their height is a factor of 2 at least, so that a norm that hardly changes is level. A character stands for one
    step or several, of which it shows the value farthest from 0; × stands for NaN or infinity among the elements, and
    a blank for no record. With --json: all steps and values.

    Ends with 0, also where no record is so.
    """
    opened = replay.open(trace, attempt)
    try:
        with progress("records") as tell:
            lines = timelines(opened, stat, layers or None, kinds or None, where, tell)
    except replay.NotRecorded:
        lines = []
    shown = lines[:limit]
    say_if_empty(shown, opened)
    if as_json:
        print_json([_facts(line) for line in shown])
    elif shown:
        _, values, broken, width = gridded(shown, _WIDTH)
        several_ranks = len({line.rank for line in lines}) > 1
        rows = []
        for line, row, marks in zip(shown, values, broken, strict=True):
            names: dict[str, Any] = {"rank": line.rank} if several_ranks else {}
            names |= {"layer": line.layer or "(root)", "kind": line.kind, "path": line.path}
            curve = sparkline(row, marks, logarithmic=stat in LOGARITHMIC)
            rows.append({**names, "trend": curve, "first": float(line.values[0]), "last": float(line.values[-1])})
        print_rows(rows, as_json, [name for name in rows[0] if name != "path"])
        if width > 1:
            say(f"A character stands for {width} steps.", err=True)
    if len(lines) > limit:
        say(f"{len(lines) - limit:,} more; --limit shows them.", err=True)


def _facts(line: Timeline) -> dict[str, Any]:
    names = {"rank": line.rank, "layer": line.layer, "kind": line.kind, "path": line.path}
    ends = {"first": float(line.values[0]), "last": float(line.values[-1])}
    broken = line.steps[line.broken].tolist()
    return {**names, **ends, "broken_steps": broken, "steps": line.steps.tolist(), "values": line.values.tolist()}
