"""How the gradient of a view is found, also when the view is changed in place.

A view has no values of its own, and its gradient is a part of that of its base. As long as nothing is changed in place
it has a node of its own in the graph, whose gradient is the view's. An in-place change of a view re-bases the history
of the base: what came through the changed view arrives at the node of the change, as part of a gradient of the base.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Cut = Callable[[Tensor], Tensor]
"""Cuts the gradient of a view out of that of its base."""

Edge = tuple[Node, int]

_graph_task = torch._C._current_graph_task_id


class SharedView:
    """The gradient of a view whose base others use as well, in-place changes or not.

    As long as the view is not changed in place, it has a node of its own, whose gradient is the view's. After a change
    it has the node of the change, which hands on what came through the changed view, as part of a gradient of the base;
    the view's own node still brings what came from those who used it before. The gradient is the sum. Where the change
    was not found, the base's gradient is all there is.

    Args:
        base: the tensor that it is a view of.
        hooks: what takes the view's gradient, and then the input's, if the layer made the view of its input; each with
            what cuts its gradient out of the base's.
    """

    def __init__(self, base: Tensor, hooks: Sequence[tuple[Callable[[Tensor], None], Cut]]) -> None:
        self._base = weakref.ref(base)
        self._held: Tensor | None = base  # until the next look, so that a change of what is dropped then is found
        self._version = base._version
        self._edge: Edge | None = edge_of(base)
        self._hooks = hooks
        self._changed = False
        self._sums: dict[int, list[Tensor | None]] = {}
        self._seen: set[int] = set()

    def settle(self) -> bool:
        """Find the node of an in-place change; return whether to look no more."""
        base, self._held = self._base(), None
        if base is None:
            return True
        if base._version == self._version:
            return False
        node = base.grad_fn
        while node is not None and node.name().endswith("CopySlices") and node.next_functions:
            if tuple(node.next_functions[0]) == self._edge:
                self._changed = True
                node.register_hook(self._take_from_change)
                break
            node = node.next_functions[0][0]
        self._edge = None
        return True

    def take_from_view(self, gradient: Tensor) -> None:
        """Take the gradient that arrives at the view's own node."""
        self.take(0, gradient)

    def take_from_input(self, gradient: Tensor) -> None:
        """Take what the view's own node hands on to the layer's input."""
        self.take(1, gradient)

    def take(self, number: int, gradient: Tensor) -> None:
        """Take a gradient for one of the hooks."""
        task = _graph_task()
        self._seen.add(task)
        if not self._changed:
            self._hooks[number][0](gradient)
            return
        if task not in self._sums:
            self._sums[task] = [None] * len(self._hooks)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._report(task))
        sums = self._sums[task]
        with torch.no_grad():
            before = sums[number]
            sums[number] = gradient.detach().clone() if before is None else before + gradient.detach()

    def _take_from_change(self, inputs: tuple[Tensor | None, ...], outputs: Any) -> None:
        if inputs[0] is not None:
            for number, (_, cut) in enumerate(self._hooks):
                self.take(number, cut(inputs[0]))

    def take_from_base(self, gradient: Tensor) -> None:
        """Take the gradient of the base, if there was no other."""
        base = self._base()
        if (base is None or base._version != self._version) and _graph_task() not in self._seen:
            for hook, cut in self._hooks:
                hook(cut(gradient))

    def _report(self, task: int) -> None:
        for (hook, _), total in zip(self._hooks, self._sums.pop(task), strict=True):
            if total is not None:
                hook(total)


def edge_of(tensor: Tensor) -> Edge:
    """Return the place in the graph where a tensor's gradient arrives."""
    edge: GradientEdge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def base_of(view: Tensor) -> Tensor:
    """Return the tensor that a view is a view of."""
    base = view._base
    assert base is not None
    return base


def can_cut(view: Tensor) -> bool:
    """Whether a view's gradient can be cut out of that of its base."""
    base = base_of(view)
    return (
        base.grad_fn is not None
        and base.dtype == view.dtype
        and view.layout is torch.strided
        and not (view.is_nested or view.is_conj() or view.is_neg() or base.is_conj() or base.is_neg())
    )


def whole(gradient: Tensor) -> Tensor:
    """Cut nothing away."""
    return gradient


def cutter(view: Tensor, base: Tensor) -> Cut:
    """Return a function that cuts the gradient of a view out of the gradient of its base."""
    size = view.size()
    if view.numel() == base.numel() and view.is_contiguous() and base.is_contiguous():
        return lambda gradient: gradient.detach().reshape(size)
    stride, offset = view.stride(), view.storage_offset() - base.storage_offset()
    base_size, base_stride = base.size(), base.stride()

    def cut(gradient: Tensor) -> Tensor:
        with torch.no_grad():
            gradient = gradient.detach()
            if gradient.stride() != base_stride:
                like_base = torch.empty_strided(base_size, base_stride, dtype=gradient.dtype, device=gradient.device)
                gradient = like_base.copy_(gradient)
            return gradient.as_strided(size, stride, offset + gradient.storage_offset())

    return cut
