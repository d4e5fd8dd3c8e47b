"""Rules about what the optimizer does: the size of its updates, weights that should be tied, and the loss."""

from collections.abc import Iterator

import numpy as np

from replay.grid import Grid, NotApplicable, Place, Records, Seen, others
from replay.rulebook import rule
from replay.series import Floats, median, sustained, usual


@rule(advice="Lower the learning rate, or warm it up over more steps.")
def large_updates(
    records: Records, *, ratio: float = 0.1, jump: float = 20.0, steps: int = 10, warmup: int = 20
) -> Iterator[Seen]:
    """The update of a weight has more than `ratio` of the norm of the weight: in `steps` steps on end, or in one step
    in which it is also `jump` times what was usual. The first `warmup` steps do not count.

    Source: Karpathy, notes of CS231n: updates of about 1e-3 of the weights; the rule WeightUpdateRatio of
    sagemaker-debugger
    """
    records.need_steps(warmup + 1)
    for grid, relative in _relative_updates(records):
        late = records.warm(warmup)[:, None]
        large = (relative > ratio) & late
        middle = np.full(relative.shape, np.nan)
        for n in np.flatnonzero(large.any(axis=0)):
            middle[:, n] = usual(relative[:, n])[0]
        held = sustained(large, np.isfinite(relative), steps) | (large & (relative > jump * middle))
        columns = np.flatnonzero(held.any(axis=0))
        if len(columns):
            # Updates are too large in many layers at once; the first of the model stands for all.
            first = min(columns, key=lambda n: (int(np.argmax(held[:, n])), n))
            at = int(np.argmax(held[:, first]))
            message = (
                f"The update of {grid.places[first]} has {relative[at, first]:.3g} of the norm of the weight at step "
                f"{grid.steps[at]}, usually {median(relative[:, first]):.2g}."
                f"{others(len(columns) - 1, 'weight')}"
            )
            yield grid.seen(first, held.any(axis=1), message)


@rule(advice="Raise the learning rate, of this layer's parameters at least; in bfloat16 keep float32 weights.")
def small_updates(records: Records, *, ratio: float = 1e-6, steps: int = 20) -> Iterator[Seen]:
    """Updates of a weight have less than `ratio` of its norm in nine of ten steps, while those of other weights are
    more than 100 times as large, or while it is so of all weights since the beginning of the trace.

    An update of zero is left to the rule `not-learning`.

    Source: Karpathy, notes of CS231n; the rule WeightUpdateRatio of sagemaker-debugger
    """
    records.need_steps(steps)
    for grid, relative in _relative_updates(records):
        high = np.sort(np.where(relative > 0, relative, np.nan), axis=0)
        count = np.sum(~np.isnan(high), axis=0)
        high = high[np.maximum(np.ceil(0.9 * count).astype(int) - 1, 0), np.arange(high.shape[1])]
        typical = median(high)
        everywhere = not records.earlier and np.nanmax(high, initial=0) < ratio
        small = (high < ratio) & (count >= steps) & (everywhere | (100 * high < typical))
        for n in np.flatnonzero(small)[: 1 if everywhere else None]:
            rest = f" So are those of all weights, {typical:.1g}." if everywhere else f" Others have {typical:.1g}."
            known = np.isfinite(relative[:, n])
            message = (
                f"The updates of {grid.places[n]} have {high[n]:.1g} of the norm of the weight at most, "
                f"{grid.when(known)}.{rest}"
            )
            yield grid.seen(n, known, message)


def _relative_updates(records: Records) -> Iterator[tuple[Grid, Floats]]:
    """Yield for each rank the updates of weights, and their norms relative to those of the weights.

    Weights that began as zero have no norm to speak of until they have grown: NaN until they have a twentieth of the
    usual scale, which is one over the square root of the inputs of a unit.
    """
    if not records.has("update", "param"):
        raise NotApplicable("it needs records of the kinds update and param")
    params = records.grid("param")
    weights = records.grid("update").select(
        lambda place: len(place.parameter.get("shape") or ()) > 1 and params.column(place) is not None
    )
    if not weights.places:
        raise NotApplicable("no update of a weight of two dimensions or more was recorded")
    for grid in weights.by_rank():
        norm = params["l2"][:, [n for place in grid.places if (n := params.column(place)) is not None]]
        units = np.array([place.parameter["shape"][0] for place in grid.places], float)
        yield grid, np.where(norm > 0.05 * np.sqrt(units), grid["l2"] / norm, np.nan)


