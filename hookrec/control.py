"""The end of a control socket that is in the training process.

A daemon thread waits at the socket. It answers what can be answered by looking, and leaves the rest to the training:
what changes something is done at the next step boundary, by the thread that trains, between two steps. So no lock is
held while the trainer computes, and a listener that nobody talks to costs a thread that sleeps. A client that wants to
know how its request went asks for it by number; nobody waits inside of the training.

Owned by the process that called `listen`: in a child that was forked the socket is closed, and stays the parent's.
"""

import atexit
import contextlib
import gc
import os
import platform
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hookrec.errors import HookrecError, warn
from hookrec.sockets import PROTOCOL, NoSocket, bind, check_peer, make_folder, receive, send
from hookrec.watch_import import ImportWatch

_READ_S = 2.0
_AGAIN_S = 0.01
_LINGER_S = 3.0
_ANSWERS = 64


def working_directory() -> str:
    """Return the working directory; an empty string if it has been removed."""
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:
        return ""


class Refused(HookrecError):
    """What was asked for cannot be done; says why."""


class Controlled(Protocol):
    """A recorder, as those who control it see it."""

    path: Path

    @property
    def active(self) -> bool:
        """Whether it records."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return what `hookrec status` shows of it."""
        ...

    def at_boundary(self, do: Callable[[], None]) -> None:
        """Call a function between two steps, on the thread that trains."""
        ...

    def change(self, changes: Mapping[str, Any]) -> str:
        """Change the plan; return what is different now."""
        ...

    def trigger(self, why: str) -> None:
        """Keep the tensors of the last steps and of the next ones."""
        ...

    def finish(self) -> Callable[[], None]:
        """Stop recording; return what waits until the trace is sealed."""
        ...


