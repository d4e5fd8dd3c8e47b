"""Rules about numbers that a dtype cannot hold: NaN, infinity, overflow and underflow in half precision."""

import contextlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from replay.grid import Grid, NotApplicable, Place, Records, Seen
from replay.passes import Columns
from replay.rulebook import rule
from replay.series import Bools, sustained

_BACKWARD = ("grad_output", "grad_input", "param_grad", "param_grad_acc")
_NOT_FINITE = ("n_nan", "n_posinf", "n_neginf")
_GRADIENTS = ("grad_output", "grad_input", "param_grad_acc", "param_grad")

# Largest value, and smallest that is not zero.
_HALF = {"float16": (65504.0, 2.0**-24), "bfloat16": (3.3895e38, 2.0**-133)}


@rule(
    severity="error",
    advice="Look at what this layer computes and at its input: log or division of 0, exp or a sum that overflows, "
    "a square root at 0, a batch with NaN in it.",
)
def non_finite(records: Records, *, count: int = 1) -> Iterator[Seen]:
    """NaN or infinity, and where it began: the first record in the order of execution.

    Left alone are gradients of steps that a GradScaler skipped, whose job that is, and -inf as in an attention mask: in
    an input that has nothing else but zeros, or in each record of a place, in steps in which all else is finite and the
    loss too.

    Source: practice; `torch.autograd.detect_anomaly`, the rule NaN/Inf of TensorBoard's Debugger V2
    """
    suspects = _suspects(records, count)
    if len(suspects["row"]):
        bad = ~_regular(records, suspects)
        suspects = {name: column[bad] for name, column in suspects.items()}
    ranks = np.unique(suspects["rank"])
    # Late records of a step may stand behind those of the next, so the first row need not be of the first step.
    first = [rows[np.argmin(suspects["step"][rows])] for rows in (np.flatnonzero(suspects["rank"] == r) for r in ranks)]
    facts = _facts(records, suspects["row"][first])
    for n, rank in enumerate(ranks):
        of_rank = suspects["step"][suspects["rank"] == rank]
        yield _where_it_began(records, {name: int(column[n]) for name, column in facts.items()}, of_rank)
    yield from _losses(records, set(ranks.tolist()))


def _suspects(records: Records, count: int) -> Columns:
    """Return what is to be known of each record with so many elements that are not finite.

    Once a training has gone wrong these are nearly all records, so it is little: where they are, and three facts.
    """
    kinds = np.array([place.kind for place in records.places], object)
    backward, is_input = np.isin(kinds, _BACKWARD), kinds == "input"
    skipped = _skipped(records)

    def suspects(part: Columns) -> Columns:
        rows = np.flatnonzero(sum(part[name] for name in _NOT_FINITE) >= count)
        rank, step, place, numel, nan, posinf, neginf, zero = (
            part[name][rows] for name in ("rank", "step", "place", "numel", *_NOT_FINITE, "n_zero")
        )
        only_neginf = (nan == 0) & (posinf == 0)
        return {
            "row": part["row"][rows],
            "rank": rank,
            "step": step,
            "place": place.astype(np.int32),
            "by_scaler": backward[place] & _at(skipped, rank, step),
            "only_neginf": only_neginf,
            "in_mask": only_neginf & is_input[place] & (zero + neginf == numel),
        }

    return records.collect(("numel", "n_zero", *_NOT_FINITE), suspects)


def _regular(records: Records, suspects: Columns) -> Bools:
    """Return which of these records are as they should be."""
    rank, step, place, by_scaler, only_neginf, in_mask = (
        suspects[name] for name in ("rank", "step", "place", "by_scaler", "only_neginf", "in_mask")
    )
    in_company = _at({n: _bad_losses(records, n) for n in records.trace.ranks}, rank, step)
    for each in np.unique(rank):
        in_company |= (rank == each) & np.isin(step, np.unique(step[(rank == each) & ~only_neginf & ~by_scaler]))
    alone = only_neginf & ~in_company
    always = np.bincount(place[alone], minlength=len(records.places)) == records.rows_of_place
    regular: Bools = by_scaler | in_mask | (alone & always[place])
    return regular


