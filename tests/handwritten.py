"""Traces written by hand, a few milliseconds each: no training, no torch, any record at any place."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from replay.files import PAGE
from replay.format import KEPT, RECORD_SCHEMA, Stream
from replay.log import LogWriter
from replay.places import Places
from replay.seal import locked, seal
from replay.stores import open_writer


class Written(NamedTuple):
    """A record to be written; `values` has its dtype and shape, at most 64 KB of it."""

    layer: str
    values: np.ndarray
    step: int = 0
    kind: str = "output"
    call: int = 0
    path: str = ""


def write_trace(
    path: Path, *records: Written, tensors: bool = True, rank: int = 0, sealed: bool = True, store: str = "zarr"
) -> Path:
    """Write a rank of a trace, with or without its tensors, a commit a step."""
    directory = path / f"rank-{rank:05}"
    directory.mkdir(parents=True)
    identity = {"format": "hookrec-trace", "version": 1, "created": "2026-12-01T12:00:00.000+00:00"}
    (path / "trace.json").write_text(json.dumps({**identity, "plan": {}, "provenance": {}}))
    writer, log = open_writer(store, directory), LogWriter(directory)
    streams: dict[tuple[Any, ...], Stream] = {}
    places = Places()
    steps: dict[int, list[dict[str, Any]]] = {}
    with (directory / "streams.jsonl").open("w") as lines:
        for layer, values, step, kind, call, where in records:
            key = layer, kind, where, values.dtype.name, values.shape
            if key not in streams:
                new = Stream(len(streams), layer, kind, where, values.dtype.name, values.shape, None)
                streams[key] = places.place(new)
                lines.write(streams[key].to_json() + "\n")
                writer.add(streams[key])
            data = np.ascontiguousarray(values).tobytes()
            row = dict.fromkeys(RECORD_SCHEMA.names, 0)
            row |= {"step": step, "stream": streams[key].id, "call": call, "kept": 1, "row": -1, "offset": -1}
            if tensors:
                (placed,) = writer.append(streams[key].id, memoryview(data + bytes(PAGE)), [0])
                row |= {"kept": KEPT, **placed._asdict(), "crc32c": google_crc32c.value(data)}
            steps.setdefault(step, []).append(row | _statistics(values))
    for rows in steps.values():
        log.append({name: np.array([row[name] for row in rows]) for name in RECORD_SCHEMA.names})
    writer.close()
    log.close()
    if sealed:
        with locked(directory):
            seal(directory, "detached", None, {})
    return path


def _statistics(values: np.ndarray) -> dict[str, float]:
    """Section 6 of the format."""
    counts = {"numel": values.size, "n_zero": int(np.count_nonzero(values == 0))}
    if values.dtype.kind == "c":
        size = np.abs(values)
        nan = dict.fromkeys(("min", "max", "mean", "std"), np.nan)
        return {**counts, **nan, "absmax": float(size.max()), "l2": float(np.linalg.norm(values))}
    numbers = values.astype(np.float64).ravel()
    finite = numbers[np.isfinite(numbers)]
    some = finite if len(finite) else np.array([np.nan])
    return {
        **counts,
        "n_nan": int(np.isnan(numbers).sum()),
        "n_posinf": int((numbers == np.inf).sum()),
        "n_neginf": int((numbers == -np.inf).sum()),
        "min": some.min(),
        "max": some.max(),
        "absmax": abs(some).max(),
        "mean": some.mean(),
        "std": some.std(),
        "l2": float(np.linalg.norm(finite)),
    }
