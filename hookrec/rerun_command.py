"""The command `hookrec rerun`: which layer's output its own input does not explain."""

import dataclasses
import sys
from pathlib import Path

import click

import replay
from replay.command_line import json_option, limit_option, print_json, print_rows, say, trace_argument
from replay.errors import BadQuery, ReplayError

_EXIT = """\b
Examples:
  hookrec rerun runs/a --step 120
  hookrec rerun runs/a --layer 'blocks.3.*' --json
  hookrec rerun runs/a --factory my_model:make

\b
Exit status:
  0  each output that could be run again is explained, and there was one
  1  one is not
  2  the question cannot be understood, or the trace cannot be read
  3  nothing could be run again; the table says why

The trace must have inputs, outputs and parameters: kinds=("input", "output", "param"). The module of --factory is
imported and run with all your rights. docs/questions/device.md tells more."""


class _Unusable(click.ClickException):
    """A question without an answer, which is not to be taken for a finding."""

    exit_code = 2


@click.command("rerun", epilog=_EXIT)
@trace_argument
@click.option("--layer", "layers", multiple=True, help="Glob over layer names; may be repeated. All if not given.")
@click.option("--step", type=click.IntRange(0, 2**62), help="The step; the last if not given.")
@click.option("--rank", default=0, show_default=True, type=click.IntRange(0, 2**62))
@click.option("--factory", metavar="MODULE:FUNCTION", help="Returns the model, for layers that torch.nn has not.")
@click.option("--tolerance", type=click.FloatRange(0), help="Relative error that counts as rounding, such as 1e-3.")
@limit_option
@json_option
def rerun_layers(
    trace: Path,
    layers: tuple[str, ...],
    step: int | None,
    rank: int,
    factory: str | None,
    tolerance: float | None,
    limit: int,
    as_json: bool,
) -> None:
    """Run the layers of a step again from their recorded inputs, and name the output that these do not explain."""
    try:
        opened = replay.open(trace)
        steps = opened.steps
        if not steps:
            raise BadQuery(f"{trace} has no committed step.")
        try:
            from hookrec.rebuild import factory_of
            from hookrec.rerun import NOT_EXPLAINED, NOT_RUNNABLE, rerun
        except ImportError:
            raise BadQuery("hookrec rerun needs PyTorch: pip install 'hookrec[torch]'.") from None
        made = None if factory is None else factory_of(factory)
        found = rerun(
            opened, steps[-1] if step is None else step, layers or None, rank=rank, factory=made, tolerance=tolerance
        )
    except ReplayError as error:
        raise _Unusable(str(error)) from None
    counts = {name: sum(v.verdict == name for v in found) for name in dict.fromkeys(v.verdict for v in found)}
    rows = [dataclasses.asdict(verdict) for verdict in found]
    if as_json:
        print_json(rows)
    else:
        shown = [
            {**row, "path": row["path"], "layer": row["layer"] or "(root)", "why": row["why"] or ""}
            for row in rows[:limit]
        ]
        columns = ["layer", "call", "verdict", "error", "rounding", "tolerance", "why"]
        if any(row["path"] for row in shown):
            columns.insert(1, "path")
        print_rows(shown, as_json=False, columns=columns)
        if len(rows) > limit:
            say(f"{len(rows) - limit:,} more; --limit shows them.", err=True)
        say(", ".join(f"{number:,} {name}" for name, number in counts.items()), err=True)
    if counts.get(NOT_EXPLAINED):
        sys.exit(1)
    if counts.get(NOT_RUNNABLE) == len(found):
        sys.exit(3)
