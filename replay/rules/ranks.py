"""Rules that compare the processes of a distributed training, which should agree, or be alike at least."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from replay.grid import Grid, NotApplicable, Records, Seen
from replay.rulebook import rule
from replay.series import Floats, median, sustained


@rule(
    severity="error",
    advice="Look for a parameter outside of DistributedDataParallel, a no_sync() too many, a process with another seed "
    "or learning rate, or a device that computes wrongly.",
)
def ranks_disagree(records: Records, *, difference: float = 1e-3) -> Iterator[Seen]:
    """Parameters, or gradients as the optimizer meets them, are the same on all ranks in the first step, and later
    differ by more than `difference` of their norm.

    What differs in the first step already is a shard, and is not compared.

    Source: practice of data-parallel training; Li et al. 2020, PyTorch Distributed
    """
    kinds = [kind for kind in ("param", "param_grad") if records.has(kind)]
    if not kinds:
        raise NotApplicable("it needs records of kind param or param_grad")
    judged, found = False, []
    for kind in kinds:
        grid, columns = _side_by_side(records, kind)
        apart = _apart(grid, columns)
        off = apart > difference
        known = np.isfinite(apart).any(axis=0)
        first = np.argmax(known, axis=0)
        same = ~off[:, first, np.arange(len(first))].any(axis=0) & known.any(axis=0)
        off &= same
        judged = judged or bool(same.any())
        if off.any():
            found.append(_first_apart(grid, columns, off, apart))
    if not judged:
        raise NotApplicable("the ranks hold different values from the first step on: shards, or other trainings")
    # Gradients differ because parameters do, or the other way round: it is the same trouble.
    yield from sorted(found, key=lambda seen: seen.first_step)[:1]


def _first_apart(grid: Grid, columns: NDArray[np.int64], off: NDArray[np.bool_], apart: Floats) -> Seen:
    steps = off.any(axis=(0, 2))
    at = int(np.argmax(steps))
    place = int(np.argmax(off[:, at].any(axis=0)))
    rank = int(np.nanargmax(apart[:, at, place]))
    many = int(off[:, at].any(axis=0).sum())
    if len(columns) == 2:
        # Of two, the one is as far from the middle as the other; the one that has made the larger step is suspected.
        before = grid["l2"][max(0, at - 1)][columns[:, place]]
        rank = int(np.argmax(np.abs(grid["l2"][at][columns[:, place]] - before)))
    there = grid.places[columns[rank, place]]
    values = ", ".join(f"{value:.6g}" for value in grid["l2"][at][columns[:4, place]])
    message = (
        f"The ranks disagree on the {grid.kind} of {there} from step {grid.steps[at]} on: its norm is {values} on "
        f"ranks {', '.join(str(grid.places[n].rank) for n in columns[:4, place])}{', …' if len(columns) > 4 else ''}. "
        f"{many} of {columns.shape[1]} differ in this step."
    )
    return grid.seen(int(columns[rank, place]), steps, message)


@rule(advice="Compare the data of this rank with those of the others, and look at its device.")
def rank_outlier(records: Records, *, factor: float = 10.0, steps: int = 5) -> Iterator[Seen]:
    """The scale of a layer's outputs or gradients on one rank is `factor` times that of the others' median, or as much
    less, in `steps` steps on end. It takes three ranks to tell which.

    Source: practice of large runs; Jiang et al. 2024, MegaScale
    """
    kinds = [kind for kind in ("output", "grad_output") if records.has(kind)]
    if not kinds:
        raise NotApplicable("it needs records of kind output or grad_output")
    if len(records.trace.ranks) < 3:
        raise NotApplicable(f"it needs three ranks, and the trace has {len(records.trace.ranks)}")
    records.need_steps(steps)
    found: set[int] = set()
    for kind in kinds:
        grid, columns = _side_by_side(records, kind)
        rms = np.moveaxis((grid["l2"] / np.sqrt(grid["numel"]))[:, columns], 1, 0)
        rms = np.where(rms > 0, rms, np.nan)
        relative = np.abs(np.log(rms / median(rms)))
        for rank in range(len(columns)):
            held = sustained(relative[rank] > np.log(factor), np.isfinite(relative[rank]), steps)
            if held.any() and rank not in found:
                found.add(rank)
                at = int(np.argmax(held.any(axis=1)))
                place = int(np.argmax(held[at]))
                there = grid.places[columns[rank, place]]
                times = np.exp(np.log(rms / median(rms))[rank, at, place])
                message = (
                    f"The {kind} of {there} on rank {there.rank} has {times:.3g} times the scale of the other ranks' "
                    f"median from step {grid.steps[at]} on."
                )
                yield grid.seen(int(columns[rank, place]), held[:, place], message)


def _side_by_side(records: Records, kind: str) -> tuple[Grid, NDArray[np.int64]]:
    """Return the records of a kind, and the columns of the places that all ranks have, of shape `(ranks, places)`."""
    ranks = records.trace.ranks
    if len(ranks) < 2:
        raise NotApplicable("the trace has one rank")
    grid = records.grid(kind)
    column = {(place.rank, place.layer, place.path): n for n, place in enumerate(grid.places)}
    names = dict.fromkeys((place.layer, place.path) for place in grid.places)
    common = [name for name in names if all((rank, *name) in column for rank in ranks)]
    if not common:
        raise NotApplicable(f"the ranks have no {kind} in common")
    return grid, np.array([[column[(rank, *name)] for name in common] for rank in ranks], np.int64)


def _apart(grid: Grid, columns: NDArray[np.int64]) -> Floats:
    """Return how far each rank is from the ranks' median, relative to the norm, of shape `(ranks, steps, places)`."""
    worst = None
    norm = np.moveaxis(grid["l2"][:, columns], 1, 0)
    largest = np.moveaxis(grid["absmax"][:, columns], 1, 0)
    for values in (norm, largest):
        middle = median(values)
        apart = np.abs(values - middle) / middle
        worst = apart if worst is None else np.fmax(worst, apart)
    # Where a rank has no record of a step yet, there is nothing to compare.
    complete = np.isfinite(norm).all(axis=0)
    assert worst is not None
    return np.where(complete & (median(norm) > 0), worst, np.nan)
