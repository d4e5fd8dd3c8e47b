"""What the user is told while a recording goes on: once, and in the trace as well where a reader will ask."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hookrec.errors import warn
from hookrec.flight import ring_for, steps_that_fit
from hookrec.nothing import likely_cause
from hookrec.plan import Plan
from hookrec.ring import LIMIT

_log = logging.getLogger("hookrec")


class Remarks:
    """Warns of what is not as it was asked for.

    Attributes:
        cost: what the first recorded step was, a sentence; None before.

    Args:
        note: takes a note about a layer, or about none.
    """

    def __init__(self, note: Callable[[str | None, str], None]) -> None:
        self.cost: str | None = None
        self._note = note
        self._told_of_nothing = self._told_of_room = self._told_to_stop = False

    def unmatched(self, sentences: Iterable[str]) -> None:
        """Say which rules are about no layer."""
        for sentence in sentences:
            self._note(None, sentence)
            warn(f"{sentence}.")

    def no_record(self, step: int, *, called: bool, kinds: Sequence[str], notes: Sequence[tuple[str, str]]) -> None:
        """Say of the first step that should have records and has none why that is; see `likely_cause`."""
        if not self._told_of_nothing:
            self._told_of_nothing = True
            cause = likely_cause(called=called, kinds=kinds, notes=notes)
            self._note(None, f"the step has no record: {cause}")
            warn(f"step {step} has no record: {cause} Later steps are not warned of.")

    def first_step(self, step: int, records: int, nbytes: int, step_s: float, path: Path, plan: Plan | None) -> None:
        """Say what the first recorded step was, and for how many like it there is room: to Python's logging.

        Args:
            step: which.
            records: how many it has.
            nbytes: bytes of its tensors.
            step_s: how long it took.
            path: a directory of the disk on which they are.
            plan: what limits them; None if that is not known.
        """
        size = f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.1f} kB"
        words = f"step {step}: {records:,} records and {size} of tensors, in {step_s:.3g} s"
        if plan is not None and nbytes:
            with contextlib.suppress(OSError):
                disk = os.statvfs(path)
                free = int((disk.f_bavail - plan.keep_free * disk.f_blocks) * disk.f_frsize)
                limits = (plan.max_bytes, f"max_bytes={plan.max_bytes:,}"), (free, f"keep_free={plan.keep_free}")
                room, limit = min(limits)
                words += f"; there is room for {max(0, room) // nbytes:,} such steps, until {limit} ends the tensors"
        self.cost = f"{words}."
        _log.info(self.cost)

    def room(self, step: int, wanted: int, ring_bytes: int, step_bytes: int) -> None:
        """Say of the first step for which the ring is too small to hold as many as flight mode is asked to."""
        fits = steps_that_fit(ring_bytes, step_bytes)
        if fits < wanted and not self._told_of_room:
            self._told_of_room = True
            room = f"has room for {fits} before that of a trigger" if fits >= 0 else "cannot hold that of a trigger"
            why = (
                f"of the steps that flight={wanted} asks for, a ring of {ring_bytes / 1e6:,.0f} MB {room}: step "
                f"{step} has {step_bytes / 1e6:,.1f} MB. "
                f"ring='{-(-ring_for(wanted, step_bytes) // 10**6)}MB' holds all of them"
            )
            self._note("", why)
            warn(f"{why}.")

    def stopped(self, step: int, why: int) -> None:
        """Say that tensors are recorded no more, or again.

        Args:
            step: the one that comes next.
            why: what the control page has: 0 while they are recorded.
        """
        if why and not self._told_to_stop:
            reason = "the limit on the disk was reached" if why == LIMIT else "tensors could not be written"
            warn(f"from step {step} on only statistics are recorded: {reason}. See `replay info`.")
        elif self._told_to_stop and not why:
            warn(f"from step {step + 1} on tensors are recorded again: there is room on the disk.")
        self._told_to_stop = bool(why)
