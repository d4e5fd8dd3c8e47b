"""How to learn what a layer did without changing what it does: the pitfalls of PyTorch's hooks.

Outputs come from a forward hook. Gradients come from `Tensor.register_hook` on the output. The obvious
`register_full_backward_hook` wraps outputs in an autograd node, which forbids in-place successors such as
`nn.ReLU(inplace=True)`, takes flat tuples only and costs 50 µs a call.

A hook on a tensor has pitfalls of its own:

* A Linear on 3-D input returns a view of its matrix product (MaxPool1d, Flatten and others do so too). An in-place
  successor re-bases the history of a view, and a hook on it then never runs. The hook on its base does, so the gradient
  is cut out of the base's. If the base is not the layer's own, others use it too: then it is cut out of what the node
  of the in-place change hands on, which is looked for at the end of the forward pass.
* A view whose base was changed behind its back has a stale `grad_fn`, and `register_hook` on it can crash
  the process (pytorch 196459). Reading `grad_fn` first refreshes it.
* A hook on a tensor without history (a parameter, an input) stays for ever. Those are removed at the end of the step.
* Activation checkpointing runs layers again inside the backward pass. That is no call. Where the first pass ran
  without grad (the reentrant kind) the gradients come only from the second, and belong to the call of the first.

Closures hold names and numbers, never tensors: a hook that holds its tensor is a cycle that the garbage collector
cannot see.
"""

import dataclasses
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from hookrec.calls import DTYPE_NAMES, Call
from hookrec.compiled import EagerSteps
from hookrec.guard import Guard
from hookrec.inputs import Frame, Frames, Input, share, sources
from hookrec.layers import Layer
from hookrec.passes import graph_task
from hookrec.uncopied import Uncopied
from hookrec.views import Cut, SharedView, base_of, can_cut, cutter, whole

_thread = threading.get_ident
_transforms = torch._C._functorch.peek_interpreter_stack
_sequence_number = torch._C._autograd._get_sequence_nr

_MAX_DEPTH = 16


class Named(Protocol):
    """Whatever has records: its name, and the numbers of its streams by kind, path, dtype and shape."""

    name: str
    streams: dict[tuple[str, str, torch.dtype, torch.Size], int]


class Sink(Protocol):
    """Takes what the hooks report. Called from any thread that runs forward or backward passes."""

    step_number: int
    """The step that is under way."""

    def micro(self, root: int) -> int:
        """Return which forward pass of a root in the step is under way, from 0."""
        ...

    def take(self, layer: "Named", kind: str, path: str, tensor: Tensor, call: Call) -> bytes:
        """Record a tensor; return its statistics."""
        ...

    def fingerprint(self, tensor: Tensor) -> bytes:
        """Return the statistics of a tensor that is not recorded."""
        ...

    def note(self, layer: str, note: str) -> None:
        """Take the reason why something of a layer is not recorded."""
        ...

    def fault(self, error: Exception) -> None:
        """Take an error of ours. The training must not see it."""
        ...


class HookedLayer(Uncopied):
    """The forward hook of one module, and what is known of its calls."""

    __slots__ = ("_calls", "_step", "_without_grad", "entered", "hooks", "module", "name", "root", "streams")

    def __init__(self, layer: Layer, hooks: "Hooks") -> None:
        self.name = layer.name
        self.root = layer.root
        self.streams: dict[tuple[str, str, torch.dtype, torch.Size], int] = {}
        self.hooks: Hooks | None = hooks
        self.module = weakref.ref(layer.module)
        self._step = -1
        self._calls = 0
        self._without_grad: list[tuple[Call, bytes]] = []
        self.entered = (0, 0)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Report what the module returned, if it is the one that was hooked and no copy."""
        hooks = self.hooks
        if hooks is None or self.module() is not module:
            return
        hooks.guard.call(hooks.forward, self, module, args, output)

    def next_call(self, step: int) -> int:
        """Return the number of the call that has just been completed."""
        if step != self._step:
            self._step, self._calls = step, 0
            self._without_grad.clear()
        call = self._calls
        self._calls = call + 1
        return call

    def await_recomputation(self, call: Call, fingerprint: bytes) -> None:
        """Remember a call that ran without grad: a recomputation may bring its gradients."""
        self._without_grad.append((call, fingerprint))

    def recomputed(self, step: int, fingerprint: Callable[[], bytes]) -> Call | None:
        """Return the call, the last first, that gave the output which was computed again."""
        if step == self._step and self._without_grad:
            found = fingerprint()
            for index in reversed(range(len(self._without_grad))):
                call, known = self._without_grad[index]
                if known == found:
                    del self._without_grad[index]
                    return call
        return None


class Entry(Uncopied):
    """The pre-hook of one module: notes which thread entered it, and the autograd sequence number then.

    A node with a higher number was made in this call. The numbers of two threads have nothing to do with each other.
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


