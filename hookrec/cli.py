"""The command `hookrec`: what is done to trainings and their traces."""

import sys
from pathlib import Path

import click

import replay
from replay.command_line import Commands, json_option, print_json, say
from replay.seal import is_locked, is_sealed, locked, seal_abandoned

_ELSEWHERE = {
    "attach": "hookrec.control_commands:attach",
    "convert": "hookrec.convert_command:convert_trace",
    "daemon": "hookrec.daemon_command:daemon",
    "detach": "hookrec.control_commands:detach",
    "estimate": "hookrec.estimate_command:estimate",
    "pin": "hookrec.pin_command:pin",
    "rerun": "hookrec.rerun_command:rerun_layers",
    "run": "hookrec.run_command:run",
    "set": "hookrec.control_commands:set_",
    "status": "hookrec.control_commands:status",
    "tensorboard": "hookrec.integrations.tensorboard:command",
    "trigger": "hookrec.control_commands:trigger",
    "unpin": "hookrec.pin_command:unpin",
}

_EXIT = """\b
Exit status of all commands, and what more some have is in their help:
  0  it was done
  1  it was refused, or failed on the way
  2  wrong use, or a trace that cannot be read"""


@click.group(cls=Commands, elsewhere=_ELSEWHERE, epilog=_EXIT)
@click.version_option(package_name="hookrec")
def main() -> None:
    """Record PyTorch trainings. In a script: hookrec.attach(model, "runs/a"). To read a trace: replay info runs/a."""


@main.command()
@click.argument("trace", type=click.Path(path_type=Path))
@json_option
def recover(trace: Path, as_json: bool) -> None:
    """Seal a trace whose writer was killed, or whose machine went down.

    Each committed step stays as it is. May be repeated.
    """
    opened = replay.open(trace)
    found = {}
    for number, directory in sorted(opened.directories.items()):
        found[number] = _recovered(directory)
        if not as_json:
            say(f"rank {number} is {_IN_WORDS[found[number]]}")
    steps = opened.refresh().steps
    if as_json:
        ranks = [{"rank": number, "found": state} for number, state in found.items()]
        ends = {"first_step": steps[0], "last_step": steps[-1]} if steps else {"first_step": None, "last_step": None}
        print_json({"trace": str(trace), "ranks": ranks, "steps": len(steps), **ends})
        return
    say(f"{trace} has {len(steps)} committed steps{f', {steps[0]} to {steps[-1]}' if steps else ''}")


_IN_WORDS = {
    "sealed": "sealed already",
    "live": "being recorded; its writer will seal it",
    "torn": "recovered",
}


def _recovered(directory: Path) -> str:
    """Seal a rank if its writer is gone; return what it was: sealed, live or torn."""
    if is_sealed(directory):
        return "sealed"
    if is_locked(directory):
        return "live"
    try:
        with locked(directory):
            seal_abandoned(directory, "the writer was gone; sealed afterwards from the log", durable=True)
    except BlockingIOError:
        return "live"
    except OSError as error:
        raise click.ClickException(f"{directory} cannot be sealed: {error}.") from None
    return "torn"


if __name__ == "__main__":
    sys.exit(main())