def _at(steps: dict[int, NDArray[np.int64]], rank: NDArray[np.int32], step: NDArray[np.int64]) -> Bools:
    """Return which rows are of these steps, given by rank."""
    found = np.zeros(len(rank), bool)
    for each, those in steps.items():
        found |= (rank == each) & np.isin(step, those)
    return found


def _bad_losses(records: Records, rank: int) -> NDArray[np.int64]:
    with contextlib.suppress(NotApplicable):
        _, steps, values = records.scalar(*records.LOSSES).get(rank, ("", np.empty(0, np.int64), np.empty(0)))
        return steps[~np.isfinite(values)]
    return np.empty(0, np.int64)


def _skipped(records: Records) -> dict[int, NDArray[np.int64]]:
    """Return by rank the steps that a gradient scaler skipped."""
    try:
        found = records.scalar("hookrec/skipped")
    except NotApplicable:
        return {}
    return {rank: steps[values > 0] for rank, (_, steps, values) in found.items()}


def _facts(records: Records, rows: NDArray[np.int64]) -> Columns:
    """Return place, step, number of elements and of those that are not finite, of some rows of the table."""
    names = ("place", "step", "numel", *_NOT_FINITE)

    def these(part: Columns) -> Columns:
        wanted = np.isin(part["row"], rows)
        return {name: part[name][wanted] for name in names}

    return records.collect(("numel", *_NOT_FINITE), these) if len(rows) else {}


def _where_it_began(records: Records, first: dict[str, int], steps: NDArray[np.int64]) -> Seen:
    place, step, later = records.places[first["place"]], first["step"], int(steps.max())
    counts = {"NaN": first["n_nan"], "+inf": first["n_posinf"], "-inf": first["n_neginf"]}
    what = ", ".join(f"{number:,} {name}" for name, number in counts.items() if number)
    name = f"layer {place.layer!r}" if place.layer else "the root"
    path = f" ({place.path})" if place.path else ""
    message = (
        f"The first value that is not finite is in the {place.kind}{path} of {name} at step {step}: {what} of "
        f"{first['numel']:,} elements; {_before(records, place, step)}. "
        f"{len(steps):,} records are like that up to step {later}."
    )
    return Seen(place.rank, place.layer, place.kind, step, later, message)


def _before(records: Records, first: Place, step: int) -> str:
    """Say what is known of what went into a record."""
    if first.kind in _BACKWARD:
        return "each output of the step that was recorded before it is finite, so it began in the backward pass"
    if first.kind in ("param", "update"):
        return "all records before it are finite, so it began in the optimizer or before the parameter was first used"
    if first.kind == "input":
        return "all outputs before it are finite, so it came into the model, or from between its layers"
    key = first.rank, first.layer, "input"
    inputs = [n for n, p in enumerate(records.places) if (p.rank, p.layer, p.kind) == key]

    def of_inputs(part: Columns) -> Columns:
        rows = np.isin(part["place"], inputs) & (part["step"] == step)
        return {"bad": sum(part[name][rows] for name in _NOT_FINITE)}

    bad = records.collect(_NOT_FINITE, of_inputs)["bad"] if inputs else ()
    if not len(bad):
        return "all records before it are finite; inputs of the layer were not recorded"
    return "its input is not finite either" if np.any(bad) else "its input is finite, so it began in this layer"


def _losses(records: Records, ranks: set[int]) -> Iterator[Seen]:
    """Report a loss that is not finite where no record is: it began in the loss function."""
    try:
        losses = records.scalar(*records.LOSSES)
    except NotApplicable:
        return
    for rank, (name, steps, values) in losses.items():
        bad = ~np.isfinite(values)
        if rank not in ranks and bad.any():
            first, last = int(steps[bad][0]), int(steps[bad][-1])
            message = f"The scalar {name!r} is {values[bad][0]} at step {first}, and every record is finite."
            yield Seen(rank, None, name, first, last, message)