class GradientHook:
    """Takes a gradient of one output or input of a call; holds the key of what it belongs to."""

    __slots__ = ("_call", "_count", "_cut", "_hooks", "_kind", "_layer", "_path")

    def __init__(
        self,
        hooks: "Hooks",
        layer: HookedLayer,
        path: str,
        call: Call,
        cut: Cut | None = None,
        kind: str = "grad_output",
    ) -> None:
        self._hooks = hooks
        self._layer = layer
        self._path = path
        self._call = call
        self._cut = cut
        self._kind = kind
        self._count = 0

    def __call__(self, gradient: Tensor | None) -> None:
        """Report the gradient, as a hook on a tensor."""
        if gradient is not None:
            self._hooks.guard.call(self.report, gradient)

    def report(self, gradient: Tensor) -> None:
        """Report the gradient."""
        if self._cut is not None:
            gradient = self._cut(gradient)
        # A second backward pass over the same output gives a second gradient, which is a record of its own.
        path = self._path if not self._count else f"{self._path}@{self._count}"
        self._count += 1
        values = recordable(gradient)
        sink = self._hooks.sink
        if isinstance(values, str):
            sink.note(self._layer.name, f"{self._kind}: {values}")
        else:
            sink.take(self._layer, self._kind, path, values, self._call)


