"""A folder of Parquet files that grows while a training runs: a file a look, and each record in one file, once.

A file appears under its name when it is whole, so readers of the folder never meet half a one. In its metadata it says
up to where in the log it goes. That is all there is to know of what was done: an export that was interrupted, by Ctrl-C
or a kill, goes on behind the last file, and no journal can contradict the files.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from replay.attempts import read_attempts
from replay.errors import BadQuery
from replay.exported import common_dtype, plain, with_values
from replay.filters import Names, globs_of
from replay.follow import Follower
from replay.following import TORN_S, narrowed
from replay.new_file import check_place, new_file
from replay.selection import KEY
from replay.trace import Trace

_STATE = b"hookrec:follow"


def grow(
    trace: Trace,
    out: Path,
    *,
    layers: Names = None,
    kinds: Names = None,
    where: str | None = None,
    tensors: bool = False,
    poll_s: float = 5.0,
) -> Iterator[tuple[Path, int]]:
    """Write records to files of a folder as they are committed; yield each file and its rows when it is whole.

    It ends when the trace is sealed, or when nobody has written for ten seconds: `Trace.status` is then "torn". Of a
    training that was resumed from a checkpoint, the steps that it took back stay in the files, and come again.

    Args:
        trace: the trace.
        out: the folder, new, empty, or of an earlier export of the same, which goes on.
        layers: glob or globs over layer names.
        kinds: glob or globs over kinds.
        where: a SQL condition over the columns.
        tensors: add the column `values`, as `Selection.to_parquet` does; its dtype is that of the first file.
        poll_s: seconds between two looks.

    Raises:
        BadQuery: the folder has something else in it, cannot be written, is being written by another, a filter cannot
            be understood, or values are wanted of a training that was resumed.
    """
    filters = [list(globs) if (globs := globs_of(names)) is not None else None for names in (layers, kinds)]
    asked = {"trace": trace.identity.get("id"), "layers": filters[0], "kinds": filters[1], "where": where}
    asked["tensors"] = tensors
    with _alone(out):
        number, places, dtype = _state(out, asked)
        follower = Follower(trace.path, places)
        written = time.monotonic()
        while True:
            status = trace.status  # before the look: what is sealed now has nothing that the look would miss
            found = [narrowed(records, globs_of(layers), globs_of(kinds), where) for records in follower.read()]
            found = [records for records in found if len(records)]
            if found:
                table = plain(pa.concat_tables([plain(records) for records in found]))
                if tensors:
                    dtype = _fitting(table["dtype"].unique().to_pylist(), dtype)
                    trace.refresh()
                    _refuse_resumed(trace)
                state = {**asked, "places": follower.places, "dtype": None if dtype is None else dtype.name}
                target = out / f"part-{number:05}.parquet"
                _write(trace, table, dtype, target, {_STATE: json.dumps(state).encode()})
                yield target, len(table)
                number += 1
            if status != "torn":
                written = time.monotonic()
            if status == "sealed" or time.monotonic() - written > TORN_S:
                return
            time.sleep(poll_s)


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Make the folder if it is not there, and see to it that nobody else writes to it."""
    check_place(out)
    try:
        out.mkdir(exist_ok=True)
        folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BadQuery(f"{out} cannot be written: {error.strerror or error}. Choose another folder.") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise BadQuery(f"{out} is being written by another export. Wait for it, or choose another folder.") from None
    finally:
        os.close(folder)


def _state(out: Path, asked: dict[str, Any]) -> tuple[int, dict[int, tuple[int, int]], np.dtype[Any] | None]:
    """Return the number of the next file, where in the log it begins, and the dtype of the values."""
    import pyarrow.parquet as pq

    for partial in out.glob("part-*.parquet.partial"):
        partial.unlink(missing_ok=True)
    names = sorted(path.name for path in out.iterdir())
    if not names:
        return 0, {}, None
    if names != [f"part-{number:05}.parquet" for number in range(len(names))]:
        raise BadQuery(f"{out} has something else in it than one export from its first file on. Choose a new folder.")
    last = out / names[-1]
    try:
        state = json.loads((pq.read_schema(last).metadata or {})[_STATE])
        before = {name: state[name] for name in asked}
        places = {int(rank): (int(place[0]), int(place[1])) for rank, place in state["places"].items()}
        dtype = None if state["dtype"] is None else np.dtype(state["dtype"])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowInvalid):
        raise BadQuery(f"{last} was not written by `replay export --follow`. Choose a new folder.") from None
    for name, value in asked.items():
        if before[name] != value:
            raise BadQuery(
                f"{out} was begun with another {name}: {before[name]!r}, not {value!r}. Ask the same, or choose a new "
                "folder."
            )
    return len(names), places, dtype


def _fitting(names: list[str], before: np.dtype[Any] | None) -> np.dtype[Any]:
    needed = common_dtype(names)
    if before is None or np.can_cast(needed, before, "safe"):
        return needed if before is None else before
    raise BadQuery(
        f"Values of {needed} come, and those of the files before are {before}, which does not hold them. Begin another "
        "folder, or choose layers whose tensors are alike."
    )


def _write(trace: Trace, table: pa.Table, dtype: np.dtype[Any] | None, target: Path, metadata: Any) -> None:
    import pyarrow.parquet as pq

    schema, parts = table.schema, iter([table])
    if dtype is not None:
        schema, parts = with_values(table, lambda record: trace.tensor(**{name: record[name] for name in KEY}), dtype)
    schema = schema.with_metadata(metadata)
    with (
        new_file(target, overwrite=False) as partial,
        pq.ParquetWriter(partial, schema, compression="zstd") as writer,
    ):
        for part in parts:
            writer.write_table(part.cast(schema))
        if dtype is not None:
            _refuse_resumed(trace)  # it may have been meanwhile


def _refuse_resumed(trace: Trace) -> None:
    """Raise where steps were taken back: they have other tensors by now, or none."""
    if any(read_attempts(directory).last for directory in trace.directories.values()):
        raise BadQuery(
            f"{trace.path} was resumed from a checkpoint, and its values cannot be followed. Export them when it is "
            "finished, or follow the statistics."
        )