@rule(
    severity="error",
    advice="Scale the values down, put a normalisation before the layer, or run it in bfloat16 or float32.",
)
def half_overflow(records: Records, *, share: float = 0.5, steps: int = 3) -> Iterator[Seen]:
    """Activations or parameters in float16 or bfloat16 that are more than `share` of the largest number of the dtype.

    Exactly the largest number is the filling of a mask, and scaled gradients are meant to be near it.

    Source: Micikevicius et al. 2018, Mixed Precision Training
    """
    for grid in _half_grids(records, ("input", "output", "param")):
        absmax, largest = grid["absmax"], np.array([_HALF[place.dtype][0] for place in grid.places])
        near = absmax / largest
        held = sustained((near > share) & (near < 1), np.isfinite(near), min(steps, len(grid.steps)))
        for n in np.flatnonzero(held.any(axis=0)):
            place = grid.places[n]
            most = np.nanmax(absmax[held[:, n], n])
            message = (
                f"The {place.kind} of {place} comes to {most:.4g} in {place.dtype}, "
                f"whose largest number is {largest[n]:.4g}, {grid.when(held[:, n])}."
            )
            yield grid.seen(n, held[:, n], message)


@rule(advice="Scale the loss (torch.amp.GradScaler), or compute the gradients in bfloat16 or float32.")
def half_underflow(records: Records, *, share: float = 0.3, steps: int = 3) -> Iterator[Seen]:
    """Gradients in float16 or bfloat16 of which more than `share` are zero, while the rest is next to the smallest
    number of the dtype.

    The rest tells underflow from zeros that are meant, as behind a ReLU: its root mean square is less than 32 times the
    smallest number. A gradient that is all zero counts if the one before it in the backward pass is so small.

    Source: Micikevicius et al. 2018, Mixed Precision Training
    """
    for grid in _half_grids(records, _GRADIENTS):
        zeros, numel = grid["n_zero"], grid["numel"]
        rest = grid["l2"] * grid["scale"] / np.sqrt(np.maximum(numel - zeros, 1))
        smallest = np.array([_HALF[place.dtype][1] for place in grid.places])
        tiny = (rest < 32 * smallest) & (rest > 0)
        small_before = np.zeros_like(tiny)
        small_before[:, 1:] = np.maximum.accumulate(tiny, axis=1)[:, :-1]
        under = (zeros > share * numel) & (tiny | (small_before & (zeros == numel)))
        held = sustained(under, np.isfinite(rest), steps)
        for n in np.flatnonzero(held.any(axis=0)):
            place = grid.places[n]
            zero = np.median(zeros[held[:, n], n] / numel[held[:, n], n])
            message = (
                f"{zero:.0%} of the {place.kind} of {place} are zero in {place.dtype}, and what is left is next to "
                f"its smallest number, {smallest[n]:.2g}, {grid.when(held[:, n])}."
            )
            yield grid.seen(n, held[:, n], message)


def _half_grids(records: Records, kinds: tuple[str, ...]) -> Iterator[Grid]:
    there = [kind for kind in kinds if records.has(kind)]
    if not there:
        raise NotApplicable(f"it needs records of kind {' or '.join(kinds)}")
    grids = [records.grid(kind).select(lambda place: place.dtype in _HALF) for kind in there]
    if not any(grid.places for grid in grids):
        raise NotApplicable(f"no {' or '.join(there)} is in float16 or bfloat16")
    for grid in grids:
        yield from grid.by_rank()


@rule(
    advice="The gradients overflow again and again: look for the layer that non-finite gradients come from, lower the "
    "learning rate, or clip after scaler.unscale_(optimizer).",
)
def skipped_steps(records: Records, *, share: float = 0.1, window: int = 50, warmup: int = 20) -> Iterator[Seen]:
    """Steps that a GradScaler skipped: more than `share` of `window` steps, after the first `warmup`, in which it finds
    its scale.

    Source: practice; with its default settings a scaler skips about one step in 2,000
    """
    judged, skipped, window = False, _skipped(records), max(1, window)
    for rank, (_, steps, _) in records.scalar("hookrec/grad_scale").items():
        steps = steps[max(0, warmup - records.earlier) :]
        if len(steps) < window:
            continue
        judged = True
        so = np.isin(steps, skipped.get(rank, ()))
        part = np.convolve(so, np.ones(window) / window, "valid")
        over = np.flatnonzero(part > share)
        if len(over):
            inside = steps[over[0] : over[-1] + window][so[over[0] : over[-1] + window]]
            message = f"The gradient scaler skipped up to {part.max():.0%} of {window} steps, from step {inside[0]} on."
            yield Seen(rank, None, "hookrec/skipped", int(inside[0]), int(inside[-1]), message)
    if not judged:
        raise NotApplicable(f"it needs {window} recorded steps with a gradient scaler after the first {warmup}")
