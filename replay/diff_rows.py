"""What a comparison keeps of its records: a row each, or of each layer the worst alone.

A row takes some hundred bytes, so ten million of them take gigabytes, and a report has a line a layer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

_STRINGS = pa.dictionary(pa.int32(), pa.string())
_SCHEMA = pa.schema(
    [
        ("rank", pa.int32()),
        ("step", pa.int64()),
        ("layer_a", _STRINGS),
        ("layer_b", _STRINGS),
        ("kind", _STRINGS),
        ("call", pa.int32()),
        ("path", _STRINGS),
        ("dtype_a", _STRINGS),
        ("dtype_b", _STRINGS),
        ("compared", _STRINGS),
        ("max_abs", pa.float64()),
        ("relative", pa.float64()),
        ("cosine", pa.float64()),
        ("max_ulp", pa.uint64()),
        ("where", pa.list_(pa.int64())),
        ("unlike", pa.int64()),
        ("error", pa.float64()),
        ("tolerance", pa.float64()),
        ("within", pa.bool_()),
        ("note", _STRINGS),
    ]
)
_OF_WORST = ("step", "max_abs", "relative", "cosine", "max_ulp", "error", "tolerance", "within")
_ROWS_A_BATCH = 1 << 13


class Rows:
    """Takes what came of each record, in the order of A's execution.

    Args:
        keep: whether all rows are kept.

    Attributes:
        count: how many were taken.
        compared: how many by their tensors, statistics and shapes.
    """

    def __init__(self, *, keep: bool) -> None:
        self.count = 0
        self.compared = {"tensors": 0, "statistics": 0, "shapes": 0}
        self._keep = keep
        self._waiting: list[Mapping[str, Any]] = []
        self._batches: list[pa.RecordBatch] = []
        self._worst: dict[tuple[str, str, str], dict[str, Any]] = {}

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the columns of `replay.diff.Diff.rows`, and what else a row has."""
        self.count += len(rows)
        for row in rows:
            self.compared[row["compared"]] += 1
            self._judge(row)
        if self._keep:
            self._waiting += rows
            if len(self._waiting) >= _ROWS_A_BATCH:
                self._make_batch()

    def _judge(self, row: Mapping[str, Any]) -> None:
        key = row["layer_a"], row["kind"], row["path"]
        worst = self._worst.get(key)
        if worst is None:
            layer, kind, path = key
            facts = {"layer": layer, "kind": kind, "path": path, **dict.fromkeys(_OF_WORST)}
            self._worst[key] = worst = {**facts, "error": -1.0, "within": True, "outside": 0, "records": 0}
        worst["records"] += 1
        worst["outside"] += not row["within"]
        if (not row["within"], row["error"]) > (not worst["within"], worst["error"]):
            worst.update((name, row[name]) for name in _OF_WORST)

    def _make_batch(self) -> None:
        self._batches.append(pa.RecordBatch.from_pylist(self._waiting, _SCHEMA))
        self._waiting = []

    def table(self) -> pa.Table:
        """Return all rows, if they were kept."""
        self._make_batch()
        return pa.Table.from_batches(self._batches).unify_dictionaries()

    def worst(self) -> list[dict[str, Any]]:
        """Return the worst row of each layer, kind and path; those that differ first, then by the size of the error.

        With `records`, how many were compared, and `outside`, how many of them are out of tolerance.
        """
        return sorted(self._worst.values(), key=lambda row: (row["within"], -row["error"]))
