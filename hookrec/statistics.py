"""What is counted of a tensor, in which precision.

Eleven numbers describe a record: how many elements there are, how many of them are NaN, +inf, -inf and zero, and of the
finite ones the extremes, mean, population standard deviation and l2 norm, NaN where none is finite: a norm of 0 would
read as a dead layer. Sums run in float64 about a shift, so a small
spread about a large mean is not lost, and squares of half-precision values do not overflow. Integers go through
float64: their extremes are exact up to 2^53, and rounded to it beyond.

On request the elements of a floating tensor are counted by their binary exponents: that of x is the e for which
2**e <= abs(x) < 2**(e + 1). From these counts underflow and overflow in narrower dtypes can be told.

There are two ways to the same numbers. For tensors on the CPU the native kernel makes them in one pass
(`native/capture.c`); `measure` and `count_exponents` have plain torch operations for every other device and dtype, and
for an installation without the kernel.
"""

import contextlib
import ctypes
import functools
import math
import os
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FIELDS = ("numel", "n_nan", "n_posinf", "n_neginf", "n_zero", "min", "max", "absmax", "mean", "std", "l2")
STATISTICS = struct.Struct("<5q6d")
NOTHING = STATISTICS.pack(0, 0, 0, 0, 0, *[math.nan] * 6)
"""The statistics of a tensor without elements."""
EXPONENTS = range(-150, 129)
"""Exponents that are counted; float64 has smaller ones, counted at the first, and larger ones, counted at the last."""
_PIECE = 1 << 22
"""Elements that plain torch operations take at once: in float64 they need several times the memory."""

_NATIVE_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool"),
    *("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
NATIVE_DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(_NATIVE_NAMES) if hasattr(torch, name)
}
"""The kernel's code of each dtype that it knows."""


@functools.cache
def load_native() -> Any:
    """Return the kernel, or None if it was not built.

    `capture(source, destination, numel, dtype, statistics, with_checksum, exponents)` takes addresses and numbers; each
    of `destination`, `statistics` and `exponents`, int64 of shape `(279,)`, may be None. It returns the CRC-32C of the
    bytes, or -1 if that was not asked for, or the processor has no instruction for it. `HOOKREC_NATIVE=0` in the
    environment stands for an installation without it. Tensors of several hundred kilobytes are shared out among torch's
    own threads.
    """
    path = Path(__file__).with_name("native") / "libcapture.so"
    if os.environ.get("HOOKREC_NATIVE") == "0" or not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
        capture = library.hookrec_capture
        if torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
            # Where the library that torch runs on does not have the symbol, the kernel keeps to one thread.
            with contextlib.suppress(AttributeError):
                library.hookrec_run_on(ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p))
    except (OSError, AttributeError):
        return None  # built for another machine
    capture.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_void_p,
    ]
    capture.restype = ctypes.c_int64
    return capture


def describe(tensor: Tensor, *, native: bool = True) -> bytes:
    """Return the statistics of a tensor, packed as `STATISTICS` has it.

    Args:
        tensor: any strided tensor with values, on any device. Of complex elements `absmax` and `l2` take the absolute
            value, an element with a NaN part is NaN, and `min`, `max`, `mean` and `std` are NaN.
        native: use the kernel where it serves.
    """
    with torch.no_grad():
        values = tensor.detach()
        code = NATIVE_DTYPES.get(values.dtype)
        capture = load_native() if native else None
        if capture is not None and code is not None and values.is_cpu:
            values = values.resolve_neg().contiguous()
            out = ctypes.create_string_buffer(STATISTICS.size)
            capture(values.data_ptr(), None, values.numel(), code, out, 0, None)
            return out.raw
        if values.numel() == 0:
            return NOTHING
        if values.device.type not in ("cpu", "cuda"):
            values = values.cpu()  # many others have no float64
        return struct.pack("<11q", *measure(values).tolist())


