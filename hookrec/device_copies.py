"""How tensors of a GPU come into the ring and their statistics into rows, while the training goes on.

A hook copies the tensor into a buffer on the device, in the training's own stream, so that an in-place change that
comes next changes nothing of it. From there a lane of ours (`lanes`) copies it into the ring. Statistics are computed
in the training's stream and stay on the device until their part of the step is sent: then one copy brings all of them.

The part is sent when that copy is done, which the ring asks at each step and never waits for, but where more is
under way than fits. What bounds it: tensors by the ring, on the device by the buffer, parts by `ring.PARTS_UNDER_WAY`.
A full buffer holds nobody up on the host: the training's stream waits, on the device, until its oldest tensor is out.

PyTorch's allocator of GPU memory knows nothing of lanes. So tensors that a lane reads are referred to until it is done,
and the buffer is ours for as long as the recording.
"""

import ctypes
import mmap
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookrec import lanes
from hookrec.errors import warn
from hookrec.lanes import Lane, Mark
from hookrec.ring import ROW, ROW_BYTES, ROWS_A_PART, STATISTICS_BYTES, Part
from hookrec.statistics import STATISTICS, measure

BUFFER_BYTES = 256 << 20
"""Of the device, for copies that are on their way. Larger tensors are copied to the host in the training's stream."""
_ALIGN = 512

AWAITED = STATISTICS.pack(-1, 0, 0, 0, 0, *[0.0] * 6)
"""Stands in a row whose statistics are still to come."""

_stuck: list[Any] = []  # memory into which a device may still write


class Measured:
    """The statistics of a tensor, on its device. To compare them waits for it."""

    __slots__ = ("row",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, row: Tensor) -> None:
        self.row = row

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Measured) and self.row.device == other.row.device and torch.equal(self.row, other.row)


class DeviceCopies:
    """The copies of all devices of one recording. Used under the lock of the capture.

    Args:
        shared: the shared memory.
        memory: a tensor over it.
    """

    def __init__(self, shared: mmap.mmap, memory: Tensor) -> None:
        self._shared = shared
        self._memory = memory
        self._devices: dict[torch.device, _Device | None] = {}
        self._pinned_by: Lane | None = None

    def of(self, device: torch.device) -> "_Device | None":
        """Return what copies from a device; None if its tensors are copied while the training waits."""
        if device not in self._devices:
            lane = lanes.lane_of(device)
            if lane is not None and self._pinned_by is None:
                if lane.pin(self._memory):
                    self._pinned_by = lane
                else:
                    warn(f"the ring's memory cannot be pinned for {device}: the training waits for each copy from it.")
            self._devices[device] = _Device(lane) if lane is not None else None
        return self._devices[device]

    def close(self) -> None:
        """Let go of the shared memory, unless a device may still write there: then it is kept for good."""
        if any(device is not None and device.is_at_work() for device in self._devices.values()):
            # A tensor over a buffer does not keep it from being closed; a view does.
            _stuck.append((memoryview(self._shared), self._devices))
        elif self._pinned_by is not None:
            self._pinned_by.unpin(self._memory)
        self._devices = {}


