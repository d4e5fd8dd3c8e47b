"""Rules about activations: units that are dead, saturated or constant, scales that drift, a batch unlike the others."""

from collections.abc import Iterator

import numpy as np

from replay.grid import Grid, NotApplicable, Place, Records, Seen
from replay.rulebook import rule
from replay.series import Bools, Floats, median, sustained, usual

_RELUS = ("ReLU", "ReLU6")
_TANHS = ("Tanh", "Hardtanh", "Softsign")
_SIGMOIDS = ("Sigmoid", "Hardsigmoid")


@rule(
    advice="Lower the learning rate, look at the biases of the layer before, or use LeakyReLU, GELU or SiLU.",
)
def dead_relu(records: Records, *, share: float = 0.99, steps: int = 5) -> Iterator[Seen]:
    """More than `share` of the outputs of a ReLU are zero, in `steps` steps on end.

    Healthy trained transformers have up to 97 % zeros, hence the height of the threshold.

    Source: Lu et al. 2019, Dying ReLU and Initialization; Li et al. 2023, The Lazy Neuron Phenomenon
    """
    grid = _outputs_of(records, _RELUS)
    records.need_steps(steps)
    zeros = grid["n_zero"] / grid["numel"]
    held = sustained((zeros > share) & np.isfinite(grid["l2"]), np.isfinite(zeros), steps)
    for n in np.flatnonzero(held.any(axis=0)):
        part = np.median(zeros[held[:, n], n])
        message = (
            f"{part:.1%} of the outputs of {grid.places[n]} ({grid.places[n].class_name}) are zero, "
            f"{grid.when(held[:, n])}."
        )
        yield grid.seen(n, held[:, n], message)


@rule(
    advice="Scale down the initial weights of the layer before, lower the learning rate, or put normalisation before "
    "it.",
)
def saturated(records: Records, *, share: float = 0.75, steps: int = 10) -> Iterator[Seen]:
    """At least `share` of the outputs of a tanh or sigmoid lie within 5 % of an end of its range, in `steps` steps on
    end.

    The share is a lower bound, from the mean of squares alone. What has no layer with parameters behind it is left out,
    since what a model puts out may well be 0 and 1; so are sigmoids that are gates, whose product with something else
    goes on: a sigmoid counts where inputs were recorded and its output is the input of a layer.

    Source: Glorot & Bengio 2010, section 3; the rule SaturatedActivation of sagemaker-debugger
    """
    grid = _outputs_of(records, _TANHS + _SIGMOIDS)
    records.need_steps(steps)
    numel, mean = grid["numel"], grid["mean"]
    square = grid["l2"] ** 2 / numel
    sigmoid = np.array([place.class_name in _SIGMOIDS for place in grid.places], bool)
    # A sigmoid y is a tanh 2y - 1. If a share s is beyond a, the mean of squares is at most s + (1 - s) a².
    square = np.where(sigmoid, 4 * square - 4 * mean + 1, square)
    part = (square - 0.9**2) / (1 - 0.9**2)
    inside = _inside(records, grid) & (~sigmoid | _are_inputs(records, grid))
    held = sustained((part > share) & inside, np.isfinite(part), steps)
    for n in np.flatnonzero(held.any(axis=0)):
        least = np.median(part[held[:, n], n])
        message = (
            f"At least {least:.0%} of the outputs of {grid.places[n]} ({grid.places[n].class_name}) are saturated, "
            f"{grid.when(held[:, n])}."
        )
        yield grid.seen(n, held[:, n], message)


def _inside(records: Records, grid: Grid) -> Bools:
    """Return which places have a layer with parameters behind them."""
    last: dict[int, int] = {}
    for place in records.grid("output").places:
        if place.module.get("parameters"):
            last[place.rank] = max(place.order, last.get(place.rank, -1))
    return np.array([place.order < last.get(place.rank, -1) for place in grid.places], bool)


def _are_inputs(records: Records, grid: Grid) -> Bools:
    """Return which outputs are the input of some layer, as far as inputs were recorded."""
    if not records.has("input"):
        return np.zeros(len(grid.places), bool)
    inputs = records.grid("input")
    known = {values.tobytes() for values in inputs["l2"].T}
    return np.array([values.tobytes() in known for values in grid["l2"].T], bool)


@rule(
    advice="Look for a softmax over a dimension of one element, a product with zero, or a layer whose input is "
    "constant.",
)
def constant_output(records: Records, *, spread: float = 1e-7, steps: int = 10) -> Iterator[Seen]:
    """All elements of a layer's output are the same number: the standard deviation is at most `spread` times the
    largest absolute value, in `steps` steps on end.

    Dead ReLUs have a rule of their own.

    Source: the rules AllZero and TensorVariance of sagemaker-debugger
    """
    grid = records.grid("output").select(lambda place: "float" in place.dtype and place.class_name not in _RELUS)
    if not grid.places:
        raise NotApplicable("no output in floating point was recorded")
    records.need_steps(steps)
    constant = (grid["std"] <= spread * grid["absmax"]) & (grid["numel"] > 1)
    held = sustained(constant, np.isfinite(grid["std"]), steps)
    for n in np.flatnonzero(held.any(axis=0)):
        value = grid["mean"][np.argmax(held[:, n]), n]
        message = (
            f"All elements of the output of {grid.places[n]} ({grid.places[n].class_name}) are {value:.4g}, "
            f"{grid.when(held[:, n])}."
        )
        yield grid.seen(n, held[:, n], message)


