"""How a layer is made again from a trace: of its class and arguments, or by the user, with what was recorded.

A trace is data, and must not choose what is run: a class counts only if `torch.nn` itself has it under its name, and
modules are made on the meta device, so that no number in a trace has memory reserved. Parameters come from the trace,
under the step and the rank that are asked for; so do the arguments of the call, as far as they were tensors.
"""

import copy
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import replay
from hookrec.layers import layers_of, named_modules, own_parameters
from replay.errors import BadQuery, NotRecorded, StepNotCommitted

_DROPOUTS = (nn.modules.dropout._DropoutNd, nn.RReLU)
_ALWAYS_RANDOM = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_NORMS_BY_BATCH = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)

Factory = Callable[[], nn.Module]


class NotRunnable(Exception):
    """Why a layer cannot be run again; the end of a sentence that begins with its name."""


def factory_of(text: str) -> Factory:
    """Return the function that `module:function` names; modules are looked for in the working directory first.

    Raises:
        BadQuery: there is none.
    """
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise BadQuery(f"--factory {text!r} is not like my_model:make, a module and a function that returns the model.")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        function: Factory = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise BadQuery(f"--factory {text!r} cannot be imported: {type(error).__name__}: {error}.") from None
    if not callable(function):
        raise BadQuery(f"--factory {text!r} is no function that returns the model.")
    return function


def modules_of(factory: Factory) -> dict[str, nn.Module]:
    """Return the modules of the model that a factory makes, by the names that a trace has.

    Raises:
        BadQuery: it makes none.
    """
    try:
        model = factory()
    except Exception as error:
        raise BadQuery(f"The factory raised {type(error).__name__}: {error}.") from None
    if not isinstance(model, nn.Module):
        raise BadQuery(f"The factory returned a {type(model).__qualname__}, which is no torch.nn.Module.")
    return {layer.name: layer.module for layer in layers_of({"": model})}


class Rebuilder:
    """Makes the layers of one rank's trace again, as they were in one step.

    Args:
        trace: the trace.
        step: the step.
        rank: the rank.
        made: by layer, modules that the user has made; a layer that is not there is made from `model.json`.
    """

    def __init__(self, trace: replay.Trace, step: int, rank: int, made: Mapping[str, nn.Module] | None) -> None:
        self._trace = trace
        self._step = step
        self._rank = rank
        self._made = made or {}
        self._entries = {entry["name"]: entry for entry in trace.modules(rank)}
        columns = trace.records(kinds="input", steps=step, where=f"rank = {rank}")
        self._inputs: dict[tuple[str, int], list[str]] = {}
        for layer, call, path in zip(*(columns[n].to_pylist() for n in ("layer", "call", "path")), strict=True):
            self._inputs.setdefault((layer, call), []).append(path)

    def module(self, layer: str, *, training: bool) -> nn.Module:
        """Return a layer with its parameters.

        Raises:
            NotRunnable: it cannot be made.
        """
        if layer in self._made:
            module = copy.deepcopy(self._made[layer]).cpu()
        else:
            entry = self._entries.get(layer)
            if entry is None:
                raise NotRunnable("is the result of a function, no module")
            module = _from_entry(entry)
            names = [parameter["name"] for parameter in entry["parameters"]]
            if set(names) != set(own_parameters(module)):
                raise NotRunnable(f"has the parameters {', '.join(names)}, which its class has not: it was changed")
        module.train(training)
        _refuse_chance(module, training=training)
        for below, owner in named_modules(module, layer):
            for name in own_parameters(owner):
                setattr(owner, name, nn.Parameter(self._parameter(below, name), requires_grad=False))
        if layer not in self._made:
            _settle_buffers(module, training=training)
        return module

    def _parameter(self, layer: str, name: str) -> Tensor:
        places = [(layer, name)]
        known = self._entries.get(layer, {}).get("parameters", ())
        tied_to = next((p.get("tied_to") for p in known if p["name"] == name), None)
        if isinstance(tied_to, list) and len(tied_to) == 2:
            places.append((str(tied_to[0]), str(tied_to[1])))
        for owner, path in places:
            try:
                return tensor_of(self._trace.tensor(self._step, owner, "param", path=path, rank=self._rank))
            except (NotRecorded, StepNotCommitted):
                continue
        raise NotRunnable(f"has a parameter {name!r} that was not recorded: record kinds=('param', …) with its tensors")

    def arguments(self, layer: str, call: int) -> tuple[list[Any], dict[str, Any]]:
        """Return the recorded arguments of a call: by position and by keyword.

        Raises:
            NotRunnable: they were not recorded, or were not tensors alone.
        """
        tree: dict[str, Any] = {}
        for path in self._inputs.get((layer, call), ()):
            try:
                values = self._trace.tensor(self._step, layer, "input", call=call, path=path, rank=self._rank)
            except NotRecorded:
                raise NotRunnable("has an input of which the tensor was not kept") from None
            *above, last = path.split(".")
            place = tree
            for part in above:
                place = place.setdefault(part, {})
            place[last] = tensor_of(values)
        if not tree:
            raise NotRunnable("has no recorded input: record kinds=('input', …) with its tensors")
        by_position = {name: value for name, value in tree.items() if name.isdigit()}
        if set(map(int, by_position)) != set(range(len(by_position))):
            raise NotRunnable("was called with an argument that is no tensor, which is not in the trace")
        keywords = {name: _nested(value) for name, value in tree.items() if not name.isdigit()}
        return [_nested(by_position[str(i)]) for i in range(len(by_position))], keywords


