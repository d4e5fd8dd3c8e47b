"""`replay plot`: a picture of a trace in a file. What each picture takes is known here, what it shows in `charts`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

import replay
from replay.command_line import (
    attempt_option,
    filter_options,
    json_option,
    print_json,
    progress,
    say,
    trace_argument,
)
from replay.format import STATISTICS
from replay.new_file import new_file

if TYPE_CHECKING:
    from replay.charts import Chart

_FORMATS = (".png", ".svg", ".html")
_LINES = 24
_ROWS = 80

_OF_STATISTICS = ("statistic over steps", "--heatmap")
_OF_TENSORS = ("--histogram", "--exponents", "--tensor")
_MEANT_FOR = {
    **dict.fromkeys(("stat", "layers", "where", "limit"), _OF_STATISTICS),
    **dict.fromkeys(("call", "path", "rank"), _OF_TENSORS),
    "step": ("--exponents", "--tensor"),
    "sample": ("--tensor",),
}


@click.command(
    epilog="""\b
Examples:
  replay plot runs/a norms.png --kinds grad_output
  replay plot runs/a map.svg --heatmap --stat absmax --layers "blocks.*"
  replay plot runs/a values.png --histogram fc1 --kinds grad_output
  replay plot runs/a fp8.png --exponents fc1 --kinds grad_output --step 120
  replay plot runs/a maps.html --tensor layer1.0.conv1 --step 120
  replay plot runs/a norms.png --json

With --json an object of path, format, bytes, what was drawn (a kind, layers, the first and the last step of each panel)
and notes.

Ends with 0, and with 2 where there is nothing to draw, the file cannot be written, or options do not go together.
"""
)
@trace_argument
@click.argument("out", type=click.Path(path_type=Path))
@filter_options
@click.option("--stat", default="l2", show_default=True, type=click.Choice(STATISTICS), help="The statistic.")
@click.option("--heatmap", is_flag=True, help="The statistic as colours: layers × steps.")
@click.option("--histogram", metavar="LAYER", help="How the elements of this layer's tensor are distributed over time.")
@click.option("--exponents", metavar="LAYER", help="Its exponents against what bf16, fp16 and fp8 can hold.")
@click.option("--tensor", metavar="LAYER", help="The tensor of this layer as images.")
@click.option("--step", type=click.IntRange(0, 2**62), help="Of one tensor: its step; the last if not given.")
@click.option(
    "--sample", default=0, show_default=True, type=click.IntRange(0), help="With --tensor: which of the batch."
)
@click.option("--call", default=0, show_default=True, type=click.IntRange(0, 2**62), help="Of one tensor: its call.")
@click.option("--path", default="", help="Of one tensor: where in a nested output it sits; a parameter's name.")
@click.option("--rank", default=0, show_default=True, type=click.IntRange(0, 2**62), help="Of one tensor: its rank.")
@click.option("--limit", type=click.IntRange(1, 2**31), help=f"Layers a kind. [default: {_LINES}, heatmap {_ROWS}]")
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
@attempt_option
@json_option
@click.pass_context
def plot(
    ctx: click.Context,
    trace: Path,
    out: Path,
    layers: tuple[str, ...],
    kinds: tuple[str, ...],
    where: str | None,
    stat: str,
    heatmap: bool,
    histogram: str | None,
    exponents: str | None,
    tensor: str | None,
    step: int | None,
    sample: int,
    call: int,
    path: str,
    rank: int,
    limit: int | None,
    overwrite: bool,
    attempt: int | None,
    as_json: bool,
) -> None:
    """Draw a statistic over the steps, or a tensor, to a PNG, SVG or HTML file.

    Without an option, a line a layer and a panel a kind. Steps with NaN or infinity are marked. HTML is a page that
    needs no network, with zoom and exact values under the pointer. Needs matplotlib (PNG, SVG) or plotly (HTML): pip
    install 'hookrec[plot]'.
    """
    given = {"--heatmap": heatmap or None, "--histogram": histogram, "--exponents": exponents, "--tensor": tensor}
    _check(ctx, out, kinds, [name for name, value in given.items() if value is not None])
    from replay import charts, drawing, interactive
    from replay.exponents import exponents as exponents_of

    as_page = out.suffix.lower() == ".html"
    (interactive.require_plotly if as_page else drawing.require_matplotlib)()
    opened = replay.open(trace, attempt)
    kind = kinds[0] if kinds else "output"
    key: dict[str, Any] = {"call": call, "path": path, "rank": rank}
    at = step if step is not None else (opened.steps or [0])[-1]
    with new_file(out, overwrite=overwrite) as partial:
        if histogram is not None:
            with progress("tensors") as tell:
                chart = charts.histogram(opened, histogram, kind, **key, progress=tell)
        elif exponents is not None:
            chart = exponents_of(opened, at, exponents, kind, **key)
        elif tensor is not None:
            chart = charts.images(opened, at, tensor, kind, sample=sample, **key)
        else:
            limit = limit or (_ROWS if heatmap else _LINES)
            form: Literal["grid", "lines"] = "grid" if heatmap else "lines"
            with progress("records") as tell:
                chart = charts.statistic(opened, stat, layers or None, kinds or None, where, limit, form, tell)
        if as_page:
            interactive.save(chart, partial)
        else:
            drawing.save(drawing.draw(chart), partial, out.suffix.lower().removeprefix("."))
    if as_json:
        print_json(_facts(out, chart, kind, next((name for name in (histogram, exponents, tensor) if name), None)))
        return
    for note in chart.notes:
        say(note, err=True)
    say(f"wrote {out}", err=True)


def _facts(out: Path, chart: "Chart", kind: str, layer: str | None) -> dict[str, Any]:
    """Return what was drawn; `layer` and `kind` are those of a picture of one tensor."""
    panels = chart.panels if layer is None else chart.panels[:1]  # a tensor has one an image
    drawn = [
        {
            "kind": panel.name if layer is None else kind,
            "layers": list(panel.whole) if layer is None else [layer],
            "steps": list(panel.steps),
        }
        for panel in panels
    ]
    format_ = out.suffix.lower().removeprefix(".")
    return {
        "path": str(out),
        "format": format_,
        "bytes": out.stat().st_size,
        "drawn": drawn,
        "notes": list(chart.notes),
    }


def _check(ctx: click.Context, out: Path, kinds: tuple[str, ...], chosen: list[str]) -> None:
    """Refuse what does not go together, rather than leave an option out silently."""
    if out.suffix.lower() not in _FORMATS:
        ends = f"{', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"
        raise click.UsageError(f"{out} ends in {out.suffix or 'nothing'}; a picture ends in {ends}.")
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} are different pictures; choose one.")
    picture = chosen[0] if chosen else _OF_STATISTICS[0]
    for name, pictures in _MEANT_FOR.items():
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE and picture not in pictures:
            raise click.UsageError(f"--{name} is for {' and '.join(pictures)}, not for {picture}.")
    if picture in _OF_TENSORS and len(kinds) > 1:
        raise click.UsageError(f"{picture} draws one kind; {len(kinds)} were given with --kinds.")
