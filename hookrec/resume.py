"""What a writer that was killed has left, and what of it the training sends again although it is there already.

A commit and its acknowledgement are two writes, and a writer may be killed between them. So the training may send again
what was committed. To recognise it no mark is needed: each row that was sent is one row of the log, in the same order,
so to count both is enough; and the same holds for the lines of `scalars.jsonl`, and for those of `notes.jsonl` that
are of a step: the others are the writer's own. Streams are announced with their numbers, which are those of the lines
of `streams.jsonl`. What they say does not tell them apart, since all begin anew when tensors are asked for later.

The tensors of what is sent again lie in the ring, unless that was too small to keep the step until its commit.

A training that was started again (`attempt`) finds what its earlier attempts have left in the same way, and sends none
of it again.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookrec.messages import Message
from hookrec.ring import KEPT, LOST
from replay import format as trace_format
from replay.dropping import read_dropped
from replay.format import whole_lines
from replay.log import Log
from replay.seal import read_streams

SHARED_FILES = (
    trace_format.STREAMS_FILE,
    trace_format.SCALARS_FILE,
    trace_format.NOTES_FILE,
    trace_format.TRIGGERS_FILE,
)
"""The files to which each writer of a rank appends lines."""


class Predecessor:
    """What the writer before has left. Made before the log is opened for writing.

    Args:
        directory: the rank's directory. Nothing is changed in it.
        acknowledged: how many rows, lines of scalars and notes the training knows to be committed; None for whatever
            is there.
        released: position up to which the ring was given back.
        attempt: the attempt of the training whose work is continued.

    Attributes:
        streams: the streams in the table.
        rows: of each of them, how many rows are committed.
        rows_committed: how many that is in the log.
        lines: how many lines of scalars and notes are there.
        nbytes: bytes of the tensors that are committed and were not dropped.
        steps: steps that this attempt has committed, sorted.
        last_step: the last of all that counts; -1 if there is none.
        closed: places of which tensors were dropped, from their first on; nothing is appended there.
    """

    def __init__(self, directory: Path, acknowledged: dict[str, int] | None, released: int, attempt: int = 0) -> None:
        self.streams = read_streams(directory)
        whole = Log(directory, superseded=True).refresh()
        log = whole.table(["step", "stream", "row", "nbytes", "attempt"])
        steps, attempts = log["step"].to_numpy(), log["attempt"].to_numpy()
        self.steps: list[int] = np.unique(steps[attempts == attempt]).tolist()
        self.last_step = int(steps[whole.attempts.mask(attempts, steps)].max(initial=-1))
        dropped = read_dropped(directory)
        self.closed = frozenset(stream.location for stream in self.streams if dropped.rows.get(stream.id))
        self.nbytes = int(log["nbytes"].to_numpy().sum()) - dropped.nbytes
        rows = np.full(len(self.streams), -1, np.int64)
        np.maximum.at(rows, log["stream"].to_numpy(), log["row"].to_numpy())
        self.rows: list[int] = (rows + 1).tolist()
        scalars = whole_lines(directory / trace_format.SCALARS_FILE)[0]
        notes = map(json.loads, whole_lines(directory / trace_format.NOTES_FILE)[0])
        self.rows_committed = len(log)
        self.lines = {"scalars": len(scalars), "notes": sum(note["step"] is not None for note in notes)}
        known = {"rows": self.rows_committed, **self.lines} if acknowledged is None else acknowledged
        self._rows_again = self.rows_committed - known["rows"]
        self._again = {name: count - known[name] for name, count in self.lines.items()}
        self._released = released

    def only_new(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages without what is in the files already; tensors in memory that was given back are lost."""
        return [
            (position, self._new_rows(position, rows), self._new_facts(facts)) for position, rows, facts in messages
        ]

    def _new_rows(self, position: int, rows: NDArray[Any]) -> NDArray[Any]:
        again = min(self._rows_again, len(rows))
        self._rows_again -= again
        rows = rows[again:]
        if position <= self._released:
            rows["kept"][(rows["kept"] == KEPT) & (rows["nbytes"] > 0)] = LOST
        return rows

    def _new_facts(self, facts: dict[str, Any]) -> dict[str, Any]:
        facts = dict(facts)
        if "streams" in facts:
            facts["streams"] = [found for found in facts["streams"] if found["id"] >= len(self.streams)]
        for name in self._again.keys() & facts.keys():
            again = min(self._again[name], len(facts[name]))
            self._again[name] -= again
            facts[name] = facts[name][again:]
        return facts


def cut_torn_line(path: Path) -> None:
    """Cut off a last line that was not written to its end."""
    if path.exists():
        os.truncate(path, whole_lines(path)[1])
