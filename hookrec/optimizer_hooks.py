"""How hooks come off optimizers while somebody may be stepping one.

`Optimizer.step` goes through its dictionaries of hooks while the hooks run, so to take one out in
the middle, from another thread or from a hook, raises in the training. Then the hook is replaced
by one that does nothing, and taken out the next time.
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


def _nothing(*args: object) -> None:
    """Take the place of a hook."""


def _steps(frame: FrameType | None) -> bool:
    """Whether a thread is inside of an optimizer's step."""
    while frame is not None:
        if frame.f_code.co_filename == optimizer.__file__:
            return True
        frame = frame.f_back
    return False
