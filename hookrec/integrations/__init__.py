"""Recording from within other people's training loops: a file a library, each with what that library calls at the
beginning, at the end, around an evaluation, and where it logs.

None of them counts steps: the optimizer that steps is the clock, as in any loop, so that gradient accumulation and
skipped steps are what they are. None but the one that is used is imported.
"""

from collections.abc import Mapping
from typing import Any


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return those of some logged values that are numbers, or tensors of one."""
    found = {}
    for name, value in values.items():
        try:
            if not isinstance(value, (str, bytes)):
                found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            continue  # a text, a picture, a table
    return found


def going_on(options: Mapping[str, Any], global_step: int) -> dict[str, Any]:
    """Return the arguments of `attach` with the step that a library knows, where `resume=True` leaves it open."""
    return {**options, "resume": global_step} if options.get("resume") is True else dict(options)
