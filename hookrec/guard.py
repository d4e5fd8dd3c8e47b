"""How our code runs inside a training: timed, never raising, and silent once the recording is over."""

import threading
import time
from collections.abc import Callable
from typing import Any


class Guard:
    """Wraps whatever PyTorch calls of ours.

    Attributes:
        alive: whether the recording goes on.
        seconds: time that was spent in what is wrapped.
        aside: threads that are in a function of the user, in which ours are silent.
    """

    def __init__(self, fault: Callable[[Exception], None]) -> None:
        self.alive = True
        self.seconds = 0.0
        self.aside: set[int] = set()
        self.fault = fault

    def wrap(self, function: Callable[..., Any]) -> Callable[..., None]:
        """Return a hook that calls a function and returns None. What is wrapped must not call what is wrapped."""

        def call(*args: Any) -> None:
            self.call(function, *args)

        return call

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function; return what it returns, or None if it raised or the recording is over."""
        if not self.alive or (self.aside and threading.get_ident() in self.aside):
            return None
        begin = time.perf_counter()
        try:
            return function(*args)
        except Exception as error:
            self.fault(error)
            return None
        finally:
            self.seconds += time.perf_counter() - begin
