"""The command `replay verify`: what is damaged, as lines or JSON, and a bar on a terminal while it reads."""

import dataclasses
import sys
from pathlib import Path

import click

from replay.command_line import json_option, print_json, trace_argument
from replay.errors import ReplayError
from replay.verify import Problem, verify

_EXIT = """\b
Exit status:
  0  all is as it was written
  1  something is damaged
  2  there is no trace, or it has a newer version of the format"""


class _NoTrace(click.ClickException):
    exit_code = 2


@click.command("verify", epilog=_EXIT)
@trace_argument
@json_option
def verify_trace(trace: Path, as_json: bool) -> None:
    """Read each file of a trace against its checksums, and name what is damaged."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    found: list[Problem] = []
    console = Console(stderr=True)
    bar = Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn(), console=console)
    bar.disable = not console.is_terminal
    count = 0
    try:
        with bar:
            task = bar.add_task("records", total=None)

            def progress(done: int, total: int) -> None:
                nonlocal count
                count = done
                if done % 64 == 0 or done == total:
                    bar.update(task, completed=done, total=total)

            for problem in verify(trace, progress):
                found.append(problem)
                if not as_json:
                    click.echo(_line(problem))
    except ReplayError as error:
        raise _NoTrace(str(error)) from None
    damaged = sum(problem.damage for problem in found)
    if as_json:
        print_json({"records": count, "damaged": damaged, "problems": [dataclasses.asdict(p) for p in found]})
    else:
        click.echo(f"{count:,} records read, {damaged or 'nothing'} damaged", err=True)
    sys.exit(bool(damaged))


def _line(problem: Problem) -> str:
    if problem.file is not None:
        return f"{problem.file}: {problem.message}"
    names = ", ".join(
        f"{name} {getattr(problem, name)!r}" for name in ("rank", "step", "layer", "kind", "call", "path")
    )
    return f"{names}: {problem.message}"
