"""What happens to parameters: their values and gradients as the optimizer meets them, and what it changes.

`param`, `param_grad` and `update` are taken around `optimizer.step`, so a gradient is seen as it is consumed: after
clipping, unscaling and reduction. With a closure, which is what runs the model then, that is after each evaluation. A
parameter that no optimizer touches in a step is taken at the end of the step. `param_grad_acc` is `.grad` as each
backward pass leaves it: a hook on the parameter marks it, and it is read when the pass is over, after those who
average gradients over ranks have had their turn.

The layer of such a record is the module that owns the parameter, whether it is a leaf or not; the path is the name of
the parameter in it.
"""

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hookrec.calls import NOTHING, Call, Sink, nothing
from hookrec.guard import Guard
from hookrec.layers import Layer, own_parameters
from hookrec.optimizer_hooks import after_step, before_step, is_inner, take_off
from hookrec.passes import at_end_of_pass, graph_task
from hookrec.uncopied import Uncopied
from hookrec.values import values_of

KINDS = ("param", "param_grad", "param_grad_acc", "update")


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
        self.handle: RemovableHandle | None = None
        self.left_out = NOTHING

    def call(self, kind: str, sink: Sink) -> Call:
        """Return the next number of a kind in the step."""
        number = self.counts[kind]
        self.counts[kind] = number + 1
        module = self.module()
        return Call(sink.step_number, number, sink.micro(self.root), 0 if module is None or module.training else 1)

    def unhook(self) -> None:
        """Take the hook off the parameter."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


class Parameters:
    """Records the parameters of some models.

    Made before the clock, whose hook on optimizers ends the step after ours has seen what the step changed.
    """

    def __init__(self, sink: Sink, kinds: Collection[str], globs: tuple[str, ...], guard: Guard) -> None:
        self._sink = sink
        self._kinds = frozenset(kinds) & set(KINDS)
        self._globs = globs
        self._guard = guard
        self._owned: dict[int, Owned] = {}
        self._installed = False
        self.left_out: Callable[[str], frozenset[str]] = nothing  # by the name of the layer, in this step
        self._touched: dict[int, dict[int, Tensor | None]] = {}
        self._before: dict[int, Tensor] = {}
        self._stop_listening: list[Callable[[], None]] = []
        self._own_hooks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
        if self._kinds - {"param_grad_acc"}:
            self._stop_listening = [
                before_step(self._hook(Parameters._be_last)),
                after_step(self._hook(Parameters._after_step)),
            ]

    def _hook(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of this class as a hook that lasts no longer than this object."""
        reference = weakref.ref(self)

        def call(*args: Any) -> Any:
            parameters = reference()
            if parameters is None or not parameters._installed:
                return None
            return parameters._guard.call(method, parameters, *args)

        return call

    def choose(self, layers: Iterable[Layer]) -> None:
        """Record the parameters that these modules own, each under the first of its names."""
        if not self._kinds:
            return
        known, self._owned = self._owned, {}
        earlier = {(owned.name, owned.path): owned for owned in known.values()}
        for layer in layers:
            if not layer.matches(self._globs):
                continue
            for name, parameter in own_parameters(layer.module).items():
                if id(parameter) not in self._owned:
                    before = known.get(id(parameter))
                    if before is None or before.parameter() is not parameter or before.name != layer.name:
                        before = Owned(layer, name, parameter)
                        before.left_out = self.left_out(layer.name)
                        if (replaced := earlier.get((layer.name, name))) is not None:
                            before.counts = replaced.counts  # of the step under way
                    self._owned[id(parameter)] = before
        for owned in known.values():
            if owned not in self._owned.values():
                owned.unhook()
        if self._installed:
            self.materialise()

    def install(self) -> None:
        """Begin a step that is recorded."""
        self._forget()
        for owned in self._owned.values():
            owned.counts = dict.fromkeys(KINDS, 0)
            owned.left_out = self.left_out(owned.name)
        self._installed = True
        self.materialise()

    def materialise(self) -> None:
        """Put hooks on the parameters that have none, as far as they have shapes by now: a lazy one gets its in use."""
        if "param_grad_acc" not in self._kinds or not self._installed:
            return
        for owned in self._owned.values():
            parameter = owned.parameter()
            if owned.handle is not None or parameter is None or nn.parameter.is_lazy(parameter):
                continue
            if parameter.requires_grad:
                hook = _Accumulated(self, owned)
                owned.handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take the hooks off the parameters, until `install`."""
        self._installed = False
        self._forget()
        for owned in self._owned.values():
            owned.unhook()

    def _forget(self) -> None:
        """Forget what a step or a backward pass that raised has left."""
        self._before.clear()
        self._touched.clear()

    def close(self) -> None:
        """Take every hook off."""
        self.remove()
        for stop in self._stop_listening:
            stop()
        take_off(self._own_hooks.values())
        self._own_hooks.clear()

    def end_step(self) -> None:
        """Record the parameters that no optimizer has touched in the step."""
        if self._installed and "param" in self._kinds:
            for owned in self._owned.values():
                parameter = owned.parameter()
                if not owned.counts["param"] and parameter is not None and not nn.parameter.is_lazy(parameter):
                    self._take(owned, "param", parameter)

    @property
    def any_due(self) -> bool:
        """Whether there is a parameter with records in this step."""
        return any(not self._kinds <= owned.left_out for owned in self._owned.values())

    def _take(self, owned: Owned, kind: str, tensor: Tensor) -> None:
        if kind in owned.left_out:
            return

        def note(note: str) -> None:
            self._sink.note(owned.name, f"{kind} {owned.path}: {note}")

        call = owned.call(kind, self._sink)
        for path, values in values_of(tensor, owned.path, note):
            self._sink.take(owned, kind, path, values, call)

    # Around optimizer.step.

    def _be_last(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """See to it that we look after the optimizer's own pre-hooks, which may clip gradients.

        Those run after the global ones, to which this belongs, so another hook of ours is put behind them.
        """
        handle = self._own_hooks.get(optimizer)
        if handle is None:
            handle = optimizer.register_step_pre_hook(self._hook(Parameters._before_step))
            self._own_hooks[optimizer] = handle
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks.move_to_end(handle.id)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if is_inner(optimizer):
            return None
        for _, parameter in self._of(optimizer):
            self._before.pop(id(parameter), None)  # of a step that raised
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None:
            self._consumed(optimizer)
            return None
        consumed = self._hook(Parameters._consumed)

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
            if gradient is None:
                continue
            if "param_grad" in self._kinds:
                with torch.no_grad():
                    self._take(owned, "param_grad", gradient if scale is None else gradient / scale)
            wanted = "update" in self._kinds and "update" not in owned.left_out
            if wanted and id(parameter) not in self._before:
                with torch.no_grad():
                    self._before[id(parameter)] = parameter.detach().clone()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_inner(optimizer):
            return
        for owned, parameter in self._of(optimizer):
            before = self._before.pop(id(parameter), None)
            if before is not None:
                with torch.no_grad():
                    self._take(owned, "update", parameter.detach() - before)

    def _of(self, optimizer: Optimizer) -> Iterable[tuple[Owned, Tensor]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owned = self._owned.get(id(parameter))
                if owned is not None and owned.parameter() is parameter and isinstance(parameter, Tensor):
                    yield owned, parameter

    # After a backward pass.

    def accumulated(self, parameter: Tensor) -> None:
        """Take note that a backward pass has added to a gradient."""
        task = graph_task()
        touched = self._touched.get(task)
        if touched is None:
            touched = self._touched[task] = {}
            finish = self._guard.wrap(lambda: self._after_backward(task))
            # Once more, to come after those who have queued a callback in this pass, as DistributedDataParallel does.
            at_end_of_pass(lambda: at_end_of_pass(finish))
        # An optimizer in the backward pass, which is another such hook, may have taken the gradient away by then.
        others = len(parameter._post_accumulate_grad_hooks or ()) > 1
        touched[id(parameter)] = parameter.grad if others else None

    def _after_backward(self, task: int) -> None:
        for key, seen in self._touched.pop(task, {}).items():
            owned = self._owned.get(key)
            parameter = owned.parameter() if owned is not None else None
            if owned is not None and parameter is not None and self._installed:
                gradient = parameter.grad if parameter.grad is not None else seen
                if gradient is not None:
                    self._take(owned, "param_grad_acc", gradient)


class _Accumulated(Uncopied):
    """The hook on a parameter that runs when its gradient has been accumulated."""

    def __init__(self, parameters: Parameters, owned: Owned) -> None:
        self._parameters = weakref.ref(parameters)
        self._owned = weakref.ref(owned)

    def __call__(self, parameter: Tensor) -> None:
        parameters, owned = self._parameters(), self._owned()
        if parameters is not None and owned is not None and owned.parameter() is parameter:
            parameters._guard.call(parameters.accumulated, parameter)
