"""The way from the training to the writer: tensors in a ring of shared memory, their rows through a socket.

Writing from the training process is what makes recording dear: buffered writes burn a core in the page cache, and HDF5
and zarr-python hold the GIL. So the training copies bytes into memory that it shares with a writer process, and
goes on. The memory is a `memfd`, not `/dev/shm`, which is 64 MB in a container.

    memfd     control page | ring
    socket    training -> writer: MESSAGE, rows, JSON; one a step, or one a part of a step that is large

Positions in the ring count bytes since the beginning and never wrap; the place of a position is its remainder by
the ring's size. The writer gives memory back by storing the position up to which it is done in the control page. So
each number has one owner, and there is no lock between the processes. What was sent survives the sender: when the
training is killed, the writer finds it in the socket and in the ring.

Both processes read this file, so it imports neither torch nor replay.
"""

import contextlib
import json
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

PAGE = 4096
DIRECT_BYTES = 65_536
"""Tensors from this size on, and smaller ones of whole pages, begin on page borders, as direct I/O demands."""
MINIMUM_BYTES = 1 << 20

ROW = struct.Struct("<qiiiBBHqqq")
"""step, stream, call, micro, mode, kept, 0, offset in the memory, nbytes, CRC-32C or -1; the statistics follow."""
STATISTICS_BYTES = 88
ROW_BYTES = ROW.size + STATISTICS_BYTES

MESSAGE = struct.Struct("<QII")
"""Position after the part, number of rows, bytes of JSON."""

KEPT, NOT_ASKED, RING_FULL, LARGER_THAN_RING, LIMIT, STORE_FAILED, NOT_STORABLE = range(7)
"""`kept` in the commit log, section 7 of the format."""

_ROWS_A_PART = 4096
_POLL_S = 0.0002


class WriterGone(Exception):
    """The writer process is not there to take what the training records."""


class Control:
    """The control page: words that one process stores and the other reads."""

    _RELEASED, _FAILED, _STOP_TENSORS = range(3)

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:PAGE].cast("Q")

    def release(self) -> None:
        """Let go of the memory."""
        self._words.release()

    @property
    def released(self) -> int:
        """Position up to which the writer has given the ring back."""
        return self._words[self._RELEASED]

    @released.setter
    def released(self, position: int) -> None:
        self._words[self._RELEASED] = position

    @property
    def failed(self) -> bool:
        """Whether the writer has given up."""
        return bool(self._words[self._FAILED])

    @failed.setter
    def failed(self, failed: bool) -> None:
        self._words[self._FAILED] = failed

    @property
    def stop_tensors(self) -> int:
        """0, or why no more tensors are taken: `LIMIT` or `STORE_FAILED`."""
        return self._words[self._STOP_TENSORS]

    @stop_tensors.setter
    def stop_tensors(self, why: int) -> None:
        self._words[self._STOP_TENSORS] = why


class Ring:
    """The training's end of the way.

    Owned by the recorder, which uses it under its lock. `rows` holds the rows of the part that is being filled; whoever
    records a tensor writes its row there, number `count`, and raises `count`.
    """

    def __init__(self, ring_bytes: int, writer_alive: Callable[[], bool]) -> None:
        self.size = max(-(-ring_bytes // PAGE) * PAGE, MINIMUM_BYTES)
        self.fd = os.memfd_create("hookrec-ring", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, PAGE + self.size)
        # Populated at once: a page of fresh memory costs more at its first touch than the copy into it.
        self.map = mmap.mmap(self.fd, PAGE + self.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.control = Control(memoryview(self.map))
        self._socket, self.writer_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # As much as the system allows: it must hold the rows that come while the writer rests.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        self._alive = writer_alive
        self.rows = bytearray(_ROWS_A_PART * ROW_BYTES)
        self.count = 0
        self.facts: dict[str, Any] = {}
        self.wait_s = 0.0
        self.high_water_bytes = 0
        self._head = 0
        self._floor = 0  # what lies below was passed over while the ring was empty
        self._sent = 0
        self._part_bytes = max(self.size // 16, MINIMUM_BYTES // 4)

    def receive_line(self, timeout_s: float) -> str:
        """Return the line that the writer sends once it is ready, or has failed to be; "" if it died."""
        line = b""
        self._socket.settimeout(timeout_s)
        while not line.endswith(b"\n") and (part := self._socket.recv(65536)):
            line += part
        self._socket.settimeout(None)
        return line.decode()

    def allocate(self, nbytes: int, *, wait: bool) -> int | None:
        """Take room for a tensor in the part that is being filled.

        Args:
            nbytes: its size, not 0.
            wait: wait for the writer if the ring is full.

        Returns:
            Its offset in the shared memory; None if there is no room and `wait` is false.

        Raises:
            WriterGone: the writer died.
        """
        align = PAGE if nbytes >= DIRECT_BYTES or nbytes % PAGE == 0 else 64
        padded = -(-nbytes // align) * align
        if self._head - self._sent > self._part_bytes or self.count >= _ROWS_A_PART:
            self.send()
        if (position := self._fit(padded, align)) is None:
            if self.count:
                self.send()  # the writer cannot give back what it was not told of
            begin = time.perf_counter()
            while (position := self._fit(padded, align)) is None and wait:
                self._check_alive(begin)
                time.sleep(_POLL_S)
            self.wait_s += time.perf_counter() - begin
            if position is None:
                return None
        self._head = position + padded
        self.high_water_bytes = max(self.high_water_bytes, self._head - max(self.control.released, self._floor))
        return PAGE + position % self.size

    def _fit(self, padded: int, align: int) -> int | None:
        """The position where `padded` bytes fit now in one piece."""
        released = max(self.control.released, self._floor)
        if released == self._head:
            # Nothing is under way: start over at the ring's beginning, where the memory is warm.
            self._head = self._floor = self._sent = -(-self._head // self.size) * self.size
            return self._head
        position = -(-self._head // align) * align
        if position % self.size + padded > self.size:
            position = -(-position // self.size) * self.size
        return position if position + padded - released <= self.size else None

    def reserve_row(self) -> int:
        """Return the number of the row that is written next."""
        if self.count >= _ROWS_A_PART:
            self.send()
        return self.count

    def send(self) -> None:
        """Send the part that was filled, and with it the `facts`.

        Raises:
            WriterGone: the writer died.
        """
        text = json.dumps(self.facts).encode() if self.facts else b""
        self.facts = {}
        data = memoryview(
            b"".join(
                (
                    MESSAGE.pack(self._head, self.count, len(text)),
                    memoryview(self.rows)[: self.count * ROW_BYTES],
                    text,
                )
            )
        )
        self.count = 0
        self._sent = self._head
        begin = time.perf_counter()
        while data:
            try:
                # Without MSG_NOSIGNAL a script that has set SIGPIPE to its default would be killed by our writer's
                # death.
                data = data[self._socket.send(data, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._check_alive(begin)
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                poll.poll(50)
                self.wait_s += time.perf_counter() - begin
                begin = time.perf_counter()
            except OSError as error:
                raise WriterGone(f"the writer process is gone ({error.strerror})") from None

    def _check_alive(self, since: float) -> None:
        if self.control.failed or (time.perf_counter() - since > 0.02 and not self._alive()):
            raise WriterGone("the writer process is gone")

    def close(self) -> None:
        """End the conversation; the writer takes what is on its way, then seals."""
        self._socket.close()
        self.writer_socket.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def release(self) -> None:
        """Give the memory back, once nobody writes there any more."""
        self.control.release()
        with contextlib.suppress(BufferError):  # somebody still looks at it; then it goes when they do
            self.map.close()
