"""How far two tensors are apart, in numbers that mean the same for every dtype, shape and scale.

Arithmetic is done in float64, a block at a time: a block and what is made of it stay in the cache, which is five times
as fast as whole arrays of a megabyte, and memory does not grow with the tensor. Integers are compared exactly.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.format import ML_DTYPES

STATISTICS_ERROR = 1e-4
"""To this the statistics of a trace are right, relative to their true value. Counts are exact, and extremes; those of
integers up to 2^53."""

# OpenBLAS shares a sum of more than 10,000 elements out among threads, which takes longer than the sum.
_BLOCK = 1 << 13


@dataclass(frozen=True)
class Distance:
    """How far a tensor of B is from its partner in A.

    Attributes:
        max_abs: largest absolute difference of two finite elements; of complex ones, of real or imaginary parts.
        relative: l2(a - b) / l2(a), over the elements that are finite in both.
        cosine: of the angle between a and b, over the same elements; 1 if both are zero.
        max_ulp: largest difference in units of the last place; None unless both have the same floating dtype.
        where: index of the largest difference, or of the first of `unlike`; None if there is none.
        unlike: elements of which one is finite and the other is not, or that are infinite or NaN in different ways.
        spread: rms(a - b) / (rms(a) + floor).
        peak: largest |a - b| / (|a| + rms(a) + floor) of an element.
    """

    max_abs: float
    relative: float
    cosine: float
    max_ulp: int | None
    where: tuple[int, ...] | None
    unlike: int
    spread: float
    peak: float


def is_real_number(dtype: np.dtype[Any]) -> bool:
    """Whether values of the dtype are rounded, as integers and booleans are not."""
    return dtype.kind in "fc" or dtype.name in ML_DTYPES


def rms_of(record: Mapping[str, Any]) -> float:
    """Return the root of the mean square of a record's finite elements, from its statistics."""
    finite = record["numel"] - record["n_nan"] - record["n_posinf"] - record["n_neginf"]
    return float(record["l2"]) / math.sqrt(finite) if finite > 0 else 0.0


def distance(a: NDArray[Any], b: NDArray[Any], rms: float, floor: float = 0.0) -> Distance:
    """Compare two tensors of the same shape. NaN equals NaN, and infinity itself.

    Args:
        a: shape `(*shape)`.
        b: shape `(*shape)`.
        rms: of a, roughly: it scales `peak` alone.
        floor: added to the scale of a where a difference is divided by it.
    """
    ulps = a.dtype == b.dtype and is_real_number(a.dtype) and a.dtype.kind != "c"
    shape = a.shape
    if a.dtype == b.dtype and np.array_equal(_bits(a), _bits(b)):
        return Distance(0.0, 0.0, 1.0, 0 if ulps else None, None, 0, 0.0, 0.0)
    parts = 1
    if "c" in (a.dtype.kind, b.dtype.kind):
        a, b, parts = _as_pairs(a), _as_pairs(b), 2
    total = _Total(rms + floor, ulps=ulps, exact=not (is_real_number(a.dtype) or is_real_number(b.dtype)))
    a, b = a.reshape(-1), b.reshape(-1)
    with np.errstate(all="ignore"):
        for begin in range(0, len(a), _BLOCK):
            total.add(a[begin : begin + _BLOCK], b[begin : begin + _BLOCK], begin)
    return total.distance(shape, parts, floor)


