"""How alerts lie beside a trace: `alerts.jsonl`, and in `alerts-sent.jsonl` which were sent on, and by which way.

An alert is there once: its id is made of what it is about, and whoever appends looks first, with the file locked. What
is told apart are the lines of a file, so a line that a crash has cut off is taken away before the next is written.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay.errors import TraceDamaged
from replay.format import ALERTS_FILE, SENT_FILE, parsed, whole_lines

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
"""A link in a trace of a stranger must not lead a daemon to a file of its owner, which would be cut and added to."""

_LONGEST = 4000  # characters of a text: the one line must stay readable, and go through a webhook


@dataclass(frozen=True)
class Alert:
    """What a rule found, as it is kept and sent.

    Attributes:
        id: 16 hexadecimal digits, the same for the same (trace, rule, rank, layer, kind).
        time: when it was found (RFC 3339).
        trace_id: `id` of `trace.json`.
        rule: the name of the rule, or the condition.
        severity: "error" or "warning".
        rank: which process; None where it is no single one.
        layer: qualified module name; None where it is no single one.
        kind: kind of the records; None where it is no single one.
        first_step: the first step that it is about.
        last_step: the last that was seen when it was found.
        message: what was found.
        advice: what to do about it.
    """

    id: str
    time: str
    trace_id: str
    rule: str
    severity: str
    rank: int | None
    layer: str | None
    kind: str | None
    first_step: int | None
    last_step: int | None
    message: str
    advice: str


def alert_id(trace_id: str, rule: str, rank: int | None, layer: str | None, kind: str | None) -> str:
    """Return the id by which an alert is never repeated."""
    about = json.dumps([trace_id, rule, rank, layer, kind])
    return hashlib.sha256(about.encode()).hexdigest()[:16]


def read_alerts(trace: Path) -> list[Alert]:
    """Return the alerts of a trace, in the order in which they were found.

    Raises:
        TraceDamaged: a line is no alert.
    """
    path = trace / ALERTS_FILE
    names = [field.name for field in dataclasses.fields(Alert)]
    found = []
    for number, line in enumerate(_lines(path), 1):
        try:
            members = parsed(line)
            alert = Alert(**{name: members[name] for name in names})
            _check(alert)
        except (ValueError, KeyError, TypeError) as error:
            raise TraceDamaged(f"Line {number} of {path} is no alert: {error!r}. Remove it, or the file.") from None
        found.append(alert)
    return found


def count_alerts(trace: Path) -> int:
    """Return how many alerts a trace has; they are not looked at."""
    return len(_lines(trace / ALERTS_FILE))


def read_sent(trace: Path) -> set[tuple[str, str]]:
    """Return what was sent on: pairs of an alert's id and the way."""
    found = set()
    for line in _lines(trace / SENT_FILE):
        try:
            members = parsed(line)
            found.add((str(members["id"]), str(members["to"])))
        except (ValueError, KeyError, TypeError):
            continue  # the alert is then sent again, which is the lesser evil
    return found


class AlertFile:
    """Appends alerts to a trace, each once.

    Args:
        trace: the directory of the trace.
    """

    def __init__(self, trace: Path) -> None:
        self._path = trace / ALERTS_FILE
        self._sent_path = trace / SENT_FILE
        self._known: set[str] = set()
        self._count: Counter[str] = Counter()
        self._seen = (-1, -1)

    def append(self, alerts: Iterable[Alert]) -> list[tuple[int, Alert]]:
        """Write the alerts that are not there yet, so that they outlast a crash of the machine.

        Returns:
            Those that were written, each with its number among the alerts of its rule, from 1.

        Raises:
            OSError: nothing was written.
        """
        new = {alert.id: _shortened(alert) for alert in alerts if alert.id not in self._known}
        if not new:
            return []
        fd = os.open(self._path, _FLAGS, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            end = self._look(fd)
            wanted = [alert for alert in new.values() if alert.id not in self._known]
            _append_whole(fd, end, [json.dumps(dataclasses.asdict(alert)) for alert in wanted])
            numbered = []
            for alert in wanted:
                numbered.append((self._take(alert.id, alert.rule), alert))
            stat = os.fstat(fd)
            self._seen = stat.st_ino, stat.st_size
        finally:
            os.close(fd)
        return numbered

    def _look(self, fd: int) -> int:
        """Learn which alerts are there; return where the last whole line ends."""
        stat = os.fstat(fd)
        if (stat.st_ino, stat.st_size) == self._seen:
            return stat.st_size
        self._known.clear()
        self._count.clear()
        data = os.pread(fd, stat.st_size, 0)
        end = data.rfind(b"\n") + 1
        for line in data[:end].splitlines():
            try:
                members = parsed(line)
                self._take(str(members["id"]), str(members["rule"]))
            except (ValueError, KeyError, TypeError):
                continue  # somebody else's line: it is named when the file is read
        return end

    def _take(self, alert: str, rule: str) -> int:
        self._known.add(alert)
        self._count[rule] += 1
        return self._count[rule]

    def mark_sent(self, alert: str, to: str, time: str) -> None:
        """Write that an alert was sent on.

        Raises:
            OSError: it could not be written.
        """
        fd = os.open(self._sent_path, _FLAGS, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            size = os.fstat(fd).st_size
            end = os.pread(fd, size, 0).rfind(b"\n") + 1
            _append_whole(fd, end, [json.dumps({"id": alert, "to": to, "time": time})])
        finally:
            os.close(fd)


def _append_whole(fd: int, end: int, lines: Sequence[str]) -> None:
    """Write lines behind byte `end`, all or none."""
    data = "".join(line + "\n" for line in lines).encode()
    if not data:
        return
    try:
        os.ftruncate(fd, end)
        written = 0
        while written < len(data):
            written += os.pwrite(fd, data[written:], end + written)
        os.fsync(fd)
    except OSError:
        os.ftruncate(fd, end)
        raise


def _lines(path: Path) -> list[str]:
    try:
        return whole_lines(path)[0]
    except OSError as error:
        raise TraceDamaged(f"{path} cannot be read: {error.strerror}.") from None


def _shortened(alert: Alert) -> Alert:
    texts = {name: value for name, value in vars(alert).items() if isinstance(value, str) and len(value) > _LONGEST}
    if not texts:
        return alert
    cut: dict[str, Any] = {name: f"{value[:_LONGEST]}… ({len(value):,} characters)" for name, value in texts.items()}
    return dataclasses.replace(alert, **cut)


def _check(alert: Alert) -> None:
    if alert.severity not in ("error", "warning"):
        raise ValueError(f"severity is {alert.severity!r:.80}")
    for name, value in vars(alert).items():
        number = name in ("rank", "first_step", "last_step")
        optional = number or name in ("layer", "kind")
        right = isinstance(value, int) and not isinstance(value, bool) if number else isinstance(value, str)
        if not right and not (optional and value is None):
            raise TypeError(f"{name} is {value!r:.80}")