def measure(values: Tensor) -> Tensor:
    """Compute the statistics of a tensor where it is, by plain torch operations; nothing waits for its device.

    Args:
        values: a tensor with at least one element.

    Returns:
        Integers of shape `(11,)` on its device, whose bytes are those that `STATISTICS` packs: a count each, then
        measures as the bits of a float64.
    """
    complex_parts = values.is_complex()
    flat = (values.resolve_conj() if complex_parts else values).reshape(-1)
    pieces = torch.split(flat, _PIECE)
    extremes = torch.stack([_extremes(_wide(piece)) for piece in pieces])
    counts = extremes[:, :4].sum(0)
    n, total = extremes[:, 4], extremes[:, 4].sum()
    low, high = extremes[:, 5].amin(), extremes[:, 6].amax()
    absmax = torch.maximum(low.abs(), high.abs())
    # In units of the largest no square overflows; of its power of two, so that nothing is rounded.
    power = torch.exp2((torch.frexp(absmax).exponent - 1).to(torch.float64))
    scale = torch.where((absmax > 0) & absmax.isfinite(), power, 1.0)
    means, spreads, squares = torch.stack([_sums(_wide(piece), low, scale) for piece in pieces]).unbind(1)
    mean = (n * means).sum() / total
    # Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983).
    std = ((spreads + n * (means - mean).square()).sum() / total).sqrt()
    l2 = squares.sum().sqrt()
    measures = [low, high, absmax, (low / scale + mean) * scale, std * scale, l2 * scale]
    if complex_parts:
        nan = torch.full_like(low, math.nan)
        measures = [nan, nan, absmax, nan, nan, l2 * scale]
    found = torch.where(total > 0, torch.stack(measures), math.nan)
    numel = torch.full((1,), values.numel(), dtype=torch.int64, device=values.device)
    return torch.cat([numel, counts.to(torch.int64), found.view(torch.int64)])


def count_exponents(values: Tensor) -> Tensor:
    """Count the elements of a floating tensor by their exponents where it is; nothing waits for its device.

    Returns:
        Integers of shape `(279,)` on its device, one for each of `EXPONENTS`. What is 0, NaN or infinite is in none.
    """
    counts = torch.zeros(len(EXPONENTS) + 1, dtype=torch.int64, device=values.device)
    for piece in torch.split(values.reshape(-1), _PIECE):
        x = _wide(piece)
        exponents = torch.frexp(x).exponent.to(torch.int64) - 1
        at = exponents.clamp(EXPONENTS[0], EXPONENTS[-1]) - EXPONENTS[0]
        at = torch.where(x.isfinite() & (x != 0), at, len(EXPONENTS))
        if values.is_cpu:
            counts += torch.bincount(at, minlength=len(counts))
        else:  # there it waits for the device, and what adds in any order may be forbidden
            ends = torch.arange(len(counts), device=values.device)
            counts += torch.searchsorted(at.sort().values, ends, right=True).diff(prepend=ends[:1])
    return counts[:-1]


def _wide(piece: Tensor) -> Tensor:
    """Return a piece in float64, of complex elements the absolute value, NaN where a part is NaN."""
    if piece.is_complex():
        parts = torch.view_as_real(piece).to(torch.float64)
        x = torch.hypot(parts[:, 0], parts[:, 1])
        return torch.where(parts.isnan().any(1), math.nan, x)  # hypot of infinity and NaN is infinity
    if piece.dtype.itemsize == 1 and piece.is_floating_point():
        piece = piece.to(torch.float32)
    return piece.to(torch.float64)


def _extremes(x: Tensor) -> Tensor:
    """Return the numbers of NaN, +inf, -inf, zeros and finite elements, and the extremes of the latter."""
    finite = x.isfinite()
    low, high = torch.where(finite, x, math.inf).amin(), torch.where(finite, x, -math.inf).amax()
    counts = [x.isnan().sum(), (x == math.inf).sum(), (x == -math.inf).sum(), (x == 0).sum(), finite.sum()]
    return torch.stack([*(count.to(torch.float64) for count in counts), low, high])


def _sums(x: Tensor, low: Tensor, scale: Tensor) -> Tensor:
    """Return of the finite elements the mean above `low`, and the sums of squares about it and about zero.

    All in units of `scale`. From `low` on: so a small spread about a large mean is not lost where pieces are joined.
    """
    finite = x.isfinite()
    count = finite.sum().clamp(min=1)
    scaled = torch.where(finite, x / scale, 0.0)
    above = torch.where(finite, scaled - low / scale, 0.0)
    mean = above.sum() / count
    spread = torch.where(finite, above - mean, 0.0).square().sum()
    return torch.stack([mean, spread, scaled.square().sum()])