class Hooks:
    """The hooks on the chosen layers of some models.

    `install` and `remove` may be called any number of times; after `remove` the modules are as they were before.
    """

    def __init__(self, layers: Iterable[Layer], sink: Sink, kinds: Collection[str], guard: Guard) -> None:
        self.sink = sink
        self.guard = guard
        self.installed = False
        self._layers: list[HookedLayer] = []
        self._handles: dict[HookedLayer, list[tuple[RemovableHandle, Any]]] = {}
        self._tensor_handles: list[RemovableHandle] = []
        self._fresh_views: list[SharedView] = []
        self._views: dict[int, list[SharedView]] = {}  # by the id of their base
        self._eager = EagerSteps()
        self.choose(layers, kinds)

    def choose(self, layers: Iterable[Layer], kinds: Collection[str] | None = None) -> None:
        """Hook these layers from now on; a layer that was hooked under the same name goes on.

        Args:
            layers: those to hook.
            kinds: what to record of them, as before if None; other kinds may come only while no hook is on.
        """
        if kinds is not None:
            self._outputs = "output" in kinds
            self._gradients = "grad_output" in kinds
            self._inputs = "input" in kinds
            self._input_gradients = "grad_input" in kinds
            self._frames = Frames() if self._inputs or self._input_gradients else None
        known = {(id(hook.module()), hook.name): hook for hook in self._layers}
        self._layers = [known.get((id(layer.module), layer.name)) or HookedLayer(layer, self) for layer in layers]
        for hook in self._handles.keys() - set(self._layers):
            self._take_off(hook)
        if self.installed:
            self._put_on()

    def forget_streams(self) -> None:
        """Ask for the number of each stream again."""
        for hook in self._layers:
            hook.streams.clear()

    def install(self) -> None:
        """Put the hooks on the modules."""
        if not self.installed:
            self.installed = True
            self._put_on()
            self._eager.enter()

    def _put_on(self) -> None:
        for hook in self._layers:
            module = hook.module()
            # A hook that is on already stays, since the module may be in the middle of calling its hooks.
            if module is not None and hook not in self._handles:
                self._handles[hook] = [(handle, handle.hooks_dict_ref()) for handle in self._register(module, hook)]

    def _register(self, module: nn.Module, hook: HookedLayer) -> Iterator[RemovableHandle]:
        if self._frames is not None:
            yield module.register_forward_pre_hook(Entry(hook, self._enter), with_kwargs=True)
        elif self._gradients:
            yield module.register_forward_pre_hook(Entry(hook))
        if self._outputs or self._gradients or self._frames is not None:
            yield module.register_forward_hook(hook)

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
        for hook in list(self._handles):
            self._take_off(hook)

    def end_step(self) -> None:
        """Take the hooks off tensors that outlive the step."""
        for handle in self._tensor_handles:
            handle.remove()
        self._tensor_handles.clear()
        self.settle_all()

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
        self.settle(tensor for _, tensor in arguments)
        again = graph_task() != -1
        for path, tensor in arguments:
            values = recordable(tensor)
            if isinstance(values, str):
                if self._inputs:
                    self.sink.note(layer.name, f"input: {values}")
                continue
            if self._inputs and not again:
                with torch.no_grad():
                    frame.values.append((path, values.detach().clone()))
            if self._input_gradients and tensor.requires_grad and torch.is_grad_enabled():
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
        if self._fresh_views or self._views:
            self.settle(tensor for _, tensor in (*flatten(args), *tensors))
        step = self.sink.step_number
        if graph_task() != -1:
            self._recomputation(layer, tensors, step, frame)
            return
        call = Call(step, layer.next_call(step), self.sink.micro(layer.root), 0 if module.training else 1)
        if frame is not None:
            for path, tensor in frame.values:
                self.sink.take(layer, "input", path, tensor, call)
        fingerprint = None
        for path, tensor in tensors:
            values = recordable(tensor)
            if isinstance(values, str):
                self.sink.note(layer.name, f"output: {values}")
            elif self._outputs:
                statistics = self.sink.take(layer, "output", path, values, call)
                fingerprint = fingerprint or statistics
        if self._gradients or self._input_gradients:
            if not torch.is_grad_enabled() and tensors:
                layer.await_recomputation(call, fingerprint or self._fingerprint(tensors))
            else:
                self._watch(layer, tensors, call, frame)

    def _recomputation(
        self, layer: HookedLayer, tensors: list[tuple[str, Tensor]], step: int, frame: Frame | None
    ) -> None:
        """Where the first pass ran without grad, the gradients come to the outputs of the second."""
        wanted = self._gradients or self._input_gradients
        if wanted and any(tensor.requires_grad for _, tensor in tensors):
            call = layer.recomputed(step, lambda: self._fingerprint(tensors))
            if call is not None:
                self._watch(layer, tensors, call, frame)

    def _fingerprint(self, tensors: list[tuple[str, Tensor]]) -> bytes:
        for _, tensor in tensors:
            values = recordable(tensor)
            if not isinstance(values, str):
                return self.sink.fingerprint(values)
        return b""

    def _watch(self, layer: HookedLayer, tensors: list[tuple[str, Tensor]], call: Call, frame: Frame | None) -> None:
        """Put hooks on outputs and on what leads to the inputs, so that their gradients are reported."""
        inputs = frame.inputs if frame is not None else []
        outputs = [(path, tensor) for path, tensor in tensors if tensor.requires_grad]
        through: dict[str, SharedView] = {}
        for path, tensor in outputs if self._gradients else ():
            # Reading grad_fn refreshes the history of a stale view; without that, register_hook may crash the process.
            if tensor.grad_fn is None:
                self._tensor_handles.append(_hook(tensor, GradientHook(self, layer, path, call)))
            elif not tensor._is_view() or not can_cut(tensor):
                _hook(tensor, GradientHook(self, layer, path, call))
            elif _made_in_call(base_of(tensor), layer) and sum(t._base is tensor._base for _, t in tensors) == 1:
                base = base_of(tensor)
                _hook(base, GradientHook(self, layer, path, call, cutter(tensor, base)))
            else:
                hooks = [(GradientHook(self, layer, path, call).report, cutter(tensor, base_of(tensor)))]
                item = frame.input_of(base_of(tensor)) if frame is not None and len(outputs) == 1 else None
                if item is not None:  # the layer made a view of its input
                    of_input = GradientHook(self, layer, item.path, call, kind="grad_input")
                    hooks.append((of_input.report, item.cut or whole))
                view = self._watch_shared_view(tensor, hooks)
                if item is not None:
                    through[item.path] = view
        if frame is not None and inputs and outputs:
            self._watch_inputs(layer, frame, [tensor for _, tensor in outputs], call, through)

    def _watch_inputs(
        self, layer: HookedLayer, frame: Frame, outputs: list[Tensor], call: Call, through: dict[str, SharedView]
    ) -> None:
        def report(path: str) -> Callable[[Tensor], None]:
            if path in through:
                return through[path].take_from_input
            return GradientHook(self, layer, path, call, kind="grad_input").report

        passed = set()
        for output in outputs:
            _ = output.grad_fn
            for item in frame.inputs:
                if item.is_handed_through(output):
                    passed.add(item.path)
                    handle = _hook(output, self.guard.wrap(report(item.path)))
                    if output.grad_fn is None:
                        self._tensor_handles.append(handle)
        frame.inputs = [item for item in frame.inputs if item.path not in passed]
        for path, nodes in sources(frame, outputs).items():
            share(nodes, report(path), self.guard)

    def _watch_shared_view(self, tensor: Tensor, reports: Sequence[tuple[Callable[[Tensor], None], Cut]]) -> SharedView:
        """Put hooks on a view whose base others use as well, and on the base."""
        base = base_of(tensor)
        view = SharedView(base, reports, self.guard)
        _hook(tensor, self.guard.wrap(view.take_from_view))
        _hook(base, self.guard.wrap(view.take_from_base))
        self._fresh_views.append(view)
        return view

    def settle(self, tensors: Iterable[Tensor]) -> None:
        """Look for in-place changes of views, among those that are new and those of which a layer has met the base."""
        while self._fresh_views:
            view = self._fresh_views.pop()
            if not view.settle():
                self._views.setdefault(view.base_id, []).append(view)
        if self._views:
            for tensor in tensors:
                key = id(base_of(tensor) if tensor._is_view() else tensor)
                waiting = [view for view in self._views.pop(key, ()) if not view.settle()]
                if waiting:
                    self._views[key] = waiting

    def settle_all(self) -> None:
        """Look for in-place changes for the last time, at the end of a forward pass or of the step."""
        self.settle(())
        while self._views:
            for view in self._views.popitem()[1]:
                if not view.settle():
                    view.give_up()


