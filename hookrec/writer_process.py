"""How the writer process is started, asked whether it lives, and waited for."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hookrec.errors import AttachError
from hookrec.ring import Ring

_START_S = 120.0


class WriterProcess:
    """The writer, as the training process sees it.

    Args:
        config: what the writer is told; see `writer.main`.
        ring_bytes: size of the shared memory.

    Raises:
        AttachError: it could not begin.
    """

    def __init__(self, config: dict[str, Any], ring_bytes: int) -> None:
        self.ring = Ring(ring_bytes, self.is_alive)
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - the process writes its last words there
        self._pid = os.getpid()
        try:
            self._process = self._start()
            self._greet(config)
        except BaseException:
            self.ring.close()
            self._words.close()
            raise

    def _start(self) -> "subprocess.Popen[bytes]":
        fds = (self.ring.fd, self.ring.writer_socket.fileno())
        start = Path(__file__).with_name("start_writer.py")
        return subprocess.Popen(
            [sys.executable, "-P", str(start), *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._words,
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C in the terminal is meant for the training
        )

    def _greet(self, config: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(config).encode())
        self.ring.writer_socket.close()
        try:
            answer = self.ring.receive_line(_START_S)
            error = json.loads(answer).get("error") if answer else self.last_words()
        except (OSError, ValueError) as failure:
            error = str(failure)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        if error is not None:
            self._process.kill()
            self._process.wait()
            raise AttachError(f"The writer process could not begin to record to {config['directory']}: {error}")

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """Return the last line that the process wrote to its standard error."""
        self._words.seek(0)
        lines = self._words.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it ended without a word"

    def wait(self) -> int:
        """Say goodbye, wait until the writer has sealed the trace, and return its exit status."""
        self.ring.close()
        status = self._process.wait()
        self._words.close()
        return status

    def forget(self) -> None:
        """Let go of the process without a word, in a child that was forked from the training."""
        self.ring.close()
        self._process.returncode = 0  # a child must not wait for its parent's child
