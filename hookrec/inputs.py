"""What goes into a layer: its inputs as they are when it is entered, and their gradients through this call alone.

The gradient that a hook on an input tensor sees is the total over all who use the tensor. The share of one call comes
from the graph: the nodes that the call made have sequence numbers from its entry on; those among them whose next edge
is the input's hand its share on, and a hook on the node sees it. Nothing is added to the graph, so in-place successors
go on working, and keyword inputs are like others.

A call is numbered when it is completed, so inputs are copied at entry and kept in a frame until then. Frames lie on a
stack a thread; a call that ends by an exception leaves its frame behind, which goes with that of its caller, or when
the thread enters a layer in the next step.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hookrec.guard import Guard
from hookrec.passes import Sum
from hookrec.views import Cut, Edge, base_of, can_cut, cutter, edge_of

_sequence_number = torch._C._autograd._get_sequence_nr


class Input:
    """One input that requires grad: its path, which tensor it was, and where its gradient goes.

    Attributes:
        base_edge: of the tensor that it is a view of, if that requires grad; an in-place change re-bases to it.
        cut: cuts the view's gradient out of the base's.
    """

    __slots__ = ("base_edge", "cut", "edge", "path", "tensor_id")

    def __init__(self, path: str, tensor: Tensor) -> None:
        self.path = path
        self.tensor_id = id(tensor)
        self.edge = edge_of(tensor)
        self.base_edge: Edge | None = None
        self.cut: Cut | None = None
        if tensor._is_view() and can_cut(tensor):
            base = base_of(tensor)
            self.base_edge, self.cut = edge_of(base), cutter(tensor, base)

    def is_handed_through(self, output: Tensor) -> bool:
        """Whether an output is this very tensor, with the same history."""
        return id(output) == self.tensor_id and edge_of(output) == self.edge


class Frame:
    """A call that is under way."""

    __slots__ = ("inputs", "layer", "sequence", "step", "values")

    def __init__(self, layer: object, step: int) -> None:
        self.layer = layer
        self.step = step
        self.sequence = _sequence_number()
        self.values: list[tuple[str, Tensor]] = []
        self.inputs: list[Input] = []

    def input_of(self, base: Tensor) -> Input | None:
        """Return the input that is a tensor, or a view of it."""
        edge = edge_of(base)
        return next((item for item in self.inputs if edge in (item.base_edge or item.edge, item.edge)), None)


class Frames(threading.local):
    """The calls that are under way in this thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Frame] = []

    def enter(self, layer: object, step: int) -> Frame:
        """Begin a call. What an exception has left here in an earlier step goes."""
        if self.stack and self.stack[-1].step != step:
            self.stack.clear()
        frame = Frame(layer, step)
        self.stack.append(frame)
        return frame

    def leave(self, layer: object) -> Frame | None:
        """Take the frame of a layer's innermost call off the stack, with whatever was left above it."""
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at].layer is layer:
                frame = self.stack[at]
                del self.stack[at:]
                return frame
        return None


def sources(frame: Frame, outputs: Iterable[Tensor]) -> dict[str, list[tuple[Node, int, Cut | None]]]:
    """Find the nodes of a call that hand gradients on to its inputs.

    Returns:
        By the path of the input: nodes, which of their gradients it is, and how to cut the input's share out of it.
    """
    wanted: dict[Edge, list[str]] = {}
    bases: dict[Edge, list[Input]] = {}
    for item in frame.inputs:
        wanted.setdefault(item.edge, []).append(item.path)
        if item.base_edge is not None:
            bases.setdefault(item.base_edge, []).append(item)
    beyond = {node for node, _ in wanted} | {node for node, _ in bases}
    waiting = [node for output in outputs if (node := output.grad_fn) is not None]
    seen: set[Node] = set()
    found: dict[str, list[tuple[Node, int, Cut | None]]] = {}
    while waiting:
        node = waiting.pop()
        if node in seen or node in beyond or node._sequence_nr() < frame.sequence:
            continue
        seen.add(node)
        for number, (following, output_number) in enumerate(node.next_functions):
            if following is None:
                continue
            edge = (following, output_number)
            if edge in wanted:
                for path in wanted[edge]:
                    found.setdefault(path, []).append((node, number, None))
            elif edge in bases and node.name().endswith("CopySlices"):
                for item in bases[edge]:
                    found.setdefault(item.path, []).append((node, number, item.cut))
            else:
                waiting.append(following)
    return found


def share(nodes: list[tuple[Node, int, Cut | None]], report: Callable[[Tensor], None], guard: Guard) -> None:
    """Report the sum of what the nodes of one call hand on to one input, in each backward pass."""
    take = report if len(nodes) == 1 else Sum(guard, report).add
    for node, number, cut in nodes:
        node.register_hook(guard.wrap(_taker(take, number, cut)))


def _taker(take: Callable[[Tensor], None], number: int, cut: Cut | None) -> Callable[[Any, Any], None]:
    def hook(inputs: tuple[Tensor | None, ...], outputs: Any) -> None:
        gradient = inputs[number]
        if gradient is not None:
            take(gradient if cut is None else cut(gradient))

    return hook
