"""When tensors stop, and when they begin again: `max_bytes`, `keep_free`, a disk that is full, a store that fails.

Statistics go on in each case. The training is told in the control page, so that it copies no tensors meanwhile; what
the ring still has of later steps is not kept either. A limit is looked at after a commit, and so it is passed by the
rest of one step, which stays whole.
"""

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookrec.ring import KEPT, LIMIT, STORE_FAILED, Control

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LOOK_AGAIN_S = 2.0
_STEPS_OF_ROOM = 4
"""Tensors begin again when there is room for so many steps, and after each time for twice as many: no flapping."""


class Room:
    """Says whether there is room for tensors.

    Args:
        directory: the rank's directory.
        plan: what is recorded, as `trace.json` has it.
        control: where the training looks.
        nbytes: bytes of the tensors that are in the trace.
        note: writes down what concerns all layers.

    Attributes:
        plan: the plan; it may change.
        nbytes: as above.
    """

    def __init__(
        self, directory: Path, plan: dict[str, Any], control: Control, nbytes: int, note: Callable[[str], None]
    ) -> None:
        self.plan = plan
        self.nbytes = nbytes
        self._directory = directory
        self._control = control
        self._note = note
        self._last_step: int | None = None  # the last whose tensors are kept, where a limit was reached
        self._may_begin_again = False
        self._stops = 0
        self._look_again = 0.0
        self._step_bytes = 0  # of tensors in the largest commit

    @property
    def store_failed(self) -> bool:
        """Whether tensors were stopped because one could not be written."""
        return self._control.stop_tensors == STORE_FAILED

    def leave_out(self, columns: dict[str, NDArray[Any]]) -> None:
        """Keep no tensor of the steps behind the one in which a limit was reached, though the ring still has them."""
        kept = columns["kept"] == KEPT
        nbytes = np.cumsum(np.where(kept, columns["nbytes"], 0))
        self._step_bytes = max(self._step_bytes, int(nbytes[-1]) if len(nbytes) else 0)
        if self._last_step is None and self.plan["compression"] is None:  # else the bytes are not known yet
            past = np.flatnonzero(self.nbytes + nbytes > self.plan["max_bytes"])
            if len(past):
                self._last_step = int(columns["step"][past[0]])
        if self._last_step is not None:
            columns["kept"][kept & (columns["step"] > self._last_step)] = LIMIT

    def look(self, step: int, begin_again: Callable[[], None]) -> None:
        """Stop tensors behind a step if a limit is reached; let them begin again if there is room.

        Args:
            step: the last that is committed, -1 if none is.
            begin_again: called before they do; they do not if it raises OSError.
        """
        if not self._control.stop_tensors:
            self.look_at_limits(step)
        elif self._may_begin_again and time.monotonic() >= self._look_again:
            self._look_again = time.monotonic() + _LOOK_AGAIN_S
            self._begin_again(begin_again)

    def fail(self, error: OSError, *, for_good: bool = False) -> None:
        """Stop tensors since one could not be written: until there is room if the disk is full, else for good."""
        self._may_begin_again = not for_good and (self._may_begin_again or error.errno in _NO_ROOM)
        self._stop(STORE_FAILED, error)

    def look_at_limits(self, step: int = -1) -> None:
        """Stop tensors behind a step if a limit is reached; where an earlier writer has, learn of it."""
        if self.nbytes > self.plan["max_bytes"]:
            self._last_step = step if self._last_step is None else self._last_step
            self._stop(
                LIMIT,
                f"max_bytes={self.plan['max_bytes']:,} was reached in step {self._last_step}, which is kept whole; "
                f"there are {self.nbytes:,} bytes of tensors",
            )
            return
        disk = os.statvfs(self._directory)
        if disk.f_bavail < self.plan["keep_free"] * disk.f_blocks:
            free = disk.f_bavail * disk.f_frsize / 1e9
            self._last_step, self._may_begin_again = step, True
            self._stop(LIMIT, f"{free:.1f} GB are free on the disk, less than keep_free={self.plan['keep_free']}")

    def _stop(self, why: int, reason: object) -> None:
        if not self._control.stop_tensors:
            self._control.stop_tensors = why
            self._stops += 1
            self._look_again = time.monotonic() + _LOOK_AGAIN_S
            self._note(f"from here on statistics only: {reason}")

    def _begin_again(self, begin_again: Callable[[], None]) -> None:
        """Take tensors again if there is room for some steps: by trying, since a quota shows in no other way."""
        need = _STEPS_OF_ROOM * 2**self._stops * self._step_bytes
        disk = os.statvfs(self._directory)
        if disk.f_bavail - need / disk.f_frsize < self.plan["keep_free"] * disk.f_blocks:
            return
        try:
            with tempfile.TemporaryFile(dir=self._directory) as file:
                os.posix_fallocate(file.fileno(), 0, need + mmap.PAGESIZE)
            begin_again()
        except OSError:
            return
        self._last_step, self._may_begin_again = None, False
        self._control.stop_tensors = 0
        self._note("there is room on the disk again: tensors are kept from the next step on")
