"""Records as they are committed: when to look, and when there is nothing more to come.

A look costs a scan of the folder and a read of what was appended; nothing is locked, and the writer is not asked. So
any number of readers may follow, on any file system, and a poll is all that works on each of them.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute

from replay.errors import BadQuery, TraceDamaged, TraceNotFound
from replay.filters import Globs, Names, check_globs, globs_of, matches
from replay.follow import Follower
from replay.query import records_where
from replay.trace import Trace

TORN_S = 10.0
"""How long a trace has no writer before it is given up: a writer that is started again needs a second or two."""


def follow(
    trace: Trace | str | Path,
    poll_s: float = 0.5,
    *,
    layers: Names = None,
    kinds: Names = None,
    where: str | None = None,
    wait_s: float = 0.0,
) -> Iterator[pa.Table]:
    """Yield the records of a trace as they are committed, from the first on, until it is sealed.

    A table is what came since the last look, in the order of execution, with the columns of `Trace.records`. It ends as
    well when nobody has written for ten seconds: `Trace.status` is then "torn".

    Args:
        trace: a trace, or where it is or will be.
        poll_s: seconds between two looks.
        layers: glob or globs over layer names.
        kinds: glob or globs over kinds.
        where: a SQL condition over the columns.
        wait_s: how long to wait for a trace that is not there yet.

    Raises:
        TraceNotFound: there is no trace, or none after `wait_s`.
        BadQuery: a filter cannot be understood; at the end, if a glob has matched nothing in any of them. Or the trace
            was opened with `attempt`: what is committed next is of the latest.
    """
    for _, records in follow_all([trace], poll_s, layers=layers, kinds=kinds, where=where, wait_s=wait_s):
        yield records


def follow_all(
    traces: Iterable[Trace | str | Path],
    poll_s: float = 0.5,
    *,
    layers: Names = None,
    kinds: Names = None,
    where: str | None = None,
    wait_s: float = 0.0,
) -> Iterator[tuple[Trace, pa.Table]]:
    """Yield the records of several traces as they are committed, each table with its trace; see `follow`."""
    deadline = time.monotonic() + wait_s
    going = [_open(trace, poll_s, deadline) for trace in traces]
    followers = {trace: Follower(trace.path) for trace in going}
    written = dict.fromkeys(going, time.monotonic())
    wanted = globs_of(layers), globs_of(kinds)
    every = list(going)
    while going:
        for trace in list(going):
            status = trace.status  # before the look: what is sealed now has nothing that the look would miss
            for records in followers[trace].read():
                found = narrowed(records, *wanted, where)
                if len(found):
                    yield trace.refresh(), found
            if status != "torn":
                written[trace] = time.monotonic()
            if status == "sealed" or time.monotonic() - written[trace] > TORN_S:
                going.remove(trace)
        if going:
            time.sleep(poll_s)
    # Only now, since what is not there yet may come.
    whose = ", ".join(str(trace.refresh().path) for trace in every)
    for what, globs in zip(("layer", "kind"), wanted, strict=True):
        check_globs(what, globs, list(dict.fromkeys(name for t in every for name in getattr(t, f"{what}s"))), whose)


def narrowed(records: pa.Table, layers: Globs, kinds: Globs, where: str | None) -> pa.Table:
    """Return those of some records that are of some layers and kinds, and for which a condition holds."""
    for column, globs in (("layer", layers), ("kind", kinds)):
        if globs is not None:
            names = [name for name in records[column].unique().to_pylist() if matches(name, globs)]
            records = records.filter(pa.compute.is_in(records[column].cast(pa.string()), pa.array(names, pa.string())))
    return records if where is None else records_where(records, where)


def _open(trace: Trace | str | Path, poll_s: float, deadline: float) -> Trace:
    if isinstance(trace, Trace):
        if trace.attempt is not None:
            raise BadQuery(
                f"{trace.path} was opened as of attempt {trace.attempt}, and what is committed next is of the latest. "
                "Open it without `attempt` to follow it; records() has those of an earlier one."
            )
        return trace
    while True:
        try:
            return Trace(Path(trace))
        except (TraceNotFound, TraceDamaged):  # not there, or made this moment and without a rank
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            time.sleep(min(poll_s, left))
