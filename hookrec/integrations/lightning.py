"""What the `Trainer` of Lightning tells its callbacks, by whichever of its two names it was installed.

A `LightningModule` is a bag around the models: `training_step` is called, itself it may never be. So its children are
recorded, each by its name in it; layers have the same names either way, and each child counts its own forward passes.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from hookrec.integrations import log, pause, resume, resumed
from hookrec.recorder import Recorder, attach

if TYPE_CHECKING:
    from lightning.pytorch import Callback
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        from pytorch_lightning import Callback


class HookrecCallback(Callback):
    """Records the training of a `Trainer`: `Trainer(..., callbacks=[HookrecCallback("runs/a")])`.

    Sanity checks and validation are left out. What the module logs is in the trace as scalars, as often as Lightning
    logs. With `resume=True` a training that goes on from a checkpoint goes on in its trace, at that step (where the
    module optimizes by hand, after the last step of the trace). Without, the scalar `global_step` says which one step 0
    is.

    Args:
        path: the directory of the trace.
        options: what else `hookrec.attach` takes.

    Attributes:
        recorder: the recorder, from the beginning of the training on.
    """

    def __init__(self, path: Any, **options: Any) -> None:
        self._path = path
        self._options = options
        self._steps = 0
        self._seen: dict[str, Any] = {}
        self._said: set[str] = set()  # of the step that ended last
        self.recorder: Recorder | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record: sanity checks are over."""
        # Of several optimizers Lightning counts each step, and we those of the first.
        options = resumed(self._options, trainer.global_step) if pl_module.automatic_optimization else self._options
        self.recorder = attach(_models_of(pl_module), self._path, **options)
        self._steps, self._seen, self._said = self.recorder.steps, dict(trainer.logged_metrics), set()
        if trainer.global_step != self.recorder.steps:
            self.recorder.log(global_step=trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Log as often as Lightning does, since to read a number is to wait for the device."""
        if self.recorder is not None and self.recorder.active and self.recorder.steps > self._steps:
            self._steps = self.recorder.steps
            self._said.clear()
            if trainer.log_every_n_steps and self._steps % trainer.log_every_n_steps == 0:
                self._log(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Log what the last epoch came to."""
        self._log(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Leave the validation out."""
        pause(self.recorder)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Log what it came to, and go on."""
        self._log(trainer)
        resume(self.recorder)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Seal the trace."""
        self._log(trainer)
        if self.recorder is not None:
            self.recorder.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Seal the trace, and say why."""
        if self.recorder is not None:
            self.recorder.__exit__(type(exception), exception, exception.__traceback__)

    def _log(self, trainer: Any) -> None:
        if self.recorder is not None and self.recorder.active:
            # Old values stay there, as the same objects for the most part, and those of a step for a second look.
            now = dict(trainer.logged_metrics)
            new = {n: value for n, value in now.items() if value is not self._seen.get(n) and n not in self._said}
            log(self.recorder, new)
            self._seen = now
            self._said |= new.keys()


def _models_of(module: nn.Module) -> nn.Module | Mapping[str, nn.Module]:
    children = dict(module.named_children())
    alone = any(True for _ in module.parameters(recurse=False))
    return module if alone or not children else children
