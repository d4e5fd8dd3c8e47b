"""How compiled models are recorded: sampled steps run eagerly, the others stay compiled.

Code that torch.compile has made does not call hooks that are put on later, and says nothing. With the stance
"force_eager" the original Python runs instead, nothing is compiled, and nothing is compiled again afterwards. The
stance lives in `torch._dynamo`, whose import takes a second and a hundred megabytes, which a training that does not
compile must not pay: so it is set at once where dynamo is loaded, and otherwise as soon as somebody
imports it.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

_DYNAMO = "torch._dynamo"


class EagerSteps:
    """Makes compiled code run eagerly between `enter` and `leave`."""

    def __init__(self) -> None:
        self._wanted = False
        self._stance: Any = None
        self._watch = _WatchImport(self._apply)

    def enter(self) -> None:
        """Run eagerly from here on."""
        self._wanted = True
        if self._stance is None:
            if _DYNAMO in sys.modules:
                self._apply()
            elif self._watch not in sys.meta_path:
                sys.meta_path.insert(0, self._watch)

    def leave(self) -> None:
        """Run what is compiled again."""
        self._wanted = False
        if self._watch in sys.meta_path:
            sys.meta_path.remove(self._watch)
        if self._stance is not None:
            stance, self._stance = self._stance, None
            stance.__exit__(None, None, None)

    def _apply(self) -> None:
        if self._wanted and self._stance is None:
            # It takes effect when it is made; as a context manager it knows how to go back.
            self._stance = torch.compiler.set_stance("force_eager")


class _WatchImport(importlib.abc.MetaPathFinder):
    """Calls a function once `torch._dynamo` has been imported."""

    def __init__(self, imported: Any) -> None:
        self._imported = imported

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run, imported = spec.loader.exec_module, self._imported

            def exec_module(module: ModuleType) -> None:
                run(module)
                imported()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
