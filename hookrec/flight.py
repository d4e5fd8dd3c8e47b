"""Which steps flight mode holds, lets go and keeps: the rules alone, with no process, file or clock.

Messages come in and go out in the same order, each with its fate. A step is held until it is older than the window, or
a trigger fires: then the steps of the window and the next ones are kept. Steps count only if they have records, so
that with `every=10` a window of five steps is five recorded ones.

What is held lies in the ring, which the training fills meanwhile. If there is no room the oldest steps are let go, and
the records of the step under way only if it alone fills the ring.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Fate(Enum):
    """What becomes of a part of a step."""

    KEEP = "its tensors are written"
    LET_GO = "no trigger fired"
    NO_ROOM = "its memory was needed while the step was under way"


@dataclass(frozen=True)
class Part:
    """What came in one message: a part of a step, or the whole of it.

    Attributes:
        message: the message itself.
        position: position in the ring after it.
        nbytes: bytes of the ring that it takes.
        recorded: whether it has records.
        ends: the number of the step, if this is its last part.
    """

    message: Any
    position: int
    nbytes: int
    recorded: bool
    ends: int | None


Due = tuple[Part, Fate]


@dataclass
class _Step:
    number: int = -1  # not known while it is under way
    parts: deque[Part] = field(default_factory=deque)  # those that have not gone out yet
    nbytes: int = 0
    recorded: bool = False

    def add(self, part: Part) -> None:
        self.parts.append(part)
        self.nbytes += part.nbytes
        self.recorded |= part.recorded


@dataclass(frozen=True)
class Kept:
    """What triggers that have fired still ask for, when another writer goes on.

    Attributes:
        first: the first step that is kept of those that are sent again.
        last: the step of the last trigger.
        more: how many steps after that one are kept.
    """

    first: int
    last: int
    more: int


class Flight:
    """Holds the parts of steps.

    Args:
        before: how many recorded steps before that of a trigger are kept.
        after: how many after it.
        ring_bytes: size of the ring.
        kept: what triggers have asked for earlier.
    """

    def __init__(self, before: int, after: int, ring_bytes: int, kept: Kept | None = None) -> None:
        self._window = before + 1
        self._after = after
        self._room = room_of(ring_bytes)
        self._held: deque[_Step] = deque()  # recorded, and complete
        self._held_bytes = 0
        self._open = _Step()
        self._largest_bytes = 0
        self._first, self._last, self._more = (kept.first, kept.last, kept.more) if kept else (0, -1, 0)
        self._gone = 0  # position after the last part that has gone out

    def take(self, part: Part, fired: Sequence[int] = ()) -> list[Due]:
        """Take a part; return what is due.

        Args:
            part: the next part.
            fired: steps, in ascending order, at which triggers fired; only with a part that ends a step, and no later
                than that step.
        """
        due: list[Due] = []
        self._open.add(part)
        self._largest_bytes = max(self._largest_bytes, self._open.nbytes)
        if part.ends is not None:
            due += self._close(part.ends)
        for number in fired:
            held = self.window(number)
            self._first, self._last, self._more = held[0] if held else number, number, self._after
            due += self._ready()
        return due + self._ready() + self._spare_room()

    def window(self, number: int) -> list[int]:
        """Return the steps that a trigger at a step keeps of those that are held."""
        return [step.number for step in self._held if step.number <= number][-self._window :]

    def free(self, position: int) -> list[Due]:
        """Let go of the ring up to a position, which the training needs; return what is due for that."""
        due: list[Due] = []
        while self._gone < position and (self._held or self._open.parts):
            due += self._pop(Fate.LET_GO) if self._held else self._out(self._open, Fate.NO_ROOM, 1)
        return due

    def finish(self, *, keep: bool) -> list[Due]:
        """Return whatever is complete at the end: its tensors are kept, or let go."""
        due: list[Due] = []
        if keep and self._held:
            self._last = self._held[-1].number
            self._first = self.window(self._last)[0]
            due += self._ready()
        while self._held:
            due += self._pop(Fate.LET_GO)
        return due

    def _close(self, number: int) -> list[Due]:
        """End the step under way."""
        step, self._open = self._open, _Step()
        step.number = number
        if step.recorded:
            self._held.append(step)
            self._held_bytes += step.nbytes
        elif self._held:
            self._held[-1].parts += step.parts  # has nothing to hold, and must not overtake
        else:
            return self._out(step, Fate.KEEP)
        return []

    def _ready(self) -> list[Due]:
        """Take out of the front what is decided."""
        due: list[Due] = []
        while self._held:
            number = self._held[0].number
            if self._first <= number <= self._last:
                due += self._pop(Fate.KEEP)
            elif number <= self._last:
                due += self._pop(Fate.LET_GO)
            elif self._more:
                self._more -= 1
                due += self._pop(Fate.KEEP)
            elif len(self._held) > self._window:
                due += self._pop(Fate.LET_GO)
            else:
                return due
        return due + (self._out(self._open, Fate.KEEP) if self._more else [])

    def _spare_room(self) -> list[Due]:
        """Let the oldest steps go before the training has to wait for the room of the step under way, or the next."""
        due: list[Due] = []
        while self._held and self._held_bytes > self._room - self._largest_bytes:
            due += self._pop(Fate.LET_GO)
        return due

    def _pop(self, fate: Fate) -> list[Due]:
        step = self._held.popleft()
        self._held_bytes -= step.nbytes
        return self._out(step, fate)

    def _out(self, step: _Step, fate: Fate, most: int | None = None) -> list[Due]:
        due: list[Due] = []
        while step.parts and len(due) != most:
            part = step.parts.popleft()
            step.nbytes -= part.nbytes
            self._gone = part.position
            due.append((part, fate))
        return due


def room_of(ring_bytes: int) -> int:
    """Return how much of a ring flight mode fills; an eighth is for what comes while the writer rests."""
    return ring_bytes - ring_bytes // 8


def steps_that_fit(ring_bytes: int, step_bytes: int) -> int:
    """Return how many steps before that of a trigger a ring can hold; -1 if not even that step itself."""
    return room_of(ring_bytes) // max(1, step_bytes) - 2


def ring_for(before: int, step_bytes: int) -> int:
    """Return the size of a ring that holds some steps, the one of the trigger, and the one under way."""
    return -(-(before + 2) * step_bytes * 8 // 7) + 8
