"""Which powers of two the elements of a tensor lie between, and which of them narrower dtypes can hold.

What a dtype would lose is not reckoned from its bits but found by a conversion of every element, so that rounding at
both ends of its range is that of the dtype. The conversion does not saturate: what is too large becomes infinity, or
NaN in float8_e4m3fn, which has no infinity.
"""

import ml_dtypes
import numpy as np

from replay.charts import Chart, Panel, Reach, finite, real, title_name
from replay.errors import BadQuery
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
        NotRecorded: the tensor is not there.
        StepNotCommitted: the step is not there.
    """
    tensor = real(trace.tensor(step, layer, kind, call=call, path=path, rank=rank)).ravel()
    known = finite(tensor)
    sizes = np.abs(known[known != 0])
    if not len(sizes):
        raise BadQuery(
            f"The {kind} of layer {layer!r} at step {step} has {len(tensor):,} elements, of which {len(known):,} are 0 "
            "and none has an exponent."
        )
    found = np.frexp(sizes)[1].astype(np.int64) - 1
    columns = range(int(found.min()), int(found.max()) + 1)
    shares = np.bincount(found - columns[0]) / len(sizes)
    notes = [f"Shares are of the {len(sizes):,} elements that are neither 0 nor NaN nor infinite."]
    for count, what in ((len(known) - len(sizes), "0"), (len(tensor) - len(known), "NaN or infinite")):
        if count:
            notes.append(f"{count:,} of {len(tensor):,} are {what}.")
    panel = Panel("", shares[None], np.zeros((1, len(shares)), bool), ["elements"], columns)
    title = f"Exponents of {printable(kind)} of {title_name(layer)} at step {step}, {printable(trace.path.name)}"
    reaches = tuple(_reach(name, sizes) for name in _DTYPES)
    return Chart("bars", title, "share of elements", ("exponent", ""), False, (panel,), tuple(notes), reaches)


def _reach(name: str, sizes: Floats) -> Reach:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    tiny, normal, largest = (float(x) for x in (limits.smallest_subnormal, limits.smallest_normal, limits.max))
    low, full, high = (int(np.frexp(x)[1]) - 1 for x in (tiny, normal, largest))
    with np.errstate(over="ignore"):
        held = sizes.astype(dtype).astype(np.float64)
    shares = (np.mean(so) for so in (held == 0, (held > 0) & (held < normal), ~np.isfinite(held)))
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