@rule(
    advice="Tie by assigning the parameter itself, head.weight = embedding.weight, after copies, casts and loading.",
)
def untied_weights(records: Records, *, steps: int = 2) -> Iterator[Seen]:
    """Two weights look like one that was meant to be tied: they are equal at first and then part, or are equal for ever
    with gradients of their own, since they share memory without being one parameter.

    Equal means that all statistics are, to the last bit. Only an embedding and another kind of layer, or a weight and
    its transpose, are compared: copies of a layer as of `nn.TransformerEncoder`, and of a model as for a teacher, are
    meant to be copies.

    Source: Press & Wolf 2017, Using the Output Embedding; practice
    """
    names = ("mean", "std", "l2", "min", "max")
    records.need_steps(steps)
    if records.earlier:
        raise NotApplicable("it needs the beginning of the trace, which lies before the steps that are looked at")
    for grid in records.grid("param").by_rank():
        print_of = np.stack([grid[name] for name in names])
        known = [n for n, place in enumerate(grid.places) if _could_be_tied(place) and print_of[1, 0, n] > 0]
        twins: dict[bytes, int] = {}
        for n in known:
            key = print_of[:, 0, n].tobytes() + grid["numel"][0, n].tobytes()
            other = twins.setdefault(key, n)
            if other == n or not _are_a_pair(grid.places[other], grid.places[n]):
                continue
            apart = np.any(print_of[:, :, n] != print_of[:, :, other], axis=0) & np.isfinite(print_of[0, :, n])
            changes = np.any(print_of[:, 1:, n] != print_of[:, :-1, n])
            pair = f"{grid.places[other]} and {grid.places[n]}"
            if apart.any():
                step = grid.steps[int(np.argmax(apart))]
                message = f"The weights of {pair} are equal at step {grid.steps[0]} and differ from step {step} on."
                yield grid.seen(n, apart, message)
            elif changes and len(grid.steps) >= steps:
                known_at = np.isfinite(print_of[0, :, n])
                message = (
                    f"The weights of {pair} stay equal {grid.when(known_at)} and are two parameters: they share "
                    "memory, and the optimizer changes it once for each."
                )
                yield grid.seen(n, known_at, message)


def _could_be_tied(place: Place) -> bool:
    return len(place.parameter.get("shape") or ()) > 1


def _are_a_pair(one: Place, other: Place) -> bool:
    shapes = one.parameter["shape"], other.parameter["shape"]
    if shapes[0] == shapes[1]:
        return ("Embedding" in one.class_name) != ("Embedding" in other.class_name)
    return bool(shapes[0] == shapes[1][::-1])


@rule(
    advice="Look at the learning rate, at whether labels fit their inputs, and at whether gradients reach the layers; "
    "a training that goes on from a checkpoint may be at its end.",
)
def loss_not_falling(records: Records, *, fall: float = 0.01, steps: int = 200) -> Iterator[Seen]:
    """The median of the last fifth of the losses is not lower than that of the first fifth by `fall` of it, after
    `steps` steps.

    Looks at whole traces only: a training may well have stopped falling in its last steps.

    Source: the rule LossNotDecreasing of sagemaker-debugger
    """
    if records.earlier:
        raise NotApplicable("it needs the loss since the beginning, which lies before the steps that are looked at")
    judged = False
    for rank, (name, when, values) in records.scalar(*records.LOSSES).items():
        finite = np.isfinite(values)
        when, values = when[finite], values[finite]
        if len(values) < steps:
            continue
        judged = True
        fifth = len(values) // 5
        first, last = float(median(values[:fifth])), float(median(values[-fifth:]))
        if first - last < fall * abs(first) and abs(first) > 1e-3:
            message = (
                f"The scalar {name!r} is not falling: {first:.4g} in the first {fifth} values, {last:.4g} in the last, "
                f"at step {when[-1]}."
            )
            yield Seen(rank, None, name, int(when[-fifth]), int(when[-1]), message)
    if not judged:
        raise NotApplicable(f"it needs {steps} values of the loss")


@rule(advice="Look at the batch and the learning rate of this step, and at the gradients of the step before.")
def loss_spike(records: Records, *, spreads: float = 10.0, steps: int = 2, least: int = 10) -> Iterator[Seen]:
    """The loss rises by more than `spreads` times its usual spread, to twice its usual value, and to above where it was
    in the first steps, in `steps` steps on end.

    The last conditions leave hard batches alone, which a training that has nearly converged meets often. At least
    `least` losses must have come before.

    Source: Chowdhery et al. 2022, PaLM, section 5.1
    """
    judged = False
    for rank, (name, at_steps, values) in records.scalar(*records.LOSSES).items():
        if len(values) <= least:
            continue
        judged = True
        middle, spread = usual(values, least=least)
        beginning = values[np.isfinite(values)][:least]
        above = np.max(beginning, initial=0) if not records.earlier else 0.0
        high = (values > middle + spreads * spread) & (values > 2 * np.abs(middle)) & (values > above)
        high = sustained(high[:, None], np.isfinite(values)[:, None], steps)[:, 0]
        if high.any():
            at = int(np.argmax(high))
            message = (
                f"The scalar {name!r} rises to {values[at]:.4g} at step {at_steps[at]}; "
                f"it was about {middle[at]:.4g} before."
            )
            yield Seen(rank, None, name, int(at_steps[at]), int(at_steps[high][-1]), message)
    if not judged:
        raise NotApplicable(f"it needs {least + 1} values of the loss")
