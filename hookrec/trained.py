"""Which models a training trains, found in a process that never told us.

An optimizer knows parameters, not modules. Whoever owns these parameters is found among all modules that live, through
the garbage collector: modules come into being in ways that no hook sees (copies, pickles, `from_pretrained`), and all
of them end up there. From the owners the way goes up to the modules that nobody contains. A model may still be inside
of something that is never called (a LightningModule, a bag of a generator and a discriminator, a wrapper that was
dropped), so the last word has the first call: the root is the outermost module that is called and has all that is
trained.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hookrec.compiled import EagerSteps
from hookrec.errors import warn
from hookrec.layers import children, named_modules, parameter_ids
from hookrec.uncopied import Uncopied

Roots = dict[str, nn.Module]
"""Models by name, as `attach` takes them."""


def optimizers_alive() -> list[Optimizer]:
    """Return the optimizers of this process that have parameters."""
    return [found for found in _alive(Optimizer) if vars(found).get("param_groups")]


def _alive(kind: type) -> Iterator[Any]:
    for found in gc.get_objects():
        if issubclass(type(found), kind):  # isinstance would ask the object, which may be anybody's proxy
            yield found


class FirstCall:
    """Waits for the first call of a module that is trained, and says then which models there are.

    Hooks are on the modules themselves, since global ones make torch.compile warn; they come off before anybody is
    told. Until then compiled code runs eagerly, as hooks on it would not be called.

    Args:
        told: is called with the roots at the beginning of the first call, on the thread that calls. The hooks that it
            puts on the called module are called as if they had been there.
    """

    def __init__(self, told: Callable[[Roots], None]) -> None:
        self._told = told
        self._tops: dict[int, weakref.ref[nn.Module]] = {}
        self._trained: set[int] = set()
        self._hooks: list[_CallHook] = []
        self._eager = EagerSteps()

    @property
    def expected(self) -> int:
        """How many models are waited for."""
        return len(self._tops)

    def expect(self, optimizers: Iterable[Optimizer]) -> bool:
        """Wait for the models that some optimizers train, too; return whether there are any."""
        trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        tops = _outermost(trained)
        self._trained |= trained
        hooked = {id(hook.module()) for hook in self._hooks}
        for top in tops:
            self._tops[id(top)] = weakref.ref(top)
            for _, module in named_modules(top):
                if id(module) not in hooked:
                    self._hooks.append(_CallHook(module, self._called))
        if self._hooks:
            self._eager.enter()
        return bool(tops)

    def close(self) -> None:
        """Wait no longer."""
        for hook in self._hooks:
            hook.handle.remove()
        self._hooks.clear()
        self._eager.leave()

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        try:
            self._tell(module, args, kwargs)
        except Exception as error:
            warn(f"this training is not recorded, and goes on. {type(error).__name__}: {error}")

    def _tell(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.close()
        before = set(module._forward_pre_hooks)
        self._told(self._roots(module))
        # PyTorch has listed the hooks of this call already, so those that have come are called by us.
        for number in [number for number in module._forward_pre_hooks if number not in before]:
            more = (kwargs,) if number in module._forward_pre_hooks_with_kwargs else ()
            module._forward_pre_hooks[number](module, args, *more)

    def _roots(self, called: nn.Module) -> Roots:
        roots: list[nn.Module] = []
        inside = parameter_ids([called])
        for reference in self._tops.values():
            top = reference()
            if top is not None:
                whole = self._trained & parameter_ids([top]) <= inside and any(
                    m is called for _, m in named_modules(top)
                )
                root = called if whole else top
                if not any(root is other for other in roots):
                    roots.append(root)
        return {"": roots[0]} if len(roots) == 1 else _named(roots)


class _CallHook(Uncopied):
    """A hook on one module that tells of its call."""

    def __init__(self, module: nn.Module, called: Callable[[nn.Module, Any, Any], None]) -> None:
        self.module = weakref.ref(module)
        self._called = called
        self.handle = module.register_forward_pre_hook(self, prepend=True, with_kwargs=True)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.module() is module:
            self._called(module, args, kwargs)


def _outermost(trained: set[int]) -> list[nn.Module]:
    """The modules that own these parameters, or contain who does, and that no module contains; in order of creation."""
    # One that is half made has no parameters yet; it is none of ours.
    modules = [module for module in _alive(nn.Module) if "_parameters" in vars(module) and "_modules" in vars(module)]
    containers: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in vars(module)["_modules"].values():
            containers.setdefault(id(child), []).append(module)
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    above = [module for module in modules if any(id(p) in trained for p in vars(module)["_parameters"].values())]
    while above:
        module = above.pop()
        if id(module) not in seen:
            seen.add(id(module))
            if id(module) in containers:
                above += containers[id(module)]
            else:
                found[id(module)] = module
    return [module for module in modules if id(module) in found]


def _named(roots: list[nn.Module]) -> Roots:
    """Name several models as the code that calls them does, else by their classes."""
    named: Roots = {}
    for root in roots:
        name = _variable(root) or type(root).__name__
        unique, number = name, 2
        while unique in named:
            unique, number = f"{name}{number}", number + 1
        named[unique] = root
    return named


def _variable(root: nn.Module) -> str | None:
    """The name of a variable, or of an attribute of a `self`, that holds a model on the way to its call."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Our own variables and PyTorch's are no names of a user's.
        if not str(frame.f_globals.get("__name__")).startswith(("hookrec.", "torch.")):
            values = frame.f_locals
            owner = values.get("self")
            attributes = getattr(owner, "__dict__", {}) if not isinstance(owner, nn.Module) else {}
            for names in (values, attributes, frame.f_globals):
                for name, value in list(names.items()):
                    if value is root or (str(type(value).__module__).startswith("torch.") and _holds(value, root)):
                        return str(name)
        frame = frame.f_back
    return None


def _holds(wrapper: object, root: nn.Module) -> bool:
    return isinstance(wrapper, nn.Module) and [child is root for child in children(wrapper).values()] == [True]
