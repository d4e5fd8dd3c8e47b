"""What happens to parameters: their values and gradients as the optimizer meets them, and what it changes.

`param`, `param_grad` and `update` are taken around `optimizer.step`, so a gradient is seen as it is consumed: after
clipping, unscaling and reduction. With a closure, which is what runs the model then, that is after each evaluation. A
parameter that no optimizer touches in a step is taken at the end of the step. `param_grad_acc` is `.grad` as each
backward pass leaves it: a hook on the parameter marks it, and it is read when the pass is over, after those who
average gradients over ranks have had their turn.

The layer of such a record is the module that owns the parameter, whether it is a leaf or not; the path is the name of
the parameter in it.
"""

import fnmatch
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hookrec.calls import Call
from hookrec.hooks import Sink, recordable
from hookrec.layers import Layer
from hookrec.uncopied import Uncopied

KINDS = ("param", "param_grad", "param_grad_acc", "update")

_graph_task = torch._C._current_graph_task_id


class Owned:
    """A parameter and the module that owns it."""

    def __init__(self, layer: Layer, path: str, parameter: nn.Parameter) -> None:
        self.name = layer.name
        self.root = layer.root
        self.path = path
        self.module = weakref.ref(layer.module)
        self.parameter = weakref.ref(parameter)
        self.streams: dict[tuple[str, str, torch.dtype, torch.Size], int] = {}
        self.counts = dict.fromkeys(KINDS, 0)

    def call(self, kind: str, sink: Sink) -> Call:
        """Return the next number of a kind in the step."""
        number = self.counts[kind]
        self.counts[kind] = number + 1
        module = self.module()
        return Call(sink.step_number, number, sink.micro(self.root), 0 if module is None or module.training else 1)


