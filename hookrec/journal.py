"""What the daemon says on standard error: a line an event, in words or as JSON, and the same complaint once.

Nothing that is said may stop the daemon, so a reader that has gone away is no error.
"""

import contextlib
import datetime
import json
import sys
from typing import TextIO

from replay.printable import printable


def timestamp() -> str:
    """Return the time as the files of a trace have it (RFC 3339)."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


class Journal:
    """Writes events. May be used by several threads: a line is one write.

    Args:
        stream: where to; standard error if None.
        as_json: lines of JSON.
    """

    def __init__(self, stream: TextIO | None = None, *, as_json: bool = False) -> None:
        self._stream = stream
        self._as_json = as_json
        self._complaints: dict[str, str] = {}

    def say(self, event: str, words: str, **facts: object) -> None:
        """Write an event.

        Args:
            event: its kind, one word.
            words: a sentence.
            facts: more of it, for JSON.
        """
        time = timestamp()
        if self._as_json:
            line = json.dumps({"time": time, "event": event, "message": words, **facts}, default=str)
        else:
            line = f"{time} {event}: {printable(words)}"
        with contextlib.suppress(OSError, ValueError):
            stream = self._stream or sys.stderr
            stream.write(line + "\n")
            stream.flush()

    def complain(self, about: object, words: str) -> None:
        """Write what is wrong with a thing, unless that was the last that was said of it."""
        if self._complaints.get(str(about)) != words:
            self._complaints[str(about)] = words
            self.say("problem", words, about=str(about[0] if isinstance(about, tuple) else about))

    def forget(self, about: object) -> None:
        """Let a complaint about a thing be heard again: it was well in between, or is gone."""
        self._complaints.pop(str(about), None)
