"""How a set of steps is written: ranges as in Python's slices, and how many steps in a row each time.

    0:100             the first hundred
    :                 all
    ::100             0, 100, 200, …
    ::100x3           0, 1, 2, 100, 101, 102, …: bursts of three, from which differences between steps can be told
    0:50,1000:2000:10 both
    7                 the one

A notation of one line goes through a command line, a TOML file and a control message as it is, and is read in the
trace as it was written.
"""

import functools
import re
from dataclasses import dataclass

from hookrec.errors import AttachError

ALL_STEPS = ":"

_PART = re.compile(
    r"(?P<start>[0-9]*) *: *(?P<stop>[0-9]*) *(?:: *(?P<every>[0-9]*))? *(?:x *(?P<burst>[0-9]+))?|(?P<only>[0-9]+)"
)
_MOST_DIGITS = 18  # what fits in the log


@dataclass(frozen=True)
class _Range:
    start: int
    stop: int | None
    every: int
    burst: int

    def __contains__(self, step: int) -> bool:
        if step < self.start or (self.stop is not None and step >= self.stop):
            return False
        return (step - self.start) % self.every < self.burst


@dataclass(frozen=True)
class Schedule:
    """A set of steps."""

    _ranges: tuple[_Range, ...]

    def __contains__(self, step: int) -> bool:
        return any(step in part for part in self._ranges)


@functools.lru_cache(maxsize=64)
def schedule_of(what: str, text: str) -> Schedule:
    """Return the steps that are meant.

    Args:
        what: the name of the option, for the message.
        text: as the module's docstring has it.

    Raises:
        AttachError: it is no schedule.
    """
    if not isinstance(text, str):
        raise AttachError(
            f"{what} is {text!r}; it takes a text: '{text}' for that step alone, '::{text}' for each so many."
        )
    return Schedule(tuple(_range_of(what, text, part.strip()) for part in text.split(",")))


def _range_of(what: str, text: str, part: str) -> _Range:
    match = _PART.fullmatch(part)
    if match is None or any(len(digits) > _MOST_DIGITS for digits in match.groups("")):
        raise AttachError(
            f"{what} is {text!r}, and {part!r} in it is no range; write '0:100' for the first hundred, '::100' for "
            "each hundredth, '::100x3' for three in a row each time, '7' for one step, and commas between several."
        )
    if match["only"]:
        return _Range(int(match["only"]), int(match["only"]) + 1, 1, 1)
    found = _Range(
        start=int(match["start"] or 0),
        stop=int(match["stop"]) if match["stop"] else None,
        every=int(match["every"] or 1),
        burst=int(match["burst"] or 1),
    )
    if found.stop is not None and found.stop <= found.start:
        raise AttachError(f"{what} is {text!r}, and {part!r} in it ends before it begins; the end itself is left out.")
    if not 1 <= found.burst <= found.every:
        raise AttachError(
            f"{what} is {text!r}, and {part!r} in it takes {found.burst} steps of each {found.every}; there must be "
            "one at least, and no more than there are."
        )
    return found
