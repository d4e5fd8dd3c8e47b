"""How fast a trace grows while it is recorded, and how long the disk bears it: reckoned from the trace alone.

The last recorded steps say what a step is, and the times at which they were written how fast they come. So a schedule,
a pause, compression and a change of the plan are in the figures, and nothing has to be written for them. What ends the
tensors first is for the plan to say: `max_bytes` is of the tensors of a rank, `keep_free` of the file system, which all
ranks and their logs fill.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from replay.documents import read_scalars
from replay.log import Log, segment_files
from replay.trace import Trace

_RECENT = 100
"""Recorded steps that are looked at, of the last."""

MAX_BYTES, KEEP_FREE, DISK = "max_bytes", "keep_free", "the disk"


@dataclass(frozen=True)
class Forecast:
    """What a recording costs, by its last steps. Of several ranks, all together.

    Attributes:
        records: of a recorded step.
        step_bytes: of the tensors of a recorded step, as they are stored.
        bytes_per_s: of tensors, by the clock on the wall.
        log_bytes_per_s: of statistics.
        ends_by: what ends the tensors first: `MAX_BYTES`, `KEEP_FREE`, or `DISK` where statistics alone are recorded;
            None if nothing grows, or it has ended.
        ends_in_s: when, from now on.
    """

    records: float
    step_bytes: float
    bytes_per_s: float
    log_bytes_per_s: float
    ends_by: str | None
    ends_in_s: float | None

    def __str__(self) -> str:
        rate, what = (self.bytes_per_s, "") if self.bytes_per_s else (self.log_bytes_per_s, " of statistics")
        pace = (
            f"{self.records:,.4g} records and {size(self.step_bytes)} of tensors a recorded step, "
            f"{size(rate)}{what} a second"
        )
        if self.ends_in_s is None:
            return pace
        ends = "the disk is full" if self.ends_by == DISK else f"{self.ends_by} ends the tensors"
        return f"{pace}; {ends} in {duration(self.ends_in_s)}"


@dataclass(frozen=True)
class _Growth:
    """The growth of one rank, and what its own limit leaves."""

    records: float
    step_bytes: float
    steps_per_s: float
    log_bytes_per_s: float
    room_bytes: float


def forecast(trace: Trace) -> Forecast | None:
    """Return what the recording of a trace costs now; None if it has no recorded step to tell it from."""
    plan = _plan(trace)
    found = [growth for rank in trace.directories.values() if (growth := _growth(rank, plan)) is not None]
    if not found:
        return None
    rate = sum(growth.step_bytes * growth.steps_per_s for growth in found)
    log_rate = sum(growth.log_bytes_per_s for growth in found)
    ends: list[tuple[float, str]] = [
        (growth.room_bytes / (growth.step_bytes * growth.steps_per_s), MAX_BYTES)
        for growth in found
        if growth.step_bytes * growth.steps_per_s > 0
    ]
    if rate + log_rate > 0:
        room, by = room_of_disk(trace.path, plan)
        ends.append((room / (rate + log_rate), by))
    ends_in_s, ends_by = min(ends) if ends else (None, None)
    return Forecast(
        records=sum(growth.records for growth in found),
        step_bytes=sum(growth.step_bytes for growth in found),
        bytes_per_s=rate,
        log_bytes_per_s=log_rate,
        ends_by=ends_by,
        ends_in_s=ends_in_s,
    )


def room_of_disk(path: "os.PathLike[str]", plan: dict[str, Any]) -> tuple[float, str]:
    """Return the bytes that may still be written where `path` lies, and what says so."""
    disk = os.statvfs(path)
    keep_free = plan.get("keep_free") if plan.get("tensors", True) else 0
    keep_free = keep_free if isinstance(keep_free, (int, float)) else 0
    room = max(0.0, (disk.f_bavail - keep_free * disk.f_blocks) * disk.f_frsize)
    return room, KEEP_FREE if keep_free else DISK


def _plan(trace: Trace) -> dict[str, Any]:
    """The plan that holds now: of the last change, else of the last attempt, else the first."""
    plans = [trace.identity.get("plan")]
    plans += [attempt["plan"] for attempt in trace.attempts if "plan" in attempt]
    plans += [note["plan"] for note in trace.notes if "plan" in note]
    return next((plan for plan in reversed(plans) if isinstance(plan, dict)), {})


def _growth(rank: Path, plan: dict[str, Any]) -> _Growth | None:
    log = Log(rank).refresh()
    steps = np.unique(log.table(["step"])["step"].to_numpy())[-_RECENT:]
    if not len(steps):
        return None
    table = log.table(["step", "nbytes"], pc.field("step") >= int(steps[0]))
    of_step, nbytes = table["step"].to_numpy(), table["nbytes"].to_numpy()
    times, lengths = {}, {}
    for step, time, name, value in read_scalars(rank, int(steps[0])):
        if name == "hookrec/step_s" and step >= steps[0]:
            times[step], lengths[step] = time, value
    timed = [step for step in steps.tolist() if step in times]
    if not timed:
        return None
    # From the end of the first to that of the last, which is what lay between; a single one has its own length.
    passed, count = times[timed[-1]] - times[timed[0]], len(timed) - 1
    if count < 1 or passed <= 0:
        passed, count = sum(lengths[step] for step in timed), len(timed)
    steps_per_s = count / passed if passed > 0 else 0.0
    rows = log.rows
    log_bytes = sum(path.stat().st_size for path in segment_files(rank).values() if path.exists())
    records = len(of_step) / len(steps)
    stored = Log(rank, superseded=True).refresh().table(["nbytes"])["nbytes"]  # all of it takes room
    limit = plan.get("max_bytes")
    limit = limit if isinstance(limit, int) else np.inf
    return _Growth(
        records=records,
        step_bytes=float(nbytes.sum()) / len(steps),
        steps_per_s=steps_per_s,
        log_bytes_per_s=records * steps_per_s * log_bytes / rows if rows else 0.0,
        room_bytes=max(0.0, limit - float(pc.sum(stored).as_py() or 0)),
    )


def size(nbytes: float) -> str:
    """Return bytes in words, in powers of ten."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.4g} {unit}"
    return f"{nbytes:,.3g} bytes"


def duration(seconds: float) -> str:
    """Return a time in words, in the unit that fits."""
    for unit, factor in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:,.1f} {unit}" if seconds < 1e4 * 86400 else "more than 10,000 days"
    return f"{seconds:,.3g} s"
