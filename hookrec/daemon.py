"""What the daemon does and when: rounds over the traces below a folder, live ones first, until it is told to stop.

All that it knows can be derived again from the traces. What it saves, in a folder of its own below the root, spares it
the reading: how far each log was read, under which rules. So it starts over any state. A lock there keeps a second one
away.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from hookrec.errors import DaemonError
from hookrec.events import Events
from hookrec.journal import Journal, timestamp
from hookrec.metrics import Pulse
from hookrec.quota import Quota
from hookrec.watched import Duties, Watched
from replay.catalog import find_traces
from replay.format import DAEMON_DIRECTORY, DAEMON_LOCK_FILE, TRACE_FILE, parsed, write_whole
from replay.printable import printable

_PLACES_FILE = "places.json"
_WALK_SHARE = 20.0  # the folders are walked through in at most this share of the time
_ROUND_S = 0.5  # what traces that are not live may take of a round
_SAVE_S = 10.0
_QUOTA_S = 60.0
_REST_SHARE = 10.0  # the rest after a round, as a multiple of the processor time that it took
_MOST_REST_S = 0.8  # and at most, since an alert is to arrive within two seconds
_TRIES = 3
_TRY_S = 0.05


@contextlib.contextmanager
def only_one(root: Path) -> Iterator[None]:
    """Be the one daemon of a root.

    Raises:
        DaemonError: another one is, or nothing can be written there.
    """
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise DaemonError(f"{printable(root)} {what}. Name the folder that has the traces below it, or make it.")
    if (root / TRACE_FILE).exists():
        raise DaemonError(f"{printable(root)} is a trace. Name the folder above, {printable(root.absolute().parent)}.")
    directory = root / DAEMON_DIRECTORY
    try:
        directory.mkdir(exist_ok=True)
        fd = os.open(directory / DAEMON_LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise DaemonError(
            f"{printable(root)} cannot be written to ({error.strerror}), and the daemon keeps its lock and the alerts "
            "there. Run it as a user who may."
        ) from None
    try:
        try:
            _lock(fd)
        except BlockingIOError:
            pid, _, host = os.pread(fd, 200, 0).decode("utf-8", "replace").strip().partition(" ")
            by = f"by process {pid} on {host}. Stop that one first, with: kill {pid}" if pid else "by another daemon."
            raise DaemonError(f"{printable(root)} is watched already, {by}") from None
        os.ftruncate(fd, 0)
        with contextlib.suppress(OSError):  # on a full disk nobody learns our number
            os.pwrite(fd, f"{os.getpid()} {platform.node()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    """Take the lock, which somebody who asks whether there is a daemon may hold for a moment."""
    for left in reversed(range(_TRIES)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not left:
                raise
            time.sleep(_TRY_S)


class Daemon:
    """Watches the traces below a root. Owned by one thread; `traces` and `pulse` may be read by any.

    Attributes:
        pulse: how its rounds go.

    Args:
        root: the folder.
        duties: what is done about each trace.
        rules: what tells these rules from others: traces are judged again by rules that are new.
        quota: keeps the traces small; None leaves them as they are.
    """

    def __init__(self, root: Path, duties: Duties, rules: Sequence[str], quota: Quota | None = None) -> None:
        self.pulse = Pulse()
        self._root = root
        self._duties = duties
        self._journal: Journal = duties.journal
        self._quota = quota
        self._quota_run: Future[None] | None = None
        self._rules = hashlib.sha256(json.dumps(sorted(rules)).encode()).hexdigest()
        self._watched: dict[Path, Watched] = {}
        self._waiting: deque[Watched] = deque()
        self._folders: list[Path] = []
        self._next_walk = self._next_save = self._next_quota = float("-inf")
        self._places_path = root / DAEMON_DIRECTORY / _PLACES_FILE
        self._saved = self._load()

    def traces(self) -> list[Path]:
        """Return the traces that were found."""
        return list(self._watched)

    def folders(self, *, logs: bool) -> list[Path]:
        """Return where something new may appear: traces that are not sealed, then folders, upper ones first.

        Args:
            logs: also where the logs of these traces grow.
        """
        live = [watched for watched in self._watched.values() if watched.urgent]
        ranks = [rank for watched in live for rank in watched.rank_directories] if logs else []
        return [*(watched.path for watched in live), *ranks, *self._folders]

    def look(self, now: float) -> float:
        """Do a round.

        Args:
            now: seconds on a clock that only goes forward.

        Returns:
            After how many seconds the next should be, even if nothing happens.
        """
        walked = now >= self._next_walk
        if walked:
            self._walk(now)
        waits = [watched.look(now) for watched in list(self._watched.values()) if watched.urgent]
        waits += [self._look_at_others(now), float("inf") if walked else self._next_walk - now]
        self._duties.conditions.answer()
        idle = self._quota_run is None or self._quota_run.done()
        if self._quota is not None and now >= self._next_quota and idle:
            self._next_quota = now + _QUOTA_S
            self._quota_run = self._duties.chores.submit(self._keep, self._quota, list(self._watched))
        if now >= self._next_save:
            self._next_save = now + _SAVE_S
            self.save()
        return min(waits)

    def _look_at_others(self, now: float) -> float:
        """Look at traces that are sealed, in turn, for a while: there may be thousands, and live ones do not wait."""
        began = time.perf_counter()
        wait_s = float("inf")
        for _ in range(len(self._waiting)):
            watched = self._waiting.popleft()
            if self._watched.get(watched.path) is not watched:
                continue
            self._waiting.append(watched)
            if not watched.urgent:
                wait_s = min(wait_s, watched.look(now))
            if time.perf_counter() - began > _ROUND_S:
                return 0.0
        return wait_s

    def _walk(self, now: float) -> None:
        """Find out which traces there are."""
        began = time.perf_counter()
        tree = find_traces(self._root, self._unreadable)
        folders = (folder for folder in tree.folders if folder.name != DAEMON_DIRECTORY)
        self._folders = sorted(folders, key=lambda folder: len(folder.parts))
        for path in self._watched.keys() - set(tree.traces):
            self._watched.pop(path)
            self._duties.pace.forget(path)
            self._journal.say("gone", f"{path} is gone", trace=str(path))
        for path in tree.traces:
            if path not in self._watched:
                watched = Watched(path, self._duties, self._saved.get(str(path.relative_to(self._root))))
                self._watched[path] = watched
                self._waiting.append(watched)
        self._next_walk = now + _WALK_SHARE * (time.perf_counter() - began)

    def _unreadable(self, folder: Path, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError) or folder == self._root:
            self._journal.complain(folder, f"{folder} cannot be read: {error.strerror}.")

    def _keep(self, quota: Quota, traces: list[Path]) -> None:
        try:
            quota.keep(traces, timestamp())
        except Exception as error:  # in another thread, where nobody else would see it
            self._journal.complain("quota", f"The quota cannot be kept: {error!r}")

    def save(self) -> None:
        """Save how far the logs were read."""
        places = {str(path.relative_to(self._root)): watched.memory for path, watched in self._watched.items()}
        if places == self._saved:
            return
        try:
            write_whole(self._places_path, json.dumps({"rules": self._rules, "traces": places}))
        except OSError as error:
            self._journal.complain("places", f"{self._places_path} cannot be written: {error.strerror}.")
            return
        self._saved = places

    def _load(self) -> dict[str, Any]:
        try:
            found = parsed(self._places_path.read_text(encoding="utf-8"))
            return dict(found["traces"]) if found["rules"] == self._rules else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._journal.complain("places", f"{self._places_path} cannot be read ({error}); all is read again.")
            return {}


def watch(daemon: Daemon, events: Events, poll_s: float, stopped: Callable[[], bool]) -> None:
    """Do rounds until `stopped` says so, then save."""
    while not stopped():
        began, began_cpu = time.monotonic(), time.thread_time()
        wait_s = daemon.look(began)
        daemon.pulse.beat(began)
        # Where one looks every second anyway, an event about each commit costs more than it brings.
        if events.watch(daemon.folders(logs=poll_s > 1)):
            wait_s = 0.0
        took_s = time.monotonic() - began
        # A round looks into every trace, whatever it is that woke us: so there is a rest after each. It is counted in
        # the processor's time, which does not grow where others keep it busy.
        rest_s = min(_MOST_REST_S, _REST_SHARE * (time.thread_time() - began_cpu))
        events.wait(min(poll_s - took_s, wait_s), rest_s)
    daemon.save()
