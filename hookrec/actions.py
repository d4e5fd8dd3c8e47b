"""What an alert may do to its training: keep the steps around it, record otherwise, or end it.

An action is a way to send an alert, like a webhook: it has a queue, is tried again, and is marked in the trace when it
is done. The training is found by the control sockets of this user on this machine: of those who listen, whoever
records into the trace. It is done to each of them, since each rank of a training is one.
"""

import json
import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hookrec.client import NotYet, do, listening
from hookrec.delivery import NotSent, Send
from hookrec.errors import AttachError, DaemonError, HookrecError
from hookrec.journal import Journal
from hookrec.plan import Plan
from hookrec.sockets import connect, peer_of

_STEP_S = 5.0

_Do = Callable[[Path, str, str], None]
"""Does it to one process: its socket, the trace as it calls it, and why."""


def action(line: str, journal: Journal) -> Send:
    """Return a way to send an alert: it does something to the training that the alert is about.

    Args:
        line: "trigger", "stop", "detach", or "set" with assignments, such as "set every=1 layers=blocks.*".
        journal: is told what was done.

    Raises:
        DaemonError: there is no such action.
    """
    act = _act(line)

    def send(document: bytes) -> None:
        alert = json.loads(document)
        trace = Path(alert["trace"])
        found = [(path, name) for path, name in _recorders() if _same(Path(name), trace)]
        if not found:
            raise NotSent(
                f"'{line}' cannot be done: no process of this user and machine records into it", for_good=True
            )
        for path, name in found:
            try:
                act(path, name, f"{alert['rule']}: {alert['message']}")
            except NotYet:
                pass  # the training has it, and does it at its next step
            except (HookrecError, OSError) as error:
                raise NotSent(f"'{line}' was not done: {error}") from None
        journal.say("action", f"{trace}: {line}, because of {alert['rule']}", trace=str(trace), alert=alert["id"])

    return send


def _act(line: str) -> _Do:
    try:
        verb, *rest = shlex.split(line) or [""]
    except ValueError as error:
        raise DaemonError(f"--then … {line!r} cannot be split into words: {error}.") from None
    if verb == "set" and rest:
        changes = _changes(line, rest)
        return lambda path, trace, why: _ask(path, {"command": "set", "changes": changes, "trace": trace})
    if verb == "trigger" and not rest:
        return lambda path, trace, why: _ask(path, {"command": "trigger", "why": why, "trace": trace})
    if verb == "detach" and not rest:
        return lambda path, trace, why: _ask(path, {"command": "detach", "trace": trace})
    if verb == "stop" and not rest:
        return lambda path, trace, why: _stop(path)
    raise DaemonError(
        f"--then … {line!r} is no action; there are 'trigger', 'set NAME=VALUE …', 'detach' and 'stop' (SIGTERM)."
    )


def _changes(line: str, assignments: list[str]) -> dict[str, Any]:
    import click

    from hookrec.plan_options import changes_of

    try:
        changes = changes_of(tuple(assignments))
        Plan().changed(changes)
    except (click.ClickException, AttachError) as error:
        words = error.message if isinstance(error, click.ClickException) else str(error)
        raise DaemonError(f"--then … {line!r}: {words}") from None
    return changes


def _ask(path: Path, request: dict[str, Any]) -> None:
    do(path, request, _STEP_S)


def _stop(path: Path) -> None:
    with connect(path, _STEP_S) as connection:
        pid = peer_of(connection)  # as this process would say it, not a number of a container's
    os.kill(pid, signal.SIGTERM)


def _recorders() -> list[tuple[Path, str]]:
    return [(path, str(recorder["trace"])) for path, facts in listening() for recorder in facts["recorders"]]


def _same(one: Path, other: Path) -> bool:
    try:
        return one == other or one.samefile(other)
    except OSError:
        return False
