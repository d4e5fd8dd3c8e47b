"""Flight mode in the writer process: what stands between the messages of the training and the writer.

Messages are held as `flight` says, and judged as `triggers` says; those that are due go on to the writer, which
commits them like any others. So a step becomes visible later than it was sent, by as many steps as the window has.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hookrec.attempt import Attempt
from hookrec.flight import Due, Fate, Flight, Kept, Part
from hookrec.messages import Message
from hookrec.resume import Predecessor
from hookrec.ring import DIRECT_BYTES, KEPT, NOT_TRIGGERED, PAGE, RING_FULL
from hookrec.triggers import Fired, Triggers

if TYPE_CHECKING:
    from hookrec.writer import Writer

_CODES = {Fate.LET_GO: NOT_TRIGGERED, Fate.NO_ROOM: RING_FULL}


class Held:
    """Holds the messages of the last steps.

    Args:
        directory: the rank's directory.
        plan: the plan, as `trace.json` has it.
        ring_bytes: size of the ring.
        writer: takes what is due.
        before: what an earlier writer has left.
        attempt: the attempt that is recorded.
    """

    def __init__(
        self,
        directory: Path,
        plan: dict[str, Any],
        ring_bytes: int,
        writer: "Writer",
        before: Predecessor | None,
        attempt: Attempt,
    ) -> None:
        self._writer = writer
        self._before = before
        self._triggers = Triggers(directory, plan, attempt)
        if before is not None:
            self._triggers.know(before.streams)
        self._flight = Flight(plan["flight"], plan["after"], ring_bytes, self._asked_for(plan["after"]))
        self._last = -1
        self._ended = False

    def _asked_for(self, after: int) -> Kept | None:
        """What the triggers ask for that have fired under an earlier writer."""
        lines = self._triggers.lines
        if self._before is None or not lines:
            return None
        steps = self._before.steps
        last = max(line["step"] for line in lines)
        new = [line for line in lines if not steps or line["step"] > steps[-1]] or [lines[-1]]
        first = min(line["step"] if line["first_step"] is None else line["first_step"] for line in new)
        return Kept(first, last, max(0, after - sum(step > last for step in steps)))

    def take(self, messages: Sequence[Message]) -> None:
        """Take messages as they come; pass on what is due.

        Raises:
            OSError: as `Writer.take`.
        """
        due: list[Due] = []
        needed = 0
        for message in messages:
            (_, all_rows, _) = message
            ((position, rows, facts),) = [message] if self._before is None else self._before.only_new([message])
            self._triggers.know(facts.get("streams", ()))
            self._triggers.see(all_rows, message[2])
            self._writer.take_facts({name: value for name, value in facts.items() if name != "triggers"})
            fired = self._triggers.judge(facts["commit"]) if "commit" in facts else []
            rest = {name: facts[name] for name in ("commit", "drop_tensors") if name in facts}
            part = Part((position, rows, rest), position, _ring_bytes(rows), len(rows) > 0, facts.get("commit"))
            due += self._add(part, fired)
            if "need" in facts:
                needed = max(needed, facts["need"])
                due += self._flight.free(facts["need"])
            if "end" in facts:
                due += self._end(facts["end"])
        self._pass_on(due, needed)

    def finish(self) -> None:
        """Keep what is held, since the training has disappeared without a word, unless it has said goodbye.

        Raises:
            OSError: as `Writer.take`.
        """
        if not self._ended:
            self._pass_on(self._end(self._writer.end), needed=0)
        for name in sorted(self._triggers.unheard):
            self._writer.note(f"a trigger asks for {name!r}, and no number of that name was logged")
        self._triggers.close()

    def _add(self, part: Part, fired: list[Fired]) -> list[Due]:
        if part.ends is not None:
            self._last = part.ends
        fired = [one for one in fired if not self._triggers.is_written(one)]
        due = self._flight.take(part, sorted({one.step for one in fired}))
        self._write(fired, due)
        return due

    def _end(self, end: dict[str, Any]) -> list[Due]:
        self._ended = True
        fired = self._triggers.finish()
        if end["how"] != "detached" and self._last >= 0:
            why = {"exception": "an exception ended the training", "died": "the training process disappeared"}
            fired.append(Fired(self._last, end["how"], why.get(end["how"], "the recording failed"), end["detail"]))
        due = self._flight.finish(keep=bool(fired))
        self._write(fired, due)
        return due

    def _write(self, fired: list[Fired], due: list[Due]) -> None:
        kept = [part.ends for part, fate in due if fate is Fate.KEEP and part.recorded and part.ends is not None]
        for one in fired:
            first = min((step for step in kept if step <= one.step), default=None)
            self._triggers.write(one, first)

    def _pass_on(self, due: list[Due], needed: int) -> None:
        for part, fate in due:
            if fate is not Fate.KEEP:
                rows = part.message[1]
                gone = (rows["kept"] == KEPT) & ~self._triggers.are_counts(rows)  # those are small, and of each step
                rows["kept"][gone] = _CODES[fate]
        if due or needed:
            self._writer.take([part.message for part, _ in due], needed=needed)


def _ring_bytes(rows: NDArray[Any]) -> int:
    """How many bytes of the ring the tensors of rows take."""
    sizes = rows["nbytes"][rows["kept"] == KEPT]
    align = np.where((sizes >= DIRECT_BYTES) | (sizes % PAGE == 0), PAGE, 64)
    return int((-(-sizes // align) * align).sum())
