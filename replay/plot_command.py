"""`replay plot`: a picture of a trace in a file. What each picture takes is known here, what it shows in `charts`."""

from pathlib import Path

import click
from click.core import ParameterSource

import replay
from replay.command_line import filter_options, trace_argument
from replay.format import STATISTICS
from replay.new_file import new_file

_FORMATS = (".png", ".svg")
_LINES = 24
_ROWS = 80

_OF_STATISTICS = ("statistic over steps", "--heatmap")
_OF_TENSORS = ("--histogram", "--tensor")
_MEANT_FOR = {
    **dict.fromkeys(("stat", "layers", "where", "limit"), _OF_STATISTICS),
    **dict.fromkeys(("call", "path", "rank"), _OF_TENSORS),
    **dict.fromkeys(("step", "sample"), ("--tensor",)),
}


@click.command(
    epilog="""\b
Examples:
  replay plot runs/a norms.png --kinds grad_output
  replay plot runs/a map.svg --heatmap --stat absmax --layers "blocks.*"
  replay plot runs/a values.png --histogram fc1 --kinds grad_output
  replay plot runs/a maps.png --tensor layer1.0.conv1 --step 120

Ends with 0, with 1 where there is nothing to draw or the file cannot be written, and with 2 for options that do not
go together.
"""
)
@trace_argument
@click.argument("out", type=click.Path(path_type=Path))
@filter_options
@click.option("--stat", default="l2", show_default=True, type=click.Choice(STATISTICS), help="The statistic.")
@click.option("--heatmap", is_flag=True, help="The statistic as colours: layers × steps.")
@click.option("--histogram", metavar="LAYER", help="How the elements of this layer's tensor are distributed over time.")
@click.option("--tensor", metavar="LAYER", help="The tensor of this layer as images.")
@click.option("--step", type=click.IntRange(0, 2**62), help="With --tensor: the step; the last if not given.")
@click.option(
    "--sample", default=0, show_default=True, type=click.IntRange(0), help="With --tensor: which of the batch."
)
@click.option("--call", default=0, show_default=True, type=click.IntRange(0, 2**62), help="Of one tensor: its call.")
@click.option("--path", default="", help="Of one tensor: where in a nested output it sits; a parameter's name.")
@click.option("--rank", default=0, show_default=True, type=click.IntRange(0, 2**62), help="Of one tensor: its rank.")
@click.option("--limit", type=click.IntRange(1, 2**31), help=f"Layers a kind. [default: {_LINES}, heatmap {_ROWS}]")
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
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
    tensor: str | None,
    step: int | None,
    sample: int,
    call: int,
    path: str,
    rank: int,
    limit: int | None,
    overwrite: bool,
) -> None:
    """Draw a statistic over the steps, or a tensor, to a PNG or SVG file.

    Without an option, a line a layer and a panel a kind. Steps with NaN or infinity are marked. Needs matplotlib: pip
    install 'hookrec[plot]'.
    """
    _check(ctx, out, kinds, heatmap=heatmap, histogram=histogram, tensor=tensor)
    from replay import charts, drawing

    drawing.require_matplotlib()
    opened = replay.open(trace)
    kind = kinds[0] if kinds else "output"
    with new_file(out, overwrite=overwrite) as partial:
        if histogram is not None:
            chart = charts.histogram(opened, histogram, kind, call=call, path=path, rank=rank)
        elif tensor is not None:
            last = opened.steps[-1:] or [0]
            at = last[0] if step is None else step
            chart = charts.images(opened, at, tensor, kind, sample=sample, call=call, path=path, rank=rank)
        else:
            limit = limit or (_ROWS if heatmap else _LINES)
            chart = charts.statistic(opened, stat, layers or None, kinds or None, where, limit)
        as_lines = not heatmap and histogram is None and tensor is None
        figure = drawing.draw_lines(chart) if as_lines else drawing.draw_images(chart)
        drawing.save(figure, partial, out.suffix.lower().removeprefix("."))
    for note in chart.notes:
        click.echo(note, err=True)
    click.echo(f"wrote {out}", err=True)


def _check(
    ctx: click.Context, out: Path, kinds: tuple[str, ...], *, heatmap: bool, histogram: str | None, tensor: str | None
) -> None:
    """Refuse what does not go together, rather than leave an option out silently."""
    if out.suffix.lower() not in _FORMATS:
        raise click.UsageError(f"{out} ends in {out.suffix or 'nothing'}; a picture ends in {' or '.join(_FORMATS)}.")
    given = {"--heatmap": heatmap, "--histogram": histogram is not None, "--tensor": tensor is not None}
    chosen = [name for name, so in given.items() if so]
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} are different pictures; choose one.")
    picture = chosen[0] if chosen else _OF_STATISTICS[0]
    for name, pictures in _MEANT_FOR.items():
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE and picture not in pictures:
            raise click.UsageError(f"--{name} is for {' and '.join(pictures)}, not for {picture}.")
    if picture in _OF_TENSORS and len(kinds) > 1:
        raise click.UsageError(f"{picture} draws one kind; {len(kinds)} were given with --kinds.")
