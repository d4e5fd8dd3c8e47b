"""How a tensor becomes a record: its bytes into the ring, its statistics into a row, before the model goes on.

The copy must be finished when this returns: an in-place successor, an optimizer or a reused buffer changes the tensor
next. For a contiguous tensor on the CPU copy and statistics are one pass of the native kernel. On CUDA the copy is only
begun, in the order of the device's work: `device_copies`. Everything else goes by torch: into the ring by `copy_`,
which knows strides and devices, and the statistics are taken of the copy. Of a tensor that is stored in part, its first
rows or in a smaller dtype, the statistics are taken of the whole first.

Where its elements are counted by their exponents, these counts are a small tensor, which is recorded in a stream of its
own right behind it.

Nothing here is differentiable, draws a random number or keeps a tensor of the model alive.
"""

import ctypes
import threading
import time
from typing import Any

import torch
from torch import Tensor

from hookrec.calls import DTYPE_NAMES, Call, Fingerprint
from hookrec.choices import Choices
from hookrec.device_copies import AWAITED, DeviceCopies, Measured
from hookrec.plan import Plan
from hookrec.ring import KEPT, LARGER_THAN_RING, NOT_ASKED, RING_FULL, ROW, ROW_BYTES, Ring
from hookrec.statistics import EXPONENTS, NATIVE_DTYPES, STATISTICS, count_exponents, describe, load_native, measure

