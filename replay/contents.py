"""What is recorded, in a line for all records that are alike: what `replay ls` lists.

The log is counted by stream, so that memory follows the streams and not the records. Streams that differ in nothing
that a reader sees, of several ranks or of a plan that was changed, are one line.
"""

from typing import Any

from replay.filters import Names
from replay.trace import Trace

_ALIKE = ("layer", "kind", "path", "dtype", "shape", "stored_dtype", "stored_shape")
_COUNTED = "rank, stream, count(*) as records, count(*) filter (kept) as tensors, min(step) as first, max(step) as last"
_FEW_SHAPES = 3


def contents(trace: Trace, layers: Names = None, kinds: Names = None, where: str | None = None) -> list[dict[str, Any]]:
    """Return lines in the order of the streams: layer, kind, path, dtype, shape, records, tensors, first and last step.

    Dtype and shape are those of the recorded tensors; `stored_dtype` and `stored_shape` are what the trace has of each,
    where the plan stores a part.

    Raises:
        BadQuery: a filter cannot be understood, or a glob matches nothing that there is.
    """
    counted = trace.columns(_COUNTED, layers, kinds, where=where, further="group by 1, 2 order by 1, 2").to_pylist()
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for count in counted:
        stream = trace.streams(count["rank"])[count["stream"]]
        key = (stream.layer, stream.kind, stream.path, *stream.whole, stream.dtype, stream.shape)
        line = found.setdefault(
            key, {**dict(zip(_ALIKE, key, strict=True)), "records": 0, "tensors": 0, **_span(count)}
        )
        joined = _joined([line, count])
        line |= joined
    return list(found.values())


def with_few_shapes(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return lines that differ in shape alone as one, where they are more than a reader wants to see."""
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        alike.setdefault(tuple(line[name] for name in ("layer", "kind", "path", "dtype", "stored_dtype")), []).append(
            line
        )
    joined = []
    for same in alike.values():
        many = f"{len(same)} shapes"
        joined += (
            same if len(same) <= _FEW_SHAPES else [{**same[0], "shape": many, "stored_shape": many, **_joined(same)}]
        )
    return joined


def _span(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in ("first", "last")}


def _joined(lines: list[dict[str, Any]]) -> dict[str, Any]:
    sums = {name: sum(line[name] for line in lines) for name in ("records", "tensors")}
    return {**sums, "first": min(line["first"] for line in lines), "last": max(line["last"] for line in lines)}
