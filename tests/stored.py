"""Small traces in each store, written without a training: three streams, some records of statistics alone."""

import json
import mmap
from pathlib import Path

import google_crc32c
import numpy as np

from replay.format import RECORD_SCHEMA, Locations, Stream
from replay.log import LogWriter
from replay.seal import locked, seal
from replay.stores import open_writer

SHAPES = {"0": ("float32", (40,)), "blocks.0/add#1": ("bfloat16", (3, 7)), "层": ("int64", ())}
PLAN = {"store": "zarr", "compression": None}


def write_stored(
    path: Path, store: str = "zarr", codec: str | None = None, *, steps: int = 6, rank: int = 0, sealed: bool = True
) -> dict[tuple[int, str], bytes]:
    """Write a trace; return the bytes of each tensor by step and layer.

    Step 1 has statistics alone. Tensors come from a seed.
    """
    directory = path / f"rank-{rank:05}"
    directory.mkdir(parents=True)
    identity = {"format": "hookrec-trace", "version": 1, "id": "0" * 32, "created": "2026-01-01T00:00:00Z"}
    plan = {"store": store, "compression": codec}
    (path / "trace.json").write_text(json.dumps({**identity, "plan": plan, "provenance": {}}))
    (directory / "model.json").write_text('{"modules": []}')
    (directory / "notes.jsonl").write_text('{"step": 0, "layer": null, "note": "a note"}\n')
    rng, locations = np.random.default_rng(rank), Locations()
    streams = [
        Stream(i, layer, "output", "", dtype, shape, locations.new(layer, "output", ""), codec)
        for i, (layer, (dtype, shape)) in enumerate(SHAPES.items())
    ]
    (directory / "streams.jsonl").write_text("".join(stream.to_json() + "\n" for stream in streams))
    tensors = {}
    with locked(directory), (directory / "scalars.jsonl").open("w") as scalars:
        writer, log = open_writer(store, directory), LogWriter(directory)
        for stream in streams:
            writer.add(stream)
        for step in range(steps):
            columns = {field.name: np.zeros(3, field.type.to_pandas_dtype()) for field in RECORD_SCHEMA}
            columns["step"][:], columns["stream"][:], columns["l2"][:] = step, range(3), step + 0.5
            for i, stream in enumerate(streams):
                columns["numel"][i] = np.prod(stream.shape, dtype=int)
                if step == 1:
                    columns["kept"][i], columns["row"][i], columns["offset"][i] = 1, -1, -1
                    continue
                data = (np.arange(stream.nbytes) // 3 + rng.integers(0, 200)).astype(np.uint8).tobytes()
                memory = mmap.mmap(-1, 4096)
                memory[: len(data)] = data
                placed = writer.append(i, memoryview(memory), [0])[0]
                columns["row"][i], columns["offset"][i], columns["nbytes"][i] = placed
                columns["crc32c"][i] = google_crc32c.value(data)
                tensors[step, stream.layer] = data
            log.append(columns)
            scalars.write(json.dumps({"step": step, "time": 1.0, "values": {"loss": 1 / (step + 1)}}) + "\n")
        writer.close()
        log.close()
        if sealed:
            scalars.flush()
            seal(directory, "detached", None, {"recorded_steps": steps})
    return tensors
