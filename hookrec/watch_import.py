"""How to do something as soon as a module has been imported, without importing it.

To import torch before the training's own code does would change the training: variables such as OMP_NUM_THREADS are
read when its libraries are loaded, and a script may set them in its first lines. `torch._dynamo` takes a second, which
a training that does not compile must not pay. So a finder at the front of `sys.meta_path` waits for the name, lets the
others find the module, and calls back once its code has run.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class ImportWatch(importlib.abc.MetaPathFinder):
    """Calls a function once a module has been imported.

    Args:
        name: of the module.
        imported: is called once, on the thread that imports.
    """

    def __init__(self, name: str, imported: Callable[[], None]) -> None:
        self._name = name
        self._imported = imported

    def begin(self) -> None:
        """Call the function now if the module is there already, else wait for it."""
        if self._name in sys.modules:
            self._imported()
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as others do, and see to it that its loader calls back."""
        if name != self._name:
            return None
        self.end()
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run, imported = spec.loader.exec_module, self._imported

            def exec_module(module: ModuleType) -> None:
                run(module)
                imported()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
