"""How a script is recorded that knows nothing of us.

Optimizers tell when they are made, models when they are called first; then `attach` gets what any user would give it.
Nothing here raises into the training. If nothing comes of it, the last line that the process writes says why.
"""

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hookrec.errors import AttachError, warn
from hookrec.watch_import import ImportWatch

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hookrec.recorder import Recorder
    from hookrec.trained import FirstCall, Roots


class AutoRecord:
    """Attaches to the models of a script once they are trained.

    Args:
        path: the directory of the trace.
        options: what `attach` takes besides.
        say: is given the line for the end; None for silence.
        stop_after: steps after which the script is ended by a SystemExit; None to let it run.
    """

    def __init__(
        self,
        path: str,
        options: Mapping[str, Any],
        say: Callable[[str], None] | None,
        stop_after: int | None = None,
    ) -> None:
        self._path = path
        self._options = options
        self._say = say
        self._stop_after = stop_after
        self._pid = os.getpid()
        self._made = 0
        self._late = 0
        self._first: FirstCall | None = None
        self._failed = False
        self.recorder: Recorder | None = None
        atexit.register(self._at_exit)
        ImportWatch("torch.optim.optimizer", self._watch_optimizers).begin()

    def _watch_optimizers(self) -> None:
        """Be told of each optimizer that is made; the hooks that PyTorch has come after the first forward pass."""
        from torch.optim import optimizer

        optimizer.Optimizer.__init__ = tells(optimizer.Optimizer.__init__, self._optimizer_made)  # type: ignore[method-assign]

    def _optimizer_made(self, optimizer: "Optimizer") -> None:
        if os.getpid() != self._pid or self._failed:
            return
        try:
            from hookrec.trained import FirstCall

            self._made += 1
            if self._first is None:
                self._first = FirstCall(self._begin)
            if self.recorder is None:
                self._first.expect([optimizer])
            elif not self.recorder.holds(p for group in optimizer.param_groups for p in group["params"]):
                self._late += 1
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _begin(self, roots: "Roots") -> None:
        if os.getpid() != self._pid:
            return
        from hookrec.recorder import attach

        try:
            model = roots[""] if list(roots) == [""] else roots
            self.recorder = attach(model, self._path, **self._options)
            if self._say is not None:
                self.recorder.at_boundary(self._say_cost)
            if self._stop_after is not None:
                self.recorder.at_boundary(self._stop)
        except AttachError as error:
            self._fail(str(error))
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _say_cost(self) -> None:
        """Say between two steps what the first recorded one was, and ask to be called again if none was yet."""
        assert self.recorder is not None
        assert self._say is not None
        if self.recorder.cost is not None:
            self._say(self.recorder.cost)
        elif self.recorder.active:
            self.recorder.at_boundary(self._say_cost)

    def _stop(self) -> None:
        """End the script between two steps if it has had enough of them, and ask to be called again if not."""
        assert self.recorder is not None
        assert self._stop_after is not None
        if not self.recorder.active:
            return
        if self.recorder.steps < self._stop_after:
            self.recorder.at_boundary(self._stop)
            return
        self.recorder.finish()()
        raise SystemExit(0)

    def _fail(self, why: str) -> None:
        self._failed = True
        if self._first is not None:
            self._first.close()
        warn(f"this training is not recorded. {why}")

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or self._failed or self._say is None:
            return
        if self.recorder is None:
            self._say(f"nothing was recorded: {self._why_nothing()}")
        else:
            steps = self.recorder.steps - self.recorder.first_step
            also = (
                f"; {self._late} optimizers of other models were made later, which are not in it" if self._late else ""
            )
            self._say(f"recorded {steps} step{'s' if steps != 1 else ''}{also}. Next: replay info {self._path}")

    def _why_nothing(self) -> str:
        if "torch.optim.optimizer" not in sys.modules:
            return "the script never imported torch."
        if not self._made:
            return (
                "no torch optimizer was made. If the script starts other processes, as launchers do, put hookrec "
                "behind the launcher: torchrun ... -m hookrec run -o DIR SCRIPT. If it trains by other means, use "
                "hookrec.attach(model, DIR, clock='forward') in it."
            )
        if self._first is None or not self._first.expected:
            return "what the optimizers train is in no torch.nn.Module."
        return "no module was called after its optimizer had been made."


def tells(initialise: Callable[..., None], made: Callable[[Any], None]) -> Callable[..., None]:
    """Return an `__init__` that tells of what it has made."""
    import functools

    @functools.wraps(initialise)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        made(self)

    return __init__
