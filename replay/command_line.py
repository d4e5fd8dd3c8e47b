"""What all commands share: options, errors as one message, answers as tables, plain text or JSON.

A table goes to a terminal drawn, and elsewhere as plain columns; how far work is, as a bar or as a line now and then. A
command that needs much, or is seldom called, is
imported when it is called, so that the others start in no time.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import replay
from replay.errors import ReplayError
from replay.printable import printable, printable_lines

_WORDS = ("layer", "kind", "path", "dtype", "shape", "rule", "severity", "advice", "trace", "status")


FIRST_S = 3.0
"""Seconds without a word, after which work that takes longer says how far it is."""

EXIT = """\b
Exit status of all commands:
  0  the question was answered, the work done
  1  the answer is bad news: a difference, a finding, damage, nothing that is so; or a file could not be written
  2  there is no answer: wrong use, a name that is not there, a trace that cannot be read"""


class Unanswered(click.ClickException):
    """A question without an answer, which is not to be taken for one: `replay diff` ends with 1 if traces differ."""

    exit_code = 2


class Commands(click.Group):
    """Shows an error of ours as one message, never as a traceback.

    Args:
        elsewhere: by name, the commands that live in a module of their own, as "module:function".
        more: what a `click.Group` takes.
    """

    def __init__(self, *args: Any, elsewhere: Mapping[str, str] | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self._elsewhere = dict(elsewhere or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return sorted({*super().list_commands(ctx), *self._elsewhere})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command."""
        if cmd_name not in self._elsewhere:
            return super().get_command(ctx, cmd_name)
        module, _, function = self._elsewhere[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), function)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except ReplayError as error:
            raise Unanswered(printable_lines(error)) from None
        except BrokenPipeError:
            raise  # whoever read has enough: click ends without a word
        except OSError as error:
            raise Unanswered(printable_lines(error)) from None
        except click.ClickException as error:
            error.message = printable_lines(error.message)  # type: ignore[misc]
            raise


trace_argument = click.argument("trace", type=click.Path(path_type=Path))
attempt_option = click.option(
    "--attempt",
    type=click.IntRange(0, 2**31),
    help="Of a training that was resumed: what there was up to this attempt, of replay info.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
limit_option = click.option(
    "--limit", default=40, show_default=True, type=click.IntRange(1, 2**31), help="Rows to print."
)
step_option = click.option("--step", type=click.IntRange(0, 2**62), help="One step.")


def names_option(flag: str, text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return an option that takes names with commas between them, and may be repeated: as all commands have them."""

    def split(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.strip() for names in given for name in names.split(",") if name.strip())

    return click.option(flag, multiple=True, help=text, callback=split)


def filter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that choose records: `layers`, `kinds` and `where`."""
    for option in (
        click.option("--where", help="SQL condition over the columns, such as 'n_nan > 0'."),
        names_option("--kinds", "Kinds, such as output,grad_output; may be repeated."),
        names_option("--layers", "Globs over layer names, such as 'blocks.0.*,head'; may be repeated."),
    ):
        command = option(command)
    return command


def say(text: object = "", *, err: bool = False, nl: bool = True, **style: Any) -> None:
    """Print text that may have come from a trace: line breaks stay, other control characters become escapes.

    Args:
        text: the text. What is one line of it has to be made so by `printable`.
        err: to standard error.
        nl: end with a newline.
        style: as of `click.style`.
    """
    click.secho(printable_lines(text), err=err, nl=nl, **style)


@contextmanager
def progress(what: str, every_s: float = 10.0) -> Iterator[Callable[[int, int], None]]:
    """Give a function to be told how many of how many are done, and show it on stderr.

    Args:
        what: of which there are many, such as "records".
        every_s: seconds between two lines, where stderr is no terminal. The first comes after `FIRST_S`; work that is
            shorter says nothing.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = [*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn()]
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    due = time.monotonic() + min(FIRST_S, every_s)

    def tell(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + every_s
            say(f"{done:,} of {total:,} {what}", err=True)

    yield tell


def say_if_empty(found: Sized, trace: replay.Trace) -> None:
    """Say what a trace has, where nothing was found."""
    if not len(found):
        steps, layers = trace.steps, ", ".join(map(repr, trace.layers[:3]))
        there = f"steps {steps[0]} to {steps[-1]}, layers such as {layers}" if steps else "no committed step"
        say(f"No record is so. {trace.path} has {there}, kinds {', '.join(trace.kinds) or 'none'}.", err=True)


def on_terminal() -> bool:
    """Return whether a person reads what is printed."""
    return sys.stdout.isatty()


def print_json(value: object) -> None:
    """Print JSON; numbers that JSON lacks become null."""
    click.echo(json.dumps(finite(value), indent=1))


def print_json_rows(rows: Iterable[dict[str, Any]]) -> None:
    """Print rows as `print_json` prints a list of them, one after the other as they come."""
    begun = False
    for row in rows:
        text = json.dumps(finite(row), indent=1).replace("\n", "\n ")  # texts have no line breaks but these
        sys.stdout.write(f"{',' if begun else '['}\n {text}")
        begun = True
    click.echo("\n]" if begun else "[]")


def finite(value: Any) -> Any:
    """Return a value as JSON can hold it: numbers that are not finite as None, what it has no type for as text."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return value if isinstance(value, (int, str, type(None))) else str(value)  # times, decimals


def print_rows(rows: Sequence[dict[str, Any]], as_json: bool, columns: Iterable[str] | None = None) -> None:
    """Print rows as a table, or as JSON; `columns` are those of the table, all if None."""
    if as_json:
        print_json(list(rows))
        return
    names = list(columns if columns is not None else rows[0] if rows else ())
    if "kind" in names:  # a path is seldom there, and stands beside the kind
        names = [name for name in names if name != "path"]
        if any(row.get("path") for row in rows):
            names.insert(names.index("kind") + 1, "path")
    cells = [[cell_text(row[name]) for name in names] for row in rows]
    if on_terminal():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold")
        for name in names:
            table.add_column(printable(name), justify="left" if name in _WORDS else "right")
        for line in cells:
            table.add_row(*map(Text, line))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(map(printable, names), *cells, strict=True)]
    for line in (list(map(printable, names)), *cells):
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def cell_text(value: object) -> str:
    """Return a value as a cell of a table shows it, on one line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        if any(isinstance(item, float) for item in value):
            return f"[{', '.join(f'{item:.4g}' for item in value[:4])}{', …' if len(value) > 4 else ''}]"
        return "×".join(map(printable, value)) or "scalar"
    return printable(value)
