"""How the gradients of what a layer returned, and of what it was given, become known.

They come from `Tensor.register_hook` on the outputs. The obvious `register_full_backward_hook` wraps outputs in an
autograd node, which forbids in-place successors such as `nn.ReLU(inplace=True)`, takes flat tuples only and costs 50 µs
a call. A hook on a tensor has pitfalls of its own:

* A Linear on 3-D input returns a view of its matrix product (MaxPool1d, Flatten and others do so too). An in-place
  successor re-bases the history of a view, and a hook on it then never runs. The hook on its base does, so the gradient
  is cut out of the base's. If the base is not the layer's own, others use it too: then it is cut out of what the node
  of the in-place change hands on, which is looked for at the end of the forward pass.
* A view whose base was changed behind its back has a stale `grad_fn`, and `register_hook` on it can crash
  the process (pytorch 196459). Reading `grad_fn` first refreshes it.
* A hook on a tensor without history (a parameter, an input) stays for ever. Those are removed at the end of the step.

Closures hold names and numbers, never tensors: a hook that holds its tensor is a cycle that the garbage collector
cannot see.
"""

import threading
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hookrec.calls import Call, Counted, Sink
from hookrec.guard import Guard
from hookrec.inputs import Frame, share, sources
from hookrec.values import values_of
from hookrec.views import Cut, SharedView, base_of, can_cut, cutter, whole


class GradientHook:
    """Takes a gradient of one output or input of a call; holds the key of what it belongs to."""

    __slots__ = ("_call", "_count", "_cut", "_gradients", "_kind", "_path", "_source")

    def __init__(
        self,
        gradients: "Gradients",
        source: Counted,
        path: str,
        call: Call,
        cut: Cut | None = None,
        kind: str = "grad_output",
    ) -> None:
        self._gradients = gradients
        self._source = source
        self._path = path
        self._call = call
        self._cut = cut
        self._kind = kind
        self._count = 0

    def __call__(self, gradient: Tensor | None) -> None:
        """Report the gradient, as a hook on a tensor."""
        if gradient is not None:
            self._gradients.guard.call(self.report, gradient)

    def report(self, gradient: Tensor) -> None:
        """Report the gradient."""
        if self._cut is not None:
            gradient = self._cut(gradient)
        # A second backward pass over the same output gives a second gradient, which is a record of its own.
        again = f"@{self._count}" if self._count else ""
        self._count += 1
        for path, values in values_of(gradient, self._path, self._note):
            self._gradients.sink.take(self._source, self._kind, path + again, values, self._call)

    def _note(self, note: str) -> None:
        self._gradients.sink.note(self._source.name, f"{self._kind}: {note}")


class Gradients:
    """Watches tensors for their gradients.

    Attributes:
        of_outputs: whether those of outputs are wanted.

    Args:
        sink: takes the gradients.
        guard: wraps what PyTorch calls.
    """

    def __init__(self, sink: Sink, guard: Guard) -> None:
        self.sink = sink
        self.guard = guard
        self.of_outputs = False
        self._handles: list[RemovableHandle] = []
        self._fresh_views: list[SharedView] = []
        self._views: dict[int, list[SharedView]] = {}  # by the id of their base

    def end_step(self) -> None:
        """Take the hooks off tensors that outlive the step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.settle_all()

    def watch(self, source: Counted, tensors: list[tuple[str, Tensor]], call: Call, frame: Frame | None) -> None:
        """Put hooks on outputs and on what leads to the inputs, so that their gradients are reported."""
        outputs = [(path, tensor) for path, tensor in tensors if tensor.requires_grad]
        through: dict[str, SharedView] = {}
        for path, tensor in outputs if self.of_outputs and "grad_output" not in source.left_out else ():
            # Reading grad_fn refreshes the history of a stale view; without that, register_hook may crash the process.
            if tensor.grad_fn is None:
                self._handles.append(_hook(tensor, GradientHook(self, source, path, call)))
            elif not tensor._is_view() or not can_cut(tensor):
                _hook(tensor, GradientHook(self, source, path, call))
            elif _made_in_call(base_of(tensor), source) and sum(t._base is tensor._base for _, t in tensors) == 1:
                base = base_of(tensor)
                _hook(base, GradientHook(self, source, path, call, cutter(tensor, base)))
            else:
                hooks = [(GradientHook(self, source, path, call).report, cutter(tensor, base_of(tensor)))]
                item = frame.input_of(base_of(tensor)) if frame is not None and len(outputs) == 1 else None
                if item is not None:  # the layer made a view of its input
                    of_input = GradientHook(self, source, item.path, call, kind="grad_input")
                    hooks.append((of_input.report, item.cut or whole))
                view = self._watch_shared_view(tensor, hooks)
                if item is not None:
                    through[item.path] = view
        if frame is not None and frame.inputs and outputs:
            self._watch_inputs(source, frame, [tensor for _, tensor in outputs], call, through)

    def _watch_inputs(
        self, source: Counted, frame: Frame, outputs: list[Tensor], call: Call, through: dict[str, SharedView]
    ) -> None:
        def report(path: str) -> Callable[[Tensor], None]:
            if path in through:
                return through[path].take_from_input
            return GradientHook(self, source, path, call, kind="grad_input").report

        passed = set()
        for output in outputs:
            _ = output.grad_fn
            for item in frame.inputs:
                if item.is_handed_through(output):
                    passed.add(item.path)
                    handle = _hook(output, self.guard.wrap(report(item.path)))
                    if output.grad_fn is None:
                        self._handles.append(handle)
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

    @property
    def unsettled(self) -> bool:
        """Whether there are views that may still be changed in place."""
        return bool(self._fresh_views or self._views)

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


def _hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def _made_in_call(base: Tensor, source: Counted) -> bool:
    """Whether the history of a base was made in this call, so that nobody else knows it yet."""
    thread, entered = source.entered
    node = base.grad_fn
    return node is not None and thread == threading.get_ident() and node._sequence_nr() >= entered
