"""What a filter over records means: globs over names, steps as numbers or slices, conditions in SQL."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from replay.errors import BadQuery

Names = str | Iterable[str] | None
"""A glob, several, or None for all."""
Globs = tuple[str, ...] | None
"""What `globs_of` makes of them."""
Steps = int | slice | Iterable[int] | None
"""A step, a slice of steps, several steps, or None for all."""
_MOST = 2**63 - 1
"""The largest number that the log could have."""


def globs_of(names: Names) -> Globs:
    """Return globs as a tuple; None stands for all."""
    if names is None or isinstance(names, str):
        return None if names is None else (names,)
    return tuple(names)


def matches(name: str, globs: Globs) -> bool:
    """Return whether one of some globs matches a name; a name with brackets in it matches itself."""
    return globs is None or any(name == glob or fnmatch.fnmatchcase(name, glob) for glob in globs)


def check_globs(what: str, globs: Globs, there: Sequence[str], whose: object) -> None:
    """Refuse a glob that matches nothing: an empty answer would read as if there were nothing to find.

    Args:
        what: of which there are names, such as "layer".
        globs: as `globs_of` returns them.
        there: the names that there are. Where there is none yet, nothing is known to be wrong.
        whose: what has them.

    Raises:
        BadQuery: with the names that are like it, or else the first ones.
    """
    for glob in globs or ():
        if there and not any(matches(name, (glob,)) for name in there):
            near = difflib.get_close_matches(glob, there, n=5, cutoff=0.4) or there[:5]
            some = ", ".join(map(repr, near if len(there) > 8 else there))
            more = f", and {len(there) - len(near)} more" if len(there) > 8 else ""
            raise BadQuery(f"There is no {what} {glob!r} in {whose}; there are {some}{more}.")


def steps_condition(steps: Steps, last: int) -> Any:
    """Return a condition over the column `step` for pyarrow, or None for all.

    Args:
        steps: which steps; a slice may lack its ends and have a stride, and counts from 0.
        last: the last step that there is.

    Raises:
        BadQuery: a negative step, or one that is no 64-bit integer.
    """
    field = pa.compute.field("step")
    if steps is None:
        return None
    if isinstance(steps, (int, np.integer)):
        return field == _step(steps)
    if not isinstance(steps, slice):
        return field.isin(pa.array([_step(step) for step in steps], pa.int64()))
    begin, end, by = steps.start or 0, last + 1 if steps.stop is None else steps.stop, steps.step or 1
    if begin < 0 or end < 0 or by < 1:
        raise BadQuery(
            f"Steps count from 0 upwards; {steps} does not. `replay info` names the last (in Python: trace.steps)."
        )
    if by != 1:
        return field.isin(pa.array(range(begin, min(end, last + 1), by), pa.int64()))
    return (field >= min(begin, _MOST)) & (field < min(end, _MOST))


def _step(step: int) -> int:
    if not -(2**63) <= step <= _MOST:
        raise BadQuery(f"{step} is no step: steps count from 0.")
    return int(step)