@rule(advice="Put normalisation into the layer, or look at the learning rate and weight decay of what feeds it.")
def activation_drift(
    records: Records, *, factor: float = 30.0, shift: float = 30.0, warmup: int = 20
) -> Iterator[Seen]:
    """A layer's outputs leave their range for good: their spread grows to more than `factor` times what any layer had,
    or shrinks to less than that part of itself, or their mean moves by more than `shift` times the spread.

    Compared are medians of ten steps: the first after `warmup` steps, and all later tens; it counts if the last ten are
    so. Layers that begin with next to nothing and grow to what others have are learning. What a model puts out at its
    end is left out: logits grow.

    Source: Ioffe & Szegedy 2015, Batch Normalization; practice of monitoring activation statistics
    """
    grid = records.grid("output").select(lambda place: "float" in place.dtype)
    begin = max(0, warmup - records.earlier)
    records.need_steps(begin + 40)
    blocks = (len(records.steps) - begin) // 10
    spread, mean = (_medians_of_ten(grid[name][begin:], blocks) for name in ("std", "mean"))
    base = spread[0]
    largest = np.nanmax(base, initial=0)
    most = factor * np.fmax(base, largest)
    least = np.where(base > 0.1 * largest, base / factor, 0)
    moved = np.abs(mean - mean[0]) / np.fmax(spread, base)
    off = (spread > most) | (spread < least) | ((moved > shift) & (base > 0.1 * largest))
    inside = _inside(records, grid)
    for n in np.flatnonzero(off[-1] & inside):
        first = blocks - int(np.argmin(np.append(off[::-1, n], False)))
        since = begin + 10 * first
        now, now_mean = grid["std"][since:, n], grid["mean"][since:, n]
        when = np.zeros(len(grid.steps), bool)
        when[since:] = (
            (now > most[n]) | (now < least[n]) | (np.abs(now_mean - mean[0, n]) > shift * np.fmax(now, base[n]))
        )
        what = (
            f"the mean has moved by {moved[-1, n]:.3g} times the spread"
            if moved[-1, n] > shift
            else f"the spread is {spread[-1, n] / base[n]:.3g} times what it was"
        )
        when[since:] |= not when.any()
        message = f"The outputs of {grid.places[n]} have drifted since step {grid.steps[begin]}: {what}, "
        yield grid.seen(n, when, f"{message}{grid.when(when)}.")


def _medians_of_ten(values: Floats, blocks: int) -> Floats:
    return median(values[: 10 * blocks].reshape(blocks, 10, -1), axis=1)


@rule(advice="Look at the batch of this step: values that were not scaled, padding alone, a damaged file.")
def input_outlier(records: Records, *, spreads: float = 15.0, least: int = 10) -> Iterator[Seen]:
    """The batch of a step is unlike those before it: the scale or the mean of what enters the first layer is off by
    more than `spreads` times the usual spread, and by more than half of itself.

    Judged by the input of the first layer, or else by the output of the first layer with parameters. Batches smaller
    than usual may differ more. At least `least` steps must have come before.

    Source: practice; median and MAD as in Leys et al. 2013, Detecting outliers
    """
    records.need_steps(least + 1)
    entrances = list(_entrance(records))
    if not entrances:
        raise NotApplicable("nothing in floating point was recorded of the first layer")
    for grid in entrances:
        for n in range(len(grid.places)):
            off = _far_off(grid, n, spreads, least)
            if grid.kind == "output":
                # What a layer puts out changes with its weights too; that of a batch is over in the next step.
                off[:-1] &= ~off[1:]
                off[-1:] = False
            if off.any():
                at = int(np.argmax(off))
                rms, mean = (grid[name][:, n] for name in ("l2", "mean"))
                rms = rms / np.sqrt(grid["numel"][:, n])
                message = (
                    f"The {grid.kind} of {grid.places[n]} at step {grid.steps[at]} is unlike that before: root mean "
                    f"square {rms[at]:.3g} (usually {median(rms):.3g}), mean {mean[at]:.3g} "
                    f"(usually {median(mean):.3g})."
                )
                yield grid.seen(n, off, message)
                break


def _entrance(records: Records) -> Iterator[Grid]:
    """Yield for each rank what enters the model, as far as it is floating point."""

    def floating(place: Place) -> bool:
        return "float" in place.dtype and place.trained

    kind = "input" if records.has("input") else "output"
    for grid in records.grid(kind).by_rank():
        first = next((p for p in grid.places if floating(p) and (kind == "input" or p.module.get("parameters"))), None)
        if first is not None:
            yield grid.select(lambda place, first=first: place.layer == first.layer and floating(place))  # type: ignore[misc]


def _far_off(grid: Grid, n: int, spreads: float, least: int) -> Bools:
    numel, mean, l2, std = (grid[name][:, n] for name in ("numel", "mean", "l2", "std"))
    smaller = np.sqrt(np.maximum(median(numel) / np.maximum(numel, 1), 1))
    size = np.log(np.maximum(l2 / np.sqrt(np.maximum(numel, 1)), 1e-30))
    off = np.zeros(len(numel), bool)
    typical, _ = usual(std, least=least)
    for values, far in ((size, np.full_like(size, np.log(1.5))), (mean, 0.5 * typical)):
        middle, spread = usual(values, least=least)
        away = np.abs(values - middle)
        off |= (away > spreads * spread * smaller) & (away > far)
    return off


def _outputs_of(records: Records, classes: tuple[str, ...]) -> Grid:
    grid = records.grid("output").select(lambda place: place.class_name in classes)
    if not grid.places:
        raise NotApplicable(f"no output of a {', '.join(classes)} was recorded")
    return grid
