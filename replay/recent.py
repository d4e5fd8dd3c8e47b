"""The last steps of a trace that is followed, as rules need them: kept in memory by whoever has read them anyway.

To open a live trace is to read the whole of the segment that grows, commit by commit; rules that are run each second
over fifty of them would read each commit a thousand times. So a follower hands what it reads to a `Window`, which
keeps what rules look back at, and `Recent` is a trace that finds it there. Whatever else a rule asks for, it reads.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.documents import read_identity, read_modules
from replay.filters import Names, Steps
from replay.rank import Rank
from replay.records import Progress
from replay.trace import Trace

_MOST_ROWS = 100_000
"""Records that a window holds: 20 MB. Rules over larger steps read them from the log."""


class Window:
    """The last steps of one trace. Owned by one thread.

    It is whole when nothing lies before it, or when it reaches as far back as is asked. It begins anew where a step
    comes a second time, since a training that was resumed supersedes steps that are in it.
    """

    def __init__(self) -> None:
        self._parts: deque[tuple[NDArray[np.int64], pa.Table]] = deque()  # steps, sorted, and their records
        self._last: dict[int, int] = {}
        self._earlier: int | None = None  # recorded steps before it, if that is known
        self._rows = 0

    def begin(self, *, at_the_beginning: bool) -> None:
        """Begin anew.

        Args:
            at_the_beginning: whether nothing is recorded before what is added next.
        """
        self._parts.clear()
        self._last.clear()
        self._earlier = 0 if at_the_beginning else None
        self._rows = 0

    def add(self, records: pa.Table) -> None:
        """Take records that were read: of one rank, behind those before."""
        rank, steps = int(records["rank"][0].as_py()), np.unique(records["step"].to_numpy())
        if int(steps[0]) <= self._last.get(rank, -1):
            self.begin(at_the_beginning=False)
        self._last[rank] = int(steps[-1])
        self._parts.append((steps, records))
        self._rows += len(records)
        if self._rows > _MOST_ROWS:
            self.begin(at_the_beginning=False)

    def learn(self, steps: NDArray[np.int64]) -> None:
        """Learn how many steps are before it.

        Args:
            steps: all that the trace has, sorted, at a time when all that was added is among them.
        """
        if self._earlier is None and self._parts:
            self._earlier = int(np.searchsorted(steps, self._steps[0]))

    def recent(self, path: Path, directories: Mapping[int, Path], since: int, background: int) -> "Recent | None":
        """Return the trace, with what rules that look at the steps from one on need in memory; None if it is not here.

        Args:
            path: the trace.
            directories: its ranks.
            since: the first step that is looked at.
            background: how many recorded steps before it are needed. What is before these is let go.
        """
        steps = self._steps
        at = int(np.searchsorted(steps, since))
        if self._earlier is None or (self._earlier and at < background):
            return None
        begin = steps[max(0, at - background)] if len(steps) else 0
        while self._parts and self._parts[0][0][-1] < begin:
            self._rows -= len(self._parts.popleft()[1])
        left = self._steps
        self._earlier += len(steps) - len(left)
        return Recent(path, directories, [table for _, table in self._parts], left, self._earlier)

    @property
    def _steps(self) -> NDArray[np.int64]:
        return np.unique(np.concatenate([np.zeros(0, np.int64), *(steps for steps, _ in self._parts)]))


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
