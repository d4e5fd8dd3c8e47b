"""Traces written by hand, a record at a time, as `schemas/trace.md` has them: no torch, no training, no luck."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from replay.format import MODES, RECORD_SCHEMA, Stream
from replay.log import LogWriter

PLAIN = {"numel": 100, "min": -3.0, "max": 3.0, "absmax": 3.0, "mean": 0.0, "std": 1.0, "l2": 10.0}
"""Statistics of a hundred normal numbers."""

Record = Mapping[str, Any]


def write_trace(
    path: Path,
    records: Iterable[Record],
    modules: Iterable[Mapping[str, Any]] = (),
    scalars: Iterable[tuple[int, str, float]] = (),
    rank: int = 0,
) -> Path:
    """Write what one rank recorded; return the path of the trace.

    Args:
        path: the directory of the trace; further ranks may be written into it.
        records: in the order of execution: `step`, `layer`, and whatever differs from a plain float32 output.
        modules: entries of `model.json`; see `module`.
        scalars: step, name, value.
        rank: which process.
    """
    directory = path / f"rank-{rank:05}"
    directory.mkdir(parents=True)
    identity = {"format": "hookrec-trace", "version": 1, "created": "2026-01-01T00:00:00Z"}
    (path / "trace.json").write_text(json.dumps({**identity, "id": "0" * 32, "plan": {}, "provenance": {}}))
    (directory / "model.json").write_text(json.dumps({"modules": list(modules)}))
    streams: dict[tuple[str, ...], Stream] = {}
    columns: dict[str, list[Any]] = {name: [] for name in RECORD_SCHEMA.names}
    for record in records:
        facts = {"kind": "output", "path": "", "dtype": "float32", "call": 0, "micro": 0, "mode": "train", **record}
        key = tuple(facts[name] for name in ("layer", "kind", "path", "dtype"))
        stream = streams.setdefault(key, Stream(len(streams), *key, (facts.get("numel", 100),), None))
        values = dict.fromkeys(RECORD_SCHEMA.names, 0) | PLAIN | {"kept": 1, "row": -1, "offset": -1} | facts
        values |= {"stream": stream.id, "mode": MODES.index(facts["mode"])}
        for name in columns:
            columns[name].append(values[name])
    (directory / "streams.jsonl").write_text("".join(stream.to_json() + "\n" for stream in streams.values()))
    with (directory / "scalars.jsonl").open("w") as file:
        for step, name, value in scalars:
            number = value if np.isfinite(value) else {"nan": "NaN", "inf": "Infinity"}.get(str(value), "-Infinity")
            file.write(json.dumps({"step": step, "time": 1.0, "values": {name: number}}) + "\n")
    log = LogWriter(directory)
    if columns["step"]:
        types = {field.name: field.type.to_pandas_dtype() for field in RECORD_SCHEMA}
        log.append({name: np.array(values, types[name]) for name, values in columns.items()})
    log.close()
    return path


def module(name: str, kind: str = "Linear", *parameters: tuple[str, list[int]], requires_grad: bool = True) -> Any:
    """Return the entry of `model.json` for a module of `torch.nn` with parameters by name and shape."""
    described = [
        {"name": each, "shape": shape, "dtype": "float32", "requires_grad": requires_grad} for each, shape in parameters
    ]
    facts = {"name": name, "class": f"torch.nn.modules.{kind.lower()}.{kind}", "leaf": True, "recorded": True}
    return {**facts, "parameters": described, "aliases": []}
