"""What a plan would write, told from a few steps that were recorded by their statistics alone.

The statistics' log names each record with the dtype and shape of its tensor, and the plan says what it stores of such a
one: so the bytes are those that a recording writes, without writing any. How often is told by going through the first
steps of the schedule, since schedules may be of any shape.
"""

import dataclasses
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hookrec.choices import Choices
from hookrec.plan import Plan
from hookrec.ring import MINIMUM_BYTES, PAGE
from replay.documents import read_scalars
from replay.forecast import MAX_BYTES, Forecast, room_of_disk
from replay.format import EXPONENTS, EXPONENTS_KIND, RECORD_SCHEMA, Stream, numpy_dtype
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
class Cost(Forecast):
    """What a plan costs, as of a step in which all its records are due; rates are means over the schedule.

    Attributes:
        plan: which, in words.
    """

    plan: str


@dataclass(frozen=True)
class Names:
    """A module by its names."""

    name: str
    aliases: list[str]


@dataclass(frozen=True)
class _Share:
    """A line, and when there are such records: where all of some plans have them, the record's own first."""

    line: Line
    plans: tuple[Plan, ...]
    kept_always: bool

    def times(self) -> tuple[int, int]:
        """Return in how many steps of the schedule they are due, and in how many of these their tensors are kept."""
        due = [step for step in range(HORIZON) if all(plan.samples(step) for plan in self.plans)]
        return len(due), len(due) if self.kept_always else sum(map(self.plans[0].keeps_tensors, due))


@dataclass(frozen=True)
class Measured:
    """What a few steps of a training were.

    Attributes:
        steps: how many.
        step_s: median of their lengths, with statistics recorded; without the first, if there are more.
        streams: each with how many records of it there were in all steps.
        modules: those with further names, which rules may use.
    """

    steps: int
    step_s: float
    streams: list[tuple[Stream, int]]
    modules: list[Names] = field(default_factory=list)

    def lines(self, plan: Plan) -> list[Line]:
        """Return what each layer has in a step, by a plan, in the order in which they ran."""
        return [share.line for share in self._shares(plan)]

    def _shares(self, plan: Plan) -> list[_Share]:
        choices = Choices(plan, self.modules)
        found: dict[tuple[str, str], list[int]] = {}
        plans: dict[tuple[str, str], tuple[Plan, ...]] = {}
        for stream, records in self.streams:
            chosen = [choices.plan_for(layer, stream.kind) for layer in _made_of(stream.layer, plan)]
            of_record = [one for one in chosen if one is not None]
            if len(of_record) < len(chosen):
                continue  # a rule leaves it out, or what it is made of
            nbytes = {stream.kind: _stored_bytes(plan, of_record[0], stream)}
            if of_record[0].exponents and stream.dtype.startswith(("float", "bfloat")):
                nbytes[EXPONENTS_KIND] = len(EXPONENTS) * (4 if stream.numel < 2**31 else 8)
            for kind, each in nbytes.items():
                line = found.setdefault((stream.layer, kind), [0, 0])
                line[0] += records
                line[1] += records * each
                plans[stream.layer, kind] = tuple(of_record)
        return [
            _Share(Line(*key, records / self.steps, nbytes / self.steps), plans[key], key[1] == EXPONENTS_KIND)
            for key, (records, nbytes) in found.items()
        ]

    def cost(self, words: str, plan: Plan, place: Path) -> Cost:
        """Return what a plan costs where the trace would lie in `place`."""
        shares = self._shares(plan)
        times: dict[tuple[object, ...], tuple[int, int]] = {}
        rate = log_rate = 0.0
        for share in shares:
            key = share.plans, share.kept_always
            due, kept = times[key] = times.get(key) or share.times()
            log_rate += share.line.records * LOG_ROW_BYTES * due / HORIZON / self.step_s
            # In flight mode tensors reach the disk only around triggers.
            if plan.flight is None or share.kept_always:
                rate += share.line.bytes * kept / HORIZON / self.step_s
        room, by = room_of_disk(place, plan.as_json())
        ends = [(room / (rate + log_rate), by)] if rate + log_rate else []
        if rate:
            ends.append((plan.max_bytes / rate, MAX_BYTES))
        ends_in_s, ends_by = min(ends) if ends else (None, None)
        return Cost(
            records=sum(share.line.records for share in shares),
            step_bytes=sum(share.line.bytes for share in shares),
            bytes_per_s=rate,
            log_bytes_per_s=log_rate,
            ends_by=ends_by,
            ends_in_s=ends_in_s,
            plan=words,
        )

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
    modules = [Names(module["name"], module["aliases"]) for module in trace.modules() if module["aliases"]]
    return Measured(len(steps), statistics.median(lengths[1:] or lengths), list(counted.items()), modules)


def _made_of(layer: str, plan: Plan) -> list[str]:
    """A layer, and the one whose record it is made of, if it is what a function of the user returned."""
    source, _, function = layer.rpartition("/")
    return [layer, source] if plan.transform and function and "#" not in function else [layer]


def _stored_bytes(plan: Plan, of_record: Plan, stream: Stream) -> int:
    """Bytes that are stored of a tensor by the plan of its record; 0 if it has no room in the ring."""
    if not of_record.tensors:
        return 0
    dtype, shape = of_record.stored(stream.kind, stream.dtype, stream.shape)
    nbytes = numpy_dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
    ring_bytes = max(-(-plan.ring_bytes // PAGE) * PAGE, MINIMUM_BYTES)
    return nbytes if nbytes <= ring_bytes else 0
