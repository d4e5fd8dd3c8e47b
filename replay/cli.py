"""The command `replay`: questions to a trace, answered as text, or as JSON with `--json`."""

import json
import sys
from pathlib import Path
from typing import Any

import click

import replay
from replay.errors import ReplayError


class _Group(click.Group):
    """Shows an error of ours as one message, never as a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ReplayError as error:
            raise click.ClickException(str(error)) from None


@click.group(cls=_Group)
def main() -> None:
    """Answer questions about a trace that hookrec recorded. Begin with: replay info TRACE."""


_trace = click.argument("trace", type=click.Path(path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_layers = click.option("--layers", multiple=True, help="Glob over layer names, such as 'blocks.0.*'; may be repeated.")
_kinds = click.option("--kinds", multiple=True, help="output or grad_output.")
_where = click.option("--where", help="SQL condition over the columns, such as 'n_nan > 0'.")


@main.command()
@_trace
@_json
def info(trace: Path, as_json: bool) -> None:
    """Say what is in a trace, how it ended, what never fired and what recording cost."""
    opened = replay.open(trace)
    steps = opened.steps
    seconds = _cost(opened)
    facts = {
        "trace": str(trace),
        "status": opened.status,
        "ended": {rank: end["detail"] or end["how"] for rank, end in opened.endings.items()},
        "steps": f"{len(steps)} ({steps[0]} to {steps[-1]})" if steps else "none",
        "layers": len(opened.layers),
        "kinds": opened.kinds,
        "ranks": opened.ranks,
        "silent": [f"{layer or '(root)'}: {why}" for layer, why in opened.silent],
        "notes": [f"{note['layer'] or 'all'}: {note['note']}" for note in opened.notes],
        "cost": seconds,
        "created": opened.identity["created"],
        "command": opened.identity["provenance"]["command"],
    }
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    for name, value in facts.items():
        values = (
            value
            if isinstance(value, list)
            else [f"{k}: {v}" for k, v in value.items()]
            if isinstance(value, dict)
            else [value]
        )
        click.echo(f"{name:8} {', '.join(map(str, values)) if name not in ('silent', 'notes') else ''}".rstrip())
        for line in value if name in ("silent", "notes") else ():
            click.echo(f"         {line}")


def _cost(trace: replay.Trace) -> dict[str, float]:
    table = trace.scalars().to_pylist()
    return {
        name: round(sum(row["value"] for row in table if row["name"] == f"hookrec/{name}"), 4)
        for name in ("step_s", "hook_s", "capture_s", "wait_s")
    }


@main.command()
@_trace
@_layers
@_kinds
@click.option("--step", type=int, help="One step.")
@_where
@click.option("--limit", default=40, show_default=True, help="Rows to print.")
@_json
def stats(
    trace: Path,
    layers: tuple[str, ...],
    kinds: tuple[str, ...],
    step: int | None,
    where: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """Print records with their statistics, in the order of execution."""
    rows = replay.open(trace).records(layers or None, kinds or None, step, where).slice(0, limit).to_pylist()
    if as_json:
        click.echo(json.dumps(rows))
        return
    names = ("step", "layer", "kind", "call", "shape", "n_nan", "min", "max", "mean", "std", "l2")
    click.echo("  ".join(f"{name:>12}" for name in names))
    for row in rows:
        cells = (f"{row[n]:.4g}" if isinstance(row[n], float) else str(row[n]) for n in names)
        click.echo("  ".join(f"{cell:>12}" for cell in cells))


@main.command()
@_trace
@click.argument("out", type=click.Path(path_type=Path))
@_layers
@_kinds
@_where
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
def export(
    trace: Path, out: Path, layers: tuple[str, ...], kinds: tuple[str, ...], where: str | None, overwrite: bool
) -> None:
    """Write the statistics to a Parquet file, one row a record."""
    replay.open(trace).select(layers or None, kinds or None, where=where).to_parquet(out, overwrite=overwrite)
    click.echo(f"wrote {out}", file=sys.stderr)
