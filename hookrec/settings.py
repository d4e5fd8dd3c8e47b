"""With which arguments a module of `torch.nn` was constructed: what it takes to make one like it again.

PyTorch keeps no arguments. But its own classes keep each under its name, save a few that are known here: a `bias` is
the parameter or None, and recurrent modules hide theirs behind `*args`. Of other people's classes nothing is assumed.
"""

import inspect
import math
from functools import cache
from typing import Any

import torch
from torch import nn

_OF_NO_MATTER = frozenset(("device", "dtype", "size_average", "reduce", "min_value", "max_value"))
"""Where a module lies, and names that torch has given up for others."""


def settings_of(module: nn.Module) -> dict[str, Any] | None:
    """Return the arguments that a module was made with, as JSON has them; None if they cannot be told.

    They cannot where the class is not one of `torch.nn`, where the module was changed (`forward` replaced, weights
    parametrized), is lazy, or has an argument that is no number, text or list.
    """
    kind = type(module)
    if getattr(torch.nn, kind.__name__, None) is not kind or "forward" in vars(module):
        return None
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return None
    found = {}
    try:
        for name in _arguments(kind):
            value = getattr(module, name)
            if name == "bias" and not isinstance(value, bool):
                value = value is not None
            found[name] = _plain(value)
    except (AttributeError, TypeError):
        return None
    return found


@cache
def _arguments(kind: type[nn.Module]) -> tuple[str, ...]:
    """The names of the arguments that a class keeps."""
    names: list[str] = []
    for cls in kind.__mro__:
        if "__init__" not in vars(cls):
            continue
        parameters = [p for p in inspect.signature(cls).parameters.values() if not p.name.startswith("_")]
        names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            break
    given_by_class = {"mode"} if issubclass(kind, nn.RNNBase) else set()
    if issubclass(kind, nn.RNNBase) and not issubclass(kind, nn.LSTM):
        given_by_class.add("proj_size")
    if issubclass(kind, nn.RNN):
        names.append("nonlinearity")
    return tuple(name for name in names if name not in _OF_NO_MATTER | given_by_class)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise TypeError
