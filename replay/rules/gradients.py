"""Rules about gradients on their way back through the model: they vanish, explode, or do not arrive."""

from collections.abc import Iterator

import numpy as np

from replay.grid import Grid, NotApplicable, Place, Records, Seen, others
from replay.rulebook import rule
from replay.series import Bools, Floats, median, sustained, usual

_OF_PARAMETERS = ("param_grad", "param_grad_acc", "update", "param")


@rule(
    advice="Use activations that do not saturate, an initialisation that fits them, normalisation or residual "
    "connections.",
)
def vanishing_gradients(records: Records, *, ratio: float = 1e-4, steps: int = 5) -> Iterator[Seen]:
    """The gradient's norm at a layer, and at all layers further from the loss, is less than `ratio` of that at a layer
    nearer to it, in `steps` steps on end.

    Named is the layer where it is least. Side branches may have small gradients, as the queries of attention have in
    the beginning. A gradient of zeros is left to the rule `not-learning`.

    Source: Glorot & Bengio 2010, Understanding the difficulty of training deep feedforward neural networks
    """
    records.need_steps(steps)
    for grid in _backward(records):
        norm = np.where(grid["l2"] > 0, grid["l2"], np.nan)
        further = np.fmax.accumulate(norm[:, ::-1], axis=1)[:, ::-1]
        share = further / _largest_before(norm)
        held = sustained(share < ratio, np.isfinite(share) & np.isfinite(norm), steps)
        columns = np.flatnonzero(held.any(axis=0))
        if len(columns):
            own = norm / _largest_before(norm)
            middle = [median(own[held[:, n], n]) for n in columns]
            least = columns[int(np.nanargmin(middle))]
            message = (
                f"The norm of the {grid.kind} of {grid.places[least]} is {np.nanmin(middle):.1g} of what it is nearer "
                f"to the loss, {grid.when(held[:, least])}.{others(len(columns) - 1, 'layer')}"
            )
            yield grid.seen(least, held[:, least], message)


@rule(
    advice="Lower the scale of the initial weights, put normalisation between the layers, or clip the gradient's norm.",
)
def exploding_gradients(records: Records, *, growth: float = 1e3, steps: int = 3) -> Iterator[Seen]:
    """The gradient's norm grows by more than `growth` from the loss back to a layer, in `steps` steps on end.

    Source: Pascanu, Mikolov & Bengio 2013, On the difficulty of training recurrent neural networks
    """
    for grid in _backward(records):
        norm = np.where(grid["l2"] > 0, grid["l2"], np.nan)
        grown = norm / median(norm[:, :3], axis=1)[:, None]
        # A training that explodes may be at its end after a step or two.
        held = sustained(grown > growth, np.isfinite(grown), min(steps, int(np.isfinite(norm).any(axis=1).sum()) or 1))
        columns = np.flatnonzero(held.any(axis=0))
        if len(columns):
            largest = [np.median(grown[held[:, n], n]) for n in columns]
            most = columns[int(np.argmax(largest))]
            message = (
                f"The norm of the {grid.kind} grows by {max(largest):.3g} on its way from the loss back to "
                f"{grid.places[most]}, {grid.when(held[:, most])}.{others(len(columns) - 1, 'layer')}"
            )
            yield grid.seen(most, held[:, most], message)


@rule(advice="Clip the gradient's norm, and look at the batch and the learning rate of this step.")
def gradient_spike(records: Records, *, jump: float = 100.0, warmup: int = 10) -> Iterator[Seen]:
    """The gradient's norm over all layers is `jump` times what was usual in the 50 steps before, and above a tenth of
    that times what it was after the first `warmup` steps.

    Source: Pascanu, Mikolov & Bengio 2013, On the difficulty of training recurrent neural networks
    """
    records.need_steps(warmup + 1)
    for grid in _backward(records):
        norm = grid["l2"]
        total = np.sqrt(np.nansum(norm**2, axis=1))
        middle, _ = usual(np.where(total > 0, total, np.nan), least=warmup)
        beginning = median(total[:warmup])
        high = (total > jump * middle) & (total > jump / 10 * beginning)
        if high.any():
            at = int(np.argmax(high))
            # The layer that has grown most is named: where the norms come together, none else stands out.
            grown = norm[at] / median(norm[max(0, at - 50) : at])
            layer = int(np.nanargmax(np.where(np.isfinite(grown), grown, -1)))
            message = (
                f"The norm of all {grid.kind} is {total[at] / middle[at]:.3g} times its usual value at step "
                f"{grid.steps[at]}; it has grown most at {grid.places[layer]}."
            )
            yield grid.seen(layer, high, message)


def _backward(records: Records) -> Iterator[Grid]:
    """Yield for each rank the gradients of layers, or else of weights, from the loss back to the input."""
    if records.has("grad_output"):
        # A loss that is a module has a gradient of one number, 1, which is no measure.
        grid = records.grid("grad_output")
        several = np.nanmax(grid["numel"], axis=0, initial=0) > 1
        chosen = {place for place, many in zip(grid.places, several, strict=True) if many}
        if not chosen:
            raise NotApplicable("no grad_output of more than one number was recorded")
        yield from grid.select(lambda place: place in chosen).by_rank()
        return
    for kind in ("param_grad", "param_grad_acc"):
        if records.has(kind):
            for grid in records.grid(kind).select(_is_matrix).by_rank():
                # Optimizers hold parameters in the order of the model, which the backward pass goes against.
                yield Grid(kind, grid.steps, grid.places[::-1], lambda name, grid=grid: grid[name][:, ::-1])  # type: ignore[misc]
            return
    raise NotApplicable("it needs records of kind grad_output, param_grad or param_grad_acc")


