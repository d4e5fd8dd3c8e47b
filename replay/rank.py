"""One rank as its reader sees it: its log, streams and store together, and where each record's tensor lies.

Records name streams by number, and a look into the log costs milliseconds whatever it is for. So places are looked up
once, for all records or for those of a layer and kind, and kept until the next refresh.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from replay.documents import read_end
from replay.dropping import Dropped, read_dropped
from replay.errors import NotRecorded, TraceDamaged
from replay.files import checksum
from replay.filters import Globs, Steps, matches, steps_condition
from replay.format import EXPONENTS_KIND, KEPT, RECORD_SCHEMA, STATISTICS, WHY_NOT_KEPT, Stream, numpy_dtype
from replay.log import Log
from replay.log_rows import LogRows
from replay.query import Part
from replay.records import OfStreams, check_rows
from replay.seal import further_streams, is_locked, is_sealed
from replay.stores import open_reader

_SMALL_LOG = 1 << 19
"""Records of which the places, 33 bytes each, are looked up together."""

_PART_ROWS = 1 << 18
"""Of a part of the records at least, unless it is the last."""


@dataclass(frozen=True)
class RecordPlaces:
    """Where the records of (layer, kind, path) are, sorted by step: arrays of shape `(records,)`.

    Not those of a stream: a training with dynamic padding has one for each length.
    """

    stream: NDArray[np.int32]
    step: NDArray[np.int64]
    call: NDArray[np.int32]
    kept: NDArray[np.uint8]
    row: NDArray[np.int64]
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    crc32c: NDArray[np.uint32]
    numel: NDArray[np.int64]


class Rank:
    """What one process recorded.

    Args:
        directory: its folder in the trace.
        attempt: the last attempt that is shown; None for the latest.
    """

    def __init__(self, directory: Path, attempt: int | None) -> None:
        self.directory = directory
        self.log = Log(directory, attempt)
        self.store = open_reader(directory)
        self.streams: list[Stream] = []
        self._streams_end = 0  # the byte behind the last line of the table that was read
        self._counts: list[int] = []  # streams that hold counts of exponents
        self._keys: dict[tuple[str, str, str], int] = {}
        self._key_of_stream: list[int] = []
        self.dropped = Dropped()
        self._places: dict[int, RecordPlaces] = {}
        self._steps: NDArray[np.int64] | None = None

    def refresh(self) -> None:
        """Look for what was committed since the last look."""
        self.log.refresh()
        self.dropped = read_dropped(self.directory)
        new, self._streams_end = further_streams(self.directory, len(self.streams), self._streams_end)
        self.streams = [*self.streams, *new]
        for stream in new:
            if stream.kind == EXPONENTS_KIND:
                self._counts.append(stream.id)
            key = stream.layer, stream.kind, stream.path
            self._key_of_stream.append(self._keys.setdefault(key, len(self._keys)))
        self._places, self._steps = {}, None

    def status(self) -> str:
        """Return what `Trace.status` says of it."""
        return "sealed" if is_sealed(self.directory) else "live" if is_locked(self.directory) else "torn"

    def end(self) -> dict[str, Any] | None:
        """How the last attempt that is shown ended."""
        attempts = self.log.attempts
        return read_end(self.directory) if attempts.shown == attempts.last else attempts.ended(attempts.shown)

    def whole_log(self) -> Log:
        """Return the log with what does not count."""
        return self.log if not self.log.attempts.last else Log(self.directory, superseded=True).refresh()

    def steps(self) -> NDArray[np.int64]:
        """Return the steps that are committed, in order."""
        if self._steps is None:
            self._steps = np.unique(self.log.table(["step"])["step"].to_numpy())
        return self._steps

    def places(self, layer: str, kind: str, path: str) -> RecordPlaces | None:
        """Return where the records are; None if there is no such stream."""
        key = self._keys.get((layer, kind, path))
        if key is None:
            return None
        if key not in self._places:
            keys = np.array(self._key_of_stream, np.int64)
            # A look into the log costs milliseconds, whatever it is for: a small one is looked through once for all.
            where = None
            if self.log.rows > _SMALL_LOG:
                where = pa.compute.field("stream").isin(pa.array(np.flatnonzero(keys == key), pa.int32()))
            names = list(RecordPlaces.__dataclass_fields__)
            table = self.log.table(names, where)
            columns = {name: table[name].to_numpy() for name in names}
            known = np.flatnonzero((columns["stream"] >= 0) & (columns["stream"] < len(keys)))
            of_rows = keys[columns["stream"][known]]
            order = np.lexsort((columns["step"][known], of_rows))
            columns = {name: column[known][order] for name, column in columns.items()}
            found, first = np.unique(of_rows[order], return_index=True)
            ends = [*first[1:].tolist(), len(order)][: len(found)]
            for number, begin, end in zip(found.tolist(), first.tolist(), ends, strict=True):
                self._places[number] = RecordPlaces(**{name: column[begin:end] for name, column in columns.items()})
            if key not in self._places:
                self._places[key] = RecordPlaces(**{name: column[:0] for name, column in columns.items()})
        return self._places[key]

    def tensor(self, places: RecordPlaces, at: int) -> NDArray[Any]:
        """Return the tensor of a record that was found; errors are those of `Trace.tensor`."""
        stream, row = self.streams[places.stream[at]], int(places.row[at])
        trace, step = self.directory.parent, int(places.step[at])
        if (why := self._why_no_tensor(stream, int(places.kept[at]), row)) is None:
            # Else a damaged table would have us make an array of any size.
            if int(places.numel[at]) != stream.numel:
                raise TraceDamaged(
                    f"The log in {self.directory} has {int(places.numel[at])} elements of {stream.kind} of layer "
                    f"{stream.layer!r}, and streams.jsonl the shape {stream.whole[1]}: one of them is damaged."
                )
            try:
                data = self.store.read(stream, row, int(places.offset[at]), int(places.nbytes[at]))
            except TraceDamaged:
                self.dropped = read_dropped(self.directory)  # perhaps it went a moment ago
                if (why := self._why_no_tensor(stream, KEPT, row)) is None:
                    raise
        if why is not None:
            raise NotRecorded(
                f"Step {step} of {trace} has statistics of {stream.kind} of layer {stream.layer!r}, and no tensor: "
                f"{why}. The statistics are in `replay stats`, in Python in records()."
            )
        if len(data) != stream.nbytes or (data and checksum(data) != places.crc32c[at]):
            raise TraceDamaged(
                f"The {stream.kind} of layer {stream.layer!r} at step {step} of {trace} is damaged: "
                "its checksum differs."
            )
        return np.frombuffer(data, numpy_dtype(stream.dtype)).reshape(stream.shape)

    def _why_no_tensor(self, stream: Stream, kept: int, row: int) -> str | None:
        """Why a record has no tensor; None if it has one."""
        if kept != KEPT:
            return WHY_NOT_KEPT.get(kept, "not kept")
        return str(self.dropped) if row < self.dropped.rows.get(stream.id, 0) else None

    def part(self, number: int, log: Any) -> Part:
        """Return what DuckDB is shown of the rank: its log, or some rows of it."""
        return Part(number, log, self.streams, self.dropped.rows)

    def datasets(self, layers: Globs, kinds: Globs, steps: Steps) -> list[Any]:
        """Return the log, or some rows of it, as `pyarrow.dataset.Dataset`s, one after the other."""
        condition, parts = self._condition(layers, kinds, steps), self.log.datasets()
        return parts if condition is None else [part.filter(condition) for part in parts]

    def numbered(self, layers: Globs, kinds: Globs, steps: Steps) -> LogRows:
        """Return the log, or some rows of it, by number."""
        return self.log.numbered(self._condition(layers, kinds, steps))

    @property
    def count(self) -> int:
        """How many records are committed, but those of kind `exponents`."""
        if not self._counts:
            return self.log.rows
        with self.log.named():
            return sum(int(part.count_rows()) for part in self.datasets(None, None, None))

    def _condition(self, layers: Globs, kinds: Globs, steps: Steps) -> Any:
        """Return a condition over the columns of the log for pyarrow, or None for all.

        Without kinds, all are those of the training: that a layer has 10,000 elements of an exponent is no `absmax`.
        """
        last = int(max(self.steps(), default=-1)) if isinstance(steps, slice) else -1
        condition = steps_condition(steps, last)
        if layers is not None or kinds is not None:
            wanted = [s.id for s in self.streams if matches(s.layer, layers) and matches(s.kind, kinds)]
            chosen = pa.compute.field("stream").isin(pa.array(wanted, pa.int32()))
            condition = chosen if condition is None else condition & chosen
        if kinds is None and self._counts:
            tensors = ~pa.compute.field("stream").isin(pa.array(self._counts, pa.int32()))
            condition = tensors if condition is None else condition & tensors
        return condition

    def records(self, number: int, layers: Globs, kinds: Globs, steps: Steps) -> pa.Table:
        """Return records as `Trace.records` does, of the rank of that number."""
        return self._joined(number, self.numbered(layers, kinds, steps).scan(self.columns()))

    def scan(self, columns: Sequence[str], kinds: Globs, steps: Steps) -> Iterator[pa.Table]:
        """Yield columns of the log in parts, of which few are in memory at once."""
        with self.log.named():
            for table in self.numbered(None, kinds, steps).scan(columns):
                check_rows(table, len(self.streams), self.directory)
                yield table

    def numbered_records(self, number: int, rows: LogRows, found: pa.Table) -> pa.Table:
        """Return the records that rows are which `found_where` has found."""
        return self._joined(number, rows.take(found, self.columns()))

    def columns(self) -> list[str]:
        """The columns of the log that a record is described by."""
        return ["step", "stream", "call", "micro", "mode", "kept", *(["row"] if self.dropped.rows else []), *STATISTICS]

    def checked(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """Yield rows of the log that are known to be of streams."""
        with self.log.named():
            for table in tables:
                check_rows(table, len(self.streams), self.directory)
                yield table

    def _joined(self, number: int, tables: Iterator[pa.Table]) -> pa.Table:
        with self.log.named():
            found = list(tables)
        return self._described(number, found)

    def parts(self, number: int, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """Yield records in parts, one at least, of rows of the log with these columns."""
        waiting: list[pa.Table] = []
        with self.log.named():
            for table in tables:
                waiting.append(table)
                if sum(map(len, waiting)) >= _PART_ROWS:
                    yield self._described(number, waiting)
                    waiting.clear()
        yield self._described(number, waiting)

    def _described(self, number: int, tables: Sequence[pa.Table]) -> pa.Table:
        columns = self.columns()
        nothing = pa.schema([RECORD_SCHEMA.field(name) for name in columns]).empty_table()
        table = pa.concat_tables([nothing, *tables])
        check_rows(table, len(self.streams), self.directory)
        return OfStreams(self.streams).described(table, number, self.dropped.kept(table))
