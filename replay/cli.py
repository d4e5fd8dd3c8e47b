"""The command `replay`: questions to a trace, answered as tables on a terminal, plain text elsewhere, or JSON."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import replay
from replay.command_line import (
    EXIT,
    Commands,
    attempt_option,
    cell_text,
    filter_options,
    json_option,
    limit_option,
    on_terminal,
    print_json,
    print_rows,
    say,
    say_if_empty,
    step_option,
    trace_argument,
)
from replay.forecast import forecast
from replay.history import in_words
from replay.printable import printable

_COLUMNS = ("step", "layer", "kind", "call", "shape", "n_nan", "min", "max", "mean", "std", "l2")
_CURVE = 16
"""Characters of a curve in a table."""

_FEW_SHAPES = 3

_ELSEWHERE = {
    "alerts": "replay.alerts_command:alerts",
    "check": "replay.check_command:check",
    "diff": "replay.diff_command:diff",
    "export": "replay.export_command:export",
    "list": "replay.list_command:list_traces",
    "plot": "replay.plot_command:plot",
    "sql": "replay.asking:sql",
    "tail": "replay.tailing:tail",
    "trend": "replay.trend_command:trend",
    "verify": "replay.verify_command:verify_trace",
}


@click.group(cls=Commands, elsewhere=_ELSEWHERE, epilog=EXIT)
@click.version_option(package_name="hookrec")
def main() -> None:
    """Answer questions about a trace that hookrec recorded. Begin with: replay info TRACE."""


@main.command()
@trace_argument
@attempt_option
@json_option
def info(trace: Path, attempt: int | None, as_json: bool) -> None:
    """Say what is in a trace, how it ended, what never fired and what recording cost."""
    facts = _facts(replay.open(trace, attempt))
    if as_json:
        print_json({**facts, "forecast": None if facts["forecast"] is None else asdict(facts["forecast"])})
        return
    facts["cost"] = _cost_in_words(facts["cost"])
    facts["forecast"] = None if facts["forecast"] is None else str(facts["forecast"])
    for name, value in facts.items():
        lines = _lines(value)
        if not lines:
            continue
        inline = not isinstance(value, list) or name in ("kinds", "ranks")
        say(f"{name:13}", bold=True, nl=False)
        say(", ".join(lines) if inline else lines[0])
        for line in () if inline else lines[1:]:
            say(f"{'':13}{line}")


def _facts(trace: replay.Trace) -> dict[str, Any]:
    steps = trace.steps
    provenance = trace.identity["provenance"]
    command, git = provenance.get("command"), provenance.get("git")
    git = git if isinstance(git, dict) else {}
    return {
        "trace": str(trace.path),
        "status": trace.status,
        "ended": [f"rank {rank}: {end['how']}{_reason(end)}, {end['time']}" for rank, end in trace.endings.items()],
        "attempts": in_words(trace.attempts),
        "steps": f"{len(steps)}, {steps[0]} to {steps[-1]}" if steps else "none is committed",
        "layers": len(trace.layers),
        "kinds": trace.kinds,
        "ranks": trace.ranks,
        "records": trace.count,
        "tensor bytes": trace.nbytes,
        "no tensor": trace.not_kept,
        "in part": _few(trace.stored_in_part),
        "rules": _rules(trace.identity["plan"].get("rules")),
        "silent": [f"{layer or '(root)'}: {why}" for layer, why in trace.silent],
        "notes": [_note(note) for note in trace.notes],
        "triggers": [_trigger(line) for line in trace.triggers],
        "cost": _cost(trace),
        "forecast": forecast(trace) if trace.status == "live" else None,
        "created": trace.identity["created"],
        "command": " ".join(map(str, command)) if isinstance(command, list) else command,
        "git": f"{git['commit']}{', with changes' if git.get('changed') else ''}" if git.get("commit") else None,
        "versions": provenance.get("packages", {}),
    }


def _few(texts: list[str]) -> list[str]:
    more = len(texts) - _FEW_SHAPES
    return [*texts[:_FEW_SHAPES], f"and {more:,} more streams"] if more > 0 else texts


def _rules(rules: object) -> list[str]:
    """Return the rules of the plan that recording began with; how they were changed is in the notes."""
    found = rules if isinstance(rules, list) else []
    return [f"rules[{number}] {json.dumps(rule, ensure_ascii=False)}" for number, rule in enumerate(found)]


def _note(note: dict[str, Any]) -> str:
    step = "" if note["step"] is None else f", step {note['step']}"
    return f"{note['layer'] or 'all layers'}{step}: {note['note']}"


def _reason(end: dict[str, Any]) -> str:
    return f" ({end['detail']})" if end.get("detail") else ""


def _trigger(line: dict[str, Any]) -> str:
    held = "no tensors were held" if line["first_step"] is None else f"tensors from step {line['first_step']} on"
    return f"step {line['step']}, {line['by']}: {line['why']}{_reason(line)}, {held}"


def _cost(trace: replay.Trace) -> dict[str, float]:
    """Seconds in the training process, over all recorded steps."""
    table = trace.scalars()
    names, values = table["name"].to_pylist(), table["value"].to_pylist()
    found: dict[str, float] = {}
    for name, value in zip(names, values, strict=True):
        if name.startswith("hookrec/") and name.endswith("_s"):
            found[name.removeprefix("hookrec/")] = found.get(name.removeprefix("hookrec/"), 0.0) + value
    return {name: round(seconds, 4) for name, seconds in found.items()}


def _cost_in_words(cost: dict[str, float]) -> str | None:
    if not cost.get("step_s"):
        return None
    hooks, copies, waiting = (cost.get(name, 0.0) for name in ("hook_s", "capture_s", "wait_s"))
    return (
        f"{hooks / cost['step_s']:.1%} of the {cost['step_s']:.2f} s of the recorded steps: {hooks:.2f} s in hooks, "
        f"of which {copies:.2f} s copies and statistics, {waiting:.2f} s waiting for the ring"
    )


def _lines(value: object) -> list[str]:
    if isinstance(value, dict):
        return [printable(f"{name} {number}") for name, number in value.items()]
    if isinstance(value, list):
        return [printable(item) for item in value]
    return [] if value in (None, "") else [f"{value:,}" if isinstance(value, int) else printable(value)]


@main.command()
@trace_argument
@filter_options
@attempt_option
@json_option
def ls(
    trace: Path,
    layers: tuple[str, ...],
    kinds: tuple[str, ...],
    where: str | None,
    attempt: int | None,
    as_json: bool,
) -> None:
    """List what is recorded of each layer: kinds, dtypes, shapes, how many records.

    Where there are more than three shapes of a tensor, they are in one line; --json has a line for each. Where a part
    of each tensor is stored, or its values in another dtype, "stored as" says what.
    """
    from replay.contents import contents, with_few_shapes

    opened = replay.open(trace, attempt)
    lines = contents(opened, layers or None, kinds or None, where)
    if as_json:
        print_json(lines)
    else:
        rows = [_stored_in_words(line) for line in with_few_shapes(lines)]
        in_part = any(row["stored as"] for row in rows)
        print_rows(rows, as_json, [name for name in rows[0] if in_part or name != "stored as"] if rows else ())
    say_if_empty(lines, opened)


def _stored_in_words(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with what is stored of each tensor, beside what was recorded, where that is another thing."""
    line = dict(line)
    stored = line.pop("stored_dtype"), line.pop("stored_shape")
    words = "" if stored == (line["dtype"], line["shape"]) else f"{stored[0]} {cell_text(stored[1])}"
    names = list(line)
    at = names.index("shape") + 1
    return {**{name: line[name] for name in names[:at]}, "stored as": words, **{n: line[n] for n in names[at:]}}


