"""How the segments of a log make one dataset in which is what counts: that of a training that was resumed as well.

A segment is of one attempt. So each has two constants, the attempt and the first step that does not count any more,
which the dataset has as two more columns; one comparison with the latter leaves out what is superseded, and pyarrow
skips row groups and whole files by it. Where there is one attempt, there are neither columns nor comparison.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replay.attempts import Attempts
from replay.format import RECORD_SCHEMA
from replay.log_parquet import check_schema

_UNTIL = "until"
_OF_SEGMENT = pa.schema([pa.field("attempt", pa.int32()), pa.field(_UNTIL, pa.int64())])
_EXTENDED = pa.schema([*RECORD_SCHEMA, *_OF_SEGMENT])


def dataset_of(
    sealed: Mapping[int, Path],
    tail_number: int,
    tail: Sequence[pa.RecordBatch],
    attempts: Attempts,
    *,
    everything: bool,
) -> Any:
    """Return records as a `pyarrow.dataset.Dataset`, in the order of execution.

    Args:
        sealed: the Parquet segments by number, in order.
        tail_number: the number of the segment behind them.
        tail: what is in it.
        attempts: those of the rank.
        everything: also what does not count, with a column `attempt`.
    """
    import pyarrow.dataset as ds

    extended = everything or attempts.last > 0
    table = pa.Table.from_batches(tail, RECORD_SCHEMA)
    if extended:
        for field, value in zip(_OF_SEGMENT, _constants(tail_number, attempts), strict=True):
            table = table.append_column(field, pa.array(np.full(len(table), value), field.type))
    found = ds.dataset(table)
    if sealed:
        files = _of_files(sealed, attempts if extended else None)
        found = ds.dataset([files, found]) if tail else files
    return found.filter(pc.field("step") < pc.field(_UNTIL)) if extended and not everything else found


def _constants(segment: int, attempts: Attempts) -> tuple[int, int]:
    attempt = attempts.of_segment(segment)
    return attempt, attempts.until(attempt)


def _of_files(sealed: Mapping[int, Path], attempts: Attempts | None) -> Any:
    import pyarrow.dataset as ds
    from pyarrow.fs import LocalFileSystem

    checked = ds.ParquetFileFormat(
        default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    )
    paths = [str(path) for path in sealed.values()]
    if attempts is None:
        files = ds.dataset(paths, schema=RECORD_SCHEMA, format=checked)
    else:
        constants = []
        for number in sealed:
            values = _constants(number, attempts)
            attempt, until = (pc.field(name) == value for name, value in zip(_OF_SEGMENT.names, values, strict=True))
            constants.append(attempt & until)
        files = ds.FileSystemDataset.from_paths(
            paths, _EXTENDED, checked, filesystem=LocalFileSystem(), partitions=constants
        )
    for fragment in files.get_fragments():
        check_schema(fragment.physical_schema, fragment.path)
    return files
