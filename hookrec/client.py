"""The end of a control socket that asks: finds the processes that listen, and waits for what they were asked to do."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hookrec.errors import HookrecError
from hookrec.sockets import check_folder, connect, folders, receive, remove_if_dead, send

_ANSWER_S = 5.0
_POLL_S = 0.05


class Unreachable(HookrecError):
    """The process does not listen, is gone, or is another user's."""


class NotYet(HookrecError):
    """The request was taken, and the training has not come to a step boundary in time."""


def listening() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the socket and the facts of each process of this user that listens; remove what dead ones have left."""
    for folder in folders():
        try:
            check_folder(folder)
            paths = sorted(folder.glob("*.sock"))
        except OSError:
            continue
        for path in paths:
            if not remove_if_dead(path):
                try:
                    facts = ask(path, {"command": "status"})
                except HookrecError as error:
                    facts = {"pid": path.name.partition(".")[0], "error": str(error), "recorders": []}
                yield path, facts


def ask(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request; return the answer.

    Raises:
        Unreachable: nobody answers.
        HookrecError: the answer is no.
    """
    try:
        with connect(path, _ANSWER_S) as connection:
            send(connection, request)
            answer = receive(connection)
    except (ConnectionRefusedError, FileNotFoundError):
        raise Unreachable(f"Nobody listens at {path} any more: the process has ended.") from None
    except TimeoutError:
        raise Unreachable(
            f"{path} does not answer within {_ANSWER_S:.0f} s: the process is stopped, or computes without ever "
            "letting another thread run."
        ) from None
    except PermissionError:
        raise Unreachable(f"{path} belongs to another user. Only the user who trains may control a training.") from None
    except (OSError, ValueError) as error:
        raise Unreachable(f"{path} does not answer as a training does: {error}") from None
    if not answer.get("ok"):
        raise HookrecError(str(answer.get("error", "The request was refused.")))
    return answer


def socket_of(pid: int) -> Path | None:
    """Return the socket of a process; None if it does not listen.

    Raises:
        Unreachable: there is no such process, or several that listen have the number.
    """
    found = [path for path, facts in listening() if path.name.partition(".")[0] == str(pid) and facts.get("pid")]
    if len(found) > 1:
        raise Unreachable(
            f"Several processes listen as {pid}, in containers of their own: {', '.join(map(str, found))}."
        )
    if found:
        return found[0]
    check_process(pid)
    return None


def check_process(pid: int) -> None:
    """Raise Unreachable unless there is a process of this number, and it is this user's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        raise Unreachable(f"There is no process {pid}. `hookrec status` lists those that listen.") from None
    except PermissionError:
        raise Unreachable(
            f"Process {pid} belongs to another user. Only the user who trains may control a training."
        ) from None


def do(path: Path, request: dict[str, Any], wait_s: float) -> dict[str, Any]:
    """Have something done at the next step boundary; return what came of it.

    Raises:
        NotYet: there was no boundary within `wait_s` seconds.
        Unreachable: the process ended meanwhile.
        HookrecError: it was refused.
    """
    number = ask(path, request)["number"]
    deadline = time.monotonic() + wait_s
    while True:
        result: dict[str, Any] | None = ask(path, {"command": "result", "number": number})["result"]
        if result is not None:
            if not result["ok"]:
                raise HookrecError(result["error"])
            return result
        if time.monotonic() > deadline:
            raise NotYet(
                f"The training has not come to the end of a step within {wait_s:g} s. The request waits there and "
                "will be done at the next one; `hookrec status` shows it under waiting."
            )
        time.sleep(_POLL_S)
