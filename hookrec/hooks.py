"""How to learn what a layer did without changing what it does: the hooks on modules.

A pre-hook notes the entry of a call, a forward hook reports what was returned; how gradients become known is the affair
of `gradients`. Only the hook that runs last sees what the caller gets, so ours are moved behind those that come later.

Activation checkpointing runs layers again inside the backward pass. That is no call. Where the first pass ran without
grad (the reentrant kind) the gradients come only from the second, and belong to the call of the first.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookrec.calls import Call, Counted, Fingerprint, Sink, nothing
from hookrec.compiled import EagerSteps
from hookrec.gradients import Gradients
from hookrec.guard import Guard
from hookrec.inputs import Frame, Frames, Input
from hookrec.layers import Layer
from hookrec.ops import Ops
from hookrec.passes import graph_task
from hookrec.uncopied import Uncopied
from hookrec.values import flatten, flatten_arguments, values_of

_thread = threading.get_ident
_OF_CALLS = frozenset(("output", "grad_output", "input", "grad_input"))
_transforms = torch._C._functorch.peek_interpreter_stack
_sequence_number = torch._C._autograd._get_sequence_nr


class HookedLayer(Counted, Uncopied):
    """The forward hook of one module, and what is known of its calls."""

    __slots__ = ("hooks", "module")

    def __init__(self, layer: Layer, hooks: "Hooks", earlier: Counted | None = None) -> None:
        super().__init__(layer.name, layer.root)
        if earlier is not None:
            self.count_on(earlier)
        self.left_out = hooks.left_out(layer.name)
        self.hooks: Hooks | None = hooks
        self.module = weakref.ref(layer.module)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Report what the module returned, if it is the one that was hooked and no copy."""
        hooks = self.hooks
        if hooks is None or self.module() is not module:
            return
        hooks.guard.call(hooks.forward, self, module, args, output)


