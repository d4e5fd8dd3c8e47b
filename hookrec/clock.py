"""What ends a step: an optimizer that has stepped or was skipped by a GradScaler, a forward pass, or the user.

The clock also counts the forward passes of each root within the step (`micro`), which tell the micro-batches of
gradient accumulation apart.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from hookrec.errors import AttachError
from hookrec.layers import parameter_ids
from hookrec.optimizer_hooks import after_step, is_inner
from hookrec.plan import CLOCKS
from hookrec.scaler import ScalerWatch
from hookrec.uncopied import Uncopied


class Clock:
    """Calls `tick` when a step has ended.

    Attributes:
        forwards: how many forward passes of each root have begun in the step.
        strangers: the optimizers that have stepped and hold no parameter of the models.

    Args:
        models: the roots.
        clock: "optimizer" for the first optimizer that steps and holds a parameter of the models, an optimizer,
            "forward" for forward passes of the roots, or "manual".
        tick: ends a step.
        begin_forward: is called before each forward pass of a root that is watched.
        end_forward: is called after each of these.
        log: takes the scale of gradients (`grad_scale`), and `skipped` for a step that a GradScaler skipped.
        fault: takes what goes wrong in here, which is in the middle of the training.

    Raises:
        AttachError: it is no clock.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        clock: str | Optimizer,
        tick: Callable[[], None],
        begin_forward: Callable[[], None],
        end_forward: Callable[[], None],
        log: Callable[[str, float], None],
        fault: Callable[[Exception], None],
    ) -> None:
        check(clock)
        self.manual = clock == "manual"
        self.forwards = [0] * len(models)
        self._by_forward = clock == "forward"
        self._given = isinstance(clock, Optimizer)
        self._optimizer = weakref.ref(clock) if isinstance(clock, Optimizer) else None
        self._skipping = False
        self.strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._models = [weakref.ref(model) for model in models.values()]
        self._tick = tick
        self._begin_forward = begin_forward
        self._end_forward = end_forward
        self._log = log
        self._fault = fault
        self._root_handles: list[Any] = []
        self._stop_listening = None if self.manual or self._by_forward else after_step(self._safe(self._stepped))
        self._scaler = ScalerWatch(self._safe(self._about_to_step), self._safe(self._perhaps_skipped))

    def begin_step(self, *, sampled: bool) -> None:
        """Count forward passes from 0 again.

        Args:
            sampled: whether anybody wants to know. If not, no hook of ours is on the roots, which torch.compile
                would trace.
        """
        self.forwards = [0] * len(self.forwards)
        self.watch(sampled=sampled)

    def watch(self, *, sampled: bool) -> None:
        """Watch the forward passes, or not, as `begin_step` does; the count goes on."""
        if sampled or self._by_forward:
            if not self._root_handles:
                roots = [model for reference in self._models if (model := reference()) is not None]
                for number, root in enumerate(roots):
                    before = _RootHook(root, self._safe(functools.partial(self.forward, number)))
                    # As functions, since a ScriptModule refuses these methods.
                    self._root_handles.append(nn.Module.register_forward_pre_hook(root, before, prepend=True))
                    after = _RootHook(root, self._safe(self._end_forward))
                    self._root_handles.append(nn.Module.register_forward_hook(root, after))
        else:
            self.unwatch()

    @property
    def watches(self) -> bool:
        """Whether forward passes are seen."""
        return bool(self._root_handles)

    def be_last(self) -> None:
        """Come after those who have begun to listen to optimizers later: the step ends when they have seen it."""
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = after_step(self._safe(self._stepped))

    def close(self) -> None:
        """Take the hooks off."""
        self.unwatch()
        if self._stop_listening is not None:
            self._stop_listening()
        self._scaler.close()

    def unwatch(self) -> None:
        """Let forward passes go by uncounted: those of an evaluation, which are of no step."""
        for handle in self._root_handles:
            handle.remove()
        self._root_handles.clear()

    def _safe(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a function that ends the recording where this one would end the training."""

        def call(*args: Any) -> None:
            try:
                function(*args)
            except Exception as error:
                self._fault(error)

        return call

    def forward(self, number: int) -> None:
        """Take note that a root begins a forward pass."""
        if self._by_forward and self.forwards[number]:
            self._tick()
        self.forwards[number] += 1
        self._begin_forward()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._skipping = False
        if self._counts(optimizer) and not is_inner(optimizer):
            # A fused optimizer is called also where it changes nothing.
            found_inf = getattr(optimizer, "found_inf", None)
            if self._root_handles and found_inf is not None and found_inf.item():
                self._log("skipped", 1.0)
            self._tick()

    def _about_to_step(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._skipping = True
        # Only in sampled steps, in which hooks are on the roots: to read the scale is to wait for the device.
        if self._root_handles and self._is_ours(optimizer):
            self._log("grad_scale", scaler.get_scale())

    def _perhaps_skipped(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        skipped, self._skipping = self._skipping, False
        if skipped and self._counts(optimizer):
            self._log("skipped", 1.0)
            self._tick()

    def _counts(self, optimizer: Optimizer) -> bool:
        """Whether a step of an optimizer ends ours."""
        if self.manual:
            return False
        # Some trainings make a new optimizer for each phase; the clock goes on with it when the first is gone.
        if self._optimizer is None or (self._optimizer() is None and not self._given):
            if optimizer in self.strangers:
                return False
            if not self._is_ours(optimizer):
                self.strangers.add(optimizer)
                return False
            self._optimizer = weakref.ref(optimizer)
        return self._optimizer() is optimizer

    def _is_ours(self, optimizer: Optimizer) -> bool:
        ours = parameter_ids(model for reference in self._models if (model := reference()) is not None)
        return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])


class _RootHook(Uncopied):
    """A hook on a root, which calls a function."""

    def __init__(self, model: nn.Module, function: Callable[[], None]) -> None:
        self._model = weakref.ref(model)
        self._function = function

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if self._model() is module:
            self._function()


def check(clock: object) -> None:
    """Raise AttachError if it is no clock."""
    choices = ", ".join(map(repr, CLOCKS))
    if isinstance(clock, str) and clock not in CLOCKS:
        raise AttachError(f"There is no clock {clock!r}; there are {choices}, or an optimizer.")
    if not isinstance(clock, (str, Optimizer)):
        raise AttachError(
            f"clock is a {type(clock).__qualname__}; it takes {choices}, or a torch optimizer. "
            "For a wrapped optimizer pass the torch optimizer inside, or leave clock='optimizer'."
        )
