"""What a plan would write, told from a few steps that were recorded by their statistics alone.

The statistics' log names each record with the dtype and shape of its tensor, and the plan says what it stores of such a
one: so the bytes are those that a recording writes, without writing any. How often is told by going through the first
steps of the schedule, since schedules may be of any shape.
"""

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hookrec.plan import Plan
from hookrec.ring import MINIMUM_BYTES, PAGE
from replay.documents import read_scalars
from replay.forecast import MAX_BYTES, room_of_disk
from replay.format import RECORD_SCHEMA, Stream, numpy_dtype
from replay.trace import Trace

HORIZON = 100_000
"""Steps of the schedule that are looked at."""

LOG_ROW_BYTES = sum(field.type.bit_width // 8 for field in RECORD_SCHEMA)
"""Of a record in the segment of the log that is being written; Parquet, which it becomes, is smaller."""


@dataclass(frozen=True)
class Line:
    """What a layer has of a kind: records and bytes of tensors in a step."""

    layer: str
    kind: str
    records: float
    bytes: float


@dataclass(frozen=True)
class Cost:
    """What a plan costs.

    Attributes:
        plan: which, in words.
        records: of a recorded step.
        step_bytes: of the tensors of a recorded step of which they are kept.
        bytes_per_s: of tensors, over the first steps of the schedule.
        log_bytes_per_s: of statistics, before the log is compacted.
        ends_by: what ends the recording of tensors first, as `replay.forecast` has it.
        ends_in_s: when.
    """

    plan: str
    records: float
    step_bytes: float
    bytes_per_s: float
    log_bytes_per_s: float
    ends_by: str | None
    ends_in_s: float | None


@dataclass(frozen=True)
class Measured:
    """What a few steps of a training were.

    Attributes:
        steps: how many.
        step_s: median of their lengths, with statistics recorded; without the first, if there are more.
        streams: each with how many records of it there were in all steps.
    """

    steps: int
    step_s: float
    streams: list[tuple[Stream, int]]

    def lines(self, plan: Plan) -> list[Line]:
        """Return what each layer has in a step, by a plan, in the order in which they ran."""
        found: dict[tuple[str, str], list[int]] = {}
        for stream, records in self.streams:
            line = found.setdefault((stream.layer, stream.kind), [0, 0])
            line[0] += records
            line[1] += records * _stored_bytes(plan, stream)
        return [Line(*key, records / self.steps, nbytes / self.steps) for key, (records, nbytes) in found.items()]

    def cost(self, words: str, plan: Plan, place: Path) -> Cost:
        """Return what a plan costs where the trace would lie in `place`."""
        lines = self.lines(plan)
        records, step_bytes = sum(line.records for line in lines), sum(line.bytes for line in lines)
        sampled = [step for step in range(HORIZON) if plan.samples(step)]
        # In flight mode tensors reach the disk only around triggers.
        kept = 0 if plan.flight is not None else sum(plan.keeps_tensors(step) for step in sampled)
        seconds = HORIZON * self.step_s
        rate, log_rate = step_bytes * kept / seconds, records * LOG_ROW_BYTES * len(sampled) / seconds
        room, by = room_of_disk(place, plan.as_json())
        ends = [(room / (rate + log_rate), by)] if rate + log_rate else []
        if rate:
            ends.append((plan.max_bytes / rate, MAX_BYTES))
        ends_in_s, ends_by = min(ends) if ends else (None, None)
        return Cost(words, records, step_bytes if plan.tensors else 0.0, rate, log_rate, ends_by, ends_in_s)

    def costs(self, plan: Plan, place: Path) -> list[Cost]:
        """Return what a plan costs, and others that are like it and cost less."""
        alone: dict[str, Any] = {"tensors": False, "tensor_rows": None, "tensor_dtype": None, "tensor_steps": ":"}
        alone |= {"flight": None, "after": 5, "triggers": (), "trigger_rest": 100, "trigger_limit": 10, "signals": ()}
        others = {
            "as given": plan,
            "every=10": dataclasses.replace(plan, every=10 * plan.every),
            "tensor_rows=1": dataclasses.replace(plan, tensor_rows=1) if plan.tensors else plan,
            "tensors=False": dataclasses.replace(plan, **alone),
        }
        return [
            self.cost(words, other, place) for words, other in others.items() if words == "as given" or other != plan
        ]


def measured(trace: Trace) -> Measured | None:
    """Return what the steps of a trace of statistics were; None if none has a record."""
    directory = trace.directories[min(trace.ranks)]
    table = trace.records()
    if not len(table):
        return None
    steps = np.unique(table["step"].to_numpy()).tolist()
    counted: dict[Stream, int] = {}
    keys = ("layer", "kind", "path", "dtype", "shape")
    for layer, kind, path, dtype, shape in zip(*(table[name].to_pylist() for name in keys), strict=True):
        stream = Stream(0, layer, kind, path, dtype, tuple(shape), None)
        counted[stream] = counted.get(stream, 0) + 1
    lengths = [value for step, _, name, value in read_scalars(directory) if name == "hookrec/step_s" and step in steps]
    return Measured(len(steps), statistics.median(lengths[1:] or lengths), list(counted.items()))


def _stored_bytes(plan: Plan, stream: Stream) -> int:
    """Bytes that a plan stores of a tensor; 0 if it has no room in the ring."""
    if not plan.tensors:
        return 0
    dtype, shape = plan.stored(stream.kind, stream.dtype, stream.shape)
    nbytes = numpy_dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
    ring_bytes = max(-(-plan.ring_bytes // PAGE) * PAGE, MINIMUM_BYTES)
    return nbytes if nbytes <= ring_bytes else 0
