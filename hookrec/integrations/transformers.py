"""What the `Trainer` of transformers tells its callbacks, and what it does not: that an evaluation begins, and that the
training has failed.

An evaluation begins behind an event that asked for it, and has come to its end when the next step begins. A failure is
seen by the `with` block that the callback may be used in, or by the end of the process.
"""

from types import TracebackType
from typing import Any, Self

from transformers import TrainerCallback

from hookrec.integrations import going_on, numbers
from hookrec.recorder import Recorder, attach


class HookrecCallback(TrainerCallback):
    """Records the training of a `Trainer`: `Trainer(..., callbacks=[HookrecCallback("runs/a")])`.

    Evaluations are left out. What the `Trainer` logs is in the trace as scalars, and so is `global_step`, once, if the
    training was resumed from a checkpoint: step 0 of the trace is that one. With `resume=True` it goes on in the
    trace at `path` from the step of the checkpoint, or begins it there.

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
        if self.recorder is None or not self.recorder.active:
            self.recorder = attach(more["model"], self._path, **going_on(self._options, state.global_step))
            if state.global_step and not self.recorder.first_step:
                self.recorder.log(global_step=state.global_step)
        if args.eval_on_start:
            self.recorder.pause()

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Record again: an evaluation is over."""
        if self.recorder is not None:
            self.recorder.resume()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Leave the evaluation out that this step, or the epoch, asks for."""
        if control.should_evaluate and self.recorder is not None:
            self.recorder.pause()

    on_epoch_end = on_step_end

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Leave out the rest of an evaluation that was not announced."""
        if self.recorder is not None and self.recorder.active:
            self.recorder.pause()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Take what the `Trainer` logs."""
        if self.recorder is not None and self.recorder.active:
            self.recorder.log(**numbers(logs or {}))

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
