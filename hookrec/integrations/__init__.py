"""Recording from within other people's training loops: a file a library, each with what that library calls at the
beginning, at the end, around an evaluation, and where it logs.

None of them counts steps: the optimizer that steps is the clock, as in any loop, so that gradient accumulation and
skipped steps are what they are. None but the one that is used is imported.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookrec.recorder import Recorder


def resumed(options: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return options of `attach` in which `resume=True` is the step that the library goes on with.

    It knows from its checkpoint, which may be older than what was recorded last.
    """
    return {**options, "resume": step} if options.get("resume") is True else dict(options)


def log(recorder: "Recorder | None", values: Mapping[str, Any]) -> None:
    """Give a recorder, if it records, those of some logged values that are numbers, or tensors of one."""
    if recorder is not None and recorder.active:
        recorder.log(**_numbers(values))


def pause(recorder: "Recorder | None") -> None:
    """Leave out what runs from here on, if it is recorded."""
    if recorder is not None and recorder.active:
        recorder.pause()


def resume(recorder: "Recorder | None") -> None:
    """Record again; where nothing was left out, go on."""
    if recorder is not None and recorder.active:
        recorder.resume()


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in values.items():
        try:
            if not isinstance(value, (str, bytes)):
                found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            continue  # a text, a picture, a table
    return found