@main.command()
@trace_argument
@filter_options
@step_option
@limit_option
@attempt_option
@json_option
def stats(
    trace: Path,
    layers: tuple[str, ...],
    kinds: tuple[str, ...],
    where: str | None,
    step: int | None,
    limit: int,
    attempt: int | None,
    as_json: bool,
) -> None:
    """Print records with their statistics, in the order of execution.

    On a terminal, with a curve of l2 over all steps; `replay trend` explains it.
    """
    opened = replay.open(trace, attempt)
    chosen = layers or None, kinds or None, step, where
    rows, columns = opened.records(*chosen, limit=limit).to_pylist(), list(_COLUMNS)
    if rows and on_terminal() and not as_json:
        from replay.sparklines import curves, place_of
        from replay.timelines import timelines

        curve = curves(timelines(opened, "l2", {row["layer"] for row in rows}, kinds or None), "l2", _CURVE)
        columns.append("l2 over steps")
        rows = [{**row, "l2 over steps": curve[place_of(row)]} for row in rows]
    print_rows(rows, as_json, columns)
    say_if_empty(rows, opened)
    if len(rows) == limit and (more := opened.columns("count(*) as n", *chosen)["n"][0].as_py() - limit):
        say(f"{more:,} more; --limit shows them.", err=True)