class Parameters:
    """Records the parameters of some models.

    Made before the clock, whose hook on optimizers ends the step after ours has seen what the step changed.
    """

    def __init__(self, sink: Sink, kinds: Collection[str], globs: tuple[str, ...]) -> None:
        self._sink = sink
        self._kinds = frozenset(kinds) & set(KINDS)
        self._globs = globs
        self._owned: dict[int, Owned] = {}
        self._installed = False
        self._handles: dict[int, RemovableHandle] = {}
        self._lazy = False
        self._touched: dict[int, dict[int, tuple[Owned, Tensor | None]]] = {}
        self._before: dict[int, Tensor] = {}
        self._optimizers: list[Any] = []
        if self._kinds - {"param_grad_acc"}:
            self._optimizers = [
                register_optimizer_step_pre_hook(self._guarded(Parameters._before_step)),
                register_optimizer_step_post_hook(self._guarded(Parameters._after_step)),
            ]

    def _guarded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of this class as a hook that lasts no longer than this object, and never raises."""
        reference = weakref.ref(self)

        def call(*args: Any) -> Any:
            parameters = reference()
            if parameters is None or not parameters._installed:
                return None
            try:
                return method(parameters, *args)
            except Exception as error:
                parameters._sink.fault(error)
                return None

        return call

    def choose(self, layers: Iterable[Layer]) -> None:
        """Record the parameters that these modules own, each under the first of its names."""
        if not self._kinds:
            return
        known, self._owned = self._owned, {}
        for layer in layers:
            if not any(
                fnmatch.fnmatchcase(name, glob) for glob in self._globs for name in (layer.name, *layer.aliases)
            ):
                continue
            for name, parameter in layer.module.named_parameters(recurse=False):
                if id(parameter) not in self._owned:
                    before = known.get(id(parameter))
                    same = before is not None and before.parameter() is parameter and before.name == layer.name
                    self._owned[id(parameter)] = before if before and same else Owned(layer, name, parameter)
        for key in self._handles.keys() - self._owned.keys():
            self._handles.pop(key).remove()
        if self._installed:
            self.materialise(always=True)

    def install(self) -> None:
        """Begin a step that is recorded."""
        for owned in self._owned.values():
            owned.counts = dict.fromkeys(KINDS, 0)
        self._installed = True
        self.materialise(always=True)

    @property
    def waiting(self) -> bool:
        """Whether a parameter has no shape yet, so that no hook could be put on it."""
        return self._lazy

    def materialise(self, *, always: bool = False) -> None:
        """Put hooks on the parameters that have none, as far as they have shapes by now."""
        if "param_grad_acc" not in self._kinds or not (always or self._lazy):
            return
        self._lazy = False
        for key, owned in self._owned.items():
            parameter = owned.parameter()
            if key in self._handles or parameter is None or not parameter.requires_grad:
                continue
            if nn.parameter.is_lazy(parameter):
                self._lazy = True
            else:
                hook = _Accumulated(self, owned)
                self._handles[key] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take the hooks off the parameters, until `install`."""
        self._installed = False
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def close(self) -> None:
        """Take every hook off."""
        self.remove()
        for handle in self._optimizers:
            handle.remove()
        self._optimizers.clear()

    def end_step(self) -> None:
        """Record the parameters that no optimizer has touched in the step."""
        if self._installed and "param" in self._kinds:
            for owned in self._owned.values():
                parameter = owned.parameter()
                if not owned.counts["param"] and parameter is not None and not nn.parameter.is_lazy(parameter):
                    self._take(owned, "param", parameter)

    def _take(self, owned: Owned, kind: str, tensor: Tensor) -> None:
        values = recordable(tensor)
        if isinstance(values, str):
            self._sink.note(owned.name, f"{kind} {owned.path}: {values}")
        else:
            self._sink.take(owned, kind, owned.path, values, owned.call(kind, self._sink))

    # Around optimizer.step.

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None:
            self._consumed(optimizer)
            return None
        consumed = self._guarded(Parameters._consumed)

        def evaluated() -> Any:
            loss = closure()
            consumed(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def _consumed(self, optimizer: Optimizer) -> None:
        # A fused optimizer unscales by itself, and skips the step if a gradient is not finite.
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return
        for owned, parameter in self._of(optimizer):
            if "param" in self._kinds:
                self._take(owned, "param", parameter)
            gradient = parameter.grad
            if gradient is not None and "param_grad" in self._kinds:
                with torch.no_grad():
                    self._take(owned, "param_grad", gradient if scale is None else gradient / scale)
            if "update" in self._kinds and id(parameter) not in self._before:
                with torch.no_grad():
                    self._before[id(parameter)] = parameter.detach().clone()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for owned, parameter in self._of(optimizer):
            before = self._before.pop(id(parameter), None)
            if before is not None and parameter.grad is not None:
                with torch.no_grad():
                    self._take(owned, "update", parameter.detach() - before)

    def _of(self, optimizer: Optimizer) -> Iterable[tuple[Owned, Tensor]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owned = self._owned.get(id(parameter))
                if owned is not None and owned.parameter() is parameter and isinstance(parameter, Tensor):
                    yield owned, parameter

    # After a backward pass.

    def accumulated(self, owned: Owned, parameter: Tensor) -> None:
        """Take note that a backward pass has added to a gradient."""
        task = _graph_task()
        touched = self._touched.setdefault(task, {})
        if not touched:
            queue = torch.autograd.Variable._execution_engine.queue_callback
            # Once more, to come after those who have queued a callback in this pass, as DistributedDataParallel does.
            queue(lambda: queue(lambda: self._after_backward(task)))
        # An optimizer in the backward pass may have taken the gradient away by then.
        touched[id(parameter)] = (owned, parameter.grad)

    def _after_backward(self, task: int) -> None:
        try:
            for owned, seen in self._touched.pop(task, {}).values():
                parameter = owned.parameter()
                gradient = parameter.grad if parameter is not None and parameter.grad is not None else seen
                if gradient is not None and self._installed:
                    self._take(owned, "param_grad_acc", gradient)
        except Exception as error:
            self._sink.fault(error)


class _Accumulated(Uncopied):
    """The hook on a parameter that runs when its gradient has been accumulated."""

    def __init__(self, parameters: Parameters, owned: Owned) -> None:
        self._parameters = weakref.ref(parameters)
        self._owned = owned

    def __call__(self, parameter: Tensor) -> None:
        parameters = self._parameters()
        if parameters is not None and self._owned.parameter() is parameter:
            try:
                parameters.accumulated(self._owned, parameter)
            except Exception as error:
                parameters._sink.fault(error)
