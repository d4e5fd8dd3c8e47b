"""Attempts: a training that goes on from a checkpoint records into the same trace, and which of its records count.

Nothing is rewritten: each attempt begins a segment of the log of its own and has a line in `attempts.jsonl`, and says
its number in the lines of other files. What an earlier attempt recorded of the steps from there on stays, and counts
no more. So two numbers decide whether a record counts: the attempt that recorded it, and its step. Whoever reads
records, numbers, notes or triggers asks here, and nobody else needs to know.

A line is there before the first commit of its attempt, so whoever reads the log first and the lines after it never
sees a step twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.errors import TraceDamaged
from replay.format import ATTEMPTS_FILE, parsed, whole_lines

FOR_EVER = 2**62
"""Until when an attempt counts that no later one has taken over from: no step is as large."""


@dataclass(frozen=True)
class Attempt:
    """A line of `attempts.jsonl`: an attempt after the first.

    Attributes:
        number: which, from 1.
        first_step: the step it went on from; what earlier ones have from there on counts no more.
        segment: the first segment of the log that is its own.
        time: when it committed first (RFC 3339).
        plan: what it records.
        provenance: where it ran.
        before: how the attempt before it ended, as `end.json` had it; None if that was torn.
    """

    number: int
    first_step: int
    segment: int
    time: str
    plan: dict[str, Any]
    provenance: dict[str, Any]
    before: dict[str, Any] | None


class Attempts:
    """The attempts of a rank up to one of them, and what counts of each.

    Args:
        later: the attempts after the first.
        shown: the last that counts; the very last if None.
    """

    def __init__(self, later: Sequence[Attempt] = (), shown: int | None = None) -> None:
        self.later = tuple(later)
        self.last = len(later)
        self.shown = self.last if shown is None else min(shown, self.last)
        self._until = [FOR_EVER]
        for attempt in reversed(self.later[: self.shown]):
            self._until.insert(0, min(attempt.first_step, self._until[0]))

    def until(self, attempt: int) -> int:
        """Return the first step of an attempt that does not count any more; 0 for one that is not shown."""
        return self._until[attempt] if attempt <= self.shown else 0

    def of_segment(self, number: int) -> int:
        """Return the attempt that wrote a segment of the log."""
        return sum(attempt.segment <= number for attempt in self.later)

    def shows(self, attempt: int, step: int | None) -> bool:
        """Whether what an attempt says of a step counts; what is of no step does."""
        return attempt <= self.shown if step is None else step < self.until(attempt)

    def mask(self, attempts: NDArray[Any], steps: NDArray[Any]) -> NDArray[np.bool_]:
        """Return of records, by attempt and step, which count."""
        until = np.array([self.until(attempt) for attempt in range(self.last + 1)], np.int64)
        shown: NDArray[np.bool_] = steps < until[attempts]
        return shown

    def ended(self, attempt: int) -> dict[str, Any] | None:
        """Return how an attempt before the last one ended; None if it was torn."""
        return self.later[attempt].before


def read_attempts(rank_directory: Path, shown: int | None = None) -> Attempts:
    """Return the attempts of a rank, to be asked after its log was read.

    Raises:
        TraceDamaged: a line is no attempt, or not the next.
    """
    path = rank_directory / ATTEMPTS_FILE
    later: list[Attempt] = []
    for line in whole_lines(path)[0]:
        try:
            attempt = _attempt(parsed(line))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceDamaged(f"{path} has a line that is no attempt: {line[:200]!r} ({error}).") from None
        if attempt.number != len(later) + 1 or attempt.segment <= max((a.segment for a in later), default=0):
            raise TraceDamaged(f"{path} has attempt {attempt.number} where attempt {len(later) + 1} belongs.")
        later.append(attempt)
    return Attempts(later, shown)


def counted(lines: Iterable[dict[str, Any]], rank_directory: Path, shown: int | None) -> Iterable[dict[str, Any]]:
    """Yield those of some lines that count, which were read already; each says its step and perhaps its attempt."""
    attempts = read_attempts(rank_directory, shown)
    return (line for line in lines if attempts.shows(_known(line, attempts), line["step"]))


def _known(line: dict[str, Any], attempts: Attempts) -> int:
    """Return the attempt of a line; the last one for one that has not committed yet."""
    number: int = line.get("attempt", 0)
    return max(0, min(number, attempts.last))


def _attempt(found: dict[str, Any]) -> Attempt:
    numbers = [found[name] for name in ("attempt", "first_step", "segment")]
    if any(not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < FOR_EVER for number in numbers):
        raise TypeError(f"{numbers} are no numbers from 0")
    facts = [found[name] for name in ("time", "plan", "provenance", "before")]
    for fact, kinds in zip(facts, ((str,), (dict,), (dict,), (dict, type(None))), strict=True):
        if not isinstance(fact, kinds):
            raise TypeError(f"{fact!r:.80} does not belong there")
    return Attempt(*numbers, *facts)
