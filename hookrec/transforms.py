"""Users' functions over what is recorded: their results are records of layers of their own.

What `function` makes of a record of `encoder.0` is a record of `encoder.0/function`, of the same kind, call and path,
so nobody takes it for the original, which is recorded as it would be without.

The function is other people's code in the middle of a training, and must not change it. It gets a clone: a write into
a detached tensor would reach the model, and of one through NumPy no version counter tells. It runs without grad and
autocast, whose cache would keep casts of parameters that have no history; the random numbers that it draws are given
back; modules that it calls are not recorded; and what it raises becomes a note.
"""

import fnmatch
import importlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hookrec.calls import Call, Named
from hookrec.errors import AttachError
from hookrec.guard import Guard
from hookrec.values import values_of

Function = Callable[[str, str, Tensor], Tensor | None]
"""Takes layer, kind and tensor."""


class Result:
    """What a function makes of the records of one layer; has records of its own."""

    def __init__(self, name: str, function: Function) -> None:
        self.name = name
        self.function = function
        self.streams: dict[tuple[str, str, torch.dtype, torch.Size], int] = {}


class Transforms:
    """Calls the functions, and hands their results on.

    Args:
        functions: by globs over names of layers; of several that match, the last decides.
        take: records a result.
        wants: whether results of a kind of a layer are recorded in a step.
        note: takes the reason why something is not recorded.
        guard: is silent in a thread that is in a function.
    """

    def __init__(
        self,
        functions: Mapping[str, Function],
        take: Callable[[Named, str, str, Tensor, Call], object],
        wants: Callable[[str, str, int], bool],
        note: Callable[[str, str], None],
        guard: Guard,
    ) -> None:
        self._functions = functions
        self._take = take
        self._wants = wants
        self._note = note
        self._guard = guard
        self._results: dict[str, Result | None] = {}
        self._failed: set[str] = set()

    def forget_streams(self) -> None:
        """Ask for the number of each stream again."""
        for result in self._results.values():
            if result is not None:
                result.streams.clear()

    def give(self, layer: str, kind: str, path: str, tensor: Tensor, call: Call) -> None:
        """Record what the function of a layer, if it has one, makes of a tensor."""
        try:
            result = self._results[layer]
        except KeyError:
            result = self._results[layer] = self._result_of(layer)
        if result is None or not self._wants(result.name, kind, call.step):
            return
        made: Any = None
        thread = threading.get_ident()
        self._guard.aside.add(thread)
        try:
            with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False), _same_randomness(tensor):
                made = result.function(layer, kind, tensor.detach().clone())
        except (Exception, SystemExit) as error:
            self._fail(result, f"{type(error).__name__}: {error}")
        finally:
            self._guard.aside.discard(thread)
        if made is None:
            return
        if not isinstance(made, Tensor):
            self._fail(result, f"returned a {type(made).__qualname__}, and no tensor")
            return
        for at, values in values_of(made.detach(), path, lambda note: self._note(result.name, f"{kind}: {note}")):
            self._take(result, kind, at, values, call)

    def _result_of(self, layer: str) -> Result | None:
        for glob, function in reversed(list(self._functions.items())):
            if fnmatch.fnmatchcase(layer, glob):
                return Result(f"{layer}/{plain_name(function)}", function)
        return None

    def _fail(self, result: Result, words: str) -> None:
        if result.name not in self._failed:  # the words may be others each time
            self._failed.add(result.name)
            self._note(result.name, f"the function of transform= gave nothing to record; {words}")


def functions_of(transform: Mapping[str, Function | str]) -> dict[str, Function]:
    """Return the functions themselves, where some are given as "module:name".

    Raises:
        AttachError: there is no such function.
    """
    return {glob: _imported(glob, given) if isinstance(given, str) else given for glob, given in transform.items()}


def plain_name(function: object) -> str:
    """Return what a function is called in names of layers."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return name.replace("/", "_").replace("#", "_")


def _imported(glob: str, place: str) -> Function:
    module, _, name = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise AttachError(f"The function {place!r} of transform[{glob!r}] cannot be imported: {error!r}.") from None
    if not callable(found):
        raise AttachError(f"{place!r} of transform[{glob!r}] is a {type(found).__qualname__}, and no function.")
    return found  # type: ignore[no-any-return]


@contextmanager
def _same_randomness(tensor: Tensor) -> Iterator[None]:
    """Give back the random numbers that are drawn inside."""
    numpy: Any = sys.modules.get("numpy.random")
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = numpy.get_state() if numpy is not None else None
    of_device = torch.cuda.get_rng_state(tensor.device) if tensor.is_cuda else None
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        if of_numpy is not None:
            numpy.set_state(of_numpy)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, tensor.device)
