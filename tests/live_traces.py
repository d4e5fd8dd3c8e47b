"""Traces written without a training: as many commits, ranks and shards as a test asks for, in no time."""

import contextlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from replay.format import RECORD_SCHEMA, Locations, Stream
from replay.log import LogWriter
from replay.seal import locked, seal
from replay.zarr_store import ZarrWriter

IDENTITY = {"format": "hookrec-trace", "version": 1, "id": "0" * 32, "plan": {}}


class WrittenTrace:
    """A trace that is live until it is closed. Each commit has one record of the output of each layer.

    Args:
        path: the trace.
        layers: names of layers.
        rank: the rank.
        width: float32 elements of a tensor; 0 keeps statistics alone.
        created: what `trace.json` says of it.
        identity: more members of `trace.json`.
    """

    def __init__(
        self,
        path: Path,
        layers: tuple[str, ...] = ("0", "1"),
        *,
        rank: int = 0,
        width: int = 0,
        created: str = "2026-12-01T12:00:00.000+00:00",
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.rank = path / f"rank-{rank:05}"
        self.rank.mkdir(parents=True)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(locked(self.rank))
        if not (path / "trace.json").exists():
            provenance = {"host": platform.node(), "command": ["python", "train.py"]}
            whole = {**IDENTITY, "created": created, "provenance": provenance, **(identity or {})}
            (path / "trace.json").write_text(json.dumps(whole))
        (self.rank / "model.json").write_text('{"modules": []}')
        self._width = width
        self._store = ZarrWriter(self.rank) if width else None
        self._locations = Locations()
        self._streams: list[Stream] = []
        for layer in layers:
            self.add(layer)
        self._log = LogWriter(self.rank)
        self._attempt = 0

    def resume(self, first_step: int) -> None:
        """Let a training that starts again take over from a step on; the elements of its tensors are 100 larger."""
        self._log.begin_segment()
        self._attempt += 1
        line = {"attempt": self._attempt, "first_step": first_step, "segment": self._log.segment, "time": ""}
        with (self.rank / "attempts.jsonl").open("a") as file:
            file.write(json.dumps({**line, "plan": {}, "provenance": {}, "before": None}) + "\n")

    def add(self, layer: str) -> None:
        """Add a layer, which has records from here on."""
        location = self._locations.new(layer, "output", "") if self._width else None
        stream = Stream(len(self._streams), layer, "output", "", "float32", (self._width,), location)
        self._streams.append(stream)
        with (self.rank / "streams.jsonl").open("a") as file:
            file.write(stream.to_json() + "\n")
        if self._store is not None:
            self._store.add(stream)

    def commit(self, *steps: int, n_nan: Mapping[str, int] | None = None) -> None:
        """Commit steps together; `n_nan` says of layers how many NaN they had."""
        count = len(steps) * len(self._streams)
        columns = {field.name: np.zeros(count, field.type.to_pandas_dtype()) for field in RECORD_SCHEMA}
        columns["step"][:] = np.repeat(steps, len(self._streams))
        columns["stream"][:] = np.tile(np.arange(len(self._streams)), len(steps))
        columns["n_nan"][:] = np.tile([(n_nan or {}).get(s.layer, 0) for s in self._streams], len(steps))
        columns["numel"][:] = self._width
        columns["kept"][:], columns["row"][:], columns["offset"][:] = 1, -1, -1
        if self._store is not None:
            columns["kept"][:], columns["nbytes"][:] = 0, 4 * self._width
            columns["numel"][:] = self._width
            for stream in self._streams:
                data = [np.full(self._width, step + 100 * self._attempt, np.float32).tobytes() for step in steps]
                mine = columns["stream"] == stream.id
                places = [4 * self._width * i for i in range(len(data))]
                placed = self._store.append(stream.id, memoryview(b"".join(data) + bytes(4096)), places)
                columns["row"][mine], columns["offset"][mine], _ = np.transpose(placed)
                columns["crc32c"][mine] = [google_crc32c.value(item) for item in data]
        self._log.append(columns)

    def close(self) -> Path:
        """Let go of it, as a writer does that is killed; return its path."""
        self._log.close()
        if self._store is not None:
            self._store.close()
        self._stack.close()
        return self.path

    def seal(self, how: str = "detached") -> Path:
        """Finish it; return its path."""
        self._log.close()
        if self._store is not None:
            self._store.close()
        seal(self.rank, how, None, {})
        self._stack.close()
        return self.path
