"""Whether a layer's output is what its input gives: each is run again, in its dtype and in float64.

A device that computes wrongly, a kernel with a bug, memory that flips a bit: none of it raises, and a loss that falls
hides it. It shows in one place, the layer whose output its own input does not explain. All layers behind it have wrong
inputs, and do with them what they should.

    error      the larger of  rms(a - b) / rms(a)  and the largest  |a - b| / (|a| + rms(a))  of an element, where a is
               the output in float64 and b the recorded one; 0 where b is, to the bit, what comes out in its dtype here
    rounding   the same of b run again in its dtype here
    tolerance  the larger of  T  and  8 × rounding,  T being that of `replay diff` for the lowest precision in the call

So the tolerance knows how much a layer rounds: a long sum, a softmax. A recording of another device may round more than
ours: on GPUs, float32 products are TF32 where `torch.backends.cuda.matmul.allow_tf32` is set, which is 1e-3.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import replay
from hookrec.rebuild import Factory, NotRunnable, Rebuilder, modules_of, tensor_of
from hookrec.values import flatten
from replay.distance import Distance, distance
from replay.errors import BadQuery, NotRecorded, StepNotCommitted
from replay.filters import globs_of, matches
from replay.tolerance import Bounds

EXPLAINED, NOT_EXPLAINED, NOT_RUNNABLE = "explained", "not explained", "not runnable"
_TIMES_ROUNDING = 8.0


@dataclass(frozen=True)
class Verdict:
    """What is said of one output of one call.

    Attributes:
        layer: qualified name.
        call: which use of the layer within the step.
        path: where in a nested output the tensor sits.
        verdict: `EXPLAINED`, `NOT_EXPLAINED` or `NOT_RUNNABLE`.
        error: how far the recorded output is from the one in float64; None if it was not run.
        rounding: how far the same layer run again in its dtype is from that; None where it cannot be run so.
        tolerance: what `error` is held against.
        where: the index at which they differ most; None if nowhere.
        why: the reason for a verdict that is not `EXPLAINED`.
    """

    layer: str
    call: int
    path: str
    verdict: str
    error: float | None = None
    rounding: float | None = None
    tolerance: float | None = None
    where: tuple[int, ...] | None = None
    why: str | None = None

    @property
    def excess(self) -> float:
        """How badly the output is explained: error by tolerance, -1 if it was not run."""
        if self.error is None or self.tolerance is None:
            return -1.0
        return self.error / self.tolerance if self.tolerance else math.inf if self.error else 0.0


def rerun(
    trace: replay.Trace,
    step: int,
    layers: str | Sequence[str] | None = None,
    *,
    rank: int = 0,
    factory: Factory | None = None,
    tolerance: float | None = None,
) -> list[Verdict]:
    """Run the layers of a step again, and hold their recorded outputs against what comes out.

    Args:
        trace: recorded with `kinds=("input", "output", "param")` and tensors.
        step: the step.
        layers: glob or globs over layer names, all if None.
        rank: the rank.
        factory: makes the model, for layers that are no modules of `torch.nn`, and for buffers, which a trace has not.
        tolerance: instead of T.

    Returns:
        A verdict an output, the worst explained first, and then in the order of execution.

    Raises:
        StepNotCommitted: there is no such step.
        NotRecorded: the step has no output of such a layer.
        BadQuery: the rank, the factory or the tolerance will not do.
    """
    if rank not in trace.ranks:
        raise BadQuery(f"{trace.path} has no rank {rank}; it has {', '.join(map(str, trace.ranks))}.")
    if step not in trace.steps:
        last = trace.steps[-1] if trace.steps else None
        raise StepNotCommitted(f"{trace.path} has no step {step}; its last committed step is {last}.")
    records = trace.records(kinds="output", steps=step, where=f"rank = {rank}").to_pylist()
    globs = globs_of(layers)
    chosen = [record for record in records if matches(record["layer"], globs)]
    if not chosen:
        have = ", ".join(map(repr, dict.fromkeys(record["layer"] for record in records[:4]))) or "none at all"
        asked = "an output" if globs is None else f"an output of a layer {', '.join(map(repr, globs))}"
        raise NotRecorded(f"Step {step} of {trace.path} does not have {asked}; it has {have}.")
    bounds = Bounds(tolerance)
    made = None if factory is None else modules_of(factory)
    again = Rebuilder(trace, step, rank, made)
    found: list[Verdict] = []
    calls: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in chosen:
        calls.setdefault((record["layer"], record["call"]), []).append(record)
    for (layer, call), outputs in calls.items():
        try:
            with torch.random.fork_rng(devices=()):
                run = _Run(again, layer, call, outputs[0], deterministic=made is None or layer not in made)
        except NotRunnable as reason:
            found += [Verdict(layer, call, record["path"], NOT_RUNNABLE, why=f"it {reason}") for record in outputs]
            continue
        found += [_judge(trace, record, run, bounds) for record in outputs]
    return sorted(found, key=lambda verdict: -verdict.excess)


class _Run:
    """One call of a layer, run again: its outputs by path, in float64 and, where that can be, in its own dtype."""

    def __init__(self, again: Rebuilder, layer: str, call: int, record: dict[str, Any], *, deterministic: bool) -> None:
        training = record["mode"] == "train"
        module = again.module(layer, training=training)
        arguments = again.arguments(layer, call)
        floats = [t for _, t in flatten((*arguments, list(module.parameters()))) if t.is_floating_point()]
        self.dtypes = {str(t.dtype).removeprefix("torch.") for t in floats}
        self.own: dict[str, Tensor] = {}
        out = getattr(torch, record["dtype"])
        with contextlib.suppress(Exception), _as_recorded(out, floats):
            self.own = _called(module, arguments)
            if not deterministic:
                second = _called(module, arguments)
                deterministic = all(torch.equal(self.own[path], second[path]) for path in self.own)
                if not deterministic:
                    self.own = {}
        if not deterministic and not self.own:
            raise NotRunnable("does not give the same twice: it draws random numbers, or keeps a state")
        try:
            self.exact = _called(module.double(), _wide(arguments))
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise NotRunnable(f"cannot be run in float64 with what was recorded: {reason}") from None


def _judge(trace: replay.Trace, record: dict[str, Any], run: _Run, bounds: Bounds) -> Verdict:
    key = record["layer"], record["call"], record["path"]
    try:
        recorded = trace.tensor(
            record["step"], record["layer"], call=record["call"], path=record["path"], rank=record["rank"]
        )
    except NotRecorded:
        return Verdict(*key, NOT_RUNNABLE, why="the tensor of its output was not kept")
    exact = run.exact.get(record["path"])
    if exact is None:
        return Verdict(*key, NOT_RUNNABLE, why="run again, it returns nothing at this path")
    if tuple(exact.shape) != recorded.shape:
        shapes = "×".join(map(str, recorded.shape)), "×".join(map(str, exact.shape))
        why = "it has the shape {}, and run again {}".format(*shapes)
        return Verdict(*key, NOT_EXPLAINED, math.inf, None, 0.0, None, why)
    tolerance = max(bounds.of_dtype(dtype) for dtype in (*run.dtypes, record["dtype"]))
    rounding = None
    own = run.own.get(record["path"])
    if own is not None and own.shape == exact.shape and str(own.dtype).removeprefix("torch.") == record["dtype"]:
        if _same_bits(own, recorded):
            exact = own
        elif not math.isfinite(rounding := _error(_compare(exact, _array_of(own)))):
            exact, rounding = own, None  # what is beyond the dtype's range
        else:
            tolerance = max(tolerance, _TIMES_ROUNDING * rounding)
    apart = _compare(exact, recorded)
    error = _error(apart)
    if error <= tolerance:
        return Verdict(*key, EXPLAINED, error, rounding, tolerance)
    return Verdict(*key, NOT_EXPLAINED, error, rounding, tolerance, apart.where, _in_words(apart, recorded, exact))


def _in_words(apart: Distance, recorded: NDArray[Any], exact: Tensor) -> str:
    if apart.where is None:
        return "it is not what its input gives"
    place = list(apart.where)
    was = f"{float(np.real(recorded[apart.where])):.6g}"
    return f"at {place} it is {was}, and its input gives {float(exact[apart.where].real):.6g}"


def _compare(reference: Tensor, other: NDArray[Any]) -> Distance:
    values = _array_of(reference)
    finite = values[np.isfinite(values)]
    rms = math.sqrt(float(np.mean(np.abs(finite.astype(np.complex128)) ** 2))) if finite.size else 0.0
    return distance(values, other, rms)


def _error(apart: Distance) -> float:
    error = math.inf if apart.unlike else max(apart.spread, apart.peak)
    return math.inf if math.isnan(error) else error


def _called(module: nn.Module, arguments: tuple[list[Any], dict[str, Any]]) -> dict[str, Tensor]:
    """Call a module with copies, since it may change what it is given; return its outputs by path."""
    args, kwargs = _map(arguments, Tensor.clone)
    with torch.no_grad():
        return dict(flatten(module(*args, **kwargs)))


@contextlib.contextmanager
def _as_recorded(out: torch.dtype, floats: Sequence[Tensor]) -> Iterator[None]:
    """Let autocast be on where a layer put out less precision than it was given."""
    halves = (torch.bfloat16, torch.float16)
    with (
        torch.autocast("cpu", dtype=out if out in halves else None, enabled=out in halves)
        if any(out in halves and t.dtype != out for t in floats)
        else contextlib.nullcontext()
    ):
        yield


def _wide(arguments: tuple[list[Any], dict[str, Any]]) -> Any:
    def widened(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(torch.complex128)
        return tensor.double() if tensor.is_floating_point() else tensor

    return _map(arguments, widened)


def _map(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, function) for item in value)
    if isinstance(value, dict):
        return {name: _map(item, function) for name, item in value.items()}
    return value


def _array_of(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor's values; of a dtype that numpy lacks, in float32."""
    tensor = tensor.detach()
    wide = tensor.is_floating_point() and tensor.dtype not in (torch.float64, torch.float32, torch.float16)
    return tensor.float().numpy() if wide else tensor.numpy()


def _same_bits(own: Tensor, recorded: NDArray[Any]) -> bool:
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (own, tensor_of(recorded))))