class Entry(Uncopied):
    """The pre-hook of one module: notes which thread entered it, and the autograd sequence number then.

    Where inputs are wanted, it is put on with keyword arguments and passes them on.
    """

    __slots__ = ("_enter", "_layer")

    def __init__(self, layer: HookedLayer, enter: Callable[..., None] | None = None) -> None:
        self._layer = layer
        self._enter = enter

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Note the call."""
        layer = self._layer
        layer.entered = (_thread(), _sequence_number())
        if self._enter is not None and layer.module() is module:
            self._enter(layer, args, kwargs or {})


class Hooks:
    """The hooks on the chosen layers of some models.

    `install` and `remove` may be called any number of times; after `remove` the modules are as they were before.
    """

    def __init__(
        self, layers: Iterable[Layer], sink: Sink, kinds: Collection[str], guard: Guard, ops: tuple[str, ...] = ()
    ) -> None:
        self.sink = sink
        self.guard = guard
        self.installed = False
        self._layers: list[HookedLayer] = []
        self._handles: dict[HookedLayer, list[tuple[RemovableHandle, Any]]] = {}
        self._gradients = Gradients(sink, guard)
        self._eager = EagerSteps()
        self.left_out: Callable[[str], frozenset[str]] = nothing
        self.ops = Ops(ops, self._operation_returned, guard) if ops else None
        self.choose(layers, kinds)

    def choose(self, layers: Iterable[Layer], kinds: Collection[str] | None = None) -> None:
        """Hook these layers from now on; a layer that was hooked under the same name goes on.

        Args:
            layers: those to hook.
            kinds: what to record of them, as before if None; other kinds may come only while no hook is on.
        """
        if kinds is not None:
            self._kinds = frozenset(kinds) & _OF_CALLS
            self._outputs = "output" in kinds
            self._output_gradients = self._gradients.of_outputs = "grad_output" in kinds
            self._inputs = "input" in kinds
            self._input_gradients = "grad_input" in kinds
            self._frames = Frames() if self._inputs or self._input_gradients else None
        known = {(id(hook.module()), hook.name): hook for hook in self._layers}
        earlier = {hook.name: hook for hook in self._layers}
        self._layers = [
            known.get((id(layer.module), layer.name)) or HookedLayer(layer, self, earlier.get(layer.name))
            for layer in layers
        ]
        for hook in self._handles.keys() - set(self._layers):
            self._take_off(hook)
        if self.installed:
            self._put_on()

    def leave_out(self, left_out: Callable[[str], frozenset[str]]) -> None:
        """Record no more of each layer in this step than a function, which is given its name, leaves in."""
        self.left_out = left_out
        for hook in self._layers:
            hook.left_out = left_out(hook.name)
            if self._kinds <= hook.left_out and hook in self._handles:
                self._take_off(hook)
        if self.ops is not None:
            self.ops.leave_out(left_out)
        if self.installed:
            self._put_on()

    @property
    def any_on(self) -> bool:
        """Whether there is a hook on a module."""
        return bool(self._handles)

    def forget_streams(self) -> None:
        """Ask for the number of each stream again."""
        for hook in self._layers:
            hook.streams.clear()
        if self.ops is not None:
            self.ops.forget_streams()

    def install(self) -> None:
        """Put the hooks on the modules."""
        if not self.installed:
            self.installed = True
            self._put_on()
            self._eager.enter()
            if self.ops is not None:
                self.ops.install()

    def _put_on(self) -> None:
        for hook in self._layers:
            module = hook.module()
            # A hook that is on already stays, since the module may be in the middle of calling its hooks.
            if module is not None and hook not in self._handles and not self._kinds <= hook.left_out:
                self._handles[hook] = [(handle, handle.hooks_dict_ref()) for handle in self._register(module, hook)]

    def _register(self, module: nn.Module, hook: HookedLayer) -> Iterator[RemovableHandle]:
        # As functions, since a ScriptModule refuses these methods, and calls the hooks all the same.
        if self._frames is not None:
            yield nn.Module.register_forward_pre_hook(module, Entry(hook, self._enter), with_kwargs=True)
        elif self._output_gradients:
            yield nn.Module.register_forward_pre_hook(module, Entry(hook))
        if self._outputs or self._output_gradients or self._frames is not None:
            yield nn.Module.register_forward_hook(module, hook)

    def _take_off(self, hook: HookedLayer) -> None:
        for handle, _ in self._handles.pop(hook, ()):
            handle.remove()

    def be_last(self) -> None:
        """Move our hooks behind those that were put on after them: only the last sees what the layer and caller get."""
        for handles in self._handles.values():
            for handle, hooks in handles:
                if next(reversed(hooks), None) != handle.id and handle.id in hooks:
                    hooks.move_to_end(handle.id)

    def remove(self) -> None:
        """Take the hooks off the modules; gradients of recorded outputs are still reported."""
        if not self.installed:
            return
        self.installed = False
        self._eager.leave()
        if self.ops is not None:
            self.ops.remove()
        for hook in list(self._handles):
            self._take_off(hook)

    def end_step(self) -> None:
        """Take the hooks off tensors that outlive the step."""
        self._gradients.end_step()

    def settle_all(self) -> None:
        """Look for in-place changes of views for the last time, at the end of a forward pass."""
        self._gradients.settle_all()

    def _enter(self, layer: HookedLayer, args: Any, kwargs: Any) -> None:
        """Note that a layer was entered, and with what; called by its pre-hook."""
        if layer.hooks is self:
            self.guard.call(self._take_inputs, layer, args, kwargs)

    def _take_inputs(self, layer: HookedLayer, args: Any, kwargs: Any) -> None:
        assert self._frames is not None
        frame = self._frames.enter(layer, self.sink.step_number)
        if _transforms() is not None:
            return
        arguments = list(flatten_arguments(args, kwargs))
        self._gradients.settle(tensor for _, tensor in arguments)
        again = graph_task() != -1
        note = _noting(self.sink, layer, "input")
        for path, tensor in arguments:
            if self._inputs and not again and "input" not in layer.left_out:
                with torch.no_grad():
                    frame.values += [(at, v.detach().clone()) for at, v in values_of(tensor, path, note)]
            wanted = self._input_gradients and "grad_input" not in layer.left_out
            if wanted and tensor.requires_grad and torch.is_grad_enabled():
                frame.inputs.append(Input(path, tensor))

    def close(self) -> None:
        """Remove every hook."""
        self.remove()
        self.end_step()
        for hook in self._layers:
            hook.hooks = None

    def forward(self, layer: HookedLayer, module: nn.Module, args: Any, output: Any) -> None:
        """Report what a module returned; called by its hook."""
        frame = self._frames.leave(layer) if self._frames is not None else None
        if _transforms() is not None:
            self.sink.note(layer.name, "called under torch.func (vmap, grad, jvp): there are no values to record")
            return
        tensors: list[tuple[str, Tensor]]
        if type(output) is Tensor:
            tensors = [("", output)]
        else:
            tensors = list(flatten(output))
            if not tensors and output is not None:
                self.sink.note(layer.name, f"returned a {type(output).__qualname__}, in which no tensor was found")
        if self._gradients.unsettled:
            self._gradients.settle(tensor for _, tensor in (*flatten(args), *tensors))
        self.returned(layer, tensors, frame, training=module.training)

    def _operation_returned(self, operation: Counted, tensors: list[tuple[str, Tensor]], training: bool) -> None:
        if self._gradients.unsettled:
            self._gradients.settle(tensor for _, tensor in tensors)
        self.returned(operation, tensors, None, training=training)

    def returned(
        self, source: Counted, tensors: list[tuple[str, Tensor]], frame: Frame | None, *, training: bool
    ) -> None:
        """Report the outputs of a layer or of what is counted like one, and watch for their gradients."""
        step = self.sink.step_number
        gradients = self._output_gradients or self._input_gradients
        if graph_task() != -1:
            # Where the first pass ran without grad, the gradients come to the outputs of the second.
            if gradients and any(tensor.requires_grad for _, tensor in tensors):
                first = source.recomputed(step, lambda: self._fingerprint(tensors))
                if first is not None:
                    self._gradients.watch(source, tensors, first, frame)
            return
        call = Call(step, source.next_call(step), self.sink.micro(source.root), 0 if training else 1)
        if frame is not None:
            for path, tensor in frame.values:
                self.sink.take(source, "input", path, tensor, call)
        fingerprint: Fingerprint = None
        if self._outputs and "output" not in source.left_out:
            note = _noting(self.sink, source, "output")
            for path, tensor in tensors:
                for at, values in values_of(tensor, path, note):
                    statistics = self.sink.take(source, "output", at, values, call)
                    fingerprint = fingerprint or statistics
        if gradients:
            if not torch.is_grad_enabled() and tensors:
                source.await_recomputation(call, fingerprint or self._fingerprint(tensors))
            else:
                self._gradients.watch(source, tensors, call, frame)

    def _fingerprint(self, tensors: list[tuple[str, Tensor]]) -> Fingerprint:
        for _, tensor in tensors:
            for _, values in values_of(tensor, "", _silent):
                return self.sink.fingerprint(values)
        return b""


def _noting(sink: Sink, source: Counted, kind: str) -> Callable[[str], None]:
    return lambda note: sink.note(source.name, f"{kind}: {note}")


def _silent(note: str) -> None:
    """Take a note that has been taken before."""
