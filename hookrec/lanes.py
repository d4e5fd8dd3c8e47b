"""What is asked of a GPU so that a copy to the host runs beside the training: a lane of its own.

A lane is a stream that nobody else uses. It is a small face, so that the rules of `device_copies` are tested without a
GPU, on a lane that is a slow thread. CUDA, and ROCm under the same names, have one; tensors of other devices
(mps, xpu) are copied while the training waits.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A place in a lane's work."""

    def query(self) -> bool:
        """Whether the work up to here is done; raises if the device has failed."""
        ...


class Lane(Protocol):
    """Work of ours on one device. No method waits for the device."""

    def follow(self) -> None:
        """Let what the lane is given from now on begin after what the training has given its current stream."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy memory of the device into memory of the host."""
        ...

    def gather(self, target: Tensor, rows: Sequence[Tensor]) -> None:
        """Stack tensors of the device, and copy them into memory of the host."""
        ...

    def mark(self) -> Mark:
        """Return the end of what the lane was given so far."""
        ...

    def hold_training(self, mark: Mark) -> None:
        """Let what the training gives its current stream from now on begin after a mark."""
        ...

    def busy(self) -> bool:
        """Whether the device must not be asked for anything, since a CUDA graph is being captured."""
        ...

    def device_memory(self, nbytes: int) -> Tensor:
        """Return bytes on the device."""
        ...

    def host_memory(self, rows: int) -> Tensor:
        """Return memory of the host for rows of statistics, into which the device copies by itself."""
        ...

    def pin(self, memory: Tensor) -> bool:
        """Let the device copy by itself into memory of ours; return whether it can."""
        ...

    def unpin(self, memory: Tensor) -> None:
        """Take back `pin`."""
        ...


def lane_of(device: torch.device) -> Lane | None:
    """Return a new lane on a device; None if its tensors are copied while the training waits."""
    return _CudaLane(device) if device.type == "cuda" else None


_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for each device of the process."""


class _CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def gather(self, target: Tensor, rows: Sequence[Tensor]) -> None:
        # The stack is of the lane's own memory, which only later work of the lane can get.
        with torch.cuda.stream(self._stream):
            target.copy_(torch.stack(list(rows)), non_blocking=True)

    def mark(self) -> Mark:
        mark: Mark = self._stream.record_event()
        return mark

    def hold_training(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)  # type: ignore[arg-type]

    def busy(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def device_memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def host_memory(self, rows: int) -> Tensor:
        return torch.empty((rows, 11), dtype=torch.int64, pin_memory=True)

    def pin(self, memory: Tensor) -> bool:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)) == 0:
            return True
        # CUDA remembers the failure, and would tell the training of it at its next kernel: so a kernel of ours asks.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device).add_(1)
        return False

    def unpin(self, memory: Tensor) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(memory.data_ptr())