class _Device:
    """One device, its lane and the buffer on it."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.spare: list[Tensor] = []  # host memory for statistics that no part uses
        self._buffer: Tensor | None = None
        self._head = 0
        self._occupied: deque[tuple[int, Mark]] = deque()  # where tensors begin in the buffer, and their copies' marks
        self._emptied: Mark | None = None  # what room is taken now was full before this
        self._last: Mark | None = None

    def record(self, part: Part, row: int, whole: Tensor, stored: Tensor, place: Tensor | None) -> Measured:
        """Record a tensor.

        Args:
            part: the part that its row belongs to.
            row: the row's number.
            whole: the tensor, with at least one element.
            stored: what is kept of it.
            place: where in the shared memory, in the dtype and shape there; None if only statistics are.
        """
        work = part.work
        if not isinstance(work, _Work):
            work = part.work = _Work()
        measured = Measured(measure(whole))
        if place is not None and place.nbytes <= BUFFER_BYTES:
            begin = self._take_room(place.nbytes)
            copy = self._buffer_at(begin, place.nbytes).view(place.dtype).view(place.shape)
            copy.copy_(stored)
            self.lane.follow()
            self.lane.copy(place, copy)
            self._last = self.lane.mark()
            self._occupied.append((begin, self._last))
        else:
            if place is not None:
                place.copy_(stored, non_blocking=True)
            self.lane.follow()
        work.add(self, row, measured.row)
        return measured

    def _take_room(self, nbytes: int) -> int:
        """Return the position of room in the buffer, which the training's stream may use once it comes to it.

        Positions count bytes since the beginning; the place of one is its remainder by the buffer's size.
        """
        begin = -(-self._head // _ALIGN) * _ALIGN
        if begin % BUFFER_BYTES + nbytes > BUFFER_BYTES:
            begin = -(-begin // BUFFER_BYTES) * BUFFER_BYTES
        while self._occupied and self._occupied[0][0] < begin + nbytes - BUFFER_BYTES:
            self._emptied = self._occupied.popleft()[1]
        if self._emptied is not None:
            # Each time, since another stream of the training may have waited for it.
            self.lane.hold_training(self._emptied)
        self._head = begin + nbytes
        return begin

    def _buffer_at(self, position: int, nbytes: int) -> Tensor:
        if self._buffer is None:
            self._buffer = self.lane.device_memory(BUFFER_BYTES)
        return self._buffer[position % BUFFER_BYTES :][:nbytes]

    def bring(self, rows: Sequence[Tensor]) -> tuple[Tensor, Mark]:
        """Let rows of statistics come to the host; return where to, and the mark of all that the lane has to do."""
        target = self.spare.pop() if self.spare else self.lane.host_memory(ROWS_A_PART)
        self.lane.gather(target[: len(rows)], rows)
        self._last = self.lane.mark()
        return target, self._last

    def is_at_work(self) -> bool:
        """Whether the device may still write into memory of the host."""
        try:
            return self._last is not None and (self.lane.busy() or not self._last.query())
        except RuntimeError:
            return False  # it has failed, and does nothing any more


class _Work:
    """What a part of a step waits for: its tensors, and the statistics of its rows."""

    def __init__(self) -> None:
        self._rows: dict[_Device, dict[int, Tensor]] = {}
        self._coming: list[tuple[_Device, list[int], Tensor, Mark]] = []
        self._done = False

    def add(self, device: _Device, row: int, statistics: Tensor) -> None:
        """Wait for what a device was given, and for the statistics of a row."""
        self._rows.setdefault(device, {})[row] = statistics

    def begin(self) -> None:
        """Let the statistics come. Again if Ctrl-C came before the part was sent, since it may have grown."""
        for device, rows in self._rows.items():
            self._coming.append((device, list(rows), *device.bring(list(rows.values()))))

    def fill(self, message: bytearray, begin: int) -> bool:
        """Put the statistics into the rows of a message, which begin at `begin`, if all is done; return whether it is.

        Raises:
            RuntimeError: the device has failed.
        """
        if self._done:
            return True
        if any(device.lane.busy() or not mark.query() for device, _, _, mark in self._coming):
            return False
        for device, rows, target, _ in self._coming:
            found = ctypes.string_at(target.data_ptr(), len(rows) * STATISTICS_BYTES)
            for number, row in enumerate(rows):
                at = begin + row * ROW_BYTES + ROW.size
                # Others are of a tensor that Ctrl-C came in the middle of: another has its row.
                if message[at : at + STATISTICS_BYTES] == AWAITED:
                    message[at : at + STATISTICS_BYTES] = found[number * STATISTICS_BYTES :][:STATISTICS_BYTES]
            device.spare.append(target)
        self._rows, self._coming, self._done = {}, [], True
        return True
