"""How a training that starts again goes on in the trace that it has begun.

Its writer process looks at what is there before anything is changed: a trace that is not whole, that somebody writes,
or that does not fit is refused, and stays as it is. Then torn ends are cut off, the log is turned into Parquet, so that
the attempt has segments of its own, and `end.json` is laid aside, since the rank is not sealed any more.

The attempt gets its line in `attempts.jsonl` with its first commit. A training that fails again before it has ended a
step supersedes nothing, and what was recorded last time is what readers see, with its ending, whoever seals it.
"""

import contextlib
import datetime
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookrec.provenance import provenance_of
from hookrec.resume import SHARED_FILES, Predecessor, cut_torn_line
from replay.attempts import read_attempts
from replay.documents import read_end, read_identity, read_laid_aside, read_notes, read_scalars, read_triggers
from replay.errors import ReplayError, TraceDamaged
from replay.files import sync
from replay.format import (
    ATTEMPTS_FILE,
    END_FILE,
    LAID_ASIDE,
    TRACE_FILE,
)
from replay.hdf5_master import MASTER
from replay.log import compact_all
from replay.log_segments import segments_of
from replay.seal import is_sealed, locked, seal, seal_abandoned
from replay.stores import store_of

_POLL_S = 0.1


class CannotResume(Exception):
    """The training cannot go on in the trace; says why, and what to do."""


