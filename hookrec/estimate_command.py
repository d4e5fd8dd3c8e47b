"""`hookrec estimate`: runs a script for a few steps, and says what recording it by a plan would write.

The script runs as under `hookrec run`, recorded by its statistics into a folder that is removed afterwards. When the
steps are done the training thread gets a SystemExit out of the end of the step, as if the script had called `sys.exit`
there: files are closed, workers of loaders ended. Whatever holds on to it after that, as a script that catches it or
trains in a thread, is killed with the processes that it has started.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

import replay
from hookrec.estimate import HORIZON, Cost, Measured, measured
from hookrec.plan import plan_of
from hookrec.plan_options import options_of, plan_options
from hookrec.run_command import interpreter_flags, usage
from replay.command_line import json_option, print_json, print_rows, say
from replay.errors import ReplayError
from replay.forecast import duration, size
from replay.ranks import ranks_of
from replay.seal import is_locked, is_sealed

_RECORDED = ("layers", "containers", "kinds", "ops", "clock", "transform")
"""What of a plan decides which records there are."""

_LEAVE_S = 10.0
_POLL_S = 0.05


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    short_help="Say what recording a script would cost.",
)
@click.option("-n", "--run-steps", default=3, show_default=True, type=click.IntRange(1, 10**6), help="Steps to run.")
@click.option(
    "-o",
    "--out",
    default=Path(),
    type=click.Path(path_type=Path),
    help="Where the trace would lie, for the free space; nothing is written there.  [default: here]",
)
@click.option("-m", "module", is_flag=True, help="TARGET is a module, as for python -m.")
@json_option
@plan_options
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def estimate(
    run_steps: int,
    out: Path,
    module: bool,
    as_json: bool,
    plan_file: Path | None,
    target: str,
    arguments: tuple[str, ...],
    **given: Any,
) -> None:
    """Run a script for some steps, and say what recording it by a plan would write, by layer and kind.

    Options are those of `hookrec run`, before TARGET. The training is stopped after the steps, as by sys.exit(), and is
    not continued; what the script itself writes stays. Its output goes to standard error. Figures are those of a step
    whose tensors are kept, before compression.

    Exit status: 0 the figures are printed, 1 no step was recorded, 2 wrong use.
    """
    if target.startswith("-"):
        raise click.UsageError(f"There is no option {target}. Options come before the script.")
    if not module and not Path(target).exists():
        raise click.UsageError(f"There is no script {target}.")
    options = usage(options_of, plan_file, given)
    plan = plan_of(**options)
    # By os.path, which takes a name that is too long for one that is not there.
    place = next(parent for parent in (out.absolute(), *out.absolute().parents) if os.path.isdir(parent))  # noqa: PTH112
    recorded = {name: value for name, value in options.items() if name in _RECORDED}
    with tempfile.TemporaryDirectory(prefix="hookrec-estimate-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "trace"
        task = {
            "path": str(path),
            "options": {**recorded, "tensors": False, "ring": "16MB"},
            "module": module,
            "quiet": True,
            "listen": False,
            "stop_after": run_steps,
        }
        status = _run([target, *arguments], task, path)
        try:
            found = measured(replay.open(path))
        except ReplayError:
            found = None
    if found is None:
        raise click.ClickException(
            f"No step of {target} was recorded; it ended with status {status}. What it said is above. Does it train "
            "by a torch optimizer? `hookrec run` says why nothing is recorded."
        )
    lines, costs = found.lines(plan), found.costs(plan, place)
    if as_json:
        layers = [dataclasses.asdict(line) for line in lines]
        facts = {"steps": found.steps, "step_s": found.step_s, "layers": layers}
        print_json({**facts, "plans": [dataclasses.asdict(cost) for cost in costs]})
        return
    print_rows([dataclasses.asdict(line) for line in lines], as_json)
    say()
    print_rows([_row(cost) for cost in costs], as_json)
    say()
    for line in _notes(found, options):
        say(line)


def _row(cost: Cost) -> dict[str, Any]:
    ends = "" if cost.ends_in_s is None else f"{duration(cost.ends_in_s)}, by {cost.ends_by}"
    return {
        "plan": cost.plan,
        "records a step": f"{cost.records:,.6g}",
        "tensors a step": size(cost.step_bytes),
        "tensors a second": size(cost.bytes_per_s),
        "log a second": size(cost.log_bytes_per_s),
        "lasts": ends,
    }


def _notes(found: Measured, options: dict[str, Any]) -> list[str]:
    notes = [f"Of {found.steps} steps; a step took {found.step_s:.3g} s with statistics recorded."]
    if {"steps", "tensor_steps"} & options.keys():
        notes.append(f"Rates are means over steps 0 to {HORIZON - 1:,} of the schedule.")
    if options.get("compression"):
        notes.append("Bytes are those before compression.")
    if options.get("flight") is not None:
        notes.append("In flight mode tensors stay in memory, and reach the disk around triggers alone.")
    return notes


def _run(command: list[str], task: dict[str, Any], path: Path) -> int:
    """Run the script until its steps are done; return its status. Nothing of it runs afterwards."""
    start = str(Path(__file__).with_name("start_run.py"))
    environment = {**os.environ, "HOOKREC_RUN": json.dumps(task), "HOOKREC_LISTEN": "0"}
    sys.stdout.flush()
    process = subprocess.Popen(
        [sys.executable, *interpreter_flags(), start, *command],
        env=environment,
        stdout=2,  # our own output is the answer
        start_new_session=True,
    )
    try:
        done_at = None
        while process.poll() is None:
            if done_at is None and any(map(is_sealed, _ranks(path))):
                done_at = time.monotonic()
            if done_at is not None and time.monotonic() - done_at > _LEAVE_S:
                break
            time.sleep(_POLL_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        until = time.monotonic() + _LEAVE_S
        while any(map(is_locked, _ranks(path))) and time.monotonic() < until:  # the writer seals what is whole
            time.sleep(_POLL_S)
    return status


def _ranks(path: Path) -> list[Path]:
    return list(ranks_of(path).values()) if path.is_dir() else []
