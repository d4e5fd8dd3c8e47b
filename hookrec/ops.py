"""What functions compute inside of modules: the results of chosen operations, which are no modules.

A residual sum, an attention by `matmul`, an `F.relu` have no hook. PyTorch tells a `TorchFunctionMode` of each function
that is called, by whatever name: `x + y`, `x += y`, `torch.add` and `Tensor.add_` are all `add`. The mode is on while a
module of the model is being called, and lies below the modes of the user, so that a forward pass that is interrupted
leaves theirs in order. Of a function that calls others only the outer one is seen.

An operation belongs to the module that is being called when it runs, the innermost, which is read from the frames of
the interpreter: no state can be out of step with those. It is numbered within that call, so `blocks.0/add#1` is the
second addition of each call of `blocks.0`. The leaves of `torch.nn` are passed over: what their functions compute is
what they return.
"""

import difflib
import fnmatch
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils.hooks import RemovableHandle

from hookrec.calls import Counted, nothing
from hookrec.errors import AttachError
from hookrec.guard import Guard
from hookrec.layers import Layer
from hookrec.uncopied import Uncopied
from hookrec.values import flatten

_sequence_number = torch._C._autograd._get_sequence_nr
_transforms = torch._C._functorch.peek_interpreter_stack
_CALL = nn.Module._call_impl.__code__

_BINARY = frozenset(("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"))
_NO_OPERATIONS = frozenset(("__get__", "__set__", "__delete__", "__setitem__"))
_NAMESPACES = (torch, functional, Tensor, torch.linalg, torch.fft, torch.special)


class Owner:
    """A module in whose calls operations are recorded."""

    def __init__(self, layer: Layer, earlier: "Owner | None") -> None:
        self.name = layer.name
        self.root = layer.root
        self.module = weakref.ref(layer.module)
        self.operations: dict[tuple[str, int], Counted] = earlier.operations if earlier is not None else {}
        self.handles: list[RemovableHandle] = []


class Ops:
    """Records chosen operations of some models.

    Args:
        names: globs over the names of operations.
        returned: takes what an operation returned, and whether its module is in training.
        guard: wraps what is done in the training.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        returned: Callable[[Counted, list[tuple[str, Tensor]], bool], None],
        guard: Guard,
    ) -> None:
        self._names = tuple(map(_plain, names))
        self._returned = returned
        self._guard = guard
        self._owners: dict[int, Owner] = {}
        self._wanted = False
        self._mode = _Mode(self)
        self._under_way = _UnderWay()
        self._operations: dict[Any, str | None] = {}
        self._left_out: Callable[[str], frozenset[str]] = nothing

    def choose(self, layers: Iterable[Layer], globs: tuple[str, ...]) -> None:
        """Record inside of these modules from now on."""
        known, self._owners = self._owners, {}
        earlier = {owner.name: owner for owner in known.values()}
        for layer in layers:
            if layer.why_not is None and layer.matches(globs) and not _is_leaf_of_torch(layer):
                owner = known.get(id(layer.module))
                if owner is not None and owner.module() is layer.module and owner.name == layer.name:
                    del known[id(layer.module)]
                else:
                    owner = Owner(layer, earlier.get(layer.name))
                self._owners[id(layer.module)] = owner
        for owner in known.values():
            _take_off(owner)
        if self._wanted:
            self._put_on()

    def forget_streams(self) -> None:
        """Ask for the number of each stream again."""
        for owner in self._owners.values():
            for operation in owner.operations.values():
                operation.streams.clear()

    def leave_out(self, left_out: Callable[[str], frozenset[str]]) -> None:
        """Record no more of each operation than a function, which is given its name, leaves in."""
        self._left_out = left_out
        for owner in self._owners.values():
            for operation in owner.operations.values():
                operation.left_out = left_out(operation.name)

    def install(self) -> None:
        """Begin a step that is recorded."""
        self._wanted = True
        self._put_on()

    def _put_on(self) -> None:
        for owner in self._owners.values():
            module = owner.module()
            if module is not None and not owner.handles:
                before, after = (_Hook(owner, do, self._guard.fault) for do in (self._enter, self._leave))
                owner.handles = [
                    module.register_forward_pre_hook(before, prepend=True),
                    module.register_forward_hook(after, always_call=True),
                ]

    def remove(self) -> None:
        """Take the hooks and the mode off; where a module is being called, when that call ends."""
        self._wanted = False
        if not any(self._is_called(frame) for frame in sys._current_frames().values()):
            self._take_off()
            _drop(self._mode)

    def _take_off(self) -> None:
        for owner in self._owners.values():
            _take_off(owner)

    def _is_called(self, frame: FrameType | None) -> bool:
        while (frame := _calling(frame)) is not None:
            if id(frame.f_locals["self"]) in self._owners:
                return True
            frame = frame.f_back
        return False

    def _enter(self, owner: Owner) -> None:
        stack = self._under_way.stack
        if stack:
            own = _calling(sys._getframe(1))
            if own is None or not self._is_called(own.f_back):
                stack.clear()  # an interrupted pass has left it
        if not stack:
            _drop(self._mode)
            _push_below(self._mode)
        stack.append((owner, {}))

    def _leave(self, owner: Owner) -> None:
        stack = self._under_way.stack
        for at in range(len(stack) - 1, -1, -1):
            if stack[at][0] is owner:
                del stack[at:]
                break
        if not stack:
            _drop(self._mode)
            # While an exception passes PyTorch goes through the dictionary that they are in.
            if not self._wanted and sys.exc_info()[0] is None:
                self._take_off()

    def operation(self, function: Any) -> str | None:
        """Return the name under which a function is recorded; None if it is not wanted."""
        try:
            return self._operations[function]
        except KeyError:
            name = name_of(function)
            wanted = name is not None and any(fnmatch.fnmatchcase(name, glob) for glob in self._names)
            return self._operations.setdefault(function, name if wanted else None)

    def returned(self, operation: str, entered: tuple[int, int], result: Any) -> None:
        """Report what an operation returned, if a module of ours was being called."""
        if self._wanted:
            self._guard.call(self._report, operation, entered, result)

    def _report(self, operation: str, entered: tuple[int, int], result: Any) -> None:
        frame = _calling(sys._getframe(1))
        if frame is None:
            return
        module = frame.f_locals["self"]
        owner = self._owners.get(id(module))
        counts = next((counts for one, counts in reversed(self._under_way.stack) if one is owner), None)
        if owner is None or counts is None:
            return
        number = counts.get(operation, 0)
        counts[operation] = number + 1
        tensors = list(flatten(result))
        if not tensors or _transforms() is not None:
            return
        key = (operation, number)
        counted = owner.operations.get(key)
        if counted is None:
            counted = owner.operations[key] = Counted(f"{owner.name}/{operation}#{number}", owner.root)
            counted.left_out = self._left_out(counted.name)
        counted.entered = entered
        self._returned(counted, tensors, module.training)


class _Mode(TorchFunctionMode):
    """Is told of each function that is called with tensors."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self._ops = weakref.ref(ops)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ops = self._ops()
        operation = ops.operation(function) if ops is not None else None
        if ops is None or operation is None or _is_ours(sys._getframe(1)):
            return function(*args, **(kwargs or {}))
        entered = threading.get_ident(), _sequence_number()
        result = function(*args, **(kwargs or {}))
        ops.returned(operation, entered, result)
        return result


