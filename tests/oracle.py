"""What each layer really computed, learnt without a hook and without the recorder.

The forward of each layer is replaced by one that gives the layer clones of what it gets, keeps what it returns, and
hands clones of that on. So nothing that happens later can change what was kept, and `retain_grad` has the gradient of
each output, whatever in-place changes follow.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import replay

Key = tuple[int, str, str, int, str]
"""step, layer, kind, call, path"""


class Oracle:
    """Keeps what the layers of a model return, and the gradients of it.

    Attributes:
        records: bytes of each record by its key, complete up to the last `step()`.
    """

    def __init__(self, layers: Mapping[str, nn.Module], *, inputs: bool = False) -> None:
        self.records: dict[Key, bytes] = {}
        self._inputs = inputs
        self._step = 0
        self._calls: dict[str, int] = {}
        self._waiting: list[tuple[Key, Tensor]] = []
        for name, module in layers.items():
            module.forward = self._watched(name, module.forward)

    def _watched(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            given = clones_of((args, kwargs))
            if self._inputs:
                self._keep_inputs(name, *given)
                given = clones_of(given)
            output = forward(*given[0], **given[1])
            originals = {id(twin): tensor for twin, tensor in zip(_all(given), _all((args, kwargs)), strict=True)}
            if isinstance(output, Tensor) and id(output) in originals and output._version == 0:
                # Handed through, as by nn.Identity: the gradient is the total over all who use that tensor.
                original = originals[id(output)]
                key = (self._step, name, "grad_input", self._calls.get(name, 0), "0")
                if self._inputs and original.requires_grad:
                    self._waiting.append((key, original))
                return self._keep(name, original)
            return clones_of(self._keep(name, output))

        return watched

    def _keep_inputs(self, name: str, args: Any, kwargs: Any) -> None:
        call = self._calls.get(name, 0)
        for path, tensor in (*tensors_in(args), *tensors_in(kwargs)):
            self.records[self._step, name, "input", call, path] = raw(tensor)
            if tensor.requires_grad:
                tensor.retain_grad()
                self._waiting.append(((self._step, name, "grad_input", call, path), tensor))

    def _keep(self, name: str, output: Any) -> Any:
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        for path, tensor in tensors_in(output):
            self.records[self._step, name, "output", call, path] = raw(tensor)
            if tensor.requires_grad:
                tensor.retain_grad()
                self._waiting.append(((self._step, name, "grad_output", call, path), tensor))
        return output

    def step(self) -> None:
        """Take the gradients of the step, and begin the next."""
        for key, tensor in self._waiting:
            if tensor.grad is not None:
                self.records[key] = raw(tensor.grad)
        self._waiting.clear()
        self._calls.clear()
        self._step += 1


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    """The modules without children by their first name."""
    return {name: module for name, module in model.named_modules() if not list(module.children())}


def raw(tensor: Tensor) -> bytes:
    """The bytes of the elements in logical order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def recorded(trace: replay.Trace) -> dict[Key, bytes]:
    """Whatever a trace holds, in the form of `Oracle.records`."""
    found = {}
    for record, tensor in trace.select().tensors():
        key = tuple(record[name] for name in ("step", "layer", "kind", "call", "path"))
        assert key not in found, f"{key} is recorded twice"
        found[key] = tensor.tobytes()
    return found


def differences(got: Mapping[Key, bytes], want: Mapping[Key, bytes]) -> list[str]:
    """What is missing, what is too much, and what differs."""
    lines = [f"missing {key}" for key in want.keys() - got.keys()]
    lines += [f"too much {key}" for key in got.keys() - want.keys()]
    lines += [f"differs {key}" for key in got.keys() & want.keys() if got[key] != want[key]]
    return sorted(lines)


def tensors_in(value: Any, path: str = "") -> Iterable[tuple[str, Tensor]]:
    """The tensors of nested values with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from tensors_in(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from tensors_in(item, f"{path}.{number}" if path else str(number))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), f"{path}.{field.name}" if path else field.name)


def _all(value: Any) -> list[Tensor]:
    return [tensor for _, tensor in tensors_in(value)]


def clones_of(value: Any) -> Any:
    """The same nested value with a clone of each tensor; parameters stay themselves."""
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        twin = copy.copy(value)
        for name, item in value.items():
            twin[name] = clones_of(item)
        return twin
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(clones_of, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(clones_of, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: clones_of(getattr(value, f.name)) for f in dataclasses.fields(value)}
        )
    return value
