"""The last steps of a trace that is followed, as rules need them: kept in memory by whoever has read them anyway.

To open a live trace is to read the whole of the segment that grows, commit by commit; rules that are run each second
over fifty of them would read each commit a thousand times. So a follower hands what it reads to a `Window`, which
keeps what rules look back at, and `Recent` is a trace that finds it there. Whatever else a rule asks for, it reads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from replay.attempts import FOR_EVER
from replay.documents import read_identity, read_modules
from replay.filters import Names, Steps
from replay.rank import Rank
from replay.records import Progress
from replay.trace import Trace

_MOST_ROWS = 100_000
"""Records that a window holds: 20 MB. Rules over larger steps read them from the log."""

_MOST_BEFORE = 10_000
"""Steps before a window that it knows: a rank that lags behind the others by more makes it begin anew."""


@dataclass(frozen=True)
class Known:
    """What a trace on the disk has, to tell what a window has lost. Made by `known_steps`.

    Attributes:
        steps: all, sorted.
        counts: by rank, how many records each step has, from some step on.
    """

    steps: NDArray[np.int64]
    counts: dict[int, dict[int, int]]


def known_steps(trace: Trace, first: int) -> Known:
    """Return what `Window.learn` has to know of a trace, which is read for that.

    Args:
        trace: the trace, opened after the window had been asked in vain.
        first: the first step of the window.
    """
    counts: dict[int, dict[int, int]] = {}
    for rank, table in trace.scan(["step"], steps=slice(first, None)):
        _count(counts.setdefault(rank, {}), *np.unique(table["step"].to_numpy(), return_counts=True))
    return Known(np.asarray(trace.steps, np.int64), counts)


@dataclass(frozen=True)
class _Part:
    """Records of one rank that were read together, and how many each of their steps has."""

    rank: int
    steps: NDArray[np.int64]
    counts: NDArray[np.int64]
    records: pa.Table


class Window:
    """The last steps of one trace. Owned by one thread.

    It has all records of all ranks from one step on, or does not know from which. It begins anew where
    a step comes a second time, since a training that was resumed supersedes steps that are in it; the other ranks have
    lost then what they had. What it does not know it learns from the trace on the disk.
    """

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._last: dict[int, int] = {}
        self._from: int | None = None
        self._earlier = 0  # recorded steps before that one
        self._before = np.zeros(0, np.int64)  # the last of these
        self._asked: dict[int, dict[int, int]] | None = None  # what it had when it did not know
        self._rows = 0

    @property
    def first_step(self) -> int:
        """The first step of which it has something."""
        return min((int(part.steps[0]) for part in self._parts), default=0)

    def begin(self, *, at_the_beginning: bool) -> None:
        """Begin anew.

        Args:
            at_the_beginning: whether nothing is recorded before what is added next.
        """
        self._parts = []
        self._from = 0 if at_the_beginning else None
        self._earlier, self._before, self._asked, self._rows = 0, self._before[:0], None, 0

    def add(self, records: pa.Table) -> None:
        """Take records that were read: of one rank, behind those before."""
        steps, counts = np.unique(records["step"].to_numpy(), return_counts=True)
        part = _Part(int(records["rank"][0].as_py()), steps, counts, records)
        if int(steps[0]) <= self._last.get(part.rank, -1) or not self._follows(part, self._before):
            self.begin(at_the_beginning=False)
        self._last[part.rank] = int(steps[-1])
        if self._from is not None:
            part = _cut(part, self._from)
        if len(part.steps):
            self._parts.append(part)
            self._rows += len(part.records)
        if self._rows > _MOST_ROWS:
            self.begin(at_the_beginning=False)

    def _follows(self, part: _Part, before: NDArray[np.int64]) -> bool:
        """Whether its steps before the window, if it has any, are among those that were counted."""
        return self._from is None or bool(np.isin(part.steps[part.steps < self._from], before).all())

    def learn(self, known: Known) -> None:
        """Learn from which step on it has everything, and how many are before.

        What was read before it began is not in it: of these steps the disk has more records. What was committed after
        it was asked is, or will be.

        Args:
            known: of the trace, opened after `recent` has returned None. Nothing is learnt if it has begun anew since.
        """
        if self._asked is None:
            return
        asked, self._asked = self._asked, None
        # Nothing in it: all that is on the disk may have been read before.
        lost = [-1] if asked else known.steps[-1:].tolist()
        for rank in known.counts.keys() | asked.keys():
            here, there = asked.get(rank, {}), known.counts.get(rank, {})
            last = max(here, default=FOR_EVER)
            lost += [step for step in here.keys() | there.keys() if step <= last and here.get(step) != there.get(step)]
        self._from = max(self.first_step, 1 + max(lost, default=-1))
        before = known.steps[known.steps < self._from]
        if not all(self._follows(part, before) for part in self._parts):
            self._from = None  # a rank that lags has steps of which nothing was known yet
            return
        self._earlier, self._before = len(before), before[-_MOST_BEFORE:]
        self._let_go()

    def recent(self, path: Path, directories: Mapping[int, Path], since: int, background: int) -> "Recent | None":
        """Return the trace, with what rules that look at the steps from one on need in memory; None if it is not here.

        Args:
            path: the trace.
            directories: its ranks.
            since: the first step that is looked at.
            background: how many recorded steps before it are needed. What is before these is let go.
        """
        if self._from is None:
            self._asked = {}
            for part in self._parts:
                _count(self._asked.setdefault(part.rank, {}), part.steps, part.counts)
            return None
        steps = self._steps
        at = int(np.searchsorted(steps, since))
        if self._earlier and at < background:
            return None
        if at > background:
            gone, self._from = steps[: at - background], int(steps[at - background])
            self._earlier += len(gone)
            self._before = np.concatenate([self._before, gone])[-_MOST_BEFORE:]
            self._let_go()
        return Recent(path, directories, [part.records for part in self._parts], self._steps, self._earlier)

    def _let_go(self) -> None:
        """Drop what is before the step from which on it has everything."""
        assert self._from is not None
        cut = [_cut(part, self._from) for part in self._parts]
        self._parts = [part for part in cut if len(part.steps)]
        self._rows = sum(len(part.records) for part in self._parts)

    @property
    def _steps(self) -> NDArray[np.int64]:
        return np.unique(np.concatenate([np.zeros(0, np.int64), *(part.steps for part in self._parts)]))


def _cut(part: _Part, first: int) -> _Part:
    """Return what of it is of the steps from one on."""
    if part.steps[0] >= first:
        return part
    left = part.steps >= first
    # A copy, since a slice would keep the whole; by a mask, since an expression takes several times as long.
    records = part.records.filter(pa.array(part.records["step"].to_numpy() >= first))
    return _Part(part.rank, part.steps[left], part.counts[left], records)


def _count(counts: dict[int, int], steps: NDArray[np.int64], more: NDArray[np.int64]) -> None:
    for step, count in zip(steps.tolist(), more.tolist(), strict=True):
        counts[step] = counts.get(step, 0) + count


class Recent(Trace):
    """A trace of which the last records are in memory. It is not refreshed. Made by `Window.recent`."""

    def __init__(
        self, path: Path, directories: Mapping[int, Path], parts: list[pa.Table], steps: NDArray[np.int64], earlier: int
    ) -> None:
        self.path = path
        self.attempt = None
        self._directories = dict(sorted(directories.items()))
        self._parts = parts
        self._recent_steps = steps
        self._earlier = earlier

    @cached_property
    def identity(self) -> dict[str, Any]:  # type: ignore[override]
        """`trace.json`."""
        return read_identity(self.path)

    @cached_property
    def _ranks(self) -> dict[int, Rank]:  # type: ignore[override]
        """What is on the disk, where somebody asks for it."""
        ranks = {number: Rank(directory, None) for number, directory in self._directories.items()}
        for rank in ranks.values():
            rank.refresh()
        return ranks

    def close(self) -> None:
        """Close the files that were opened."""
        if "_ranks" in vars(self):
            super().close()

    @property
    def ranks(self) -> list[int]:
        """The processes that recorded."""
        return list(self._directories)

    @property
    def directories(self) -> dict[int, Path]:
        """The directory of each rank."""
        return dict(self._directories)

    def modules(self, rank: int | None = None) -> list[dict[str, Any]]:
        """Return what `Trace.modules` does."""
        return read_modules(self._directories[min(self._directories) if rank is None else rank])

    def steps_since(self, since: int | None, background: int) -> tuple[int, NDArray[np.int64]]:
        """Return what `Trace.steps_since` does."""
        if since is None:
            return super().steps_since(since, background)
        at = max(0, int(np.searchsorted(self._recent_steps, since)) - background)
        return self._earlier + at, self._recent_steps[at:]

    def records(
        self,
        layers: Names = None,
        kinds: Names = None,
        steps: Steps = None,
        where: str | None = None,
        limit: int | None = None,
    ) -> pa.Table:
        """Return what `Trace.records` does."""
        begin = self._begin_of(steps)
        if begin is None or any(given is not None for given in (layers, kinds, where, limit)):
            return super().records(layers, kinds, steps, where, limit)
        by_rank = [[part for part in self._parts if part["rank"][0].as_py() == rank] for rank in self._directories]
        table = pa.concat_tables([part for parts in by_rank for part in parts]).unify_dictionaries()
        return table.filter(pa.compute.field("step") >= begin) if begin > self._recent_steps[0] else table

    def record_parts(
        self,
        layers: Names = None,
        kinds: Names = None,
        steps: Steps = None,
        where: str | None = None,
        progress: Progress | None = None,
    ) -> Iterator[pa.Table]:
        """Yield what `Trace.record_parts` does."""
        if where is None and self._begin_of(steps) is not None:
            yield self.records(layers, kinds, steps)
        else:
            yield from super().record_parts(layers, kinds, steps, where, progress)

    def _begin_of(self, steps: Steps) -> int | None:
        """The step from which on all are wanted, if these are here."""
        if not self._parts:
            return None
        if steps is None and not self._earlier:
            return int(self._recent_steps[0])
        if isinstance(steps, slice) and steps.stop is None and steps.step is None and steps.start is not None:
            return int(steps.start) if steps.start >= self._recent_steps[0] else None
        return None
