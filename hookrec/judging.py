"""How the daemon runs rules over a trace that grows: how often, over which steps, and without reading them again.

Rules run in another thread, on what the daemon has read anyway (`replay.recent`). How often is decided over all traces
together: what one training may have, fifty may not.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

import replay
from hookrec.findings import Check, Finding, as_alert
from replay.grid import BACKGROUND
from replay.recent import Known, Window, known_steps

_BETWEEN_S = 1.0
_SHARE = 0.1
_TROUBLE_REST_S = 30.0


class Pace:
    """How often rules are run over a trace: once a second at most, and over all traces in a tenth of a core."""

    def __init__(self) -> None:
        self._took: dict[Path, float] = {}

    def took(self, path: Path, seconds: float) -> None:
        """Learn what the last run over a trace took, in seconds of a core."""
        self._took[path] = seconds

    def forget(self, path: Path) -> None:
        """Forget a trace over which they are run no more."""
        self._took.pop(path, None)

    def next(self, began: float) -> float:
        """Return when they may be run again over a trace.

        Args:
            began: when they were last, in seconds.

        Returns:
            A whole number of seconds, so that the traces that are due then are looked at in one round.
        """
        wait_s = max(_BETWEEN_S, sum(self._took.values()) / _SHARE)
        return math.ceil((began + wait_s) / _BETWEEN_S) * _BETWEEN_S


class Judge:
    """Runs rules over one trace. Owned by the daemon's thread.

    Args:
        path: the trace.
        trace_id: its id.
        check: the rules.
        pace: says how often.
        wake: is called from another thread when they have found something new.
        unchecked: the first step that they have not seen; None if there is none.
        from_the_beginning: whether all records of the trace are still to come.
    """

    def __init__(
        self,
        path: Path,
        trace_id: str,
        check: Check,
        pace: Pace,
        wake: Callable[[], None],
        *,
        unchecked: int | None,
        from_the_beginning: bool,
    ) -> None:
        self._path = path
        self._trace_id = trace_id
        self._check = check
        self._pace = pace
        self._wake = wake
        self._unchecked = unchecked
        self._window = Window()
        self._window.begin(at_the_beginning=from_the_beginning)
        self._running: tuple[Future[_Judged], int, float] | None = None
        self._next = -math.inf

    @property
    def unchecked(self) -> int | None:
        """The first step of which it is not known what the rules find."""
        return self._unchecked if self._running is None else self._running[1]

    def add(self, records: pa.Table) -> None:
        """Take new records, of one rank."""
        first = int(np.min(records["step"].to_numpy()))
        self._unchecked = first if self._unchecked is None else min(self._unchecked, first)
        self._window.add(records)

    def start(self, now: float, executor: Executor, directories: Mapping[int, Path], known: Collection[str]) -> None:
        """Run the rules, if there is something new and it is time.

        Args:
            now: in seconds.
            executor: runs them.
            directories: of the ranks.
            known: ids of the alerts that are no news.
        """
        since = self._unchecked
        if since is None or self._running is not None or now < self._next:
            return
        trace = self._window.recent(self._path, directories, since, BACKGROUND) or self._path
        future = executor.submit(_judge, self._check, trace, since, self._window.first_step)
        self._unchecked, self._running = None, (future, since, now)

        def tell(done: "Future[_Judged]") -> None:
            if self._is_news(done, known):  # else the next round is soon enough
                self._wake()

        future.add_done_callback(tell)

    def _is_news(self, done: "Future[_Judged]", known: Collection[str]) -> bool:
        if done.cancelled() or done.exception() is not None:
            return not done.cancelled()
        return any(as_alert(finding, self._trace_id, "").id not in known for finding in done.result().findings)

    def collect(self, now: float) -> list[Finding]:
        """Return what the rules found, if they are done.

        Raises:
            Exception: a rule's. They are run again over the same steps, after a rest.
        """
        if self._running is None or not self._running[0].done():
            return []
        future, since, began = self._running
        self._running = None
        try:
            judged = future.result()
        except Exception:
            self._unchecked = since if self._unchecked is None else min(since, self._unchecked)
            self._next = now + _TROUBLE_REST_S
            raise
        if judged.known is not None:
            self._window.learn(judged.known)
        self._pace.took(self._path, judged.took_s)
        self._next = self._pace.next(began)
        return judged.findings

    def wait_s(self, now: float) -> float:
        """Return after how many seconds the rules should be started; infinite if there is nothing for them yet."""
        return math.inf if self._unchecked is None else max(0.0, self._next - now)


@dataclass(frozen=True)
class _Judged:
    """What rules found, the seconds of a core that took, and what the trace has if it was opened for that."""

    findings: list[Finding]
    took_s: float
    known: Known | None


def _judge(check: Check, trace: Path | replay.Trace, since: int, first: int) -> _Judged:
    began = time.thread_time()
    with replay.open(trace) if isinstance(trace, Path) else trace as found:
        findings = list(check(found, since))
        known = known_steps(found, first) if isinstance(trace, Path) else None
    return _Judged(findings, time.thread_time() - began, known)
