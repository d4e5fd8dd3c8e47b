"""`replay list`: the traces below a folder, one in a line."""

import dataclasses
from pathlib import Path

import click

import replay
from replay.catalog import entry_of, find_traces
from replay.command_line import json_option, print_rows, say
from replay.printable import printable

_COLUMNS = ("name", "status", "steps", "records", "bytes", "alerts", "created", "command")
_COMMAND_WIDTH = 60


@click.command("list")
@click.argument("root", type=click.Path(path_type=Path))
@json_option
def list_traces(root: Path, as_json: bool) -> None:
    """List the traces below a folder: status, steps, records, bytes of tensors, alerts, when and of what.

    A trace that cannot be read is listed as damaged. Ends with 0, also where there is no trace, and with 2 where ROOT
    is no folder that can be read.
    """
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise replay.TraceNotFound(f"{printable(root)} {what}. Name a folder that has traces below it.")

    def unreadable(folder: Path, error: OSError) -> None:
        say(f"{printable(folder)} cannot be read: {error.strerror}.", err=True)

    entries = [entry_of(trace, root) for trace in find_traces(root, unreadable).traces]
    if as_json:
        print_rows([dataclasses.asdict(entry) for entry in entries], as_json)
        return
    rows = []
    for entry in entries:
        row = {name: "-" if value is None else value for name, value in dataclasses.asdict(entry).items()}
        row |= {name: printable(row[name]) for name in ("name", "command")}
        if len(row["command"]) > _COMMAND_WIDTH:
            row["command"] = row["command"][: _COMMAND_WIDTH - 1] + "…"
        row["created"] = row["created"][:19]
        rows.append({name: row[name] for name in _COLUMNS})
    if rows:
        print_rows(rows, as_json)
    else:
        say(f"{printable(root)} has no trace below it.", err=True)
    for entry in entries:
        if entry.problem:
            say(f"{printable(entry.name)} is damaged: {printable(entry.problem)}", err=True)
