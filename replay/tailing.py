"""The command `replay tail`: a line a step of what is recorded right now."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa

import replay
from replay.command_line import cell_text, filter_options, finite, say
from replay.printable import printable


@click.command(
    epilog="""\b
Examples:
  replay tail runs/a                                  a line a step, until the trace is sealed
  replay tail runs/a --kinds grad_output --wait 60    wait for a training that begins
  replay tail runs/a --where "n_nan > 0" --records    each record with NaN
  replay tail runs/* --json | jq .step

Ends with 0 when all traces are sealed, with 1 if one is torn, with 2 if one is not there, with 130 after Ctrl-C.
"""
)
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", type=click.Path(path_type=Path))
@filter_options
@click.option("--records", is_flag=True, help="A line a record instead of a line a step.")
@click.option("--poll", "poll_s", default=0.5, show_default=True, type=click.FloatRange(0.01), help="Seconds.")
@click.option("--wait", "wait_s", default=0.0, show_default=True, help="Seconds to wait for a trace to begin.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line.")
def tail(
    traces: tuple[Path, ...],
    layers: tuple[str, ...],
    kinds: tuple[str, ...],
    where: str | None,
    records: bool,
    poll_s: float,
    wait_s: float,
    as_json: bool,
) -> None:
    """Print what is recorded, from the first step on and as it comes.

    A line a step says how many records it has, the largest absolute value of each kind and the layer that has it, and
    which layer is the first with NaN or infinity. Records that come later, such as those of a backward pass after the
    optimizer's step, give their step another line.
    """
    torn = dict.fromkeys(traces, False)
    try:
        following = replay.follow_all(
            traces, poll_s, layers=layers or None, kinds=kinds or None, where=where, wait_s=wait_s
        )
        for trace, found in following:
            for line in found.to_pylist() if records else _steps(found):
                if as_json:
                    click.echo(json.dumps(finite({"trace": str(trace.path), **line})))
                    continue
                text = _record_text(line) if records else _step_text(line)
                say(printable(f"{trace.path}  {text}" if len(traces) > 1 else text))
        torn = {path: replay.open(path).status == "torn" for path in traces}
    except KeyboardInterrupt:
        sys.exit(130)
    for path, is_torn in torn.items():
        if is_torn:
            say(f"{path} is torn: its writer is gone. Run `hookrec recover {path}` to seal it.", err=True)
    sys.exit(any(torn.values()))


def _steps(records: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield what there is to say of each step, in the order in which it came."""
    names = ("rank", "step", "layer", "kind", "absmax")
    rank, step, layer, kind, absmax = (records[name].to_pylist() for name in names)
    broken = sum(records[name].to_numpy() for name in ("n_nan", "n_posinf", "n_neginf")) > 0
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for n, key in enumerate(zip(rank, step, strict=True)):
        line = found.setdefault(key, {"rank": key[0], "step": key[1], "records": 0, "nonfinite": None, "absmax": {}})
        line["records"] += 1
        if broken[n] and line["nonfinite"] is None:
            line["nonfinite"] = {"layer": layer[n], "kind": kind[n]}
        most = line["absmax"].get(kind[n])
        if not np.isnan(absmax[n]) and (most is None or absmax[n] > most["value"]):
            line["absmax"][kind[n]] = {"layer": layer[n], "value": absmax[n]}
    yield from found.values()


def _step_text(line: dict[str, Any]) -> str:
    rank = f"rank {line['rank']}  " if line["rank"] else ""
    parts = [f"{rank}step {line['step']:<7} {line['records']:>5} records"]
    parts += [f"{kind} ≤ {most['value']:.3g} ({_name(most['layer'])})" for kind, most in line["absmax"].items()]
    if first := line["nonfinite"]:
        parts.append(f"NaN or inf: {first['kind']} of {_name(first['layer'])}")
    return "  ".join(parts)


def _record_text(record: dict[str, Any]) -> str:
    names = ("n_nan", "min", "max", "mean", "std", "l2")
    path = f" {record['path']}" if record["path"] else ""
    rank = f"rank {record['rank']}  " if record["rank"] else ""
    key = f"{rank}step {record['step']:<7} {_name(record['layer'])} {record['kind']}{path} ({record['call']})"
    return f"{key}  {cell_text(record['shape'])}  " + "  ".join(f"{name} {cell_text(record[name])}" for name in names)


def _name(layer: str) -> str:
    return layer or "the root"