@main.command()
@trace_argument
@click.argument("where")
@attempt_option
@json_option
def first(trace: Path, where: str, attempt: int | None, as_json: bool) -> None:
    """Print the first record for which a condition holds, such as 'n_nan > 0'. Ends with 1 if there is none."""
    found = replay.open(trace, attempt).first(where)
    if found is None:
        say("null" if as_json else f"No record of {trace} has {where}.")
        sys.exit(1)
    if as_json:
        print_json(found)
    else:
        print_rows([found], as_json, _COLUMNS)


@main.command()
@trace_argument
@click.argument("layer")
@click.option("--step", type=click.IntRange(0, 2**62), help="The step; the last if not given.")
@click.option("--kind", default="output", show_default=True)
@click.option("--call", default=0, show_default=True, type=click.IntRange(0, 2**62))
@click.option(
    "--path",
    default="",
    help="Where in a nested output the tensor sits; of an input its position or keyword, of a parameter its name.",
)
@click.option("--rank", default=0, show_default=True, type=click.IntRange(0, 2**62))
@attempt_option
@json_option
def show(trace: Path, layer: str, step: int | None, attempt: int | None, as_json: bool, **key: Any) -> None:
    """Print one tensor: its statistics and its values, shortened.

    On a terminal, with a curve of l2 over all steps, as of `replay trend`, and one of how its elements lie between
    the smallest and the largest.
    """
    import numpy as np

    opened = replay.open(trace, attempt)
    if step is None:
        steps = opened.steps
        step = steps[-1] if steps else 0
    tensor = opened.tensor(step, layer, **key)
    same = opened.records(layer, key["kind"], step).to_pylist()
    wanted = {"layer": layer, "call": key["call"], "path": key["path"], "rank": key["rank"]}
    record = next(row for row in same if all(row[name] == value for name, value in wanted.items()))
    if as_json:
        print_json({**record, "values": tensor.tolist() if tensor.dtype.kind in "biuf" else str(tensor.tolist())})
        return
    for name, value in record.items():
        say(f"{name:9} {cell_text(value)}")
    if (tensor.dtype.name, list(tensor.shape)) != (record["dtype"], list(record["shape"])):
        say(f"{'stored':9} {tensor.dtype.name} {cell_text(tensor.shape)} of it, shown below")
    if on_terminal():
        from replay.sparklines import curves, distribution, place_of
        from replay.timelines import timelines

        curve = curves(timelines(opened, "l2", layer, key["kind"]), "l2", 3 * _CURVE)[place_of(record)]
        say(f"{'over time':9} {curve}")
        say(f"{'elements':9} {distribution(tensor, 3 * _CURVE)}")
    say(np.array2string(tensor, threshold=1000, edgeitems=3, precision=5))


if __name__ == "__main__":
    sys.exit(main())
