"""How we are told that an optimizer steps, where others may be stepping one as we begin or end to listen.

`Optimizer.step` goes through PyTorch's dictionaries of hooks while the hooks run, so to put one in or take one out in
the middle, from another thread or from a hook, raises in the training. So there is one hook of ours on either side of
the step, and it calls those who have asked, in the order in which they asked. They may come and go at any moment,
also while they are called: attaching happens at the end of a step, which is such a call.

PyTorch puts the calls of hooks around the `step` of each class. Where a class of the user calls `super().step()`, they
run for both; the outer one is the step.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch.optim import Optimizer, optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

Told = Callable[[Optimizer, Any, Any], Any]
"""Is called with the optimizer, and with the positional and keyword arguments of its step."""

_left: list[RemovableHandle] = []


class _Side:
    """The hook before or after the step of every optimizer, and those whom it tells."""

    def __init__(self, register: Callable[[Callable[..., None]], RemovableHandle]) -> None:
        self._register = register
        self._told: list[Told] = []  # changed by single operations, since several threads may
        self._handle: RemovableHandle | None = None

    def add(self, told: Told) -> Callable[[], None]:
        """Tell somebody from now on; return what ends that, which may be called again."""
        self._told.append(told)
        if self._handle is None:
            self._handle = self._register(self._stepped)

        def remove() -> None:
            with contextlib.suppress(ValueError):
                self._told.remove(told)
            if not self._told and self._handle is not None:
                handle, self._handle = self._handle, None
                take_off([handle])

        return remove

    def _stepped(self, *args: Any) -> None:
        for told in tuple(self._told):
            told(*args)


_before, _after = _Side(register_optimizer_step_pre_hook), _Side(register_optimizer_step_post_hook)


def before_step(told: Told) -> Callable[[], None]:
    """Call a function before each step of each optimizer; return what ends that."""
    return _before.add(told)


def after_step(told: Told) -> Callable[[], None]:
    """Call a function after each step of each optimizer; return what ends that."""
    return _after.add(told)


def somebody_steps() -> bool:
    """Whether a thread is inside of an optimizer's step."""
    return any(map(_steps, sys._current_frames().values()))


def take_off(handles: Iterable[RemovableHandle]) -> None:
    """Take hooks off optimizers, or see to it that they do nothing until somebody can."""
    _left.extend(handles)
    if not somebody_steps():
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
    while frame is not None:
        if frame.f_code.co_filename == optimizer.__file__:
            return True
        frame = frame.f_back
    return False