COUNTS_KIND = "exponents"
"""Of the streams that hold counts; their path says of what."""

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Capture:
    """Writes records into the ring.

    Hooks call it from any thread; `lock` is held while a record is written, so that a part is never sent half filled.
    """

    def __init__(self, ring: Ring, plan: Plan, choices: Choices | None = None) -> None:
        self.lock = threading.RLock()
        self.seconds = 0.0
        self.records = 0
        self._closed = False
        self._ring = ring
        self._wait = plan.when_full == "block"
        self._plan = plan
        self._choices = choices
        self._step = 0
        self._keep_this_step = KEPT
        # What the rules of the plan say: by the number of a stream, and which have no tensors in this step.
        self._ruled: dict[int, Plan] = {}
        self._not_asked: set[int] = set()
        self._placed = plan.tensors  # whether streams get a place in the store: from the first plan with tensors on
        self._parts: dict[int, _Part] = {}  # by the number of a stream whose tensors are stored in part
        self._counts_of: dict[int, int] = {}  # by the number of a stream, that of the stream of its counts
        self._count_streams: set[int] = set()
        self._native = load_native()
        for number, facts in enumerate(ring.earlier_streams):
            ring.streams[self._key_of(facts) or number] = facts
        self._memory = torch.frombuffer(ring.map, dtype=torch.uint8)
        self._memory_address = self._memory.data_ptr()
        self._device_copies = DeviceCopies(ring.map, self._memory)
        # The rows are written by address, so the buffer must never be resized: the export of it sees to that.
        self._rows = (ctypes.c_char * len(ring.rows)).from_buffer(ring.rows)
        self._statistics_address = ctypes.addressof(self._rows) + ROW.size
        self._counts = torch.zeros(len(EXPONENTS), dtype=torch.int64)

    def _key_of(self, facts: dict[str, Any]) -> tuple[object, ...] | None:
        """Return the key of an earlier stream; None if it takes no records of this attempt."""
        if "layer" not in facts:
            return None
        dtype, shape = facts["whole"]
        key = (facts["layer"], facts["kind"], facts["path"], _DTYPES[dtype], torch.Size(shape))
        return (facts["placed"], *key, facts["dtype"], tuple(facts["shape"]))

    def stream(self, layer: str, kind: str, path: str, dtype: torch.dtype, shape: torch.Size) -> int:
        """Return the number of the stream of such records; a new one is told to the writer with the next part."""
        choice = self._plan if self._choices is None else self._choices.plan_for(layer, kind) or self._plan
        stored_dtype, stored_shape = choice.stored(kind, DTYPE_NAMES[dtype], tuple(shape))
        facts = {"layer": layer, "kind": kind, "path": path, "dtype": stored_dtype, "shape": list(stored_shape)}
        part = None
        if (stored_dtype, stored_shape) != (DTYPE_NAMES[dtype], tuple(shape)):
            facts |= {"of_dtype": DTYPE_NAMES[dtype], "of_shape": list(shape)}
            part = _Part(getattr(torch, stored_dtype), torch.Size(stored_shape))
        with self.lock:
            streams = self._ring.streams
            key = (layer, kind, path, dtype, shape, stored_dtype, stored_shape)
            asked = self._placed if choice is self._plan else choice.tensors
            placed = asked or (True, *key) in streams
            # One call gives the number and announces it, so that Ctrl-C cannot come between.
            known = streams.setdefault((placed, *key), {"id": len(streams), "placed": placed, **facts})
            number: int = known["id"]
            if choice.exponents and dtype.is_floating_point:
                self._counts_of[number] = self._stream_of_counts(layer, f"{kind}.{path}" if path else kind, shape)
            if part is not None:
                self._parts[number] = part
            if self._choices is not None:
                self._ruled[number] = choice
                if not choice.keeps_tensors(self._step):
                    self._not_asked.add(number)
        return number

    def _stream_of_counts(self, layer: str, path: str, whole: torch.Size) -> int:
        """Return the number of the stream of the counts of tensors of a shape."""
        dtype = _dtype_of_counts(whole.numel())
        shape = (len(EXPONENTS),)
        facts = {"layer": layer, "kind": COUNTS_KIND, "path": path, "dtype": DTYPE_NAMES[dtype], "shape": list(shape)}
        streams = self._ring.streams
        key = (True, layer, COUNTS_KIND, path, dtype, torch.Size(shape), DTYPE_NAMES[dtype], shape)
        number: int = streams.setdefault(key, {"id": len(streams), "placed": True, **facts})["id"]
        self._count_streams.add(number)
        return number

    def record(self, stream: int, tensor: Tensor, call: Call) -> Fingerprint:
        """Record a tensor whose dtype and layout can be stored.

        Returns:
            Its statistics, packed, or where they will be on its device.

        Raises:
            WriterGone: the writer died.
        """
        with self.lock:
            if self._closed:
                return bytes(STATISTICS.size)
            begin = time.perf_counter()
            ring = self._ring
            part = self._parts.get(stream) if self._parts else None
            nbytes = tensor.nbytes if part is None else part.nbytes
            kept, offset = self._keep_this_step, 0
            if call.step != self._step:
                kept = self._keep_late(stream, call.step)
            elif self._not_asked and stream in self._not_asked:
                kept = NOT_ASKED
            counts_stream = address_of_counts = None
            if self._counts_of:
                if (counts_stream := self._counts_of.get(stream)) is not None:
                    address_of_counts = self._counts.data_ptr()
                elif kept == NOT_ASKED and stream in self._count_streams:
                    kept = ring.control.stop_tensors
            if kept == KEPT:
                if nbytes == 0:
                    pass
                elif nbytes > ring.size:
                    kept = LARGER_THAN_RING
                else:
                    waited = ring.wait_s
                    place = ring.allocate(nbytes, wait=self._wait)
                    begin += ring.wait_s - waited
                    if place is None:
                        kept = self._keep_this_step = RING_FULL
                    else:
                        offset = place
            row = ring.reserve_row()
            code = NATIVE_DTYPES.get(tensor.dtype)
            address = self._statistics_address + row * ROW_BYTES
            into = offset if part is None else 0
            measured = None
            if self._native is not None and code is not None and tensor.is_cpu and is_plain(tensor):
                destination = self._memory_address + into if into else None
                checksum = self._native(
                    tensor.data_ptr(), destination, tensor.numel(), code, address, into != 0, address_of_counts
                )
            elif measured := self._record_on_device(tensor, part, row, offset, nbytes):
                checksum = -1
            else:
                checksum = self._record_by_torch(tensor, into, nbytes, row, code, address, address_of_counts)
            if part is not None and offset and measured is None:
                self._store_part(tensor, part, offset)
            begin_row = row * ROW_BYTES
            step, number, micro, mode = call
            ROW.pack_into(ring.rows, begin_row, step, stream, number, micro, mode, kept, 0, offset, nbytes, checksum)
            ring.part.count = row + 1
            self.records += 1
            self.seconds += time.perf_counter() - begin
            statistics = measured or bytes(ring.rows[begin_row + ROW.size : begin_row + ROW_BYTES])
            if counts_stream is not None:
                natively = self._native is not None and code is not None and measured is None
                self._record_counts(counts_stream, tensor, call, counted=natively and tensor.numel() > 0)
            return statistics

    def _keep_late(self, stream: int, step: int) -> int:
        """Whether the tensor of a gradient that came after its step is kept: that is settled by the step's number."""
        if not self._ruled.get(stream, self._plan).keeps_tensors(step):
            return NOT_ASKED
        return RING_FULL if self.ring_was_full else self._ring.control.stop_tensors

    def _record_counts(self, stream: int, tensor: Tensor, call: Call, *, counted: bool) -> None:
        """Record how many elements of a tensor there are of each exponent; whether the kernel has just counted them."""
        begin = time.perf_counter()
        with torch.no_grad():
            counts = self._counts if counted else count_exponents(tensor.detach())
            counts = counts.to(_dtype_of_counts(tensor.numel()))
        self.seconds += time.perf_counter() - begin
        self.record(stream, counts, call)

    def _record_on_device(
        self, tensor: Tensor, part: "_Part | None", row: int, offset: int, nbytes: int
    ) -> Measured | None:
        """Let a device record a tensor; None if it has no lane of ours, or there is nothing to do."""
        device = self._device_copies.of(tensor.device)
        if device is None or not tensor.numel():
            return None
        with torch.no_grad():
            whole = stored = tensor.detach()
            dtype, shape = tensor.dtype, tensor.shape
            if part is not None:
                dtype, shape = part.dtype, part.shape
                stored = whole[: shape[0]] if len(shape) else whole
            place = self._memory[offset : offset + nbytes].view(dtype).view(shape) if offset else None
            measured = device.record(self._ring.part, row, whole, stored, place)
        begin = row * ROW_BYTES + ROW.size
        self._ring.rows[begin : begin + STATISTICS.size] = AWAITED
        return measured

    def _record_by_torch(
        self,
        tensor: Tensor,
        offset: int,
        nbytes: int,
        row: int,
        code: int | None,
        address: int,
        address_of_counts: int | None,
    ) -> int:
        """Copy what is not contiguous, or not on the CPU, and describe the copy; return its checksum or -1."""
        with torch.no_grad():
            values = tensor.detach()
            if offset:
                place = self._memory[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape)
                values = place.copy_(values)
            elif self._native is not None and code is not None:
                values = values.cpu().resolve_conj().resolve_neg().contiguous()
            if self._native is not None and code is not None and values.numel():
                checksum: int = self._native(
                    values.data_ptr(), None, values.numel(), code, address, offset != 0, address_of_counts
                )
                return checksum
            begin = row * ROW_BYTES + ROW.size
            self._ring.rows[begin : begin + STATISTICS.size] = describe(values)
            return -1

    def _store_part(self, tensor: Tensor, part: "_Part", offset: int) -> None:
        """Copy what is stored of a tensor; the writer takes its checksum."""
        with torch.no_grad():
            place = self._memory[offset : offset + part.nbytes].view(part.dtype).view(part.shape)
            values = tensor.detach()
            place.copy_(values[: part.shape[0]] if len(part.shape) else values)

    def fingerprint(self, tensor: Tensor) -> Fingerprint:
        """Return the statistics of a tensor, by which a recomputed value is told from others."""
        if tensor.numel() and self._device_copies.of(tensor.device) is not None:
            with torch.no_grad():
                return Measured(measure(tensor.detach()))
        return describe(tensor)

    def follow(self, plan: Plan, choices: Choices | None = None) -> bool:
        """Go by another plan from here on.

        Returns:
            Whether the number of each stream is to be asked for again: those for which the store has no place cannot
            take tensors, rules say what is stored, and counts have streams of their own.
        """
        self._wait = plan.when_full == "block"
        before, self._plan = self._plan, plan
        anew = (plan.tensors and not self._placed) or choices is not None or self._choices is not None
        anew |= plan.exponents != before.exponents
        self._placed |= plan.tensors
        self._choices = choices
        self._ruled.clear()
        self._not_asked.clear()
        if anew:
            self._counts_of.clear()
        return anew

    def begin_step(self, step: int) -> None:
        """Keep tensors again, unless the step is to have none or the writer has asked for no more of them."""
        self._step = step
        keep = KEPT
        if self._choices is not None:
            self._not_asked = {number for number, plan in self._ruled.items() if not plan.keeps_tensors(step)}
        elif not self._plan.keeps_tensors(step):
            keep = NOT_ASKED
        self._keep_this_step = keep or self._ring.control.stop_tensors

    def close(self) -> None:
        """Let go of the ring; what a hook in another thread still brings is dropped."""
        with self.lock:
            self._closed = True
            self._device_copies.close()
            self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def ring_was_full(self) -> bool:
        """Whether the ring was full in this step, so that its tensors are not kept."""
        return self._keep_this_step == RING_FULL


class _Part:
    """What is stored of the tensors of a stream."""

    __slots__ = ("dtype", "nbytes", "shape")

    def __init__(self, dtype: torch.dtype, shape: torch.Size) -> None:
        self.dtype = dtype
        self.shape = shape
        self.nbytes = dtype.itemsize * shape.numel()


def _dtype_of_counts(numel: int) -> torch.dtype:
    return torch.int32 if numel < 2**31 else torch.int64


def is_plain(tensor: Tensor) -> bool:
    """Whether the bytes in memory are the values in logical order."""
    return tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())
