"""What a case of trouble with hooks is, and how a recording of it is judged.

A case trains a small model, and has a replica of each step that computes the same by plain functions and says which
layer each belongs to. The replica hands clones to each function and clones of its result on, so no in-place change
reaches what was said; gradients are asked of `torch.autograd.grad`. Neither hook nor recorder has a part in it.

A recording must have exactly the records that the replica says, bit for bit, and must leave the training as it is:
losses, parameters, buffers, the random state, hooks, and nothing of the model kept alive.
"""

import gc
import random
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hookrec
import replay
from tests.oracle import Key, clones_of, raw, recorded, tensors_in

KINDS = ("output", "grad_output", "input", "grad_input")

CASES: dict[str, Callable[[], "Case"]] = {}


def case(build: Callable[[], "Case"]) -> Callable[[], "Case"]:
    """Add a case under the name of the function that builds it."""
    assert build.__name__ not in CASES
    CASES[build.__name__] = build
    return build


@dataclass
class Case:
    """A small training and what its records are.

    Attributes:
        model: what is attached to.
        train: does one step of the training, whose number it gets; may return the loss.
        right: says with a replica what each layer computes in the step.
        kinds: what is recorded and judged.
        attach: further arguments of `attach`.
        near: the relative error that is allowed, where functions round otherwise than the layer does.
        note: what a note in the trace has to say.
        also: looks at what else the trace has to have.
        hooks_change: whether the training itself puts on or takes off hooks.
    """

    model: nn.Module
    train: Callable[[int], Tensor | None]
    right: Callable[["Replica"], None]
    steps: int = 2
    kinds: tuple[str, ...] = KINDS
    attach: dict[str, Any] = field(default_factory=dict)
    near: float = 0.0
    note: str = ""
    also: Callable[[replay.Trace], None] | None = None
    hooks_change: bool = False


