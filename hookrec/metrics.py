"""What the daemon knows, as metrics for Prometheus: which there are, and how many series they may become.

A series is a trace, or a trace and a rule; never a layer, of which a model has hundreds, nor a step. Traces that were
sealed more than an hour ago are only counted, and of the others at most `MOST` have series of their own, the youngest
first. Everything is read from the traces when somebody asks, in the thread that answers, so that the daemon's rounds do
not wait; two that ask within a few seconds get the same answer.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hookrec.errors import DaemonError
from replay.alerts import read_alerts
from replay.catalog import Entry, entry_of
from replay.documents import read_end
from replay.errors import ReplayError
from replay.format import END_FILE
from replay.printable import printable
from replay.ranks import ranks_of

MOST = 500
STATES = ("live", "died", "sealed", "damaged")
_AGAIN_S = 5.0
_NEWS_S = 3600.0


@dataclass
class Pulse:
    """How the daemon's rounds go. Written by its thread, read by any.

    Attributes:
        rounds: how many were done.
        seconds: what they took together.
        last_s: what the last one took.
        ended: when it ended, on the clock that only goes forward.
    """

    rounds: int = 0
    seconds: float = 0.0
    last_s: float = 0.0
    ended: float = field(default_factory=time.monotonic)

    def beat(self, began: float) -> None:
        """Take note of a round that has ended."""
        self.ended = time.monotonic()
        self.last_s = self.ended - began
        self.seconds += self.last_s
        self.rounds += 1


@contextlib.contextmanager
def served(where: str, root: Path, traces: Callable[[], Sequence[Path]], pulse: Pulse) -> Iterator[str]:
    """Answer at an address, in a thread, until the block is left.

    Args:
        where: host and port, such as "127.0.0.1:9464"; port 0 is one that is free.
        root: the daemon's folder.
        traces: returns the traces below it. Called in the threads that answer.
        pulse: of the daemon.

    Yields:
        The address.

    Raises:
        DaemonError: it is no address or is taken, or `prometheus_client` is not installed.
    """
    host, port = _address(where)
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise DaemonError(
            "--metrics needs prometheus_client, which is not installed: pip install 'hookrec[metrics]'"
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(root, traces, pulse))
    try:
        server, thread = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        raise DaemonError(f"--metrics {where} cannot be served: {error}. Choose another address.") from None
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _address(where: str) -> tuple[str, int]:
    host, colon, port = where.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise DaemonError(f"--metrics {where!r} is no address; it is a host and a port, such as 127.0.0.1:9464.")
    return host, int(port)


@dataclass(frozen=True)
class _Facts:
    entry: Entry
    state: str
    alerts: Counter[str]
    old: bool


class _Collector:
    """Answers `prometheus_client`, which calls `collect` for each request."""

    def __init__(self, root: Path, traces: Callable[[], Sequence[Path]], pulse: Pulse) -> None:
        self._root = root
        self._traces = traces
        self._pulse = pulse
        self._reading = threading.Lock()
        self._read: list[_Facts] = []
        self._read_at = float("-inf")

    def collect(self) -> Iterator[Any]:
        """Yield the metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        facts = self._facts()
        shown = sorted((one for one in facts if not one.old), key=lambda one: one.entry.created or "", reverse=True)
        states = Counter(one.state for one in facts)
        family = GaugeMetricFamily("hookrec_traces", "Traces below the root, by state.", labels=["state"])
        for state in STATES:
            family.add_metric([state], states[state])
        yield family
        yield GaugeMetricFamily(
            "hookrec_traces_without_series",
            "Traces that have no series of their own: sealed long ago, or too many.",
            value=len(facts) - len(shown[:MOST]),
        )
        for name, words, member in (
            ("steps", "Committed steps.", "steps"),
            ("records", "Committed records.", "records"),
            ("tensor_bytes", "Bytes of the tensors that are there.", "bytes"),
        ):
            family = GaugeMetricFamily(f"hookrec_trace_{name}", words, labels=["trace"])
            for one in shown[:MOST]:
                if (number := getattr(one.entry, member)) is not None:
                    family.add_metric([_label(one.entry.name)], number)
            yield family
        family = GaugeMetricFamily("hookrec_trace_state", "1 for the state of the trace.", labels=["trace", "state"])
        for one in shown[:MOST]:
            for state in STATES:
                family.add_metric([_label(one.entry.name), state], state == one.state)
        yield family
        family = GaugeMetricFamily("hookrec_trace_alerts", "Alerts, by rule.", labels=["trace", "rule"])
        for one in shown[:MOST]:
            for rule, count in one.alerts.items():
                family.add_metric([_label(one.entry.name), _label(rule)], count)
        yield family
        pulse = self._pulse
        yield CounterMetricFamily("hookrec_daemon_rounds", "Rounds over the traces.", value=pulse.rounds)
        yield CounterMetricFamily("hookrec_daemon_round_seconds", "Time that all rounds took.", value=pulse.seconds)
        yield GaugeMetricFamily("hookrec_daemon_last_round_seconds", "Time that the last took.", value=pulse.last_s)
        yield GaugeMetricFamily(
            "hookrec_daemon_lag_seconds",
            "Time since the last round ended; what was committed since has not been looked at.",
            value=time.monotonic() - pulse.ended,
        )

    def _facts(self) -> list[_Facts]:
        with self._reading:
            if time.monotonic() - self._read_at > _AGAIN_S:
                self._read = [_facts_of(trace, self._root) for trace in self._traces()]
                self._read_at = time.monotonic()
            return self._read


def _facts_of(trace: Path, root: Path) -> _Facts:
    entry = entry_of(trace, root)
    state = {"torn": "died"}.get(entry.status, entry.status)
    alerts: Counter[str] = Counter()
    old = False
    try:
        alerts.update(alert.rule for alert in read_alerts(trace))
        if state == "sealed":
            ranks = ranks_of(trace).values()
            if any((end := read_end(rank)) is not None and end["how"] != "detached" for rank in ranks):
                state = "died"
            old = all(time.time() - (rank / END_FILE).stat().st_mtime > _NEWS_S for rank in ranks)
    except (OSError, ReplayError):
        pass  # the entry says what is wrong, or the trace has gone meanwhile
    return _Facts(entry, state, alerts, old)


def _label(text: str) -> str:
    """A label of one line that is not too long; a name of odd bytes is no UTF-8, which the protocol wants."""
    return printable(text) if len(text) <= 200 else f"{printable(text)[:199]}…"
