"""Whether a trigger has fired: judges each step by the conditions of the plan, and takes the reasons that were sent.

A number is often logged when its step has ended, so it arrives with the next one. Conditions on columns alone are
judged when a step ends, those that ask for a logged number when the next one ends: the window still holds the step.

A condition fires when it becomes true, and again only after it was false, has rested, and has not reached its limit: a
NaN that stays does not fill the disk. Owned by the writer process.
"""

import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookrec.attempt import Attempt
from hookrec.conditions import Condition, Judged
from replay.format import EXPONENTS_KIND, MODES, SCALARS_FILE, TRIGGERS_FILE, whole_lines


@dataclass(frozen=True)
class Fired:
    """A trigger that has fired: at which step, by what ("condition", "call", …), and why."""

    step: int
    by: str
    why: str
    detail: str | None = None


@dataclass
class _State:
    condition: Condition
    armed: bool = True
    last: int | None = None
    count: int = 0


@dataclass
class _Step:
    rows: list[NDArray[Any]] = field(default_factory=list)
    scalars: dict[str, float] = field(default_factory=dict)


class Triggers:
    """Judges steps, and writes down in `triggers.jsonl` what has fired.

    Args:
        directory: the rank's directory. What is there of an earlier writer counts.
        plan: the plan, as `trace.json` has it.
        attempt: the attempt that is recorded; what fired in others does not keep a trigger from firing.
    """

    def __init__(self, directory: Path, plan: Mapping[str, Any], attempt: Attempt) -> None:
        self._attempt = attempt
        self._states = [_State(Condition(text)) for text in plan["triggers"]]
        self._rest, self._limit = plan["trigger_rest"], plan["trigger_limit"]
        self._columns = sorted({name for state in self._states for name in state.condition.columns})
        self._streams: dict[str, list[str]] = {name: [] for name in ("layer", "kind", "path", "dtype")}
        self._counts: list[int] = []  # streams of counts, which no condition is about
        self._open = _Step()
        self._waiting: dict[int, _Step] = {}  # steps whose numbers may still come
        self._reasons: list[Fired] = []
        lengths: dict[str, int] = {}
        for state in self._states:
            for name, count in state.condition.scalars.items():
                lengths[name] = max(lengths.get(name, 0), count)
        self._earlier = {name: deque[tuple[int, float]](maxlen=count + 8) for name, count in lengths.items()}
        self._unheard = set(lengths)
        lines = map(json.loads, whole_lines(directory / TRIGGERS_FILE)[0])
        self.lines: list[dict[str, Any]] = [line for line in lines if line.get("attempt", 0) == attempt.number]
        self._said = {(line["step"], line["by"], line["why"]) for line in self.lines}
        self._file = (directory / TRIGGERS_FILE).open("a", encoding="utf-8")
        self._remember(directory)

    def _remember(self, directory: Path) -> None:
        """Take up what an earlier writer knew."""
        for state in self._states:
            steps = [n["step"] for n in self.lines if (n["by"], n["why"]) == ("condition", state.condition.text)]
            state.count, state.last, state.armed = len(steps), max(steps, default=None), not steps
        for line in map(json.loads, whole_lines(directory / SCALARS_FILE)[0] if self._earlier else ()):
            self._add_earlier(line["step"], {name: float(value) for name, value in line["values"].items()})

    def know(self, streams: Sequence[Any]) -> None:
        """Take the names of further streams."""
        for stream in streams:
            found = stream if isinstance(stream, dict) else vars(stream)
            for name, values in self._streams.items():
                values.append(found[name])
            if found["kind"] == EXPONENTS_KIND:
                self._counts.append(len(self._streams["kind"]) - 1)

    def are_counts(self, rows: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which rows are no tensors of the training, but counts of exponents."""
        return np.isin(rows["stream"], self._counts) if self._counts else np.zeros(len(rows), bool)

    def see(self, rows: NDArray[Any], facts: Mapping[str, Any]) -> None:
        """Take a part of the step under way."""
        if self._states and len(rows := rows[~self.are_counts(rows)]):
            self._open.rows.append(rows)
        for line in facts.get("scalars", ()):
            step = self._waiting.setdefault(line["step"], _Step())
            step.scalars |= {name: value for name, value in line["values"].items() if name in self._earlier}
        self._reasons += [Fired(**reason) for reason in facts.get("triggers", ())]

    def judge(self, number: int) -> list[Fired]:
        """Return what has fired now that a step has ended, in order of steps."""
        step, self._open = self._open, _Step()
        fired = self._late(number)
        self._waiting.setdefault(number, _Step()).rows = step.rows
        if step.rows:
            fired += self._judge(number, step, late=False)
        fired += [reason for reason in self._reasons if reason.step <= number]
        self._reasons = [reason for reason in self._reasons if reason.step > number]
        return sorted(fired, key=lambda one: one.step)

    def finish(self) -> list[Fired]:
        """Return what has fired at the last step, of which nothing more will come."""
        return self._late(1 << 62) + self._reasons

    @property
    def unheard(self) -> set[str]:
        """The numbers that conditions ask for and that were never logged."""
        return self._unheard

    def write(self, fired: Fired, first_step: int | None) -> None:
        """Write down that a trigger has fired, and from which step on there are tensors."""
        key = (fired.step, fired.by, fired.why)
        if key not in self._said:
            self._said.add(key)
            line = {"step": fired.step, "time": round(time.time(), 3), "by": fired.by, "why": fired.why}
            line |= {"detail": fired.detail, "first_step": first_step}
            self._file.write(json.dumps(self._attempt.marked(line)) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())  # a few lines a trace, and what is looked for first

    def is_written(self, fired: Fired) -> bool:
        """Whether an earlier writer has written it down."""
        return (fired.step, fired.by, fired.why) in self._said

    def _late(self, before: int) -> list[Fired]:
        """Judge the steps before one by what asks for numbers."""
        fired = []
        for number in sorted(self._waiting):
            if number < before:
                step = self._waiting.pop(number)
                fired += self._judge(number, step, late=True)
                self._add_earlier(number, step.scalars)
        return fired

    def _judge(self, number: int, step: _Step, *, late: bool) -> list[Fired]:
        states = [state for state in self._states if bool(state.condition.scalars) == late]
        if not states:
            return []
        rows = np.concatenate(step.rows) if step.rows else None
        earlier = {name: [value for when, value in values if when < number] for name, values in self._earlier.items()}
        judged = Judged(self._columns_of(rows), step.scalars, earlier)
        fired = []
        for state in states:
            if state.condition.columns and rows is None:
                continue
            truth = state.condition.judge(judged)
            if truth is None:
                continue
            if not truth.any():
                state.armed = True
            elif state.last == number:
                state.armed = False  # judged by an earlier writer
            elif (
                state.armed and state.count < self._limit and (state.last is None or number - state.last >= self._rest)
            ):
                state.armed, state.last, state.count = False, number, state.count + 1
                fired.append(Fired(number, "condition", state.condition.text, self._detail(state, judged, truth, rows)))
        return fired

    def _columns_of(self, rows: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
        columns: dict[str, NDArray[Any]] = {}
        for name in self._columns:
            if rows is None:
                columns[name] = np.empty(0, np.float64)
            elif name in self._streams:
                columns[name] = np.array(self._streams[name], object)[rows["stream"]]
            elif name == "mode":
                columns[name] = np.array(MODES, object)[rows["mode"]]
            else:
                columns[name] = rows[name].astype(np.float64)
        return columns

    def _detail(self, state: _State, judged: Judged, truth: NDArray[Any], rows: NDArray[Any] | None) -> str:
        """The first record for which a condition holds, and the values that it asks for."""
        condition = state.condition
        found = [f"{name} = {judged.scalars[name]:.6g}" for name in condition.scalars if name in judged.scalars]
        if truth.ndim == 0 or rows is None:
            return ", ".join(found)
        at = int(np.argmax(truth))
        layer, kind, path = (self._streams[name][rows["stream"][at]] for name in ("layer", "kind", "path"))
        measured = [name for name in sorted(condition.columns) if name not in ("layer", "kind", "path")]
        found += [f"{name} = {judged.columns[name][at] if name == 'mode' else rows[name][at]}" for name in measured]
        more = int(truth.sum()) - 1
        where = f"layer {layer!r}, {kind}{f' {path}' if path else ''}, call {rows['call'][at]}"
        return f"{where}: {', '.join(found)}{f'; {more} more records' if more else ''}"

    def _add_earlier(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name in self._earlier:
                self._unheard.discard(name)
                history = self._earlier[name]
                while history and history[-1][0] >= step:
                    history.pop()
                if np.isfinite(value):
                    history.append((step, value))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