class Replica:
    """One step of a case in plain functions.

    Attributes:
        step: its number.
        p: the parameters by name, as they are before the step.
        b: the buffers, likewise.
        records: what has to be in the trace.
    """

    def __init__(self, step: int, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        self.step = step
        trained = {name: p.requires_grad for name, p in model.named_parameters()}
        self.p = {name: state[name].clone().requires_grad_(trained[name]) for name in trained if name in state}
        self.b = {name: value.clone() for name, value in state.items() if name not in trained}
        self.records: dict[Key, bytes] = {}
        self._calls: dict[str, int] = {}
        self._waiting: list[tuple[Key, Tensor]] = []
        self._grads: dict[str, Tensor] = {}
        self._backwards: dict[str, int] = {}

    def call(self, layer: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Say that a layer is called, and computes a function of its arguments; return what it returns."""
        given = clones_of((args, kwargs))
        arguments = [*tensors_in(given[0]), *tensors_in(given[1])]
        inner = clones_of(given)
        output = function(*inner[0], **inner[1])
        call = self._calls.get(layer, 0)
        self._calls[layer] = call + 1
        for path, tensor in arguments:
            self.put(layer, "input", call, path, tensor)
            self._await(layer, "grad_input", call, path, tensor)
        for path, tensor in tensors_in(output):
            self.put(layer, "output", call, path, tensor)
            self._await(layer, "grad_output", call, path, tensor)
        return clones_of(output)

    def linear(self, layer: str, x: Tensor) -> Tensor:
        """Say that an `nn.Linear` is called."""
        weight, bias = self.p[f"{layer}.weight"], self.p.get(f"{layer}.bias")
        return self.call(layer, lambda x: nn.functional.linear(x, weight, bias), x)

    def descend(self, layer: str, rate: float) -> None:
        """Say that SGD changes the parameters of a layer, whose gradients are set to zero afterwards."""
        for name in [name for name in self._grads if name.startswith(f"{layer}.")]:
            self.p[name] = self.p[name].detach().sub(self._grads.pop(name), alpha=rate).requires_grad_()

    def put(self, layer: str, kind: str, call: int, path: str, tensor: Tensor) -> None:
        """Say what one record is; a second gradient of the same thing is `@1`."""
        key, again = (self.step, layer, kind, call, path), 0
        while key in self.records:
            again += 1
            key = (self.step, layer, kind, call, f"{path}@{again}")
        self.records[key] = raw(tensor)

    def _await(self, layer: str, kind: str, call: int, path: str, tensor: Tensor) -> None:
        if tensor.requires_grad:
            self._waiting.append(((self.step, layer, kind, call, path), tensor))

    def backward(self, *losses: Tensor, gradient: Tensor | None = None, **options: Any) -> None:
        """Say that a backward pass from a loss, or several, reaches what was said until now."""
        outputs = [loss if loss.numel() == 1 else loss.sum() for loss in losses] if gradient is None else losses
        wanted = [tensor for _, tensor in self._waiting]
        trained = {name: p for name, p in self.p.items() if p.requires_grad}
        options = {"retain_graph": True, "allow_unused": True, "grad_outputs": gradient, **options}
        found = torch.autograd.grad(outputs, [*wanted, *trained.values()], **options)
        for ((_, layer, kind, call, path), _), grad in zip(self._waiting, found, strict=False):
            if grad is not None:
                self.put(layer, kind, call, path, grad)
        for name, grad in zip(trained, found[len(wanted) :], strict=True):
            if grad is not None:
                before = self._grads.get(name)
                self._grads[name] = grad.detach() if before is None else before + grad.detach()
                layer, _, path = name.rpartition(".")
                self._backwards[name] = self._backwards.get(name, -1) + 1
                self.put(layer, "param_grad_acc", self._backwards[name], path, self._grads[name])


def judge(build: Callable[[], Case], path: Path, store: str) -> list[str]:
    """Record a case to a store, and return what is wrong with it."""
    gc.collect()
    gc.disable()
    try:
        bare = _fresh(build)
        states, losses, random_states = _run(bare, None)
        bare_model = weakref.ref(bare.model)
        del bare
        in_cycles = bare_model() is not None  # of its own, which only the garbage collector can see
        want = _right(build, states)
        watched = _fresh(build)
        model = weakref.ref(watched.model)
        before = count_hooks(watched.model)
        arguments = {"clock": "manual", "store": store, "keep_free": 0, "ring": "16MB", **watched.attach}
        with hookrec.attach(watched.model, path, kinds=watched.kinds, **arguments) as recorder:
            found = _run(watched, recorder)
        kinds, near, note, also = watched.kinds, watched.near, watched.note, watched.also
        wrong = []
        if not watched.hooks_change and count_hooks(watched.model) != before:
            wrong.append("hooks are left on the model")
        del watched, recorder
        if model() is not None and not in_cycles:
            wrong.append("the model is kept alive")
    finally:
        gc.enable()

    parts = ("states", "losses", "random states")
    for what, one, other in zip(parts, found, (states, losses, random_states), strict=True):
        if not _same(one, other):
            wrong.append(f"the training is another: {what} differ")
    trace = replay.open(path)
    got = recorded(trace)
    right = {key: value for key, value in want.items() if key[2] in kinds}
    wrong += [f"missing {key}" for key in right.keys() - got.keys()]
    wrong += [f"too much {key}" for key in got.keys() - right.keys()]
    wrong += [f"differs {key}" for key in got.keys() & right.keys() if not _near(got[key], right[key], near)]
    notes = [note["note"] for note in trace.notes]
    if note and not any(note in said for said in notes):
        wrong.append(f"no note says {note!r}: {notes}")
    if not note and notes:
        wrong.append(f"notes: {notes}")
    if also is not None:
        also(trace)
    return sorted(wrong)


def count_hooks(model: nn.Module) -> int:
    """How many hooks are on modules and parameters."""
    on_modules = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(m, name, ())) for m in model.modules() for name in on_modules) + sum(
        len(p._backward_hooks or ()) + len(getattr(p, "_post_accumulate_grad_hooks", None) or ())
        for p in model.parameters()
    )


def _fresh(build: Callable[[], Case]) -> Case:
    torch.manual_seed(0)
    random.seed(0)
    return build()


def _run(case: Case, recorder: hookrec.Recorder | None) -> tuple[list[dict[str, Tensor]], list[Tensor], list[Any]]:
    """Train; return the states of the model before each step and at the end, the losses, and the random states."""
    states, losses = [], []
    for step in range(case.steps):
        states.append(_state(case.model))
        torch.manual_seed(100 + step)
        loss = case.train(step)
        if loss is not None:
            losses.append(loss.detach().clone())
        if recorder is not None and case.attach.get("clock", "manual") == "manual":
            recorder.step()
    states.append(_state(case.model))
    return states, losses, [torch.get_rng_state(), random.getstate()]


def _state(model: nn.Module) -> dict[str, Tensor]:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: value.detach().clone()
        for name, value in state.items()
        if not nn.parameter.is_lazy(value) and not value.is_meta
    }


def _right(build: Callable[[], Case], states: list[dict[str, Tensor]]) -> dict[Key, bytes]:
    twin = _fresh(build)
    want: dict[Key, bytes] = {}
    for step in range(twin.steps):
        replica = Replica(step, twin.model, states[step])
        torch.manual_seed(100 + step)
        twin.right(replica)
        want |= replica.records
    return want


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and raw(one) == raw(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _near(got: bytes, right: bytes, near: float) -> bool:
    if not near or len(got) != len(right):
        return got == right
    one, other = np.frombuffer(got, "f4"), np.frombuffer(right, "f4")
    return bool(np.abs(one - other).max(initial=0) <= near * np.abs(other).max(initial=0))
