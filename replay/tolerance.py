"""Which difference is rounding, and which is a divergence.

A fixed tolerance is wrong twice: rounding grows with every layer that it passes, so a deep layer is accused of what the
first ones did; and a tolerance that is wide enough for the deep layers misses a small fault in the first. So a record
is held against what went before it in the order of execution:

    error      the larger of  rms(a - b) / rms(a)  and  1/16 of the largest  |a - b| / (|a| + rms(a))  of an element
    tolerance  the largest of
                 T, by the dtype of the lower precision
                 4 × the largest error that was within tolerance before, but at most √T of the lowest precision so far
                 10 × the noise, where a second run of A was given

T is 11 eps for float32 and float64, and eps for smaller floats, where eps is the distance from 1 to the next number:
1.3e-6 for float32 and 1e-3 for float16 are the rtol of `torch.testing.assert_close`; for bfloat16 it is half of that
(7.8e-3, torch has 1.6e-2), and for float64 2.4e-15 instead of 1e-7, since those are errors of one operation: small
floats are summed in float32 and rounded once. √T means that half of the digits may go; what is further off is
accused however slowly it came. Integers and booleans have T = 0.

torch's absolute tolerance is left out: 1e-5 says that all gradients of a deep net are equal. Instead 1/64 of the
largest rms of the same kind in the step is added to rms(a) for gradients: those that are zero but for rounding (of a
bias before a normalisation) differ from themselves by 100 %.

Parameters are stored, not summed, so an element of theirs counts by 1/2, not by 1/16.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from replay.distance import Distance, is_real_number, rms_of
from replay.errors import BadQuery
from replay.format import DTYPES, numpy_dtype

Tolerance = float | Mapping[str, float] | None
"""T for all floating dtypes, or by the name of a dtype; None for those of the table."""

GROWTH = 4.0
NOISE_FACTOR = 10.0
_ELEMENT = 1 / 16
_ELEMENT_OF_PARAMETER = 1 / 2
_GRADIENT_FLOOR = 1 / 64
_GRADIENTS = ("grad_output", "grad_input", "param_grad", "param_grad_acc", "update")


def gradient_floors(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return by kind what is added to the scale of a record, given the records of a step."""
    floors: dict[str, float] = {}
    for record in records:
        if record["kind"] in _GRADIENTS:
            floors[record["kind"]] = max(floors.get(record["kind"], 0.0), rms_of(record) * _GRADIENT_FLOOR)
    return floors


def error_of(distance: Distance, kind: str) -> float:
    """Return the one number that is held against a tolerance; infinite where no rounding explains the difference."""
    if distance.unlike:
        return math.inf
    error = max(distance.spread, distance.peak * (_ELEMENT_OF_PARAMETER if kind == "param" else _ELEMENT))
    return math.inf if math.isnan(error) else error


class Bounds:
    """The tolerances of one process's records, in the order of execution."""

    def __init__(self, given: Tolerance) -> None:
        self._given = _checked(given)
        self._lowest = 0.0
        self.before = 0.0
        """The largest error that was within tolerance so far."""

    def of_step(
        self, records: Sequence[tuple[str, str, str]], errors: Sequence[float], noise: Sequence[float | None]
    ) -> list[tuple[float, float]]:
        """Return of each record of a step its tolerance, and the largest error before it.

        Args:
            records: kind, dtype in A and dtype in B.
            errors: as `error_of` has them.
            noise: the error of the same record between two runs of A; None where it is not known.
        """
        by_kind: dict[str, list[float]] = {}
        for (kind, _, _), known in zip(records, noise, strict=True):
            if known is not None:
                by_kind.setdefault(kind, []).append(known)
        # A tensor of few elements may differ little in one pair of runs by chance, and much in another.
        typical = {kind: median(values) for kind, values in by_kind.items()}
        found = []
        for (kind, *dtypes), error, own in zip(records, errors, noise, strict=True):
            least = max(self.of_dtype(dtype) for dtype in dtypes)
            self._lowest = max(self._lowest, least)
            bound = max(least, min(GROWTH * self.before, math.sqrt(self._lowest))) if least else 0.0
            floor = 0.0
            if own is not None:
                floor = NOISE_FACTOR * max(own, 0.0 if self._exact(dtypes) else typical[kind])
            found.append((max(bound, floor), self.before))
            if error <= bound:
                self.before = max(self.before, error)
        return found

    @staticmethod
    def _exact(dtypes: Iterable[str]) -> bool:
        return not any(is_real_number(numpy_dtype(name)) for name in dtypes)

    def of_dtype(self, name: str) -> float:
        """Return T of a dtype."""
        if name not in self._given:
            dtype = numpy_dtype(name)
            if not is_real_number(dtype):
                self._given[name] = 0.0
            else:
                eps = _eps(dtype)
                self._given[name] = self._given.get("*", 11 * eps if eps < 1e-6 else eps)
        return self._given[name]


def _eps(dtype: np.dtype[Any]) -> float:
    if dtype.kind in "fc":
        return float(np.finfo(dtype).eps)
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def _checked(given: Tolerance) -> dict[str, float]:
    by_name = {} if given is None else dict(given) if isinstance(given, Mapping) else {"*": given}
    for name, value in by_name.items():
        if name != "*" and name not in DTYPES:
            raise BadQuery(f"tolerance names a dtype {name!r}; there are {', '.join(sorted(DTYPES))}.")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise BadQuery(f"tolerance is {value!r}; it is a number from 0, relative to the size of a tensor.")
    return {name: float(value) for name, value in by_name.items()}
