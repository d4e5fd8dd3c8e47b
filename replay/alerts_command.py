"""`replay alerts`: what the rules of a daemon found in a trace."""

import dataclasses
from pathlib import Path

import click

from replay.alerts import read_alerts
from replay.command_line import json_option, print_rows, say, trace_argument
from replay.documents import read_identity
from replay.printable import printable

_COLUMNS = ("time", "severity", "rule", "rank", "layer", "kind", "first_step", "message")


@click.command()
@trace_argument
@json_option
def alerts(trace: Path, as_json: bool) -> None:
    """Print the alerts of a trace, as `hookrec daemon` found them.

    Ends with 0, also where there is none, and with 2 where the trace cannot be read.
    """
    read_identity(trace)
    found = read_alerts(trace)
    if as_json:
        print_rows([dataclasses.asdict(alert) for alert in found], as_json)
    elif found:
        print_rows([{name: _cell(getattr(alert, name)) for name in _COLUMNS} for alert in found], as_json)
    else:
        say(f"{printable(trace)} has no alert. `hookrec daemon` writes them as it watches a folder.", err=True)


def _cell(value: object) -> object:
    return "-" if value is None else value