class _UnderWay(threading.local):
    """The calls that are under way in this thread, the innermost last, with how often each operation has run in it."""

    def __init__(self) -> None:
        self.stack: list[tuple[Owner, dict[str, int]]] = []


class _Hook(Uncopied):
    """A hook on a module, which calls a function with its owner."""

    def __init__(self, owner: Owner, function: Callable[[Owner], None], fault: Callable[[Exception], None]) -> None:
        self._owner = owner
        self._function = function
        self._fault = fault

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if self._owner.module() is module:
            try:
                self._function(self._owner)
            except Exception as error:
                self._fault(error)


def check(names: tuple[str, ...]) -> None:
    """Raise AttachError where a name is no operation of torch."""
    for name in names:
        if not set("*?[") & set(name) and not any(hasattr(space, name) for space in _NAMESPACES):
            known = {found for space in (functional, Tensor) for found in dir(space) if not found.startswith("_")}
            near = difflib.get_close_matches(name, sorted(known), n=3) or ["relu", "softmax", "matmul"]
            raise AttachError(f"ops={name!r} is no function of torch; there are, for example, {', '.join(near)}.")


def name_of(function: Any) -> str | None:
    """Return the name of a function without what tells its variants apart; None if it computes nothing."""
    name: str = getattr(function, "__name__", "")
    return None if not name or name in _NO_OPERATIONS else _plain(name)


def _plain(name: str) -> str:
    """Return `add` for `add_`, `__add__`, `__radd__` and `__iadd__`."""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        reflected = name[1:] if name[:1] in ("r", "i") and name[1:] in _BINARY else name
        return {"truediv": "div", "mod": "remainder"}.get(reflected, reflected)
    return name if name.startswith("_") else name.rstrip("_")


def _is_leaf_of_torch(layer: Layer) -> bool:
    return isinstance(layer.module, torch.jit.ScriptModule) or (
        layer.leaf and type(layer.module).__module__.startswith("torch.nn.")
    )


def _take_off(owner: Owner) -> None:
    for handle in owner.handles:
        handle.remove()
    owner.handles = []


def _is_ours(frame: FrameType) -> bool:
    """Whether it is our own hooks that compute something, and not the model."""
    return str(frame.f_globals.get("__name__")).startswith("hookrec.")


def _calling(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame, from this one outwards, in which a module is called."""
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame


def _push_below(mode: TorchFunctionMode) -> None:
    """Put a mode below all others of this thread."""
    above = _pop_all()
    for each in (mode, *above):
        _push_mode(each)  # type: ignore[no-untyped-call]


def _drop(mode: TorchFunctionMode) -> None:
    """Take a mode out of those of this thread, wherever it lies."""
    above = _pop_all()
    for each in above:
        if each is not mode:
            _push_mode(each)  # type: ignore[no-untyped-call]


def _pop_all() -> list[TorchFunctionMode]:
    """Take all modes of this thread off; the lowest is first."""
    count = torch._C._len_torch_function_stack()
    modes: list[TorchFunctionMode] = [_pop_mode() for _ in range(count)]  # type: ignore[no-untyped-call]
    return modes[::-1]