def _is_matrix(place: Place) -> bool:
    return len(place.parameter.get("shape") or ()) > 1


def _largest_before(norm: Floats) -> Floats:
    """Return the largest norm nearer to the loss, of shape `(steps, places)`."""
    largest = np.full_like(norm, np.nan)
    largest[:, 1:] = np.fmax.accumulate(norm, axis=1)[:, :-1]
    return largest


@rule(
    advice="Look for detach(), no_grad() or an integer operation behind the layer, for a parameter that the optimizer "
    "was not given, and for dead units; or set requires_grad=False if it is meant to be frozen.",
)
def not_learning(records: Records, *, steps: int = 10) -> Iterator[Seen]:
    """A layer has parameters with requires_grad, and ran, but no gradient arrives, or none of them changes, in `steps`
    steps on end, while others of the model do learn.

    Judged by whatever was recorded of grad_output, param_grad, update and param, in this order.

    Source: the rules UnchangedTensor and AllZero of sagemaker-debugger
    """
    records.need_steps(steps)
    kinds = [kind for kind in ("grad_output", *_OF_PARAMETERS) if records.has(kind)]
    if not kinds:
        raise NotApplicable("it needs records of kind grad_output, param_grad, update or param")
    judged = False
    found: set[tuple[int, str]] = set()
    for kind in kinds:
        for grid in records.grid(kind).by_rank():
            change = _change(grid)
            alive = np.nansum(change, axis=1, keepdims=True) > 0
            judged = judged or bool(alive.any())
            for seen in (*_stopped(grid, change, alive, steps), *_absent(records, grid, alive, steps)):
                if (seen.rank, str(seen.layer)) not in found:
                    found.add((seen.rank, str(seen.layer)))
                    yield seen
    if not judged:
        raise NotApplicable("no gradient and no change of a parameter was recorded of any layer: is it inference?")


def _change(grid: Grid) -> Floats:
    """Return by how much a parameter changes, or how large a gradient is; 0 means not at all."""
    if grid.kind != "param":
        return grid["l2"]
    change = np.full(grid.shape, np.nan)
    change[1:] = sum(np.abs(np.diff(grid[name], axis=0)) for name in ("mean", "l2", "min", "max"))
    return change


def _stopped(grid: Grid, change: Floats, alive: Bools, steps: int) -> Iterator[Seen]:
    """Yield the layers whose gradients are all zero, or of which no parameter changes."""
    columns: dict[str, list[int]] = {}
    for n, place in enumerate(grid.places):
        parameters = place.module.get("parameters", ()) if grid.kind == "grad_output" else [place.parameter]
        if any(p.get("requires_grad") for p in parameters):
            columns.setdefault(place.layer, []).append(n)
    for layer, several in columns.items():
        # Some parameters have no gradient by nature, as a bias before a normalisation; it takes all of a layer.
        most = np.max(change[:, several], axis=1, keepdims=True)
        held = sustained((most == 0) & alive, np.isfinite(most), steps)[:, 0]
        if held.any():
            subject, what = {
                "update": ("The optimizer changes no parameter", ""),
                "param": ("No parameter", " changes"),
            }.get(grid.kind, (f"The {grid.kind}", " is all zero"))
            message = f"{subject} of layer {layer!r}{what}, {grid.when(held)}, though it requires gradients."
            yield grid.seen(several[0], held, message)


def _absent(records: Records, grid: Grid, alive: Bools, steps: int) -> Iterator[Seen]:
    """Yield the layers that ran and have no record of the kind at all, though steps with such records are many."""
    if grid.kind == "param" or not records.has("output"):
        return
    rank = grid.places[0].rank
    passed = {note["layer"] for note in records.trace.notes} | {place.layer for place in grid.places}
    owners = {place.layer for place in records.places if place.rank == rank and place.kind == "param"}
    outputs = records.grid("output").select(lambda place: place.rank == rank and place.trained)
    ran = np.isfinite(outputs["numel"]) & alive
    for n, place in enumerate(outputs.places):
        if ran[:, n].sum() >= steps and place.layer not in passed and _is_absent(records, grid.kind, place, owners):
            message = (
                f"No {grid.kind} arrives at layer {place.layer!r} in the {ran[:, n].sum()} steps in which it ran, "
                f"{grid.when(ran[:, n])}, though it requires gradients."
            )
            when = grid.steps[ran[:, n]]
            yield Seen(rank, place.layer, grid.kind, int(when[0]), int(when[-1]), message)


def _is_absent(records: Records, kind: str, ran: Place, owners: set[str]) -> bool:
    """Return whether a layer without a record of the kind should have one.

    Args:
        records: all of them.
        kind: of a gradient or an update.
        ran: an output of the layer.
        owners: the layers whose parameters were recorded.
    """
    learnable = [p for p in ran.module.get("parameters", ()) if p.get("requires_grad")]
    if not learnable or kind == "grad_output":
        return bool(learnable)
    # A tied parameter is recorded under its first name only, and is no different from one that gets no gradient, unless
    # parameters were recorded, or none could be its twin.
    if records.has("param"):
        return ran.layer in owners
    shapes = [p.get("shape") for module in records.modules(ran.rank).values() for p in module["parameters"]]
    return all(shapes.count(p.get("shape")) == 1 for p in learnable)
