"""A flight recorder and debugger for PyTorch training.

    import hookrec

    with hookrec.attach(model, "runs/a") as rec:
        train(model)

Names are loaded when they are used: the writer process and the command line import this package without torch.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookrec.control import listen as listen
    from hookrec.errors import AttachError as AttachError
    from hookrec.errors import DetachedError as DetachedError
    from hookrec.errors import HookrecError as HookrecError
    from hookrec.errors import HookrecWarning as HookrecWarning
    from hookrec.recorder import Recorder as Recorder
    from hookrec.recorder import attach as attach

__version__ = "0.1.0"
__all__ = ["AttachError", "DetachedError", "HookrecError", "HookrecWarning", "Recorder", "attach", "listen"]

_PLACES = {"Recorder": "recorder", "attach": "recorder", "listen": "control"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hookrec' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"hookrec.{_PLACES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


if os.environ.get("HOOKREC_LISTEN", "0") not in ("", "0"):
    from hookrec.watch_import import ImportWatch

    # Only where torch is: the writer and the command line import this package as well.
    ImportWatch("torch", lambda: __getattr__("listen")()).begin()