def flatten_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a call's arguments: by position, or by keyword."""
    for position, value in enumerate(args):
        yield from flatten(value, str(position))
    for name, value in kwargs.items():
        yield from flatten(value, name)


def flatten(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts, sequences and dataclasses with their paths, such as "1.0" or "logits".

    Other objects are left alone: to look inside could consume an iterator or never end.
    """
    if isinstance(value, Tensor):
        yield path, value
        return
    if value is None or depth == _MAX_DEPTH:
        return
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    else:
        return
    for key, item in items:
        yield from flatten(item, f"{path}.{key}" if path else str(key), depth + 1)


def recordable(tensor: Tensor) -> Tensor | str:
    """Return the plain strided tensor that holds a tensor's values, or why there is none."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        if isinstance(tensor, FakeTensor):
            return "a fake tensor, which has no values"
        if hasattr(tensor, "to_local"):
            with torch.no_grad():
                tensor = tensor.to_local()  # the local shard of a DTensor
        elif is_traceable_wrapper_subclass(tensor):
            return f"a {type(tensor).__qualname__}, whose values are inside of it"
        elif tensor.layout is torch.strided:
            tensor = tensor.as_subclass(Tensor)
    if tensor.dtype not in DTYPE_NAMES:
        return f"dtype {str(tensor.dtype).removeprefix('torch.')} cannot be stored"
    if tensor.is_nested:
        return "a nested tensor cannot be stored"
    if tensor.layout is not torch.strided:
        return f"layout {str(tensor.layout).removeprefix('torch.')} cannot be stored"
    if tensor.is_meta:
        return "a meta tensor, which has no values"
    return tensor


def _hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def _made_in_call(base: Tensor, layer: HookedLayer) -> bool:
    """Whether the history of a base was made in this call of the layer, so that nobody else knows it yet."""
    thread, entered = layer.entered
    node = base.grad_fn
    return node is not None and thread == _thread() and node._sequence_nr() >= entered
