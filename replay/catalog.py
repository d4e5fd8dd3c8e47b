"""Which traces lie below a folder, and what each is in a line, without reading its log.

What a sealed rank holds is counted in its `end.json`. Of a rank that is not sealed, the Parquet segments say how many
rows they have, and the column of steps and the segment that is being written are read. So a thousand traces take a
second or two, whatever is in them.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from replay.alerts import count_alerts
from replay.documents import read_end, read_identity
from replay.dropping import read_dropped
from replay.errors import ReplayError, TraceDamaged
from replay.format import END_FILE, PINNED_FILE, TRACE_FILE
from replay.log import Log
from replay.ranks import ranks_of
from replay.seal import COUNTED_COLUMNS, is_locked, totals
from replay.zarr_store import DIRECTORY


@dataclass(frozen=True)
class Tree:
    """What lies below a folder.

    Attributes:
        traces: the directories of traces.
        folders: the directories above them, and those without any.
    """

    traces: list[Path]
    folders: list[Path]


def find_traces(root: Path, unreadable: Callable[[Path, OSError], None]) -> Tree:
    """Find the traces below a folder, or the one that it is itself.

    Traces and stores are not looked into. Links are followed, and each directory is found once, by its own name rather
    than by that of a link.

    Args:
        root: the folder.
        unreadable: is told of each directory that cannot be read.
    """
    tree = Tree([], [])
    seen: set[tuple[int, int]] = set()
    folders, links = [root], list[Path]()
    while folders or links:
        folder = folders.pop() if folders else links.pop()
        try:
            stat = folder.stat()
            if (stat.st_dev, stat.st_ino) in seen:
                continue
            seen.add((stat.st_dev, stat.st_ino))
            with os.scandir(folder) as entries:
                inside = list(entries)
            if any(entry.name == TRACE_FILE for entry in inside):
                tree.traces.append(folder)
                continue
            tree.folders.append(folder)
            for entry in inside:
                if entry.name == DIRECTORY:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(folder / entry.name)
                elif _leads_to_a_folder(entry):
                    links.append(folder / entry.name)
        except OSError as error:
            unreadable(folder, error)
    tree.traces.sort()
    return tree


def _leads_to_a_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_symlink() and entry.is_dir()
    except OSError:
        return False  # a link to itself, or to where we may not go


@dataclass(frozen=True)
class Entry:
    """A trace in a line.

    Attributes:
        name: its path below the folder.
        path: its path.
        status: "live", "sealed", "torn", or "damaged", where it cannot be read.
        steps: committed steps, of the rank that has most; None if it cannot be read, as all that follows.
        records: committed records of all ranks.
        bytes: of the tensors that are there, those of earlier attempts as well.
        alerts: how many.
        pinned: whether a quota leaves its tensors alone.
        created: when recording began (RFC 3339).
        command: what was recorded.
        problem: why it cannot be read.
    """

    name: str
    path: str
    status: str
    steps: int | None = None
    records: int | None = None
    bytes: int | None = None
    alerts: int | None = None
    pinned: bool = False
    created: str | None = None
    command: str | None = None
    problem: str | None = None


def entry_of(trace: Path, root: Path) -> Entry:
    """Return the line of a trace below a folder; what is wrong with it is part of the line."""
    name = str(trace.relative_to(root))
    try:
        identity = read_identity(trace)
        ranks = ranks_of(trace).values()
        if not ranks:
            raise TraceDamaged(f"{trace} has a {TRACE_FILE} and no rank in it.")
        counted = [_counted(rank) for rank in ranks]
        states = {count.state for count in counted}
        return Entry(
            name=name,
            path=str(trace),
            status=next((state for state in ("live", "torn") if state in states), "sealed"),
            steps=max(count.steps for count in counted),
            records=sum(count.records for count in counted),
            bytes=sum(count.nbytes for count in counted),
            alerts=count_alerts(trace),
            pinned=(trace / PINNED_FILE).exists(),
            created=identity["created"],
            command=" ".join(map(str, identity["provenance"].get("command", ()))),
        )
    except (ReplayError, OSError, pa.ArrowException) as error:
        return Entry(name=name, path=str(trace), status="damaged", problem=str(error))


@dataclass(frozen=True)
class _Counted:
    state: str
    steps: int
    records: int
    nbytes: int


def _counted(rank: Path) -> _Counted:
    end = read_end(rank)
    if end is not None:
        try:
            steps, records, nbytes = (int(end[name]) for name in ("steps", "records", "bytes"))
        except (KeyError, TypeError, ValueError):
            raise TraceDamaged(f"{rank / END_FILE} does not say how many steps, records and bytes there are.") from None
        return _Counted("sealed", steps, records, max(0, nbytes - read_dropped(rank).nbytes))
    state = "live" if is_locked(rank) else "torn"
    log = Log(rank, superseded=True).refresh()
    table = log.table(COUNTED_COLUMNS)
    found = totals({name: table[name].to_numpy() for name in table.column_names}, log.attempts)
    return _Counted(state, found["steps"], found["records"], found["bytes"])
