"""What hooks and capture both speak of: which call a tensor belongs to, who takes it, which dtypes a trace can hold."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Call(NamedTuple):
    """Which call of a layer a tensor belongs to."""

    step: int
    call: int
    micro: int
    mode: int


Fingerprint = object
"""What is the same of the same values: their statistics, or a reference to those that are on a device."""


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

    def take(self, layer: Named, kind: str, path: str, tensor: Tensor, call: Call) -> Fingerprint:
        """Record a tensor; return its statistics."""
        ...

    def fingerprint(self, tensor: Tensor) -> Fingerprint:
        """Return the statistics of a tensor that is not recorded."""
        ...

    def note(self, layer: str, note: str) -> None:
        """Take the reason why something of a layer is not recorded."""
        ...

    def fault(self, error: Exception) -> None:
        """Take an error of ours. The training must not see it."""
        ...


DTYPE_NAMES = {
    getattr(torch, name): name
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}


NOTHING: frozenset[str] = frozenset()


def nothing(name: str) -> frozenset[str]:
    """Leave nothing out of a layer."""
    return NOTHING


class Counted:
    """Whatever is called in a step and has records, such as a layer: its name, its streams, the numbers of its calls.

    Attributes:
        entered: the thread that began the last call, and the autograd sequence number then. A node with a higher number
            was made in this call. The numbers of two threads have nothing to do with each other.
        left_out: the kinds of which there is to be no record in this step.
    """

    __slots__ = ("_calls", "_step", "_without_grad", "entered", "left_out", "name", "root", "streams")

    def __init__(self, name: str, root: int) -> None:
        self.name = name
        self.root = root
        self.streams: dict[tuple[str, str, torch.dtype, torch.Size], int] = {}
        self.entered = (0, 0)
        self.left_out = NOTHING
        self._step = -1
        self._calls = 0
        self._without_grad: list[tuple[Call, Fingerprint]] = []

    def next_call(self, step: int) -> int:
        """Return the number of the call that has just been completed."""
        if step != self._step:
            self._step, self._calls = step, 0
            self._without_grad.clear()
        call = self._calls
        self._calls = call + 1
        return call

    def count_on(self, earlier: "Counted") -> None:
        """Number calls behind those of another, which had the name before: a module may be replaced within a step."""
        self._step, self._calls = earlier._step, earlier._calls

    def await_recomputation(self, call: Call, fingerprint: Fingerprint) -> None:
        """Remember a call that ran without grad: a recomputation may bring its gradients."""
        self._without_grad.append((call, fingerprint))

    def recomputed(self, step: int, fingerprint: Callable[[], Fingerprint]) -> Call | None:
        """Return the call, the last first, that gave the output which was computed again."""
        if step == self._step and self._without_grad:
            found = fingerprint()
            for index in reversed(range(len(self._without_grad))):
                call, known = self._without_grad[index]
                if known == found:
                    del self._without_grad[index]
                    return call
        return None
