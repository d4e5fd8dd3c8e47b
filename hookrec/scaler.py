"""How the scale of a `GradScaler`, and the steps that it skips, become known.

Where a gradient is not finite, `GradScaler.step` does not call the optimizer, so no hook of the optimizer can tell that
a step has ended. PyTorch has no hook there; so the method is replaced while somebody watches, by one that calls it.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer

Watch = Callable[[GradScaler, Optimizer], None]

_watching: dict[object, tuple[Watch, Watch]] = {}
_original: Callable[..., Any] | None = None


class ScalerWatch:
    """Calls `before` when a scaler is about to step an optimizer, and `after` when it has stepped or skipped it."""

    def __init__(self, before: Watch, after: Watch) -> None:
        global _original
        if not _watching:
            _original = GradScaler.step
            GradScaler.step = _watched(_original)  # type: ignore[method-assign]
        _watching[self] = (before, after)

    def close(self) -> None:
        """Watch no longer; the last one puts the method back, unless somebody else has replaced it too."""
        _watching.pop(self, None)
        if not _watching and _original is not None and getattr(GradScaler.step, "__wrapped__", None) is _original:
            GradScaler.step = _original  # type: ignore[method-assign, assignment]


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        watching = list(_watching.values()) if self.is_enabled() else []
        for before, _ in watching:
            before(self, optimizer)
        result = original(self, optimizer, *args, **kwargs)
        for _, after in watching:
            after(self, optimizer)
        return result

    return step
