"""What becomes of the messages of a training: tensors are written, then the step is committed.

The order is what a crash at any moment rests on. First come the tables that a record refers to and the tensors, then
the records of a step by one write; until then nobody sees them. Then the ring is given back.
"""

import contextlib
import json
import math
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from hookrec.attempt import Attempt
from hookrec.messages import Message
from hookrec.resume import Predecessor
from hookrec.ring import KEPT, RING_FULL, STORE_FAILED, Control
from hookrec.room import Room
from replay import format as trace_format
from replay.files import sync
from replay.format import STATISTICS, Placed, Stream
from replay.log import LogWriter
from replay.places import Places
from replay.stores import open_writer

DIED = "the training process disappeared without detaching: it was killed, or crashed in native code"


class Writer:
    """Writes one rank of a trace.

    Args:
        directory: the rank's directory.
        plan: what is recorded, as `trace.json` has it.
        memory: the shared memory.
        before: the writer whose work this one continues.
        attempt: the attempt of the training that is recorded.
    """

    def __init__(
        self,
        directory: Path,
        plan: dict[str, Any],
        memory: memoryview,
        before: Predecessor | None = None,
        attempt: Attempt | None = None,
    ) -> None:
        self._directory = directory
        self._plan = plan
        self._attempt = attempt or Attempt()
        self._memory = memory
        # The checksum's extension takes no memoryview, but arrays that cannot be written to.
        self._readable = np.frombuffer(memory.toreadonly(), np.uint8)
        self._control = Control(memory)
        self._durable = plan["durability"] == "power"
        self._log = LogWriter(directory, durable=self._durable)
        streams = before.streams if before else ()
        # The writer before may have come as far as a change of the plan that is sent again.
        stored = plan["tensors"] or any(stream.location is not None for stream in streams)
        self._store = open_writer(plan["store"], directory) if stored else None
        self._closed = before.closed if before else frozenset()
        self._places = Places(streams, self._closed)
        self._streams = 0
        self._streams_file = _appending(directory / trace_format.STREAMS_FILE)
        self._scalars_file = _appending(directory / trace_format.SCALARS_FILE)
        self._notes_file = _appending(directory / trace_format.NOTES_FILE)
        self._pending: list[dict[str, NDArray[Any]]] = []
        self._uncommitted: dict[int, int] = {}  # of streams with rows that are not committed: how many are
        self._room = Room(directory, plan, self._control, before.nbytes if before else 0, self.note)
        self._taken = self._committed = self._control.released  # positions in the ring
        self._messages = self._control.committed
        self._not_in_store: list[tuple[Stream, int]] = []
        self._unacknowledged = 0  # messages that were taken and not committed
        self._unreleased_bytes = 0  # of tensors that were taken and not committed
        for stream in before.streams if before else ():
            self._add_to_store(stream, before.rows[stream.id] if before else 0)
        self.end: dict[str, Any] = {"how": "died", "detail": DIED, "books": {}}

    def take(self, messages: Sequence[Message], *, needed: int = 0) -> None:
        """Take parts of steps; commit the steps whose last part is among them.

        Args:
            messages: the parts.
            needed: position up to which the training waits for the ring. What is not committed stays there unless
                that is waited for, or is more than half of the ring, for the case that another writer has to go on.

        Raises:
            OSError: what cannot be done without could not be written; what was not committed before is not now.
        """
        parts: list[NDArray[Any]] = []
        step_begin = 0
        for position, rows, facts in messages:
            self.take_facts(facts)
            parts.append(rows)
            self._taken = position
            self._unacknowledged += 1
            self._unreleased_bytes += int(rows["nbytes"][rows["kept"] == KEPT].sum())
            if "commit" in facts:
                if "drop_tensors" in facts:
                    self._drop_tensors(parts[step_begin:], pending=not step_begin)
                step_begin = len(parts)
                self._committed = position
                self._messages += self._unacknowledged
                self._unacknowledged = self._unreleased_bytes = 0
        # What is committed is written before what is not, since the latter may have to be taken back.
        if step_begin:
            self._pending.append(self._write_tensors(np.concatenate(parts[:step_begin])))
            self._commit()
        if step_begin < len(parts):
            self._pending.append(self._write_tensors(np.concatenate(parts[step_begin:])))
        let_go = needed > self._committed or self._unreleased_bytes > len(self._memory) // 2
        self._control.released = max(self._control.released, self._taken if let_go else self._committed)
        self._control.committed = self._messages

    def take_facts(self, facts: dict[str, Any]) -> None:
        """Write down what a message says besides its rows."""
        if "plan" in facts:
            self._plan = self._room.plan = facts["plan"]
        if "commit" in facts:
            self._attempt.begin(self._directory, self._log.segment, self._plan)
        if "model" in facts:
            write_model_file(self._directory, facts["model"], durable=self._durable)
        self._add_streams(facts.get("streams", ()))
        for note in facts.get("notes", ()):
            self._write_note(note)
        for line in facts.get("scalars", ()):
            line["values"] = {name: _json_number(value) for name, value in line["values"].items()}
            self._scalars_file.write(json.dumps(self._attempt.marked(line)) + "\n")
        if "scalars" in facts:
            self._scalars_file.flush()
        for reason in facts.get("triggers", ()):  # in flight mode they go another way
            self.note(f"trigger at step {reason['step']}: {reason['why']}")
        self.end = facts.get("end", self.end)

    def _add_streams(self, streams: Any) -> None:
        for found in streams:
            if found["id"] != self._streams:
                raise RuntimeError(f"stream {found['id']} was announced where stream {self._streams} is the next")
            shape, codec = tuple(found["shape"]), self._plan["compression"]
            of_shape = tuple(found["of_shape"]) if "of_shape" in found else None
            facts = {name: value for name, value in found.items() if name != "placed"}
            stream = Stream(**{**facts, "location": None, "shape": shape, "codec": codec, "of_shape": of_shape})
            if found["placed"]:
                self._store = self._store or open_writer(self._plan["store"], self._directory)
                stream = self._places.place(stream)
            self._streams_file.write(stream.to_json() + "\n")
            self._add_to_store(stream)
        if streams:
            self._streams_file.flush()

    def _add_to_store(self, stream: Stream, rows: int = 0) -> None:
        self._streams += 1
        if self._store is not None and stream.location is not None and stream.location not in self._closed:
            try:
                self._store.add(stream, rows)
            except OSError as error:
                self._not_in_store.append((stream, rows))
                self._room.fail(error)

    def _write_tensors(self, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Write the tensors of some parts; return the columns of their records.

        The records of a stream lie one behind the other in its file, so they are written together.
        """
        count = len(rows)
        columns = {name: rows[name].copy() for name in ("step", "stream", "call", "micro", "mode", "kept", "nbytes")}
        columns |= {name: rows[name].copy() for name in STATISTICS}
        columns["row"] = np.full(count, -1, np.int64)
        columns["offset"] = np.full(count, -1, np.int64)
        columns["crc32c"] = np.zeros(count, np.uint32)
        self._room.leave_out(columns)
        kept = np.flatnonzero(columns["kept"] == KEPT)
        order = kept[np.argsort(columns["stream"][kept], kind="stable")]
        ends = (np.flatnonzero(np.diff(columns["stream"][order], append=-1)) + 1).tolist()
        # Lists, since numpy takes its time over single elements, and time that is taken here the training lacks.
        streams, places = (rows[name][order].tolist() for name in ("stream", "place"))
        begin, found = 0, list[Placed]()
        for end in ends:
            try:
                found += self._write_stream(streams[begin], places[begin:end])
            except OSError as error:
                found += [Placed(-1, -1, 0)] * (end - begin)
                columns["kept"][order[begin:end]] = STORE_FAILED
                self._room.fail(error)
            begin = end
        if found:
            placed = np.array(found, np.int64).T
            columns["row"][order], columns["offset"][order], columns["nbytes"][order] = placed
        checksums = columns["crc32c"]
        checksums[order] = rows["checksum"][order]
        for i in order[rows["checksum"][order] < 0].tolist():
            place = int(rows["place"][i])
            checksums[i] = google_crc32c.value(self._readable[place : place + int(rows["nbytes"][i])])
        failed = columns["kept"] != KEPT
        columns["nbytes"][failed] = checksums[failed] = 0
        self._room.nbytes += int(columns["nbytes"].sum())
        return columns

    def _write_stream(self, stream: int, places: list[int]) -> list[Placed]:
        """Write the tensors of a stream; return where each is.

        Raises:
            OSError: they were not written.
        """
        if self._store is None or self._room.store_failed:
            raise OSError("the store has failed before")
        if stream not in self._uncommitted:
            self._uncommitted[stream] = self._store.rows(stream)
        return self._store.append(stream, self._memory, places)

    def _commit(self) -> None:
        """Commit what is pending."""
        columns = {name: np.concatenate([part[name] for part in self._pending]) for name in self._pending[0]}
        self._pending.clear()
        self._uncommitted.clear()
        if len(columns["step"]):
            if self._durable:
                self._bring_to_disk(columns)
            self._log.append(columns)
        if self._store is not None:
            self._room.look(int(columns["step"].max(initial=-1)), self._add_to_store_again)

    def _add_to_store_again(self) -> None:
        """Give those streams a place that got none while the disk was full.

        Raises:
            OSError: it is still full.
        """
        while self._not_in_store and self._store is not None:
            self._store.add(*self._not_in_store[0])
            self._not_in_store.pop(0)

    def _bring_to_disk(self, columns: dict[str, NDArray[Any]]) -> None:
        """Bring to the disk itself what a commit names, before it is there: tensors, then the tables."""
        if self._store is not None:
            try:
                self._store.sync()
            except OSError as error:
                self._take_back(columns, STORE_FAILED)
                self._room.fail(error, for_good=True)  # what a failed sync has lost is not known
        for file in (self._streams_file, self._scalars_file, self._notes_file):
            os.fdatasync(file.fileno())

    def _take_back(self, columns: dict[str, NDArray[Any]], why: int) -> None:
        """Turn records into such as have no tensor."""
        columns["kept"][columns["kept"] == KEPT] = why
        self._room.nbytes -= int(columns["nbytes"].sum())
        columns["row"][:] = columns["offset"][:] = -1
        columns["nbytes"][:] = columns["crc32c"][:] = 0

    def _drop_tensors(self, parts: list[NDArray[Any]], *, pending: bool) -> None:
        """Drop the tensors of a step that the ring was too full to take whole: of its parts, and of those before."""
        for rows in parts:
            rows["kept"][rows["kept"] == KEPT] = RING_FULL
        if not pending:
            return
        for columns in self._pending:
            self._take_back(columns, RING_FULL)
        assert self._store is not None
        for stream, count in self._uncommitted.items():
            self._store.rewind(stream, count)

    def note(self, note: str) -> None:
        """Write down what concerns all layers."""
        with contextlib.suppress(OSError):
            self._write_note({"step": None, "layer": None, "note": note})

    def _write_note(self, note: dict[str, Any]) -> None:
        self._notes_file.write(json.dumps(self._attempt.marked(note)) + "\n")
        self._notes_file.flush()

    def begin(self) -> None:
        """Look at the limits before the first step, and see that the trace itself outlasts what its steps do."""
        if self._durable:
            for file in (self._directory.parent / trace_format.TRACE_FILE, self._directory / trace_format.MODEL_FILE):
                with contextlib.suppress(FileNotFoundError):  # rank 0 writes the former
                    sync(file)
            for folder in (self._directory, *self._directory.parents):
                with contextlib.suppress(OSError):  # one that we may not read has been there before us
                    sync(folder)
        if self._store is not None:
            self._room.look_at_limits()

    def finish(self) -> None:
        """Close the files and seal the trace."""
        for file in (self._streams_file, self._scalars_file, self._notes_file):
            with contextlib.suppress(OSError):
                file.close()
        self._log.close()
        if self._store is not None:
            self._store.close()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        books = {**self.end["books"], "writer_cpu_s": round(usage.ru_utime + usage.ru_stime, 3)}
        self._attempt.seal(self._directory, {**self.end, "books": books}, durable=self._durable)


def write_model_file(directory: Path, model: dict[str, Any], *, durable: bool = False) -> None:
    """Write `model.json`, at once or not at all."""
    trace_format.write_whole(directory / trace_format.MODEL_FILE, json.dumps(model, indent=1) + "\n", durable=durable)


def _appending(path: Path) -> Any:
    return path.open("a", encoding="utf-8")


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
