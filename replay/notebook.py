"""How a trace and a selection look as the last line of a notebook's cell: small tables of HTML.

Names come from the trace, which may come from anybody, so all text is escaped.
"""

from html import escape
from typing import TYPE_CHECKING, Any

from replay.errors import ReplayError

if TYPE_CHECKING:
    from replay.selection import Selection
    from replay.trace import Trace

_ROWS = 20
_COLUMNS = ("step", "layer", "kind", "call", "shape", "n_nan", "min", "max", "mean", "std", "l2")


def trace_in_words(trace: "Trace") -> str:
    """Return what a trace is, in a line; never an error, since debuggers and tracebacks ask for it."""
    try:
        steps = trace.steps
        which = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
        return f"{trace.status}, {which}, {len(trace.layers):,} layers, {trace.count:,} records"
    except (ReplayError, OSError) as error:
        return f"cannot be read: {error}"


def trace_as_html(trace: "Trace") -> str:
    """Return a table of what is in a trace."""
    facts = {
        "trace": str(trace.path),
        "what": trace_in_words(trace),
        "kinds": ", ".join(trace.kinds),
        "ended": ", ".join(f"rank {rank}: {end['how']}" for rank, end in trace.endings.items()),
        "notes": f"{len(trace.notes):,}" if trace.notes else "",
    }
    rows = "".join(f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in facts.items() if value)
    return f"<table>{rows}</table>"


def selection_as_html(selection: "Selection") -> str:
    """Return the first records of a selection as a table, and how many there are."""
    table = selection.stats()
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(_cell(record[name]))}</td>' for name in _COLUMNS)}</tr>"
        for record in table.slice(0, _ROWS).to_pylist()
    )
    more = f", of which the first {_ROWS}" if len(table) > _ROWS else ""
    return f"<p>{len(table):,} records{more}</p><table><tr>{head}</tr>{rows}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "×".join(map(str, value)) or "scalar"
    return str(value)
