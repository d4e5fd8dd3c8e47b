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

from hookrec.guard import Guard
from hookrec.passes import Sum, graph_task

Cut = Callable[[Tensor], Tensor]
"""Cuts the gradient of a view out of that of its base."""

Edge = tuple[Node, int]


class SharedView:
    """The gradient of a view whose base others use as well, in-place changes or not.

    As long as the view is not changed in place, it has a node of its own, whose gradient is the view's. After a change
    it has the node of the change, which hands on what came through the changed view, as part of a gradient of the base;
    the view's own node still brings what came from those who used it before. The gradient is the sum. Where the change
    was not found, the base's gradient is all there is.

    Args:
        base: the tensor that it is a view of.
        reports: what takes the view's gradient, and then the input's, if the layer made the view of its input; each
            with what cuts its gradient out of the base's.
        guard: wraps the hook on the node of a change.
    """

    def __init__(self, base: Tensor, reports: Sequence[tuple[Callable[[Tensor], None], Cut]], guard: Guard) -> None:
        self.base_id = id(base)
        self._base = weakref.ref(base)
        self._version = base._version
        # Both are given up after a look or two: the edge's node holds this object by its hooks.
        self._held: Tensor | None = base  # so that a change of what is dropped until then is found
        self._edge: Edge | None = edge_of(base)
        self._reports = reports
        self._guard = guard
        self._sums: list[Sum] | None = None
        self._seen: set[int] = set()

    def settle(self) -> bool:
        """Find the node of an in-place change; return whether to look no more."""
        base, self._held = self._base(), None
        if base is not None and base._version == self._version:
            return False
        node = base.grad_fn if base is not None else None
        while node is not None and node.name().endswith("CopySlices") and node.next_functions:
            if tuple(node.next_functions[0]) == self._edge:
                self._sums = [Sum(self._guard, report) for report, _ in self._reports]
                node.register_hook(self._guard.wrap(self._take_from_change))
                break
            node = node.next_functions[0][0]
        self.give_up()
        return True

    def give_up(self) -> None:
        """Look no more."""
        self._held = self._edge = None

    def take_from_view(self, gradient: Tensor) -> None:
        """Take the gradient that arrives at the view's own node."""
        self._take(0, gradient)

    def take_from_input(self, gradient: Tensor) -> None:
        """Take what the view's own node hands on to the layer's input."""
        self._take(1, gradient)

    def _take(self, number: int, gradient: Tensor) -> None:
        self._seen.add(graph_task())
        if self._sums is not None:
            self._sums[number].add(gradient)
        else:
            self._reports[number][0](gradient)

    def _take_from_change(self, inputs: tuple[Tensor | None, ...], outputs: Any) -> None:
        if inputs[0] is not None:
            for number, (_, cut) in enumerate(self._reports):
                self._take(number, cut(inputs[0]))

    def take_from_base(self, gradient: Tensor) -> None:
        """Take the gradient of the base, if there was no other."""
        base = self._base()
        if (base is None or base._version != self._version) and graph_task() not in self._seen:
            for report, cut in self._reports:
                report(cut(gradient))


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
