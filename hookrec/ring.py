"""The way from the training to the writer: tensors in a ring of shared memory, their rows through a socket.

Writing from the training process is what makes recording dear: buffered writes burn a core in the page cache, and HDF5
and zarr-python hold the GIL. So the training copies bytes into memory that it shares with a writer process, and
goes on. The memory is a `memfd`, not `/dev/shm`, which is 64 MB in a container.

    memfd     control page | ring
    socket    training -> writer: MESSAGE, rows, JSON; one a step, or one a part of a step that is large

Positions in the ring count bytes since the beginning and never wrap; the place of a position is its remainder by
the ring's size. The writer gives memory back by storing the position up to which it is done in the control page. So
each number has one owner, and there is no lock between the processes. What was sent survives the sender: when the
training is killed, the writer finds it in the socket and in the ring. What was sent survives the writer too: the
training keeps each message until the writer has stored in the control page that it is committed, and sends those that
are left to the writer's successor.

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
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

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

KEPT, NOT_ASKED, RING_FULL, LARGER_THAN_RING, LIMIT, STORE_FAILED, NOT_STORABLE, NOT_TRIGGERED, LOST = range(9)
"""`kept` in the commit log, section 7 of the format."""

ROWS_A_PART = 4096
PARTS_UNDER_WAY = 16
"""So many parts may wait for a device; before there are more, the training waits."""
_DEVICE_S = 60.0
"""A device that brings no part to an end for so long, while the training waits for it, has failed."""
_STUCK = f"a GPU has come no further for {_DEVICE_S:g} s"
_POLL_S = 0.0002

# Without MSG_NOSIGNAL a script that has set SIGPIPE to its default would be killed by our writer's death.
_SEND_FLAGS = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT


class WriterGone(Exception):
    """The writer process is not there to take what the training records."""


class DeviceStuck(Exception):
    """A GPU does not come to the end of what it was given."""


class Work(Protocol):
    """What a device still has to do for a part."""

    def begin(self) -> None:
        """Ask for what is missing in the rows; called when the part is whole, perhaps more than once."""
        ...

    def fill(self, message: bytearray, begin: int) -> bool:
        """Fill in the rows of a message, which begin at `begin`, if the device is done; return whether it is."""
        ...


class Control:
    """The control page: words that one process stores and the other reads."""

    _RELEASED, _FAILED, _STOP_TENSORS, _COMMITTED = range(4)

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
    def committed(self) -> int:
        """How many messages, from the first, the writer has committed: nobody needs them any more."""
        return self._words[self._COMMITTED]

    @committed.setter
    def committed(self, messages: int) -> None:
        self._words[self._COMMITTED] = messages

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


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that was sent, and how much was with it since the beginning.

    Attributes:
        number: its number, from 1.
        rows: how many rows.
        streams: how many streams were announced.
        scalars: how many lines of scalars.
        notes: how many notes.
        plan: the plan as it was changed last; None if it never was.
        data: the message.
        work: what a device has to do before it may go out; those behind it wait as well.
    """

    number: int = 0
    rows: int = 0
    streams: int = 0
    scalars: int = 0
    notes: int = 0
    plan: dict[str, Any] | None = None
    data: bytes | bytearray = b""
    work: Work | None = None

    def is_ready(self) -> bool:
        """Whether it may go out."""
        return self.work is None or (isinstance(self.data, bytearray) and self.work.fill(self.data, MESSAGE.size))


@dataclass(slots=True)
class Part:
    """What is filled at present, and the message before it.

    Ctrl-C may come between any two lines of ours. So a part is sent by one assignment, of the part after it: before,
    nothing was sent, and after it nothing is left to be sent.
    """

    after: Sent
    count: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    work: Work | None = None


