"""`hookrec pin` and `unpin`: which traces keep their tensors, whatever the quota."""

from pathlib import Path

import click

import replay
from replay.command_line import json_option, print_json, say
from replay.format import PINNED_FILE
from replay.printable import printable


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@json_option
def pin(trace: Path, as_json: bool) -> None:
    """Keep the tensors of a trace, whatever the quota of a daemon. May be repeated.

    Ends with 1 where it cannot be written to, and with 2 where there is no trace.
    """
    with replay.open(trace):
        try:
            if not (trace / PINNED_FILE).exists():
                (trace / PINNED_FILE).touch(exist_ok=False)  # it makes no file where a link leads
        except OSError as error:
            raise click.ClickException(f"{printable(trace)} cannot be pinned: {error.strerror}.") from None
    if as_json:
        print_json({"trace": str(trace), "pinned": True})
    else:
        say(f"{printable(trace)} is pinned: no quota drops its tensors", err=True)


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@json_option
def unpin(trace: Path, as_json: bool) -> None:
    """Let the quota of a daemon drop the tensors of a trace. May be repeated.

    Ends with 1 where it cannot be written to, and with 2 where there is no trace.
    """
    with replay.open(trace):
        try:
            (trace / PINNED_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise click.ClickException(f"{printable(trace)} cannot be unpinned: {error.strerror}.") from None
    if as_json:
        print_json({"trace": str(trace), "pinned": False})
    else:
        say(f"{printable(trace)} is not pinned", err=True)
