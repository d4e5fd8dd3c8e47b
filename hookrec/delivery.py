"""How alerts are sent on: each way has a thread and a queue of its own, so that none waits for another.

An alert is in the file of its trace before it comes here, and is marked there when it has gone out. So it goes out at
least once by each way: a crash between the two sends it again after the restart. What cannot be sent is tried again
at growing intervals for a quarter of an hour, then left for the next start of the daemon.
"""

import contextlib
import dataclasses
import http.client
import json
import os
import platform
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from hookrec.errors import DaemonError
from hookrec.journal import Journal, timestamp
from replay.alerts import Alert, AlertFile

AT_MOST = 20  # of a rule and trace: where one layer is NaN, the hundreds behind it are
GIVE_UP_S = 900.0
_ATTEMPT_S = 10.0
_LONGEST_PAUSE_S = 60.0

Send = Callable[[bytes], None]
"""Sends a JSON document, a line, or raises `NotSent`."""


class NotSent(Exception):
    """The alert did not go out; `for_good` if there is no sense in trying again."""

    def __init__(self, words: str, *, for_good: bool = False) -> None:
        super().__init__(words)
        self.for_good = for_good


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Leaves a redirect as the answer: to follow it would be a GET without the document, and look like success."""

    def redirect_request(self, *_: object) -> None:
        """Return no further request."""


def webhook(url: str, timeout_s: float = _ATTEMPT_S) -> Send:
    """Return a way to send: a POST to an address. A redirect is no success: what was sent would not go along.

    Raises:
        DaemonError: it is no address of a web server.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise DaemonError(f"--webhook {url!r} is no address; it begins with http:// or https:// and names a server.")

    opener = urllib.request.build_opener(_NoRedirect)

    def send(document: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "hookrec"}
        request = urllib.request.Request(url, document, headers, method="POST")
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                answer.read(1)
        except urllib.error.HTTPError as error:
            with error:
                refused = 400 <= error.code < 500 and error.code not in (408, 425, 429)
                elsewhere = error.headers.get("Location") if 300 <= error.code < 400 else None
                hint = f", which sends on to {elsewhere}: give that address" if elsewhere else ""
                raise NotSent(f"the webhook answered {error.code} {error.reason}{hint}", for_good=refused) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NotSent(f"the webhook cannot be reached: {getattr(error, 'reason', error)}") from None

    return send


def command(line: str, timeout_s: float = _ATTEMPT_S) -> Send:
    """Return a way to send: a command, without a shell, that gets the document on its standard input.

    Raises:
        DaemonError: it is no command.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise DaemonError(f"--run {line!r} cannot be split into words: {error}.") from None
    if not words:
        raise DaemonError("--run is empty; name a command.")

    def send(document: bytes) -> None:
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=sys.__stderr__, start_new_session=True
            )
        except OSError as error:
            raise NotSent(f"{words[0]} cannot be run: {error.strerror}") from None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.communicate(document, timeout=timeout_s)
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise NotSent(f"{words[0]} did not end within {timeout_s:g} s") from None
        if status:
            raise NotSent(f"{words[0]} ended with status {status}")

    return send


class Outbox:
    """Sends alerts on by one way, in a thread.

    Args:
        name: of the way, by which an alert is marked as sent.
        send: sends a document.
        journal: is told what cannot be sent.
        rule: the rule whose alerts go this way; None for all.
        at_most: how many alerts of a rule and trace.
        give_up_s: how long an alert is tried.
        pause_s: the first pause after a failure; each further one is twice as long.
    """

    def __init__(
        self,
        name: str,
        send: Send,
        journal: Journal,
        *,
        rule: str | None = None,
        at_most: int = AT_MOST,
        give_up_s: float = GIVE_UP_S,
        pause_s: float = 1.0,
    ) -> None:
        self.name = name
        self._rule = rule
        self._at_most = at_most
        self._send = send
        self._journal = journal
        self._give_up_s = give_up_s
        self._first_pause_s = pause_s
        self._queue: queue.SimpleQueue[tuple[float, Path, Alert, str] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"send by {name}", daemon=True)
        self._thread.start()

    def put(self, trace: Path, number: int, alert: Alert) -> None:
        """Send an alert of a trace, which is so many-th of its rule; past the limit, do nothing."""
        if number > self._at_most or self._rule not in (None, alert.rule):
            return
        more = f" Further alerts of this rule are in {trace} and are not sent." if number == self._at_most else ""
        self._queue.put((time.monotonic(), trace, alert, alert.message + more))

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is waiting, for a while; what is left goes out after the next start."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._stopped.set()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        pause_s = self._first_pause_s
        while (item := self._queue.get()) is not None and not self._stopped.is_set():
            began, trace, alert, message = item
            facts = {**dataclasses.asdict(alert), "message": message, "trace": str(trace), "host": platform.node()}
            document = json.dumps(facts).encode() + b"\n"
            while True:
                try:
                    self._send(document)
                except NotSent as error:
                    if error.for_good or time.monotonic() - began + pause_s > self._give_up_s:
                        self._journal.say("problem", f"Alert {alert.id} of {trace} was not sent: {error}.")
                        break
                    self._journal.complain(self.name, f"Alerts cannot be sent: {error}. They are tried again.")
                    if self._stopped.wait(pause_s):
                        return
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                else:
                    pause_s = self._first_pause_s
                    self._journal.forget(self.name)
                    self._mark(trace, alert)
                    break

    def _mark(self, trace: Path, alert: Alert) -> None:
        try:
            AlertFile(trace).mark_sent(alert.id, self.name, timestamp())
        except OSError as error:
            self._journal.complain((trace, "sent"), f"{trace} cannot note what was sent: {error.strerror}.")