def _from_entry(entry: Mapping[str, Any]) -> nn.Module:
    name = str(entry.get("class", "")).rpartition(".")[2]
    kind = getattr(torch.nn, name, None)
    if (
        not isinstance(kind, type)
        or not issubclass(kind, nn.Module)
        or f"{kind.__module__}.{kind.__qualname__}" != entry["class"]
    ):
        raise NotRunnable(f"is a {entry.get('class')}, which torch.nn does not have: give a --factory")
    settings = entry.get("settings")
    if not isinstance(settings, dict):
        raise NotRunnable(f"is a {name} whose arguments are not in model.json: give a --factory")
    try:
        with torch.device("meta"):
            return kind(**{key: _as_tuple(value) for key, value in settings.items()})
    except Exception as error:
        raise NotRunnable(f"is a {name} that cannot be made of what model.json says: {error}") from None


def _refuse_chance(module: nn.Module, *, training: bool) -> None:
    for _, below in named_modules(module):
        share = getattr(below, "p", getattr(below, "dropout", 0.0))
        drops = isinstance(below, (*_DROPOUTS, nn.RNNBase)) and (isinstance(below, nn.RReLU) or share)
        if isinstance(below, _ALWAYS_RANDOM) or (training and drops):
            raise NotRunnable(f"is a {type(below).__name__} that draws random numbers, which are not in the trace")


def _settle_buffers(module: nn.Module, *, training: bool) -> None:
    """Let a normalisation in training do without its running statistics, which it does not read then."""
    if isinstance(module, _NORMS_BY_BATCH) and training:
        module.track_running_stats = False
        module.running_mean = module.running_var = None
        module.num_batches_tracked = None
    missing = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if missing:
        raise NotRunnable(f"has buffers, {', '.join(missing)}, which are not in the trace: give a --factory")


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _nested(value: Any) -> Any:
    """Return what the parts of a nested argument were: a tuple where they have numbers, else a dict."""
    if not isinstance(value, dict):
        return value
    if set(value) == {str(i) for i in range(len(value))}:
        return tuple(_nested(value[str(i)]) for i in range(len(value)))
    return {name: _nested(item) for name, item in value.items()}


def tensor_of(array: NDArray[Any]) -> Tensor:
    """Return an array, also of one of the dtypes of `ml_dtypes`, as a tensor of its own."""
    dtype = getattr(torch, array.dtype.name)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    data = bytearray(np.ascontiguousarray(array).tobytes())
    return torch.frombuffer(data, dtype=dtype).reshape(array.shape)
