"""Which powers of two the elements of a tensor lie between, and which of them narrower dtypes can hold.

What a dtype would lose is not reckoned from its bits but found by a conversion of every element, so that rounding at
both ends of its range is that of the dtype. The conversion does not saturate: what is too large becomes infinity, or
NaN in float8_e4m3fn, which has no infinity.

Where the whole tensor is not stored and its exponents were counted while recording, an element stands for all of one
exponent: the middle one. That is wrong where a border lies inside of a power of two, and a note says so.
"""

from typing import Any

import ml_dtypes
import numpy as np

from replay.charts import Chart, Panel, Reach, finite, real, title_name
from replay.errors import BadQuery, NotRecorded, StepNotCommitted
from replay.format import EXPONENTS
from replay.printable import printable
from replay.series import Floats
from replay.trace import Trace

_DTYPES = ("bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")


def exponents(trace: Trace, step: int, layer: str, kind: str, *, call: int = 0, path: str = "", rank: int = 0) -> Chart:
    """Return how the elements of a tensor are distributed over powers of two: a bar an exponent.

    The exponent of x is that e for which 2**e <= abs(x) < 2**(e + 1). What is 0, NaN or infinite has none, and is
    counted in a note.

    Raises:
        BadQuery: no element of the tensor has an exponent.
        NotRecorded: neither the tensor is there nor its counts are.
        StepNotCommitted: the step is not there.
    """
    key: dict[str, Any] = {"call": call, "path": path, "rank": rank}
    counted = _counted(trace, step, layer, kind, key)
    if counted is not None:
        sizes, weights, numel, zeros = counted
    else:
        tensor = real(trace.tensor(step, layer, kind, **key)).ravel()
        known = finite(tensor)
        sizes = np.abs(known[known != 0])
        weights, numel, zeros = np.ones(len(sizes)), len(tensor), len(known) - len(sizes)
    total = int(weights.sum())
    if not total:
        raise BadQuery(
            f"The {kind} of layer {layer!r} at step {step} has {numel:,} elements, of which {zeros:,} are 0 "
            "and none has an exponent."
        )
    found = np.frexp(sizes)[1].astype(np.int64) - 1
    columns = range(int(found.min()), int(found.max()) + 1)
    shares = np.bincount(found - columns[0], weights) / total
    notes = [f"Shares are of the {total:,} elements that are neither 0 nor NaN nor infinite."]
    for count, what in ((zeros, "0"), (numel - zeros - total, "NaN or infinite")):
        if count:
            notes.append(f"{count:,} of {numel:,} are {what}.")
    if counted is not None:
        notes.append("Counted while recording: each element is taken for the middle of its power of two.")
    panel = Panel("", shares[None], np.zeros((1, len(shares)), bool), ["elements"], columns, (step, step))
    title = f"Exponents of {printable(kind)} of {title_name(layer)} at step {step}, {printable(trace.path.name)}"
    reaches = tuple(_reach(name, sizes, weights) for name in _DTYPES)
    return Chart("bars", title, "share of elements", ("exponent", ""), False, (panel,), tuple(notes), reaches)


def _counted(
    trace: Trace, step: int, layer: str, kind: str, key: dict[str, Any]
) -> tuple[Floats, Floats, int, int] | None:
    """Return sizes, how many elements each stands for, the number of elements and that of zeros, as it was counted.

    None where it was not, or the whole tensor is there.
    """
    try:
        counts = trace.exponents(step, layer, kind, **key)
    except (NotRecorded, StepNotCommitted):
        return None
    rows = trace.records(layer, kind, step).to_pylist()
    wanted = {"layer": layer, "kind": kind, **key}
    record = next(row for row in reversed(rows) if all(row[name] == value for name, value in wanted.items()))
    if record["kept"]:
        tensor = trace.tensor(step, layer, kind, **key)
        if (tensor.dtype.name, list(tensor.shape)) == (record["dtype"], list(record["shape"])):
            return None
    there = np.flatnonzero(counts)
    sizes = np.ldexp(1.5, there + EXPONENTS[0])
    return sizes, counts[there].astype(np.float64), record["numel"], record["n_zero"]


def _reach(name: str, sizes: Floats, weights: Floats) -> Reach:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    tiny, normal, largest = (float(x) for x in (limits.smallest_subnormal, limits.smallest_normal, limits.max))
    low, full, high = (int(np.frexp(x)[1]) - 1 for x in (tiny, normal, largest))
    with np.errstate(over="ignore"):
        held = sizes.astype(dtype).astype(np.float64)
    shares = (np.average(so, weights=weights) for so in (held == 0, (held > 0) & (held < normal), ~np.isfinite(held)))
    lost, coarse, over = map(float, shares)
    return Reach(dtype.name, low, (full, high), lost, coarse, over)


def shown(chart: Chart) -> tuple[int, int]:
    """Return the first and the last exponent to draw: those of the tensor and of float16, and a little room.

    The range of bfloat16 goes on beyond them; to show all of it would leave no room for the others.
    """
    half = next(reach for reach in chart.reaches if reach.name == "float16")
    columns = chart.panels[0].columns
    return min(columns[0], half.subnormal) - 3, max(columns[-1], half.normal[1]) + 3


def verdict(reach: Reach) -> str:
    """Return in words what a tensor would lose in a dtype."""
    losses = {"become 0": reach.lost, "subnormal": reach.coarse, "too large": reach.over}
    return ", ".join(f"{_percent(share)} {what}" for what, share in losses.items() if share) or "all in range"


def _percent(share: float) -> str:
    if share < 0.001:
        return "<0.1%"
    return f"{share:.1%}" if share < 0.999 or share == 1 else ">99.9%"
