"""What the `Trainer` of transformers tells its callbacks, and what it does not: that an evaluation begins, and that the
training has failed.

An evaluation begins behind an event that asked for it, and has come to its end when the next step begins. A failure is
seen by the `with` block that the callback may be used in, or by the end of the process.
"""

from types import TracebackType
from typing import Any, Self

from transformers import TrainerCallback

from hookrec.integrations import log, pause, resume, resumed
from hookrec.recorder import Recorder, attach


class HookrecCallback(TrainerCallback):
    """Records the training of a `Trainer`: `Trainer(..., callbacks=[HookrecCallback("runs/a")])`.

    Evaluations are left out. What the `Trainer` logs is in the trace as scalars. With `resume=True` a training that
    goes on from a checkpoint goes on in its trace, at that step. Without, the scalar `global_step` says which one step
    0 is.

    Used in a `with` statement, an exception that leaves it is noted as the end of the trace. Without one that is so if
    the exception ends the process.

    Args:
        path: the directory of the trace.
        options: what else `hookrec.attach` takes.

    Attributes:
        recorder: the recorder, from the beginning of the training on.
    """

    def __init__(self, path: Any, **options: Any) -> None:
        self._path = path
        self._options = options
        self.recorder: Recorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin to record; where the `Trainer` begins again, as with `auto_find_batch_size`, go on."""
        model = more["model"]
        if self.recorder is not None and not self.recorder.holds(model.parameters()):
            self.recorder.detach()  # of a training that failed, and nobody said so
        if self.recorder is None or not self.recorder.active:
            self.recorder = attach(model, self._path, **resumed(self._options, state.global_step))
            if state.global_step != self.recorder.steps:
                self.recorder.log(global_step=state.global_step)
        if args.eval_on_start:
            pause(self.recorder)

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Record again: an evaluation is over."""
        resume(self.recorder)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Leave the evaluation out that this step, or the epoch, asks for."""
        if control.should_evaluate:
            pause(self.recorder)

    on_epoch_end = on_step_end

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Leave out the rest of an evaluation that was not announced."""
        pause(self.recorder)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Take what the `Trainer` logs."""
        log(self.recorder, logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Seal the trace."""
        if self.recorder is not None:
            self.recorder.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.recorder is not None:
            self.recorder.__exit__(kind, error, traceback)
