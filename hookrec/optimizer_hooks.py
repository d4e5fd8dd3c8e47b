"""What is odd about the hooks of optimizers: how they come off while somebody steps, and that they run twice.

`Optimizer.step` goes through its dictionaries of hooks while the hooks run, so to take one out in
the middle, from another thread or from a hook, raises in the training. Then the hook is replaced
by one that does nothing, and taken out the next time.

PyTorch puts the calls of hooks around the `step` of each class. Where a class of the user calls `super().step()`, they
run for both; the outer one is the step.
"""

import sys
from collections.abc import Iterable
from types import FrameType

from torch.optim import optimizer
from torch.utils.hooks import RemovableHandle

_left: list[RemovableHandle] = []


def take_off(handles: Iterable[RemovableHandle]) -> None:
    """Take hooks off optimizers, or see to it that they do nothing."""
    _left.extend(handles)
    if not any(map(_steps, sys._current_frames().values())):
        while _left:
            _left.pop().remove()
    for handle in _left:
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks[handle.id] = _nothing  # to set what is there already is no change of the dictionary


def is_inner(stepped: optimizer.Optimizer) -> bool:
    """Whether the hook that asks runs for a step that is a part of another step of the same optimizer."""
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None:
        if frame.f_code.co_filename == optimizer.__file__ and frame.f_code.co_name == "wrapper":
            steps += frame.f_locals.get("self") is stepped
        frame = frame.f_back
    return steps > 1


def _nothing(*args: object) -> None:
    """Take the place of a hook."""


def _steps(frame: FrameType | None) -> bool:
    """Whether a thread is inside of an optimizer's step."""
    while frame is not None:
        if frame.f_code.co_filename == optimizer.__file__:
            return True
        frame = frame.f_back
    return False
