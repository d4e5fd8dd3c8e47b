"""What Accelerate adds to a loop that is the user's own: a wrapper around the model, and trackers of what is logged."""

import contextlib
from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch import nn

from hookrec.integrations import log
from hookrec.recorder import Recorder, attach


@contextlib.contextmanager
def recorded(accelerator: Accelerator, model: nn.Module, path: Any, **options: Any) -> Iterator[Recorder]:
    """Record a model inside of a `with` block, and what is logged there.

    What is given to `accelerator.log` is in the trace as scalars. An exception that leaves the block is noted as the
    end of the trace.

    Args:
        accelerator: the accelerator.
        model: the model, before or after `accelerator.prepare`.
        path: the directory of the trace.
        options: what else `hookrec.attach` takes.
    """
    with attach(accelerator.unwrap_model(model), path, **options) as recorder:
        tracker = _Tracker(recorder)
        accelerator.trackers.append(tracker)
        try:
            yield recorder
        finally:
            accelerator.trackers.remove(tracker)


class _Tracker(GeneralTracker):
    """Gives to a recorder what is logged."""

    name = "hookrec"
    requires_logging_directory = False

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @property
    def tracker(self) -> Recorder:
        """The recorder."""
        return self._recorder

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        """Take numbers."""
        log(self._recorder, values)