class _Total:
    """Sums and extremes over blocks of two tensors."""

    def __init__(self, scale: float, *, ulps: bool, exact: bool) -> None:
        self._scale = max(scale, np.finfo(np.float64).tiny)
        self._exact = exact
        self._count = 0
        self._aa = self._bb = self._ab = self._dd = 0.0
        self._max = self._peak = 0.0
        self._ulp = 0 if ulps else None
        self._at: int | None = None
        self._unlike = 0
        self._unlike_at: int | None = None

    def add(self, a: NDArray[Any], b: NDArray[Any], begin: int) -> None:
        x, y = a.astype(np.float64), b.astype(np.float64)
        if self._exact:
            self._add_exactly(a, b, x, y, begin)
            return
        d = np.subtract(x, y)
        dd = float(d @ d)
        usable: NDArray[np.bool_] | None = None
        if not math.isfinite(dd):
            usable = np.isfinite(x) & np.isfinite(y)
            unlike = ~usable & (x != y) & ~(np.isnan(x) & np.isnan(y))
            if unlike.any():
                self._unlike += int(np.count_nonzero(unlike))
                if self._unlike_at is None:
                    self._unlike_at = begin + int(np.argmax(unlike))
            x, y, d = (np.where(usable, values, 0.0) for values in (x, y, d))
            dd = float(d @ d)
        self._sum(x, y, dd, len(x) if usable is None else int(np.count_nonzero(usable)))
        if dd == 0.0 and not d.any():
            return
        self._extremes(x, d, begin)
        if self._ulp is not None:
            ulps = _ulps(a, b)
            self._ulp = max(self._ulp, int((ulps if usable is None else np.where(usable, ulps, 0)).max()))

    def _add_exactly(self, a: NDArray[Any], b: NDArray[Any], x: Any, y: Any, begin: int) -> None:
        """Integers: those of 64 bits may differ where their float64 do not."""
        d = x - y
        lost = (a != b) & (d == 0)
        d[lost] = [int(left) - int(right) for left, right in zip(a[lost], b[lost], strict=True)]
        self._sum(x, y, float(d @ d), len(x))
        self._extremes(x, d, begin)

    def _sum(self, x: Any, y: Any, dd: float, count: int) -> None:
        self._count += count
        self._dd += dd
        self._aa += float(x @ x)
        self._bb += float(y @ y)
        self._ab += float(x @ y)

    def _extremes(self, x: NDArray[np.float64], d: NDArray[np.float64], begin: int) -> None:
        np.abs(d, out=d)
        at = int(np.argmax(d))
        if d[at] > self._max:
            self._max, self._at = float(d[at]), begin + at
        scale = np.abs(x, out=x)
        scale += self._scale
        d /= scale
        self._peak = max(self._peak, float(d.max()))

    def distance(self, shape: tuple[int, ...], parts: int, floor: float) -> Distance:
        count = max(1, self._count)
        spread = _ratio(math.sqrt(self._dd / count), math.sqrt(self._aa / count) + floor)
        at = self._at if self._unlike_at is None else self._unlike_at
        return Distance(
            max_abs=self._max,
            relative=_ratio(math.sqrt(self._dd), math.sqrt(self._aa)),
            cosine=_cosine(self._aa, self._bb, self._ab),
            max_ulp=self._ulp,
            where=None if at is None else tuple(int(i) for i in np.unravel_index(at // parts, shape)),
            unlike=-(-self._unlike // parts),
            spread=spread,
            peak=self._peak,
        )


def _ratio(part: float, whole: float) -> float:
    if part == 0.0:
        return 0.0
    return part / whole if whole else math.inf


def _cosine(aa: float, bb: float, ab: float) -> float:
    if not aa or not bb:
        return 1.0 if aa == bb else 0.0
    return max(-1.0, min(1.0, ab / math.sqrt(aa) / math.sqrt(bb)))


def _as_pairs(values: NDArray[Any]) -> NDArray[Any]:
    """Real and imaginary parts in a last dimension."""
    if values.dtype.kind != "c":
        values = values.astype(np.complex128)
    pairs: NDArray[Any] = np.ascontiguousarray(values).reshape(-1).view(values.real.dtype)
    return pairs


def _bits(values: NDArray[Any]) -> NDArray[Any]:
    width = values.dtype.itemsize
    flat = np.ascontiguousarray(values).reshape(-1)
    bits: NDArray[Any] = flat.view(np.uint64 if width == 16 else np.dtype(f"u{width}"))
    return bits


def _ulps(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """How many numbers of the dtype one must step over from a to b; +0 and -0 are the same number."""
    left, right = _bits(a), _bits(b)
    m, n = left, right
    other_sign: NDArray[Any] | bool = False
    if a.dtype.name != "float8_e8m0fnu":  # which has no sign
        width = 8 * left.itemsize
        magnitude = left.dtype.type((1 << (width - 1)) - 1)
        m, n = left & magnitude, right & magnitude
        other_sign = (left ^ right) > magnitude
    ulps: NDArray[Any] = np.where(other_sign, m + n, np.maximum(m, n) - np.minimum(m, n))
    return ulps


def statistics_distance(a: Mapping[str, Any], b: Mapping[str, Any], floor: float = 0.0) -> Distance:
    """Compare the statistics of two records of the same number of elements, where one has no tensor.

    The mean, the standard deviation and l2 are right to 1e-4, so what they differ by up to that is nothing;
    extremes are exact. `max_abs`, `relative`, `cosine` and `max_ulp` cannot be known, and are NaN or None.
    """
    rms = rms_of(a)
    counts = ("n_nan", "n_posinf", "n_neginf")
    unlike = sum(abs(a[name] - b[name]) for name in counts)

    def apart(name: str) -> float:
        # Of complex tensors there are no extremes, and where no element is finite there is nothing.
        left, right = float(a[name]), float(b[name])
        return 0.0 if math.isnan(left) and math.isnan(right) else abs(left - right)

    scale = max(abs(a["absmax"]) if math.isfinite(a["absmax"]) else 0.0, rms) + floor
    spread = max(_ratio(apart(name), rms + floor) for name in ("mean", "std"))
    spread = max(spread, _ratio(abs(rms - rms_of(b)), rms + floor))
    peak = max(_ratio(apart(name), scale) for name in ("min", "max", "absmax"))
    if math.isnan(spread) or math.isnan(peak):  # only one of them has a finite element
        unlike, spread, peak = max(unlike, 1), 0.0, 0.0
    nan = math.nan
    return Distance(nan, nan, nan, None, None, unlike, max(0.0, spread - STATISTICS_ERROR), peak)