class Ring:
    """The training's end of the way.

    Owned by the recorder, which uses it under its lock. `rows` holds the rows of the part that is being filled; whoever
    records a tensor writes its row there, number `part.count`, and raises that. `streams` has all that there ever were,
    by any key, with their announcements in the order of their numbers; a part announces those that the parts before it
    have not. `earlier_streams` are those of earlier attempts, which come first and are announced to nobody.

    Args:
        ring_bytes: size of the memory.
        writer_alive: whether the writer runs.
        succeed: starts another writer at the other end of a new socket when the writer is gone; raises `WriterGone`
            where there is to be none.
    """

    def __init__(self, ring_bytes: int, writer_alive: Callable[[], bool], succeed: Callable[[], None]) -> None:
        self.size = max(-(-ring_bytes // PAGE) * PAGE, MINIMUM_BYTES)
        self.fd = os.memfd_create("hookrec-ring", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, PAGE + self.size)
            # Populated at once: a page of fresh memory costs more at its first touch than the copy into it.
            self.map = mmap.mmap(self.fd, PAGE + self.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(self.fd)
            raise
        try:
            self._connect()
        except BaseException:
            self.map.close()
            os.close(self.fd)
            raise
        self.control = Control(memoryview(self.map))
        self._alive = writer_alive
        self._succeed = succeed
        # The last message that the writer has acknowledged, and those after it. All counts are taken from here, so
        # that an interrupt from the keyboard cannot come between two that belong together.
        self._messages = deque([Sent()])
        self._under_way: tuple[int, list[int]] = (1, [])  # the next message, and the bytes the socket took of it
        self.rows = bytearray(ROWS_A_PART * ROW_BYTES)
        self.part = Part(self._messages[0])
        self.streams: dict[Any, dict[str, Any]] = {}
        self.earlier_streams: list[dict[str, Any]] = []
        self.wait_s = 0.0
        self.high_water_bytes = 0
        self.step_bytes = 0
        self._head = 0
        self._floor = 0  # what lies below was passed over while the ring was empty
        self._sent = 0
        self._part_bytes = max(self.size // 16, MINIMUM_BYTES // 4)

    def _connect(self) -> None:
        self._socket, self.writer_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # As much as the system allows: it must hold the rows that come while the writer rests.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)

    def reconnect(self) -> None:
        """Make a new socket for a new writer."""
        self._socket.close()
        self.writer_socket.close()
        self._under_way = (self.acknowledged().number + 1, [])
        self._connect()

    def go_on(self, there: Mapping[str, Any]) -> None:
        """Go on where earlier attempts of the training have ended, before anything is recorded.

        Args:
            there: how many `rows`, lines of `scalars` and `notes` are there; `streams`, in order, with None for such
                as take no more.
        """
        streams = there["streams"]
        self.earlier_streams = [{"id": number} if found is None else found for number, found in enumerate(streams)]
        self._messages = deque([Sent(0, there["rows"], len(streams), there["scalars"], there["notes"])])
        self.part = Part(self._messages[0])

    @property
    def facts(self) -> dict[str, Any]:
        """What the part that is being filled says besides its rows."""
        return self.part.facts

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
            DeviceStuck: the memory waits for a device that does not go on.
        """
        align = PAGE if nbytes >= DIRECT_BYTES or nbytes % PAGE == 0 else 64
        padded = -(-nbytes // align) * align
        if self._head - self._sent > self._part_bytes or self.part.count >= ROWS_A_PART:
            self.send()
        if (position := self._fit(padded, align)) is None:
            # The writer cannot give back what it was not told of, and keeps what is not committed as long as it may.
            self.facts["need"] = min(self._place(padded, align) + padded - self.size, self._head)
            self.send()
            begin = time.perf_counter()
            while (position := self._fit(padded, align)) is None and wait:
                if not self._is_served(begin) or not self._transmit():
                    self.replace_writer()
                if self.held and time.perf_counter() - begin > _DEVICE_S:
                    raise DeviceStuck(_STUCK)
                time.sleep(_POLL_S)
            self.wait_s += time.perf_counter() - begin
            if position is None:
                return None
        self._head = position + padded
        self.step_bytes += padded
        self.high_water_bytes = max(self.high_water_bytes, self._head - max(self.control.released, self._floor))
        return PAGE + position % self.size

    def _fit(self, padded: int, align: int) -> int | None:
        """The position where `padded` bytes fit now in one piece."""
        released = max(self.control.released, self._floor)
        if released == self._head:
            # Nothing is under way: start over at the ring's beginning, where the memory is warm.
            self._head = self._floor = self._sent = -(-self._head // self.size) * self.size
            return self._head
        position = self._place(padded, align)
        return position if position + padded - released <= self.size else None

    def _place(self, padded: int, align: int) -> int:
        """The next position where `padded` bytes are in one piece."""
        position = -(-self._head // align) * align
        if position % self.size + padded > self.size:
            position = -(-position // self.size) * self.size
        return position

    def reserve_row(self) -> int:
        """Return the number of the row that is written next."""
        if self.part.count >= ROWS_A_PART:
            self.send()
        return self.part.count

    def send(self) -> None:
        """Send the part that was filled, and with it the `facts`.

        Raises:
            WriterGone: the writer died.
            DeviceStuck: too many parts wait for a device that does not go on.
        """
        self.acknowledged()
        part, last = self.part, self.part.after
        facts = part.facts
        if len(self.streams) > last.streams:
            facts = {**facts, "streams": list(self.streams.values())[last.streams :]}
        text = json.dumps(facts).encode() if facts else b""
        head = MESSAGE.pack(self._head, part.count, len(text))
        sent = Sent(
            number=last.number + 1,
            rows=last.rows + part.count,
            streams=len(self.streams),
            scalars=last.scalars + len(facts.get("scalars", ())),
            notes=last.notes + len(facts.get("notes", ())),
            plan=facts.get("plan", last.plan),
            data=b"".join((head, memoryview(self.rows)[: part.count * ROW_BYTES], text)),
        )
        if part.work is not None:
            part.work.begin()
            sent = replace(sent, data=bytearray(sent.data), work=part.work)
        self._sent = self._head
        self.part = Part(sent)
        self.send_held(most=PARTS_UNDER_WAY)

    def send_held(self, most: int | None = None) -> None:
        """Send what was held until a device had done its work, if it has.

        Args:
            most: wait until no more parts than these are held.

        Raises:
            WriterGone: the writer died.
            DeviceStuck: the device does not go on.
        """
        since, held = time.perf_counter(), self.held
        while True:
            if not self._transmit():
                self.replace_writer()
            if most is None or self.held <= most:
                return
            now = time.perf_counter()
            if self.held < held:
                since, held = now, self.held
            elif now - since > _DEVICE_S:
                raise DeviceStuck(_STUCK)
            time.sleep(_POLL_S)
            self.wait_s += time.perf_counter() - now

    @property
    def held(self) -> int:
        """How many parts were sent and are not in the socket."""
        return self.part.after.number + 1 - self._under_way[0]

    def send_last(self) -> None:
        """Send the part that says how it ended, and whatever is held; of a device that has failed, only the end.

        Raises:
            WriterGone: the writer died.
        """
        end = self.facts["end"]
        try:
            self.send()
            self.send_held(most=0)
        except WriterGone:
            raise
        except Exception as error:
            self._drop_held()
            failed = {**end, "how": "failed", "detail": f"{type(error).__name__}: {error}"}
            self.facts["end"] = end if end["how"] == "failed" else failed
            self.send()

    def _drop_held(self) -> None:
        """Forget what is held, and the part under way."""
        self.acknowledged()
        number, taken = self._under_way
        while self._messages[-1].number >= number + bool(taken):
            self._messages.pop()
        self.part = Part(self._messages[-1])

    def acknowledged(self) -> Sent:
        """Forget what the writer has committed; return the last message of it."""
        messages, committed = self._messages, self.control.committed
        if self.part.after.number > messages[-1].number:
            messages.append(self.part.after)
        while len(messages) > 1 and messages[1].number <= committed:
            messages.popleft()
        return messages[0]

    def _transmit(self) -> bool:
        """Put whatever was not sent into the socket; return whether the writer is there."""
        begin = time.perf_counter()
        self.acknowledged()
        while True:
            number, taken = self._under_way
            if number > self._messages[-1].number:
                return True
            sent = self._messages[number - self._messages[0].number]
            if not sent.is_ready():
                return True
            message = memoryview(sent.data)[sum(taken) :]
            if not message:
                self._under_way = (number + 1, [])
                continue
            try:
                # What the socket takes is noted inside of one call, since Ctrl-C may come when a call returns.
                taken.extend(map(self._socket.send, (message,), (_SEND_FLAGS,)))
            except BlockingIOError:
                if not self._is_served(begin):
                    return False
                waiting = time.perf_counter()
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                poll.poll(50)
                self.wait_s += time.perf_counter() - waiting
            except OSError:
                return False

    def _is_served(self, since: float) -> bool:
        """Whether there is a writer that does its work; to ask the system is left out in the first moments."""
        return not self.control.failed and (time.perf_counter() - since <= 0.02 or self._alive())

    def replace_writer(self) -> None:
        """Have another writer go on, and send it whatever the one that is gone has not committed.

        Raises:
            WriterGone: there is no other.
        """
        while True:
            if self.control.failed:
                raise WriterGone("the writer process has given up")
            self._succeed()
            if self._transmit():
                return

    def hang_up(self) -> None:
        """Say that nothing more will come."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket and the memory's file; the writer takes what is on its way, then seals."""
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
