"""What an `Engine` of Ignite tells its handlers, and how it treats errors: it raises them only if no handler is there
for `EXCEPTION_RAISED`.
"""

from collections.abc import Mapping
from typing import Any, Self

from ignite.engine import Engine, Events
from torch import nn

from hookrec.integrations import log, pause, resume
from hookrec.recorder import Recorder, attach


class HookrecHandler:
    """Records the training of an engine: `HookrecHandler(model, "runs/a").attach(trainer, evaluator)`.

    What the engine's function returns is in the trace as scalars: a number as `loss`, of a dict each number by its
    name; and so are the engine's metrics when an epoch has ended, and the metrics of evaluators.

    Args:
        model: a model, or several by name.
        path: the directory of the trace.
        options: what else `hookrec.attach` takes.

    Attributes:
        recorder: the recorder, from the beginning of the training on.
    """

    def __init__(self, model: nn.Module | Mapping[str, nn.Module], path: Any, **options: Any) -> None:
        self._model = model
        self._path = path
        self._options = options
        self._steps = 0
        self.recorder: Recorder | None = None

    def attach(self, trainer: Engine, *evaluators: Engine) -> Self:
        """Record what an engine does whenever it runs.

        Args:
            trainer: the engine.
            evaluators: engines that run the same models meanwhile, which is left out.
        """
        trainer.add_event_handler(Events.STARTED, self._begin)
        trainer.add_event_handler(Events.ITERATION_STARTED, self._resume)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._log_output)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, self._log_metrics)
        trainer.add_event_handler(Events.COMPLETED, self._end)
        trainer.add_event_handler(Events.EXCEPTION_RAISED, self._fail)
        for evaluator in evaluators:
            evaluator.add_event_handler(Events.STARTED, self._pause)
            evaluator.add_event_handler(Events.COMPLETED, self._log_metrics)
        return self

    def _begin(self, engine: Engine) -> None:
        self.recorder = attach(self._model, self._path, **self._options)
        self._steps = self.recorder.steps
        if engine.state.iteration:
            self.recorder.log(iteration=engine.state.iteration)

    def _log_output(self, engine: Engine) -> None:
        # Of several batches to a step, as gradients are accumulated, the last one's loss is the step's.
        if self.recorder is not None and self.recorder.steps > self._steps:
            self._steps = self.recorder.steps
            output = engine.state.output
            log(self.recorder, output if isinstance(output, Mapping) else {"loss": output})

    def _log_metrics(self, engine: Engine) -> None:
        log(self.recorder, engine.state.metrics)

    def _pause(self, engine: Engine) -> None:
        pause(self.recorder)

    def _resume(self, engine: Engine) -> None:
        resume(self.recorder)

    def _end(self, engine: Engine) -> None:
        if self.recorder is not None:
            self.recorder.detach()

    def _fail(self, engine: Engine, error: BaseException) -> None:
        if self.recorder is not None:
            self.recorder.__exit__(type(error), error, error.__traceback__)
        if len(engine._event_handlers[Events.EXCEPTION_RAISED]) == 1:
            raise error  # as the engine would without us; other handlers decide that by themselves
