"""The errors of replay, all on one screen.

    ReplayError
    ├── TraceNotFound        (also LookupError)   no trace at this place
    ├── TraceTooNew                               written by a newer version of the format
    ├── TraceDamaged                              a file is not what the format says
    ├── StepNotCommitted     (also LookupError)   the step is not in the trace, or not yet
    ├── NotRecorded          (also LookupError)   the step is there, the record or its tensor is not
    ├── CannotConvert        (also ValueError)    a trace cannot be written anew, or not so
    ├── BadQuery             (also ValueError)    a filter or argument that cannot be understood
    └── MissingPackage       (also ImportError)   an optional package is needed for this

Each message says what was asked, what is there and what to do next. Look-up errors derive from
`LookupError` and not from `KeyError`, whose `str` puts the message in quotes.
"""


class ReplayError(Exception):
    """Whatever replay has to say about a trace or a question."""


class TraceNotFound(ReplayError, LookupError):
    """There is no trace at the path."""


class TraceTooNew(ReplayError):
    """The trace was written in a newer version of the format."""


class TraceDamaged(ReplayError):
    """A file of the trace is not what the format says."""


class StepNotCommitted(ReplayError, LookupError):
    """The step is not in the trace, or not yet."""


class NotRecorded(ReplayError, LookupError):
    """The step is in the trace, and this record, or its tensor, is not."""


class BadQuery(ReplayError, ValueError):
    """A filter, a name or an argument that cannot be understood."""


class CannotConvert(ReplayError, ValueError):
    """A trace cannot be written anew in this store, or at this place; says what to change."""


class MissingPackage(ReplayError, ImportError):
    """The answer needs a package that is not installed."""
