"""What is counted of a tensor, in which precision.

Eleven numbers describe a record: how many elements there are, how many of them are NaN, +inf, -inf and zero, and of the
finite ones the extremes, mean, population standard deviation and l2 norm, NaN where none is finite: a norm of 0 would
read as a dead layer. Sums run in float64 about a shift, so a small
spread about a large mean is not lost, and squares of half-precision values do not overflow. Integers go through
float64: their extremes are exact up to 2^53, and rounded to it beyond.

There are two ways to the same numbers. For tensors on the CPU the native kernel makes them in one pass
(`native/capture.c`); `describe` has plain torch operations for every other device and dtype, and for an installation
without the kernel.
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

    `capture(source, destination, numel, dtype, statistics, with_checksum)` takes addresses and numbers; either of
    `destination` and `statistics` may be None. It returns the CRC-32C of the bytes, or -1 if that was not asked for, or
    the processor has no instruction for it. `HOOKREC_NATIVE=0` in the environment stands for an installation without
    it. Tensors of several hundred kilobytes are shared out among torch's own threads.
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
            capture(values.data_ptr(), None, values.numel(), code, out, 0)
            return out.raw
        return _describe_by_torch(values)


def _describe_by_torch(values: Tensor) -> bytes:
    """Compute on the tensor's device in float64; one copy to the host at the end."""
    numel = values.numel()
    if numel == 0:
        return STATISTICS.pack(0, 0, 0, 0, 0, *[math.nan] * 6)
    if values.device.type == "mps":
        values = values.cpu()  # it has no float64
    complex_parts = values.is_complex()
    if complex_parts:
        parts = torch.view_as_real(values.resolve_conj()).to(torch.float64)
        nan = parts.isnan().any(-1).flatten()
        x = torch.hypot(parts[..., 0], parts[..., 1]).flatten()
    else:
        wide = values.to(torch.float32) if values.dtype.itemsize == 1 and values.is_floating_point() else values
        x = wide.to(torch.float64).flatten()
        nan = x.isnan()
    posinf, neginf = ~nan & (x == math.inf), ~nan & (x == -math.inf)
    finite = ~(nan | posinf | neginf)
    count = finite.sum()
    low, high = torch.where(finite, x, math.inf).min(), torch.where(finite, x, -math.inf).max()
    absmax = torch.maximum(low.abs(), high.abs())
    # In units of the largest no square overflows.
    scale = torch.where((absmax > 0) & absmax.isfinite(), absmax, 1.0)
    scaled = torch.where(finite, x / scale, 0.0)
    mean = scaled.sum() / count
    spread = torch.where(finite, scaled - mean, 0.0)
    std = (spread.square().sum() / count).sqrt()
    l2 = scaled.square().sum().sqrt()
    numbers = (nan.sum(), posinf.sum(), neginf.sum(), (x == 0).sum(), count)
    measures = (low, high, absmax, mean * scale, std * scale, l2 * scale)
    host = torch.stack([number.to(torch.float64) for number in (*numbers, *measures)]).tolist()
    counts, found = [int(number) for number in host[:4]], host[5:]
    if host[4] == 0:
        found = [math.nan] * 6
    elif complex_parts:
        found = [math.nan, math.nan, found[2], math.nan, math.nan, found[5]]
    return STATISTICS.pack(numel, *counts, *found)
