"""What the daemon does about one trace: reads what is new, writes alerts, sends them on, and seals what died.

The order is what makes it safe to be killed at any moment. An alert is in the trace's file before it is sent, and the
place up to which the log was read is saved after that. So a restart may read some records again, and finds their
alerts in the file already.
"""

import contextlib
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import replay
from hookrec.delivery import Outbox
from hookrec.findings import Check, Conditions, Finding, as_alert, ended
from hookrec.journal import Journal, timestamp
from hookrec.judging import Judge, Pace
from replay.alerts import Alert, AlertFile, read_alerts, read_sent
from replay.attempts import read_attempts
from replay.documents import read_end, read_identity
from replay.errors import ReplayError
from replay.follow import Follower, Place
from replay.format import ALERTS_FILE, END_FILE, LOCK_FILE, TRACE_FILE
from replay.ranks import ranks_of
from replay.seal import is_locked, is_sealed, locked, seal_abandoned

_LOOK_S = 0.5  # what reading one trace may take before the others get their turn
_DONE_REST_S = 60.0
_TROUBLE_REST_S = 30.0
_AGAIN_S = 1.0  # where something was finished in this look, and the next may find that all is
_OTHER_HOST = 60.0  # locks do not reach every machine: who is elsewhere is given longer
_STALE_S = 86_400.0
_DETAIL = "the writer was gone; sealed by the daemon from the log"


@dataclass(frozen=True)
class Duties:
    """What the daemon does about each trace.

    Attributes:
        conditions: look at each new record.
        check: rules over the trace.
        outboxes: the ways by which alerts are sent on.
        seal_after_s: how long a trace must be without a writer, and unchanged, before it is sealed.
        journal: is told what happens.
        rules: runs rules over traces that are live.
        backlog: runs them over those that are not, of which there may be thousands.
        chores: runs what may take long otherwise.
        wake: makes the daemon look again.
        pace: says how often rules are run.
    """

    conditions: Conditions
    check: Check | None
    outboxes: Sequence[Outbox]
    seal_after_s: float
    journal: Journal
    rules: Executor
    backlog: Executor
    chores: Executor
    wake: Callable[[], None]
    pace: Pace


