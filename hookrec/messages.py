"""What the training has sent, taken out of the socket: messages that came together, for as long as any can come.

How long to rest is decided here. To be woken by each small step takes a core from the training in the middle of it, and
to write each small record by itself costs more than its bytes. So the writer rests when it has caught up, and then
takes the steps that came together. A ring that would be full by then (at 8 GB/s) gets a shorter rest.
"""

import json
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookrec.ring import MESSAGE, ROW, ROW_BYTES
from replay.format import STATISTICS

Message = tuple[int, NDArray[Any], dict[str, Any]]
"""Position in the ring after it, rows, facts."""

ROW_DTYPE = np.dtype(
    [
        *(("step", "<i8"), ("stream", "<i4"), ("call", "<i4"), ("micro", "<i4"), ("mode", "u1"), ("kept", "u1")),
        *(("unused", "<u2"), ("place", "<i8"), ("nbytes", "<i8"), ("checksum", "<i8")),
        *((name, "<i8") for name in STATISTICS[:5]),
        *((name, "<f8") for name in STATISTICS[5:]),
    ]
)
assert ROW_DTYPE.itemsize == ROW_BYTES
assert ROW_DTYPE.fields is not None
assert ROW_DTYPE.fields["numel"][1] == ROW.size

_REST_S = 0.025
_RING_BYTES_A_SECOND = 8e9


class Source:
    """What the training sends, until it says goodbye or is gone: lists of whole messages that came together.

    Processes that the training has forked may hold its end of the socket open, so its death is watched too.
    """

    def __init__(self, connection: socket.socket, training: int, memory_bytes: int) -> None:
        self._connection = connection
        self._training = training
        self._rest_s = min(_REST_S, memory_bytes / _RING_BYTES_A_SECOND)
        self._together_bytes = memory_bytes // 16
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(training, select.POLLIN)
        self._buffer = bytearray()
        connection.setblocking(False)

    def __iter__(self) -> Iterator[list[Message]]:
        dead = False
        position = 0
        while True:
            open_ = self._receive()
            messages: list[Message] = []
            for message in self._parse():
                messages.append(message)
                # The training may be waiting for the memory of these.
                if message[0] - position >= self._together_bytes:
                    yield messages
                    messages, position = [], message[0]
            if messages:
                yield messages
                position = messages[-1][0]
                if "end" in messages[-1][2]:
                    return
            if dead or not open_:
                return
            time.sleep(self._rest_s)
            # Death is looked at before the socket is read again: what was sent before it is there.
            dead = any(fd == self._training for fd, _ in self._poll.poll())

    def _receive(self) -> bool:
        """Read what is there; return whether more may come."""
        while True:
            try:
                data = self._connection.recv(1 << 18)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            if not data:
                return False
            self._buffer += data

    def _parse(self) -> Iterator[Message]:
        """Take whole messages out of the buffer."""
        begin = 0
        while len(self._buffer) - begin >= MESSAGE.size:
            position, count, text_bytes = MESSAGE.unpack_from(self._buffer, begin)
            rows_begin = begin + MESSAGE.size
            text_begin = rows_begin + count * ROW_BYTES
            if text_begin + text_bytes > len(self._buffer):
                break
            begin = text_begin + text_bytes
            rows = np.frombuffer(self._buffer[rows_begin:text_begin], ROW_DTYPE)
            yield position, rows, json.loads(self._buffer[text_begin:begin]) if text_bytes else {}
        del self._buffer[:begin]
