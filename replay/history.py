"""The attempts of a training that was resumed in its trace: what each recorded, how it ended, where the seams are."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replay.documents import read_end
from replay.log import Log


def history(rank_directory: Path, rank: int) -> Iterator[dict[str, Any]]:
    """Yield the attempts of a rank, as `Trace.attempts` has them."""
    log = Log(rank_directory, superseded=True).refresh()
    attempts = log.attempts
    table = log.table(["step", "attempt"])
    steps, of_steps = table["step"].to_numpy(), table["attempt"].to_numpy()
    for attempt in range(attempts.last + 1):
        own = np.unique(steps[of_steps == attempt])
        found: dict[str, Any] = {
            "rank": rank,
            "attempt": attempt,
            "first_step": int(own[0]) if len(own) else None,
            "last_step": int(own[-1]) if len(own) else None,
            "steps": len(own),
            "superseded": int(np.sum(own >= attempts.until(attempt))),
            "ended": read_end(rank_directory) if attempt == attempts.last else attempts.ended(attempt),
        }
        if attempt:
            line = attempts.later[attempt - 1]
            found |= {"time": line.time, "plan": line.plan, "provenance": line.provenance}
        yield found


def in_words(attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line on each attempt, given as of `Trace.attempts`; none where nothing was resumed."""
    last = {attempt["rank"]: attempt["attempt"] for attempt in attempts}
    return [_words(one, last=one["attempt"] == last[one["rank"]]) for one in attempts if last[one["rank"]]]


def _words(attempt: Mapping[str, Any], *, last: bool) -> str:
    steps = "no step"
    if attempt["steps"]:
        steps = f"steps {attempt['first_step']} to {attempt['last_step']}"
    words = [f"rank {attempt['rank']}, attempt {attempt['attempt']}: {steps}"]
    if attempt["superseded"]:
        words.append(f"of which {attempt['superseded']:,} are superseded")
    if attempt["ended"] is not None:
        words.append(f"ended: {attempt['ended']['how']}")
    elif not last:
        words.append("torn")
    if "time" in attempt:
        where = ", ".join(str(attempt["provenance"][n]) for n in ("host", "pid") if n in attempt["provenance"])
        words.append(f"since {attempt['time']}" + (f" ({where})" if where else ""))
    return ", ".join(words)