@dataclass
class Attempt:
    """The attempt that a writer records.

    Attributes:
        number: which, from 0.
        first_step: where it goes on.
        before: how the attempt before ended, as `end.json` had it; None if that was torn, or there is none.
        begun: whether it counts: the first always does.
        provenance: where it runs.
    """

    number: int = 0
    first_step: int = 0
    before: dict[str, Any] | None = None
    begun: bool = True
    provenance: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], directory: Path) -> "Attempt":
        """Return the attempt that a writer was told of whose work another one began."""
        found = config.get("attempt")
        if found is None:
            return cls()
        begun = read_attempts(directory).last >= found["number"]
        return cls(found["number"], found["first_step"], found["before"], begun, found["provenance"])

    def begin(self, directory: Path, segment: int, plan: Mapping[str, Any]) -> None:
        """Write the line of the attempt, unless it is there: from now on what earlier ones have counts no more."""
        if self.begun:
            return
        line = {
            "attempt": self.number,
            "first_step": self.first_step,
            "segment": segment,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "plan": plan,
            "provenance": self.provenance,
            "before": self.before,
        }
        path = directory / ATTEMPTS_FILE
        cut_torn_line(path)
        length = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
            sync(directory)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, length)  # a line without a commit would hide what is there
            raise
        self.begun = True
        with contextlib.suppress(OSError):  # the line has it
            (directory / LAID_ASIDE.format(self.number - 1)).unlink(missing_ok=True)

    def marked(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return a line for a file that all attempts share."""
        return {**line, "attempt": self.number} if self.number else line

    def seal(self, directory: Path, end: Mapping[str, Any], *, durable: bool) -> None:
        """Finish the rank: as the attempt ended, or as the one before did if this has recorded nothing."""
        if self.begun:
            seal(directory, end["how"], end["detail"], end["books"], durable=durable)
        else:
            why = "the writer was gone; sealed by a later attempt, which recorded nothing"
            seal_abandoned(directory, why, durable=durable)


@contextmanager
def locked_soon(directory: Path, wait_s: float) -> Iterator[None]:
    """Hold the writer's lock of a rank.

    The writer of a training that was killed a moment ago is still busy with what that has left.

    Args:
        directory: the rank.
        wait_s: how long to wait for it.

    Raises:
        CannotResume: another writer still holds it, or there is a link in it.
    """
    deadline = time.monotonic() + wait_s
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(directory))
                break
            except TraceDamaged as error:
                raise CannotResume(str(error).removesuffix(".")) from None
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise CannotResume(
                        f"another process writes to it, and still did after {wait_s:g} s. End that training first"
                    ) from None
                time.sleep(_POLL_S)
        yield


def take_up(directory: Path, config: dict[str, Any]) -> tuple[Attempt, Predecessor, dict[str, Any]]:
    """Make a rank ready for another attempt; the lock is held.

    Args:
        directory: the rank.
        config: what the writer is told.

    Returns:
        The attempt, what the earlier ones have left, and what the training has to know of that.

    Raises:
        CannotResume: the trace is not whole, or does not fit. Nothing was changed.
        OSError: a file cannot be written.
    """
    try:
        _check_whole(directory)
        attempts = read_attempts(directory)
        before = Predecessor(directory, None, 0, attempts.last + 1)
        end = read_end(directory) or read_laid_aside(directory)
        _check_fits(directory, config, before)
    except (ReplayError, ValueError, KeyError, IndexError) as error:
        raise CannotResume(f"it is damaged: {error} `replay verify {directory.parent}` shows all of it") from None
    begins = not before.rows_committed and not attempts.last
    first = config["attempt"]["first_step"]
    if first is None:
        first = before.last_step + 1
    for name in (*SHARED_FILES, ATTEMPTS_FILE):
        cut_torn_line(directory / name)
    compact_all(directory)
    (directory / MASTER).unlink(missing_ok=True)
    if begins:
        (directory / END_FILE).unlink(missing_ok=True)
    elif is_sealed(directory):
        (directory / END_FILE).replace(directory / LAID_ASIDE.format(attempts.last))
    number = 0 if begins else attempts.last + 1
    attempt = Attempt(number, first, end, begins, provenance_of(config))
    facts = {
        "attempt": {"number": number, "first_step": first, "before": end, "provenance": attempt.provenance},
        "streams": _usable(config["plan"], before),
        "rows": before.rows_committed,
        "scalars": before.lines["scalars"],
        "notes": before.lines["notes"],
    }
    return attempt, before, facts


def changes_of_plan(directory: Path, plan: Mapping[str, Any]) -> str | None:
    """Return in words how a plan differs from that of the last attempt; None if it does not."""
    later = read_attempts(directory).later
    last = later[-1].plan if later else read_identity(directory.parent)["plan"]
    different = [name for name, value in plan.items() if name in last and last[name] != value]
    return ", ".join(f"{name} {last[name]} -> {plan[name]}" for name in different) or None


def _check_whole(directory: Path) -> None:
    """Raise where what was committed is damaged; a commit that a crash cut off is no damage."""
    if (directory.parent / TRACE_FILE).exists():
        read_identity(directory.parent)
    for segment in segments_of(directory):
        if segment.path.suffix == ".arrows":
            for _ in segment.batches():
                pass
            if (tail := segment.tail()) is not None and tail.damage:
                raise ValueError(f"{segment.path}: {tail.message}")
        elif not segment.path.exists():
            raise ValueError(f"{segment.path} is missing.")
    read_notes(directory)
    read_triggers(directory)
    for _ in read_scalars(directory):
        pass


def _check_fits(directory: Path, config: dict[str, Any], before: Predecessor) -> None:
    """Raise CannotResume where the trace is of another store or another number of ranks."""
    root = directory.parent
    wanted = config["plan"]["store"]
    if any(stream.location is not None for stream in before.streams) and store_of(directory) != wanted:
        raise CannotResume(
            f"its tensors are in the store {store_of(directory)!r}, and store={wanted!r} was asked for. Ask for the "
            "same, or record to another path"
        )
    ranks = config["attempt"]["ranks"]
    # Before that file is there, other ranks may be about to make their folders for the first time.
    there = read_identity(root).get("ranks") if (root / TRACE_FILE).exists() else None
    if there is None:
        there = max(ranks, len([path for path in root.glob("rank-[0-9]*") if path.is_dir()]))
    if there != ranks:
        raise CannotResume(
            f"it was recorded by {there} process{'es' * (there != 1)}, and this training has {ranks}. Start as many, "
            "or record to another path"
        )
    if config["attempt"]["first_step"] is None and ranks > 1 and before.rows_committed:
        raise CannotResume(
            f"of {ranks} processes each may have committed another last step. Say where the training goes on, by "
            "resume=STEP"
        )


def _usable(plan: Mapping[str, Any], before: Predecessor) -> list[dict[str, Any] | None]:
    """Return the streams that are there, in order, with None for such as can take no records of this attempt."""
    found: list[dict[str, Any] | None] = []
    numbers: dict[tuple[object, ...], int] = {}
    for stream in before.streams:
        placed = (
            stream.location is not None and stream.codec == plan["compression"] and stream.location not in before.closed
        )
        fits = placed or not plan["tensors"]
        key = (placed, stream.layer, stream.kind, stream.path, stream.dtype, stream.shape, *stream.whole)
        if fits and key in numbers:
            found[numbers[key]] = None
        if fits:
            numbers[key] = stream.id
        names = ("id", "layer", "kind", "path", "dtype", "shape", "whole")
        found.append({"placed": placed, **{name: getattr(stream, name) for name in names}} if fits else None)
    return found
