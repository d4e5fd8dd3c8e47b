"""`replay alerts`: what the rules of a daemon found in a trace."""

import contextlib
import dataclasses
from pathlib import Path

import click

from replay.alerts import read_alerts
from replay.command_line import json_option, print_rows, say, trace_argument
from replay.documents import read_identity
from replay.format import DAEMON_DIRECTORY, DAEMON_LOCK_FILE
from replay.printable import printable
from replay.seal import is_locked

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
        say(f"{printable(trace)} has no alert, and {_watched(trace)}", err=True)


def _watched(trace: Path) -> str:
    """Say whether a daemon would write one; locks do not reach every machine."""
    for root in trace.absolute().parents:
        with contextlib.suppress(OSError):
            if is_locked(root / DAEMON_DIRECTORY, DAEMON_LOCK_FILE):
                return f"a daemon watches {printable(root)}."
    return "no daemon of this machine watches it. `hookrec daemon ROOT` watches what is below a folder."


def _cell(value: object) -> object:
    return "-" if value is None else value
