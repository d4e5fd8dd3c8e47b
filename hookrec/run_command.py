"""`hookrec run`: checks what can be checked, then becomes the interpreter that runs the script."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from hookrec.plan_options import options_of, plan_options


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    short_help="Record a script, unchanged.",
)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Directory of the trace; must be new or empty.")
@click.option("--resume", is_flag=True, help="Go on in the trace at --out after its last step, or begin it.")
@click.option("--resume-at", type=click.IntRange(0, 2**62), metavar="STEP", help="The same, from this step on.")
@click.option("-m", "module", is_flag=True, help="TARGET is a module, as for python -m.")
@click.option("--idle", is_flag=True, help="Record nothing; only listen for `hookrec attach`.")
@click.option("-q", "--quiet", is_flag=True, help="Do not say at the end what was recorded.")
@plan_options
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    out: Path | None,
    module: bool,
    idle: bool,
    quiet: bool,
    resume: bool,
    resume_at: int | None,
    plan_file: Path | None,
    target: str,
    arguments: tuple[str, ...],
    **given: Any,
) -> None:
    """Run a script as `python TARGET ARGUMENTS...` would, and record the models that its optimizers train.

    The options of this command come before TARGET. The exit code is the script's; it is 2 if the script was not begun.
    Ranks: torchrun --nproc-per-node 2 -m hookrec run -o DIR TARGET.
    """
    if target.startswith("-"):
        raise click.UsageError(f"There is no option {target}. Options come before the script.")
    if idle == (out is not None):
        raise click.UsageError("Say where to with -o DIR, or --idle to record nothing for now.")
    if idle and (plan_file is not None or any(value not in (None, ()) for value in given.values())):
        raise click.UsageError("--idle records nothing, so it takes no plan; give it to `hookrec attach PID`.")
    if resume and resume_at is not None:
        raise click.UsageError("--resume goes on after the last step, --resume-at from a step on; choose one.")
    going_on = resume or resume_at is not None
    if idle and going_on:
        raise click.UsageError("--idle records nothing, so it resumes nothing.")
    options = {} if idle else usage(options_of, plan_file, given)
    if going_on:
        options["resume"] = True if resume_at is None else resume_at
    if out is not None:
        _check_out(out, going_on=going_on)
    if not module and not Path(target).exists():
        hint = "" if target.endswith(".py") else f" For a module: hookrec run -m {target}"
        raise click.UsageError(f"There is no script {target}.{hint}")
    task = {
        "path": None if out is None else os.path.abspath(out),
        "options": options,
        "module": module,
        "quiet": quiet,
        "listen": os.environ.get("HOOKREC_LISTEN") != "0",
    }
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, *interpreter_flags(), str(Path(__file__).with_name("start_run.py")), target, *arguments]
    os.execve(sys.executable, command, {**os.environ, "HOOKREC_RUN": json.dumps(task)})


def usage(function: Any, *arguments: Any) -> Any:
    """Call a function whose refusal is a wrong use of the command."""
    try:
        return function(*arguments)
    except click.ClickException as error:
        raise click.UsageError(error.message) from None


def _check_out(out: Path, *, going_on: bool) -> None:
    """Refuse before the script begins what `attach` would refuse later; ranks find the folders of others there."""
    if out.exists() and not out.is_dir():
        raise click.UsageError(f"{out} is a file. A trace is a directory: choose another path.")
    if out.is_dir() and any(out.iterdir()) and "RANK" not in os.environ and not going_on:
        raise click.UsageError(
            f"{out} is not empty. Choose a new directory, remove that one first, or go on in it by --resume."
        )
    above = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        raise click.UsageError(f"{out} cannot be made: {above} cannot be written to.")


def interpreter_flags() -> list[str]:
    """The options of the interpreter that runs us, such as -u or -X dev, which are meant for the script."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    return before[:-2] if before[-2:-1] == ["-m"] else before[:-1]
