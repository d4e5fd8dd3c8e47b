"""The commands that reach into trainings: `status`, `set`, `trigger`, `detach`, `attach`.

They end with 0 when it was done, 1 when it was refused, 2 for wrong arguments, 3 when nobody can be reached (no such
process, no rights, socket gone), and 4 when the request was taken and no step has ended in time.
"""

import dataclasses
import inspect
import json
import os
import shlex
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

import replay
from hookrec.client import NotYet, Unreachable, do, listening, socket_of
from hookrec.errors import HookrecError
from hookrec.plan_options import changes_of, options_of, plan_options
from replay.command_line import json_option, print_json, say
from replay.errors import ReplayError
from replay.forecast import Forecast, forecast
from replay.printable import printable

_EXIT_CODES = (
    "Exit codes: 0 done, 1 refused, 2 wrong arguments, 3 cannot be reached, 4 taken, but no step ended in time."
)

pid_argument = click.argument("pid", type=click.IntRange(1, 2**31))
trace_option = click.option("--trace", type=click.Path(), help="Which recording, where the process has several.")
wait_option = click.option(
    "--wait", "wait_s", default=30.0, show_default=True, type=click.FloatRange(0), help="Seconds to wait for a step."
)


class _Failure(click.ClickException):
    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]


def _reaching(command: Callable[..., None]) -> Callable[..., None]:
    """Turn errors into one message and the exit code that is documented, and say the codes in the help."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        try:
            command(**arguments)
        except HookrecError as error:
            raise _Failure(
                str(error), 3 if isinstance(error, Unreachable) else 4 if isinstance(error, NotYet) else 1
            ) from None

    run.__doc__ = f"{inspect.cleandoc(command.__doc__ or '')}\n\n{_EXIT_CODES}"
    return run


@click.command()
@click.argument("pid", type=click.IntRange(1, 2**31), required=False)
@json_option
@_reaching
def status(pid: int | None, as_json: bool) -> None:
    """List the processes that listen, or one: what they record, how far they are, by which plan."""
    if pid is not None:
        path = _socket(pid)
    found = [facts for place, facts in listening() if pid is None or place == path]
    for recorder in (recorder for facts in found for recorder in facts.get("recorders", ())):
        expected = _forecast(Path(recorder["trace"]))
        recorder["forecast"] = dataclasses.asdict(expected) if expected and as_json else expected
    if as_json:
        print_json(found)
        return
    for facts in found:
        _print(facts)
    if not found:
        say("No process of yours listens. Start one by: hookrec run -o DIR SCRIPT", err=True)


def _forecast(trace: Path) -> Forecast | None:
    """What a recording costs; None where its trace cannot be read, as that of a process in another container."""
    try:
        return forecast(replay.open(trace))
    except (ReplayError, OSError):
        return None


def _print(facts: dict[str, Any]) -> None:
    command = shlex.join(facts.get("command", ()))
    say(f"{facts['pid']:<8}", bold=True, nl=False)
    say(printable(command if len(command) < 200 else f"{command[:197]}..."))
    if "error" in facts:
        say(f"{'':8}{facts['error']}")
        return
    for recorder in facts["recorders"]:
        say(f"{'':8}trace    {recorder['trace']}")
        age = f", this one for {recorder['step_s']:.1f} s" if recorder["step_s"] > 1 else ""
        say(f"{'':8}step     {recorder['step']:,}, {recorder['steps_per_s']:.3g} a second{age}")
        plan = recorder["plan"]
        shown = {name: plan[name] for name in ("layers", "kinds", "every", "tensors") if name in plan}
        shown |= {name: plan[name] for name in ("steps", "tensor_steps") if plan.get(name, ":") != ":"}
        words = [f"{n}={','.join(v) if isinstance(v, list) else str(v).lower()}" for n, v in shown.items()]
        words += [f"rules[{n}]={json.dumps(rule, ensure_ascii=False)}" for n, rule in enumerate(plan.get("rules", ()))]
        say(f"{'':8}plan     {' '.join(words)}")
        if recorder.get("forecast") is not None:
            say(f"{'':8}cost     {recorder['forecast']}")
        if recorder["tensors_stopped"]:
            say(f"{'':8}tensors  stopped: a limit on the disk was reached; see `replay info`")
    if not facts["recorders"]:
        minutes = (time.time() - facts["since"]) / 60
        say(f"{'':8}idle     for {minutes:.0f} min; hookrec attach {facts['pid']} -o DIR")
    if facts["waiting"]:
        say(f"{'':8}waiting  {len(facts['waiting'])} requests wait for the end of a step")


@click.command("set")
@pid_argument
@click.argument("assignments", nargs=-1, required=True)
@trace_option
@wait_option
@json_option
@_reaching
def set_(pid: int, assignments: tuple[str, ...], trace: str | None, wait_s: float, as_json: bool) -> None:
    """Change what is recorded from the next step on: hookrec set 4711 every=1 layers=a.*,b.*.

    ASSIGNMENTS may be of layers, containers, kinds, every, steps, tensors, tensor_steps, when_full and rules
    (rules='[{layers="a.*", tensors=false}]'). The change is noted in the trace.
    """
    changes = changes_of(assignments)
    _do(pid, {"command": "set", "changes": changes, "trace": _absolute(trace)}, wait_s, as_json=as_json)


@click.command()
@pid_argument
@click.argument("why")
@trace_option
@wait_option
@json_option
@_reaching
def trigger(pid: int, why: str, trace: str | None, wait_s: float, as_json: bool) -> None:
    """Have the steps that a recorder keeps in memory written, and say why."""
    _do(pid, {"command": "trigger", "why": why, "trace": _absolute(trace)}, wait_s, as_json=as_json)


@click.command()
@pid_argument
@trace_option
@wait_option
@json_option
@_reaching
def detach(pid: int, trace: str | None, wait_s: float, as_json: bool) -> None:
    """Stop a recording and seal its trace; the training goes on without us."""
    _do(pid, {"command": "detach", "trace": _absolute(trace)}, wait_s, as_json=as_json)


@click.command()
@pid_argument
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="Directory of the trace.")
@click.option("--debugger", type=click.Choice(("gdb", "lldb")), help="Which debugger to use, if one is needed.")
@click.option("--only-socket", is_flag=True, help="Never use a debugger; only reach processes that listen.")
@plan_options
@wait_option
@json_option
@_reaching
def attach(
    pid: int,
    out: Path,
    debugger: str | None,
    only_socket: bool,
    plan_file: Path | None,
    wait_s: float,
    as_json: bool,
    **given: Any,
) -> None:
    """Record a training that runs already, from its next forward pass on.

    A process that listens (hookrec run --idle, hookrec.listen(), HOOKREC_LISTEN=1) is asked by its socket. Any other
    CPython is made to listen first: from Python 3.14 on by sys.remote_exec, before by gdb or lldb, where the system
    permits it.
    """
    options = options_of(plan_file, given)
    path = socket_of(pid)
    if path is None:
        from hookrec.inject import make_listen

        if only_socket:
            raise Unreachable(f"Process {pid} does not listen, and --only-socket forbids to make it.")
        path = make_listen(pid, wait_s, debugger, lambda line: say(line, err=True))
    request = {"command": "attach", "path": os.path.abspath(out), "options": options}
    _say(pid, do(path, request, wait_s), as_json=as_json)


def _socket(pid: int) -> Path:
    path = socket_of(pid)
    if path is None:
        raise Unreachable(
            f"Process {pid} runs and does not listen. It listens while hookrec records, under `hookrec run --idle`, "
            f"after hookrec.listen(), and once `hookrec attach {pid} -o DIR` has reached it."
        )
    return path


def _do(pid: int, request: dict[str, Any], wait_s: float, *, as_json: bool) -> None:
    _say(pid, do(_socket(pid), request, wait_s), as_json=as_json)


def _say(pid: int, done: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json({"pid": pid, "trace": done.get("trace"), "message": done["message"]})
    else:
        say(done["message"])


def _absolute(trace: str | None) -> str | None:
    return None if trace is None else os.path.abspath(trace)
