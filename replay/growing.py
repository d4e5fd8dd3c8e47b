"""An export that goes on while a training runs: a file a look, and each record that counts in one file, once.

What is a record of, the log says; whether it counts, the attempts say, which are read behind it. So a look finds no
record of an attempt of which it does not know, and none counts that was taken back. Which files there are, and how
records leave them, is known in `grown_files`.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from replay.attempts import Attempts, read_attempts
from replay.errors import BadQuery
from replay.exported import common_dtype, plain, with_values
from replay.filters import Names, globs_of
from replay.follow import Follower
from replay.following import TORN_S, narrowed
from replay.grown_files import Grown, grown_files
from replay.selection import KEY
from replay.trace import Trace


def grow(
    trace: Trace,
    out: Path,
    *,
    layers: Names = None,
    kinds: Names = None,
    where: str | None = None,
    tensors: bool = False,
    poll_s: float = 5.0,
) -> Iterator[Grown]:
    """Write records to files of a folder as they are committed; yield each file when it is whole.

    It ends when the trace is sealed, or when nobody has written for ten seconds: `Trace.status` is then "torn". Where a
    training was resumed from a checkpoint, the steps that it took back leave the files that have them, which are
    yielded too, before what was recorded in their stead is written.

    Args:
        trace: the trace.
        out: the folder, new, empty, or of an earlier export of the same, which goes on.
        layers: glob or globs over layer names.
        kinds: glob or globs over kinds.
        where: a SQL condition over the columns.
        tensors: add the column `values`, as `Selection.to_parquet` does; its dtype is that of the first file.
        poll_s: seconds between two looks.

    Raises:
        BadQuery: the folder has something else in it, cannot be written, is being written by another, or a filter
            cannot be understood.
    """
    filters = [list(globs) if (globs := globs_of(names)) is not None else None for names in (layers, kinds)]
    asked = {"trace": trace.identity.get("id"), "layers": filters[0], "kinds": filters[1], "where": where}
    with grown_files(out, {**asked, "tensors": tensors}) as files:
        follower = Follower(trace.path, files.places)
        written = time.monotonic()
        while True:
            status = trace.status  # before the look: what is sealed now has nothing that the look would miss
            found = [
                (rank, segment, narrowed(records, globs_of(layers), globs_of(kinds), where))
                for rank, segment, records in follower.read_segments()
            ]
            if tensors:
                trace.refresh()  # before the attempts: what counts by these has its own tensor there
            attempts = {rank: read_attempts(directory) for rank, directory in follower.directories.items()}
            yield from files.take_back(attempts)
            counted = [plain(_counted(records, segment, attempts[rank])) for rank, segment, records in found]
            if sum(map(len, counted)):
                table = pa.concat_tables(counted)
                schema, parts = table.schema, iter([table])
                if tensors:
                    files.dtype = _fitting(table["dtype"].unique().to_pylist(), files.dtype)
                    read = lambda record: trace.tensor(**{name: record[name] for name in KEY})  # noqa: E731
                    schema, parts = with_values(table, read, files.dtype)
                yield files.add(schema, parts, follower.places)
            if status != "torn":
                written = time.monotonic()
            if status == "sealed" or time.monotonic() - written > TORN_S:
                return
            time.sleep(poll_s)


def _counted(records: pa.Table, segment: int, attempts: Attempts) -> pa.Table:
    """Return those of some records of a segment that count."""
    return records.filter(pa.compute.field("step") < attempts.until(attempts.of_segment(segment)))


def _fitting(names: list[str], before: np.dtype[Any] | None) -> np.dtype[Any]:
    needed = common_dtype(names)
    if before is None or np.can_cast(needed, before, "safe"):
        return needed if before is None else before
    raise BadQuery(
        f"Values of {needed} come, and those of the files before are {before}, which does not hold them. Begin another "
        "folder, or choose layers whose tensors are alike."
    )
