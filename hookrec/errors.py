"""What hookrec says when it cannot do what was asked, and the one warning it gives while training runs.

    HookrecError
    ├── AttachError      (also ValueError)     attach() cannot record this model, or not there
    ├── DaemonError                            the daemon cannot watch, or not so
    └── DetachedError    (also RuntimeError)   the recorder was detached already

After `attach` has returned, nothing of ours is fatal: a fault becomes one `HookrecWarning`, recording stops, and
the training goes on.
"""

import contextlib
import sys
import warnings


class HookrecError(Exception):
    """Whatever hookrec refuses to do."""


class AttachError(HookrecError, ValueError):
    """The model cannot be recorded, or not at this path; says what to change."""


class DaemonError(HookrecError):
    """The daemon cannot watch this folder, or not with these options; says what to change."""


class DetachedError(HookrecError, RuntimeError):
    """The recorder has been detached; what it recorded is in the trace."""


class HookrecWarning(UserWarning):
    """Something is not being recorded. The training is not concerned."""


def warn(message: str) -> None:
    """Warn, and never raise: a user may have turned warnings into errors, and ours must not end a training."""
    try:
        warnings.warn(f"hookrec: {message}", HookrecWarning, stacklevel=2)
    except Exception:
        with contextlib.suppress(Exception):  # standard error may be closed, or None
            sys.stderr.write(f"hookrec: {message}\n")
