"""How the daemon waits: until the time is up, or the system tells that something changed in a folder.

Events are a courtesy. They do not arrive from other machines over NFS, may be lost, and there are limits on how many
folders can be watched; so they only ever shorten the wait. Folders are watched one by one, never with what lies below:
a store has thousands of folders, and each tensor that is written would be an event.
"""

import contextlib
import itertools
import os
import queue
import time
from collections.abc import Iterable
from pathlib import Path

from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileCreatedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import ObservedWatch

from hookrec.journal import Journal

_MOST = 256  # each costs a thread of watchdog's
_TOGETHER_S = 0.2  # events come in crowds
_KINDS: list[type[FileSystemEvent]] = [
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileCreatedEvent,
    FileModifiedEvent,
    FileMovedEvent,
]


class Events:
    """Waits. Owned by one thread; `wake` may be called by any, and by a signal.

    Args:
        journal: is told where events do not arrive.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        # A queue, and no `threading.Event`: a signal may come while this thread holds the lock of one.
        self._changed: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._gone: set[Path] = set()  # folders that may be there again, and are then others
        self._watches: dict[Path, ObservedWatch | None] = {}
        self._listener = _Listener(self._changed)
        self._observer = Observer()
        self._observer.start()

    def watch(self, folders: Iterable[Path]) -> bool:
        """Watch these folders, and no others; where there are too many, the first of them.

        Returns:
            Whether one is watched from now on: what came there before is no event, and has to be looked for.
        """
        wanted = set(itertools.islice(folders, _MOST))
        more = False
        for folder in self._watches.keys() - (wanted - self._gone):
            if (watch := self._watches.pop(folder)) is not None:
                self._observer.unschedule(watch)
        self._gone.clear()
        for folder in wanted - self._watches.keys():
            try:
                self._watches[folder] = self._observer.schedule(self._listener, str(folder), event_filter=_KINDS)
                more = True
            except FileNotFoundError:
                continue  # gone again; the next look at the folders finds that too
            except (OSError, ValueError) as error:
                self._watches[folder] = None
                self._journal.complain("events", f"Some folders are looked at now and then, without events: {error}")
        return more

    def wait(self, timeout_s: float, rest_s: float = 0.0) -> None:
        """Wait for an event, or until the time is up; `rest_s` at least, whatever happens."""
        began = time.monotonic()
        with contextlib.suppress(queue.Empty):
            self._take(self._changed.get(timeout=max(0.0, timeout_s, rest_s)))
            time.sleep(max(_TOGETHER_S, rest_s - (time.monotonic() - began)))
            while True:
                self._take(self._changed.get_nowait())

    def _take(self, gone: Path | None) -> None:
        if gone is not None:
            self._gone.add(gone)

    def wake(self) -> None:
        """End the wait."""
        self._changed.put(None)

    def close(self) -> None:
        """Let go of the folders."""
        self._observer.stop()
        self._observer.join()


class _Listener(FileSystemEventHandler):
    def __init__(self, changed: "queue.SimpleQueue[Path | None]") -> None:
        self._changed = changed

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Say that something changed, and which folder is gone from its place."""
        gone = isinstance(event, (DirDeletedEvent, DirMovedEvent))
        self._changed.put(Path(os.fsdecode(event.src_path)) if gone else None)
