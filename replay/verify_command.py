"""The command `replay verify`: what is damaged, as lines or JSON, and how far it is while it reads."""

import dataclasses
import sys
from pathlib import Path

import click

from replay.command_line import json_option, print_json, progress, say, trace_argument
from replay.printable import printable
from replay.verify import Problem, verify

_EXIT = """\b
Exit status:
  0  all is as it was written
  1  something is damaged
  2  there is no trace, or it has a newer version of the format"""


@click.command("verify", epilog=_EXIT)
@trace_argument
@json_option
def verify_trace(trace: Path, as_json: bool) -> None:
    """Read each file of a trace against its checksums, and name what is damaged."""
    found: list[Problem] = []
    count = 0
    with progress("records") as tell:

        def count_and_tell(done: int, total: int) -> None:
            nonlocal count
            count = done
            if done % 64 == 0 or done == total:
                tell(done, total)

        for problem in verify(trace, count_and_tell):
            found.append(problem)
            if not as_json:
                say(printable(_line(problem)))
    damaged = sum(problem.damage for problem in found)
    if as_json:
        print_json({"records": count, "damaged": damaged, "problems": [dataclasses.asdict(p) for p in found]})
    else:
        say(f"{count:,} records read, {damaged or 'nothing'} damaged", err=True)
    sys.exit(bool(damaged))


def _line(problem: Problem) -> str:
    if problem.file is not None:
        return f"{problem.file}: {problem.message}"
    names = ", ".join(
        f"{name} {getattr(problem, name)!r}" for name in ("rank", "step", "layer", "kind", "call", "path")
    )
    return f"{names}: {problem.message}"