class Listener:
    """Listens at a socket, as long as somebody wants it."""

    def __init__(self) -> None:
        self._coming_and_going = threading.Lock()  # recorders end in threads and timers too
        self._recorders: list[Controlled] = []
        self._always = False
        self._socket: socket.socket | None = None
        self._path: Path | None = None
        self._pid = 0
        self._thread: threading.Thread | None = None
        self._since = 0.0
        self._wanted: deque[Callable[[], None]] = deque()
        self._answers: dict[int, dict[str, Any] | None] = {}
        self._count = 0
        self._stop_hearing: Callable[[], None] | None = None
        self._attaching: Any = None
        self._hearing = ImportWatch("torch.optim.optimizer", self._hear_steps)

    # Who wants it.

    def always(self) -> Path:
        """Listen until the process ends; return the socket.

        Raises:
            NoSocket: there is no place for one.
        """
        with self._coming_and_going:
            self._open()
            self._always = True
            assert self._path is not None
            return self._path

    def add(self, recorder: Controlled) -> None:
        """Listen for a recorder.

        Raises:
            NoSocket: there is no place for a socket.
        """
        with self._coming_and_going:
            self._open()
            self._recorders.append(recorder)

    def remove(self, recorder: Controlled) -> None:
        """Listen no longer for a recorder; the last one closes the socket."""
        with self._coming_and_going:
            if recorder not in self._recorders:
                return  # it has gone before; others may just be coming
            self._recorders.remove(recorder)
            if not self._recorders and not self._always:
                self.close()

    def _open(self) -> None:
        if self._socket is None:
            self._socket, self._path = bind(make_folder())
            self._pid = os.getpid()
            self._since = time.time()
            self._thread = threading.Thread(target=self._serve, args=(self._socket,), name="hookrec", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def close(self) -> None:
        """Close the socket and take its name away."""
        listening, self._socket = self._socket, None
        if listening is None or os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        self._always = False
        self._hearing.end()
        if self._stop_hearing is not None:
            self._stop_hearing()
            self._stop_hearing = None
        assert self._path is not None
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # this wakes the thread
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_READ_S)
        listening.close()

    def abandon(self) -> None:
        """Close the socket in a child that was forked; its name is the parent's."""
        listening, self._socket = self._socket, None
        if listening is not None:
            listening.close()
            atexit.unregister(self.close)
        self._hearing.end()

    # The thread.

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                if self._socket is not listening:
                    return
                time.sleep(1)  # no file descriptor was left, for example
                continue
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_READ_S)
                check_peer(connection)
                send(connection, self._answer(connection))

    def _answer(self, connection: socket.socket) -> dict[str, Any]:
        try:
            request = receive(connection)
            if request["hookrec"] > PROTOCOL:
                raise Refused(
                    f"This process speaks version {PROTOCOL} of the protocol; you speak {request['hookrec']}."
                )
            return {"ok": True, **self._take(request)}
        except (HookrecError, ValueError) as error:
            return {"ok": False, "error": str(error)}
        except OSError:
            raise
        except Exception as error:  # ours: it must end neither the thread nor the training
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def _take(self, request: dict[str, Any]) -> dict[str, Any]:
        command = request.get("command")
        if command == "status":
            return self.facts()
        if command == "result":
            number = request.get("number")
            if number not in self._answers:
                raise Refused(f"There is no request {number!r}.")
            return {"number": number, "result": self._answers[number]}
        if command == "attach":
            self._hearing.begin()
            path, options = _member(request, "path", str), _member(request, "options", dict)
            return self._queue(self._wanted.append, lambda number: self._attach(number, path, options))
        if command in ("set", "trigger", "detach"):
            recorder = self._chosen(request.get("trace"))
            do = getattr(self, f"_{command}")(recorder, request)
            return self._queue(
                recorder.at_boundary, lambda number: self._finish(number, lambda: _if_active(recorder, do))
            )
        raise Refused(f"There is no command {command!r}; there are status, set, trigger, detach, attach, result.")

    def _queue(self, queue: Callable[[Callable[[], None]], None], do: Callable[[int], None]) -> dict[str, Any]:
        self._count += 1
        number = self._count
        self._answers[number] = None
        for old in list(self._answers)[:-_ANSWERS]:
            del self._answers[old]
        queue(lambda: do(number))
        return {"number": number}

    def _chosen(self, trace: Any) -> Controlled:
        active = [recorder for recorder in self._recorders if recorder.active]
        found = [recorder for recorder in active if trace is None or str(recorder.path) == trace]
        if len(found) == 1:
            return found[0]
        there = ", ".join(str(recorder.path) for recorder in active)
        if not there:
            raise Refused("Nothing is being recorded in this process. Attach first: hookrec attach PID -o DIR")
        if trace is None:
            raise Refused(f"This process records into several traces: {there}. Choose one by --trace.")
        raise Refused(f"This process does not record into {trace}, but into {there}.")

    def facts(self) -> dict[str, Any]:
        """Return what `hookrec status` shows of the process."""
        return {
            "pid": os.getpid(),
            "command": sys.orig_argv,
            "cwd": working_directory(),
            "python": platform.python_version(),
            "torch": getattr(sys.modules.get("torch"), "__version__", None),
            "since": self._since,
            "recorders": [recorder.facts() for recorder in self._recorders if recorder.active],
            "waiting": [number for number, answer in self._answers.items() if answer is None],
        }

    # At a step boundary.

    def _finish(self, number: int, do: Callable[[], dict[str, Any]]) -> None:
        """Do what was asked for and keep the answer; nothing is raised into the training."""
        try:
            answer = {"ok": True, **do()}
        except Exception as error:
            why = str(error) if isinstance(error, HookrecError) else f"{type(error).__name__}: {error}"
            answer = {"ok": False, "error": why}
        self._answers[number] = answer

    def _set(self, recorder: Controlled, request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        changes = _member(request, "changes", dict)
        if not changes:
            raise Refused("There is nothing to change; say for example every=1 or layers='blk.3.*'.")
        return lambda: {"message": recorder.change(changes), "trace": str(recorder.path)}

    def _trigger(self, recorder: Controlled, request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        why = _member(request, "why", str)
        if recorder.facts()["plan"]["flight"] is None:
            raise Refused(
                f"The recorder of {recorder.path} has nothing to trigger: it keeps no past steps in memory. "
                "Attach with flight=5 to keep five."
            )

        def do() -> dict[str, Any]:
            recorder.trigger(why)
            return {"message": f"triggered: {why}", "trace": str(recorder.path)}

        return do

    def _detach(self, recorder: Controlled, request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        def do() -> dict[str, Any]:
            wait = recorder.finish()
            # The writer may have much to write yet, and the training must not wait for it.
            threading.Thread(target=wait, name="hookrec-detach").start()
            # Whoever has asked comes back for the answer.
            leave = threading.Timer(_LINGER_S, unheard, (recorder,))
            leave.daemon = True
            leave.start()
            return {"message": f"{recorder.path} is finished", "trace": str(recorder.path)}

        return do

    def _attach(self, number: int, path: str, options: dict[str, Any]) -> None:
        """Find the models that are trained, and attach when one of them is called next."""
        from hookrec.recorder import attach
        from hookrec.trained import FirstCall, Roots, optimizers_alive

        def begin(roots: Roots) -> None:
            self._attaching = None
            if self._stop_hearing is not None and not self._wanted:
                self._stop_hearing()
                self._stop_hearing = None

            def do() -> dict[str, Any]:
                attach(roots[""] if list(roots) == [""] else roots, path, **options)
                return {"message": f"recording into {path}", "trace": path}

            self._finish(number, do)

        def look() -> dict[str, Any]:
            if self._attaching is not None:
                raise Refused("Another request to attach waits for the next forward pass.")
            gc.collect()  # optimizers and models that are garbage are not what is trained
            self._attaching = FirstCall(begin)
            if not self._attaching.expect(optimizers_alive()):
                self._attaching = None
                raise Refused("No torch.nn.Module was found that has what the optimizers of this process train.")
            return {}

        self._finish(number, look)
        answer = self._answers[number]
        if answer is not None and answer["ok"]:
            self._answers[number] = None  # not before the model is called

    def _hear_steps(self) -> None:
        """Have steps of optimizers told to us, which are the boundaries while nothing is recorded.

        This may run in the middle of a step, on any thread: then it is tried again until nobody steps.
        """
        from hookrec.optimizer_hooks import after_step, somebody_steps

        def stepped(*args: object) -> None:
            while self._wanted:
                self._wanted.popleft()()

        def hear() -> bool:
            if somebody_steps():
                return False
            if self._stop_hearing is None and self._socket is not None:
                self._stop_hearing = after_step(stepped)
            return True

        def hear_later() -> None:
            while not hear():
                time.sleep(_AGAIN_S)

        if not hear():
            threading.Thread(target=hear_later, name="hookrec-later", daemon=True).start()


def _if_active(recorder: Controlled, do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if not recorder.active:
        raise Refused(f"The recording into {recorder.path} ended before that could be done.")
    return do()


def _member(request: dict[str, Any], name: str, kind: type) -> Any:
    value = request.get(name)
    if not isinstance(value, kind):
        raise Refused(f"The request needs {name!r}, which is missing or of another type.")
    return value


_listener = Listener()


def _forget() -> None:
    global _listener
    _listener.abandon()
    _listener = Listener()


os.register_at_fork(after_in_child=_forget)


def listen() -> None:
    """Let `hookrec status`, `attach`, `set`, `trigger` and `detach` reach this process, also while it records nothing.

    Costs a thread that sleeps. May be repeated. Where no socket can be made, one warning says so.
    """
    try:
        _listener.always()
    except OSError as error:
        warn(f"this process cannot be controlled from outside: {error}")


def heard(recorder: Controlled) -> str | None:
    """Let a recorder be controlled until `unheard`; return why that is not possible, if so."""
    if os.environ.get("HOOKREC_LISTEN") == "0":
        return None
    try:
        _listener.add(recorder)
    except (OSError, NoSocket) as error:
        return str(error)
    return None


def unheard(recorder: Controlled) -> None:
    """Let a recorder be controlled no longer."""
    _listener.remove(recorder)