class Watched:
    """One trace. Owned by the daemon's thread.

    Args:
        path: its directory.
        duties: what is done about it.
        memory: what an earlier daemon knew of it.
    """

    def __init__(self, path: Path, duties: Duties, memory: Any = None) -> None:
        self.path = path
        self.done = False
        self.urgent = False
        with contextlib.suppress(OSError):  # the first look says what is wrong
            self.urgent = any(not is_sealed(rank) for rank in ranks_of(path).values())
        self._duties = duties
        self._memory = memory
        self._stamp: list[int] = []
        self._rest_until = -np.inf

    def look(self, now: float) -> float:
        """Look at what is new.

        Args:
            now: seconds on a clock that only goes forward.

        Returns:
            After how many seconds it should be looked at again, even if nothing happens.
        """
        if now < self._rest_until:
            return self._rest_until - now
        try:
            return self._look(now)
        except Exception as error:  # whatever is wrong with one trace, the others are followed
            if not (self.path / TRACE_FILE).exists() and isinstance(error, (FileNotFoundError, replay.TraceNotFound)):
                return np.inf  # it is gone, which the next walk finds
            words = str(error) if isinstance(error, (ReplayError, OSError)) else repr(error)
            self._duties.journal.complain(self.path, f"{self.path} cannot be followed: {words}")
            self._rest_until = now + _TROUBLE_REST_S
            return _TROUBLE_REST_S

    @property
    def memory(self) -> Any:
        """What a later daemon has to know, as JSON: never more than was written to the file of alerts."""
        if self._stamp and not self._unwritten and not self._unanswered:
            unchecked = None if self._judge is None else self._judge.unchecked
            places = {str(rank): list(place) for rank, place in self._follower.places.items()}
            self._memory = {"stamp": self._stamp, "places": places, "unchecked": unchecked}
            self._memory["done"] = self._ends_when_done if self.done else None
        return self._memory

    @property
    def rank_directories(self) -> list[Path]:
        """The ranks that were found."""
        return list(self._follower.directories.values()) if self._stamp else []

    def _look(self, now: float) -> float:
        stat = (self.path / TRACE_FILE).stat()
        if self._stamp != [stat.st_ino, stat.st_mtime_ns]:
            self._begin([stat.st_ino, stat.st_mtime_ns])
        if self.done and self._ends() != self._ends_when_done:
            self.done = False  # the training was resumed
        if self.done:
            self._rest_until = now + _DONE_REST_S
            return _DONE_REST_S
        # What is sealed now cannot be sealed after a last look that missed its last records.
        ranks = self._follower.directories.values()
        sealed = bool(ranks) and all(is_sealed(rank) for rank in ranks)
        self._collect(now)
        try:
            news, more = self._read()
        finally:
            self._write_alerts()  # also what was found in one rank, where another cannot be read
        if self._judge is not None:
            executor = self._duties.rules if self.urgent else self._duties.backlog
            self._judge.start(now, executor, self._follower.directories, self._known)
        patience = self._seal_dead(now, news=news)
        self.urgent = not sealed
        unchecked = None if self._judge is None else self._judge.unchecked
        if sealed and not (news or more or self._unwritten or self._unanswered) and unchecked is None:
            self._finish()
        self._duties.journal.forget(self.path)
        if more:
            return 0.0
        next_check = np.inf if self._judge is None else self._judge.wait_s(now)
        return min(next_check, patience, np.inf if sealed == self.done else _AGAIN_S)

    def _begin(self, stamp: list[int]) -> None:
        """Begin with a trace, or with another one at the same place."""
        identity = read_identity(self.path)
        self._stamp = []
        places, unchecked, self._ends_when_done = _remembered(self._memory, stamp)
        self.done = self._ends_when_done is not None
        self._trace_id = str(identity.get("id"))
        self._host = identity["provenance"].get("host")
        self._follower = Follower(self.path, places)
        self._judge: Judge | None = None
        if self._duties.check is not None:
            self._judge = Judge(
                self.path,
                self._trace_id,
                self._duties.check,
                self._duties.pace,
                self._duties.wake,
                unchecked=unchecked,
                from_the_beginning=not any(number or rows for number, rows in places.values()),
            )
        self._known: set[str] = set()  # ids of what was found
        self._unanswered = 0  # how often the conditions were asked, and have not answered
        self._sealing: Future[None] | None = None
        self._quiet: dict[Path, float] = {}
        self._unwritten: dict[str, Alert] = {}
        self._file = AlertFile(self.path)
        self._stale = self._is_stale()
        self._send_old()
        self._stamp = stamp

    def _ends(self) -> list[int]:
        """When the ranks were sealed; 0 where one is not."""
        found = []
        for rank in ranks_of(self.path).values():
            try:
                found.append((rank / END_FILE).stat().st_mtime_ns)
            except OSError:
                found.append(0)
        return found

    def _is_stale(self) -> bool:
        """Whether it ended too long ago for its alerts to be news."""
        ends = [rank / END_FILE for rank in ranks_of(self.path).values()]
        return bool(ends) and all(end.exists() and time.time() - end.stat().st_mtime > _STALE_S for end in ends)

    def _send_old(self) -> None:
        """Send on what an earlier daemon wrote and did not send."""
        if self._stale or not self._duties.outboxes or not (self.path / ALERTS_FILE).exists():
            return
        try:
            alerts, sent = read_alerts(self.path), read_sent(self.path)
        except ReplayError as error:
            self._duties.journal.complain((self.path, "sent"), f"Old alerts are not sent: {error}")
            return
        counts: dict[str, int] = {}
        for alert in alerts:
            counts[alert.rule] = counts.get(alert.rule, 0) + 1
            for outbox in self._duties.outboxes:
                if (alert.id, outbox.name) not in sent:
                    outbox.put(self.path, counts[alert.rule], alert)

    def _read(self) -> tuple[bool, bool]:
        """Read new records; return whether there were any, and whether there may be more."""
        began = time.perf_counter()
        news = False
        for records in self._follower.read():
            news = True
            self._ask(records)
            if self._judge is not None:
                self._judge.add(records)
            if time.perf_counter() - began > _LOOK_S:
                return True, True
        return news, False

    def _ask(self, records: pa.Table) -> None:
        """Ask the conditions. The answer comes at the end of the round, or later."""

        def found(findings: Sequence[Finding]) -> None:
            self._unanswered -= 1
            self._found(findings)
            self._write_alerts()

        def trouble(words: str) -> None:
            self._duties.journal.complain((self.path, "conditions"), f"{self.path}: {words}")

        self._unanswered += 1
        self._duties.conditions.ask(records, found, trouble)

    def _found(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            alert = as_alert(finding, self._trace_id, timestamp())
            if alert.id not in self._known:
                self._known.add(alert.id)
                self._unwritten[alert.id] = alert

    def _write_alerts(self) -> None:
        if not self._unwritten:
            return
        try:
            written = self._file.append(self._unwritten.values())
        except OSError as error:
            self._duties.journal.complain(
                (self.path, "alerts"),
                f"{len(self._unwritten)} alerts of {self.path} cannot be written, and wait: {error.strerror}. "
                "Make room, or let the daemon write there.",
            )
            return
        self._unwritten.clear()
        self._duties.journal.forget((self.path, "alerts"))
        for number, alert in written:
            self._duties.journal.say("alert", f"{self.path}: {alert.message}", trace=str(self.path), alert=vars(alert))
            for outbox in self._duties.outboxes if not self._stale else ():
                outbox.put(self.path, number, alert)

    def _collect(self, now: float) -> None:
        """Take what the rules found, if they are done."""
        try:
            if self._judge is not None:
                self._found(self._judge.collect(now))
        except Exception as error:  # rules are other people's code
            self._duties.journal.complain((self.path, "rules"), f"The rules cannot judge {self.path}: {error!r}")

    def _seal_dead(self, now: float, *, news: bool) -> float:
        """Seal ranks that have been without a writer, and unchanged, for long enough.

        Returns:
            Seconds until the next may be sealed.
        """
        wait_s = np.inf
        patience = self._duties.seal_after_s * (1.0 if self._host == platform.node() else _OTHER_HOST)
        for rank in self._follower.directories.values():
            # A rank without the file has a writer that is about to begin.
            if is_sealed(rank) or not (rank / LOCK_FILE).exists() or is_locked(rank):
                self._quiet.pop(rank, None)
                continue
            since = now if news else self._quiet.get(rank, now)
            busy = self._sealing is not None and not self._sealing.done()
            if now - since >= patience and not busy:
                self._sealing = self._duties.chores.submit(_seal, rank, self._duties.journal)
                self._sealing.add_done_callback(lambda _: self._duties.wake())
                since = now  # if it fails, there is a next time
            self._quiet[rank] = since
            if not busy:  # else the end of that one is waited for
                wait_s = min(wait_s, since + patience - now)
        return wait_s

    def _finish(self) -> None:
        """Say how the trace ended, once."""
        ends = self._ends()
        for number, rank in self._follower.directories.items():
            end = read_end(rank)
            if end is not None and (finding := ended(number, end, read_attempts(rank).last)) is not None:
                self._found([finding])
        self._write_alerts()
        self._duties.pace.forget(self.path)
        self.done = not self._unwritten
        self._ends_when_done = ends


def _remembered(memory: Any, stamp: list[int]) -> tuple[dict[int, Place], int | None, list[int] | None]:
    """Return places, the first step that was not judged, and when the ranks had ended if all is done.

    Of another trace, it is nothing.
    """
    try:
        if memory["stamp"] == stamp:
            places = {int(rank): (int(number), int(rows)) for rank, (number, rows) in memory["places"].items()}
            unchecked, ends = memory["unchecked"], memory["done"]
            return (
                places,
                None if unchecked is None else int(unchecked),
                None if ends is None else [int(end) for end in ends],
            )
    except (KeyError, TypeError, ValueError, AttributeError):
        pass  # somebody else's; all is read again
    return {}, None, None


def _seal(rank: Path, journal: Journal) -> None:
    try:
        with locked(rank):
            if not is_sealed(rank):
                seal_abandoned(rank, _DETAIL)
                journal.say("sealed", f"{rank}: {_DETAIL}", trace=str(rank.parent))
    except BlockingIOError:
        pass  # a writer came
    except Exception as error:  # a damaged trace may fail in many ways; it is tried again
        journal.complain((rank, "seal"), f"{rank} cannot be sealed: {error}")
