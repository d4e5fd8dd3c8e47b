"""Follows a trace: each record once, as its step is committed, without keeping what was seen.

`Trace.refresh` keeps the whole of the log that is being written, to answer any question at once. Whoever stays beside
fifty live trainings wants only what is new: this reader holds a place in the log of each rank and nothing else.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute

from replay.dropping import read_dropped
from replay.errors import TraceDamaged
from replay.format import EXPONENTS_KIND, STREAMS_FILE, Stream, whole_lines
from replay.log_following import Following
from replay.ranks import ranks_of
from replay.records import OfStreams, check_rows

Place = tuple[int, int]
"""A segment of a rank's log, and how many of its rows were read."""


class Follower:
    """Reads what is new in a trace.

    Args:
        path: the trace.
        places: by rank, where an earlier follower ended; a rank that is not named is read from its beginning.
    """

    def __init__(self, path: Path, places: Mapping[int, Place] | None = None) -> None:
        self._path = path
        self._places = dict(places or {})
        self._ranks: dict[int, _Rank] = {}

    @property
    def places(self) -> dict[int, Place]:
        """By rank, the place up to which everything was read."""
        return self._places | {number: rank.place for number, rank in self._ranks.items()}

    @property
    def directories(self) -> dict[int, Path]:
        """The directory of each rank that was found."""
        return {number: rank.directory for number, rank in self._ranks.items()}

    def read(self) -> Iterator[pa.Table]:
        """Yield new records but those of kind `exponents`, rank by rank, in the order of execution.

        They have the columns of `Trace.records`.

        Raises:
            TraceDamaged: a file is not what the format says. The other ranks were read before this is raised.
            OSError: it cannot be read; likewise.
        """
        yield from (records for _, _, records in self.read_segments())

    def read_segments(self) -> Iterator[tuple[int, int, pa.Table]]:
        """Yield what `read` does, each table with its rank and the segment of the log that it is of."""
        trouble: Exception | None = None
        for number, directory in ranks_of(self._path).items():
            if number not in self._ranks:
                self._ranks[number] = _Rank(directory, number, self._places.get(number, (0, 0)))
        for rank in list(self._ranks.values()):
            try:
                while len(found := rank.read()):
                    yield rank.number, rank.segment, found
            except (TraceDamaged, OSError) as error:
                trouble = trouble or error
        if trouble is not None:
            raise trouble


class _Rank:
    def __init__(self, directory: Path, number: int, place: Place) -> None:
        self.directory = directory
        self.number = number
        self._log = Following(directory, place)
        self._streams: list[Stream] = []
        self._of_streams = OfStreams([])
        self._streams_end = 0
        self._held: tuple[Place, pa.Table] | None = None
        self.segment = 0  # of what was read last

    @property
    def place(self) -> Place:
        return self._log.place if self._held is None else self._held[0]

    def read(self) -> pa.Table:
        while True:
            if self._held is None:
                before = self._log.place
                table = self._log.read()
                if not len(table):
                    return table
                self._held = before, table
                self.segment = self._log.segment
            # What cannot be described now is held until it can: over NFS, a stream may be seen after its records.
            records = self._described(self._held[1])
            self._held = None
            if len(records):
                return records

    def _described(self, table: pa.Table) -> pa.Table:
        last = int(table["stream"].to_numpy().max())
        if last >= len(self._streams):
            path = self.directory / STREAMS_FILE
            lines, end = whole_lines(path, self._streams_end)
            self._streams += [Stream.from_json(line, path) for line in lines]
            self._streams_end = end
            self._of_streams = OfStreams(self._streams)
        check_rows(table, len(self._streams), self.directory)
        counts = [stream.id for stream in self._streams if stream.kind == EXPONENTS_KIND]
        if counts:
            table = table.filter(~pa.compute.field("stream").isin(pa.array(counts, pa.int32())))
        return self._of_streams.described(table, self.number, read_dropped(self.directory).kept(table))
