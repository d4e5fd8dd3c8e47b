"""How the writer process is started, asked whether it lives, waited for, and followed by another when it dies.

A writer that was killed leaves whole commits, the training has kept what is not among them, and the tensors of that lie
in the shared memory still. So another can go on where it stopped: `hookrec.resume`. One that has given up, since the
disk is full, is not followed: the next would do no better.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from hookrec.available import available_bytes
from hookrec.errors import AttachError, warn
from hookrec.ring import Ring, WriterGone

_START_S = 120.0
_END_S = 2.0
_END_FILE = "end.json"
_WORDS_BYTES = 1 << 20
_NO_WORDS = "it ended without a word"


class WriterProcess:
    """The writer, as the training process sees it.

    Args:
        config: what the writer is told; see `writer.main`.
        ring_bytes: size of the shared memory.
        restarts: how many times another is started when it dies.

    Attributes:
        first_step: the step that the recording begins with.

    Raises:
        AttachError: it could not begin.
    """

    def __init__(self, config: dict[str, Any], ring_bytes: int, restarts: int = 0) -> None:
        self._config = config
        self.directory = Path(config["directory"])
        self.goes_on = config["attempt"] is not None  # in a trace that has tensors already
        self._restarts = restarts
        self._pid = os.getpid()
        available = available_bytes()
        if available is not None and ring_bytes > available:
            raise AttachError(
                f"A ring of {ring_bytes:,} bytes of shared memory cannot be made: {available:,} bytes of memory are "
                "available, and who takes more is killed. Choose a smaller one, such as ring='64MB'."
            )
        with contextlib.ExitStack() as undo:
            try:
                # The process writes its last words there, also where no folder for temporary files is left.
                self._words = undo.enter_context(os.fdopen(os.memfd_create("hookrec-words"), "w+b"))
                self.ring = Ring(ring_bytes, self.is_alive, self._succeed)
                undo.callback(self.ring.release)
                undo.callback(self.ring.close)
            except (OSError, OverflowError) as error:
                raise AttachError(
                    f"A ring of {ring_bytes:,} bytes of shared memory cannot be made: {error}. Choose a smaller one, "
                    "such as ring='64MB', or raise the limits that `ulimit -a` shows."
                ) from None
            try:
                self._process = self._start()
            except OSError as error:
                raise AttachError(f"The writer process cannot be started: {error}.") from None
            answer = self._greet(config)
            if "attempt" in answer:
                self._config = {**config, "attempt": answer["attempt"]}
                self.ring.go_on(answer)
            self.first_step: int = answer.get("attempt", {}).get("first_step", 0)
            undo.pop_all()

    def _start(self) -> "subprocess.Popen[bytes]":
        fds = (self.ring.fd, self.ring.writer_socket.fileno())
        self._words_begin = os.fstat(self._words.fileno()).st_size
        start = Path(__file__).with_name("start_writer.py")
        return subprocess.Popen(
            [sys.executable, "-P", str(start), *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._words,
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C in the terminal is meant for the training
        )

    def _greet(self, config: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(config).encode())
        self.ring.writer_socket.close()
        answer: dict[str, Any] = {}
        try:
            line = self.ring.receive_line(_START_S)
            answer = json.loads(line) if line else {"error": self.last_words()}
        except (OSError, ValueError) as failure:
            answer = {"error": str(failure)}
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        if "error" in answer or "refused" in answer:
            self._process.kill()
            self._process.wait()
            if "refused" in answer:
                raise AttachError(f"{config['directory']} cannot be resumed: {answer['refused']}.")
            raise AttachError(
                f"The writer process could not begin to record to {config['directory']}: {answer['error']}"
            )
        return answer

    def _succeed(self) -> None:
        """Start another writer in the place of one that is gone.

        Raises:
            WriterGone: there is to be no other, or it could not begin.
        """
        how = self._how_it_ended()
        if not self._restarts:
            raise WriterGone(f"the writer process is gone: {how}")
        self._restarts -= 1
        done = self.ring.acknowledged()
        try:
            self.ring.reconnect()
            self._process = self._start()
            self._greet(
                {
                    **self._config,
                    "plan": done.plan or self._config["plan"],  # later changes of it are sent again
                    "trace": None,
                    "predecessor": {"rows": done.rows, "scalars": done.scalars, "notes": done.notes, "why": how},
                }
            )
        except (AttachError, OSError) as error:  # no process or file may be left for one
            raise WriterGone(f"the writer process is gone ({how}), and another could not go on: {error}") from None
        warn(f"the writer process is gone ({how}); another goes on in the same trace.")

    def _how_it_ended(self) -> str:
        """Wait for the end of a process that has closed its socket, and say how it came."""
        try:
            # One that fails closes its socket before it is gone, and has its own words on that.
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return f"it closed its socket and had not ended {_END_S:g} s later"
        words = self.last_words()
        if status >= 0:
            return words
        how = f"killed by {signal.Signals(-status).name}"
        return how if words == _NO_WORDS else f"{how}, after it said: {words}"

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """Return the last line that the process wrote to its standard error."""
        # Not by `seek`, which would move the place where the process writes.
        words = os.pread(self._words.fileno(), _WORDS_BYTES, self._words_begin)
        lines = words.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else _NO_WORDS

    def wait(self) -> str | None:
        """Say goodbye, wait until the writer has sealed the trace, and return how it failed, if it did."""
        self.ring.hang_up()
        status = self._process.wait()
        sealed = Path(self._config["directory"], _END_FILE)
        with contextlib.suppress(WriterGone):
            while status < 0 and self._restarts and not sealed.exists():
                self.ring.replace_writer()
                self.ring.hang_up()
                status = self._process.wait()
        failed = status > 0 or (status < 0 and not sealed.exists())
        how = self._how_it_ended() if failed else None
        self.ring.close()
        self._words.close()
        return how

    def forget(self) -> None:
        """Let go of the process without a word, in a child that was forked from the training."""
        self.ring.close()
        self._process.returncode = 0  # a child must not wait for its parent's child
