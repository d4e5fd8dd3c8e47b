"""Hooks that stay behind when a model is copied or saved.

What sits in a module's dictionary of hooks is copied by `copy.deepcopy` (EMA, best-model snapshots) and pickled by
`torch.save(model)`. A copy must not report under the original's names, and must load where hookrec is not installed: it
gets a method of the standard library that takes any arguments and returns None.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class Uncopied:
    """A callable that turns into one that does nothing when it is copied or pickled."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")
