"""Signals as triggers, without changing what they do.

Our handler notes the signal and then does what the handler before it would have done: it calls that one, or lets the
system's default happen. A signal that ends the process is a trigger by itself, since the writer sees the death.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from hookrec.errors import AttachError

_NO_HANDLER = ("SIGKILL", "SIGSTOP")


class Signals:
    """Watches signals until it is closed.

    Args:
        names: such as "SIGUSR1"; `check` has seen them.
        report: is called with a name, in the main thread, between any two instructions of Python.
    """

    def __init__(self, names: Sequence[str], report: Callable[[str], None]) -> None:
        self._report = report
        self._open = True
        self._before: dict[int, Any] = {}
        self._handler = self._handle  # one object, to be recognised later
        for name in names:
            number = getattr(signal, name)
            self._before[number] = signal.signal(number, self._handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._open:
            self._report(signal.Signals(number).name)
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and number not in (signal.SIGUSR1, signal.SIGUSR2):
            # The default of the two is death, which nobody who asks for them as triggers means.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            if self._open:  # it was not the end: SIGCONT, SIGCHLD, SIGWINCH
                signal.signal(number, self._handler)

    def close(self) -> None:
        """Put the handlers back that were there, where ours are on top."""
        self._open = False
        for number, before in self._before.items():
            if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is self._handler:
                signal.signal(number, before if before is not None else signal.SIG_DFL)


def check(names: Sequence[str]) -> None:
    """Raise AttachError where a signal cannot be watched."""
    known = sorted(one.name for one in signal.Signals if one.name not in _NO_HANDLER)
    for name in names:
        if name not in known:
            raise AttachError(f"There is no signal {name!r} that can be caught; there are {', '.join(known)}.")
        if signal.getsignal(getattr(signal, name)) is None:
            raise AttachError(f"Signal {name} has a handler that was not installed by Python, and would be lost.")
    if names and threading.current_thread() is not threading.main_thread():
        raise AttachError("Signals can be watched from the main thread alone; attach there, or leave signals out.")
