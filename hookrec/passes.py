"""What belongs to one backward pass: gradients that several nodes bring are added up, and reported when it ends.

Passes may be nested, and those of several threads run at once; autograd numbers them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hookrec.guard import Guard

graph_task = torch._C._current_graph_task_id
"""The number of the backward pass under way in this thread; -1 outside of one."""


def at_end_of_pass(function: Callable[[], None]) -> None:
    """Call a function when the backward pass under way ends. It must not raise."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


class Sum:
    """Adds up gradients, and reports the sum at the end of each backward pass."""

    __slots__ = ("_guard", "_report", "_totals")

    def __init__(self, guard: Guard, report: Callable[[Tensor], None]) -> None:
        self._guard = guard
        self._report = report
        self._totals: dict[int, Tensor] = {}

    def add(self, gradient: Tensor) -> None:
        """Take a gradient; it is copied."""
        task = graph_task()
        before = self._totals.get(task)
        with torch.no_grad():
            self._totals[task] = gradient.detach().clone() if before is None else before + gradient.detach()
        if before is None:
            at_end_of_pass(self._guard.wrap(lambda: self._report(self._totals.pop(task))))
