"""The writer process: takes what a training sends, writes tensors, then commits the step.

It is a process of its own so that writing costs the training neither its GIL nor a page cache, and so that there is
somebody left when the training is killed: it then takes what is still in the socket and the ring, commits the steps
that are whole and seals the trace. It never imports torch.
"""

import contextlib
import errno
import json
import math
import mmap
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from hookrec.attempt import Attempt, CannotResume, changes_of_plan, locked_soon, take_up
from hookrec.held import Held
from hookrec.provenance import write_trace_file
from hookrec.resume import SHARED_FILES, Message, Predecessor, cut_torn_line
from hookrec.ring import KEPT, LIMIT, MESSAGE, PAGE, RING_FULL, ROW, ROW_BYTES, STORE_FAILED, Control
from replay import format as trace_format
from replay.files import sync
from replay.format import STATISTICS, Placed, Stream
from replay.log import LogWriter
from replay.places import Places
from replay.stores import open_writer

_ROW_DTYPE = np.dtype(
    [
        *(("step", "<i8"), ("stream", "<i4"), ("call", "<i4"), ("micro", "<i4"), ("mode", "u1"), ("kept", "u1")),
        *(("unused", "<u2"), ("place", "<i8"), ("nbytes", "<i8"), ("checksum", "<i8")),
        *((name, "<i8") for name in STATISTICS[:5]),
        *((name, "<f8") for name in STATISTICS[5:]),
    ]
)
assert _ROW_DTYPE.itemsize == ROW_BYTES
assert _ROW_DTYPE.fields is not None
assert _ROW_DTYPE.fields["numel"][1] == ROW.size

# To be woken by each small step takes a core from the training in the middle of it, and to write each small record by
# itself costs more than its bytes. So the writer rests when it has caught up, and then takes the steps that came
# together. A ring that would be full by then (at 8 GB/s) gets a shorter rest. Where there are fewer cores than threads,
# the training goes first.
_REST_S = 0.025
_RING_BYTES_A_SECOND = 8e9
_NICE = 10

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LOOK_AGAIN_S = 2.0
_STEPS_OF_ROOM = 4
"""Tensors begin again when there is room for so many steps, and after each time for twice as many: no flapping."""


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
        self._places = Places(plan["store"], streams, self._closed)
        self._streams = 0
        self._streams_file = _appending(directory / trace_format.STREAMS_FILE)
        self._scalars_file = _appending(directory / trace_format.SCALARS_FILE)
        self._notes_file = _appending(directory / trace_format.NOTES_FILE)
        self._pending: list[dict[str, NDArray[Any]]] = []
        self._uncommitted: dict[int, int] = {}  # of streams with rows that are not committed: how many are
        self._bytes = before.nbytes if before else 0
        self._taken = self._committed = self._control.released  # positions in the ring
        self._messages = self._control.committed
        self._limit_step: int | None = None  # the last whose tensors are kept, where a limit was reached
        self._may_begin_again = False
        self._stops = 0
        self._look_again = 0.0
        self._step_bytes = 0  # of tensors in the largest commit
        self._not_in_store: list[tuple[Stream, int]] = []
        self._unacknowledged = 0  # messages that were taken and not committed
        self._unreleased_bytes = 0  # of tensors that were taken and not committed
        for stream in before.streams if before else ():
            self._add_to_store(stream, before.rows[stream.id] if before else 0)
        self.end: dict[str, Any] = {"how": "died", "detail": _DIED, "books": {}}

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
            self._plan = facts["plan"]
        if "commit" in facts:
            self._attempt.begin(self._directory, self._log.segment, self._plan)
        if "model" in facts:
            _write_model_file(self._directory, facts["model"], durable=self._durable)
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
                self._may_begin_again |= error.errno in _NO_ROOM
                self._stop_tensors(STORE_FAILED, error)

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
        self._apply_limit(columns)
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
                self._may_begin_again |= error.errno in _NO_ROOM
                self._stop_tensors(STORE_FAILED, error)
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
        self._bytes += int(columns["nbytes"].sum())
        return columns

    def _apply_limit(self, columns: dict[str, NDArray[Any]]) -> None:
        """Keep no tensor of the steps behind the one in which a limit was reached, though the ring still has them."""
        kept = columns["kept"] == KEPT
        nbytes = np.cumsum(np.where(kept, columns["nbytes"], 0))
        self._step_bytes = max(self._step_bytes, int(nbytes[-1]) if len(nbytes) else 0)
        if self._limit_step is None and self._plan["compression"] is None:  # else the bytes are not known yet
            past = np.flatnonzero(self._bytes + nbytes > self._plan["max_bytes"])
            if len(past):
                self._limit_step = int(columns["step"][past[0]])
        if self._limit_step is not None:
            columns["kept"][kept & (columns["step"] > self._limit_step)] = LIMIT

    def _write_stream(self, stream: int, places: list[int]) -> list[Placed]:
        """Write the tensors of a stream; return where each is.

        Raises:
            OSError: they were not written.
        """
        if self._store is None or self._control.stop_tensors == STORE_FAILED:
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
        if self._store is not None and not self._control.stop_tensors:
            self._check_limits(int(columns["step"].max()) if len(columns["step"]) else -1)
        elif self._may_begin_again and time.monotonic() >= self._look_again:
            self._look_again = time.monotonic() + _LOOK_AGAIN_S
            self._begin_again()

    def _bring_to_disk(self, columns: dict[str, NDArray[Any]]) -> None:
        """Bring to the disk itself what a commit names, before it is there: tensors, then the tables."""
        if self._store is not None:
            try:
                self._store.sync()
            except OSError as error:
                self._take_back(columns, STORE_FAILED)
                self._may_begin_again = False  # what a failed sync has lost is not known
                self._stop_tensors(STORE_FAILED, error)
        for file in (self._streams_file, self._scalars_file, self._notes_file):
            os.fdatasync(file.fileno())

    def _take_back(self, columns: dict[str, NDArray[Any]], why: int) -> None:
        """Turn records into such as have no tensor."""
        columns["kept"][columns["kept"] == KEPT] = why
        self._bytes -= int(columns["nbytes"].sum())
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

    def _check_limits(self, step: int = -1) -> None:
        """Stop the tensors behind a step if a limit is reached."""
        if self._bytes > self._plan["max_bytes"]:
            self._limit_step = step if self._limit_step is None else self._limit_step
            self._stop_tensors(
                LIMIT,
                f"max_bytes={self._plan['max_bytes']:,} was reached in step {self._limit_step}, which is kept whole; "
                f"there are {self._bytes:,} bytes of tensors",
            )
            return
        disk = os.statvfs(self._directory)
        if disk.f_bavail < self._plan["keep_free"] * disk.f_blocks:
            free = disk.f_bavail * disk.f_frsize / 1e9
            self._limit_step, self._may_begin_again = step, True
            self._stop_tensors(
                LIMIT, f"{free:.1f} GB are free on the disk, less than keep_free={self._plan['keep_free']}"
            )

    def _stop_tensors(self, why: int, reason: object) -> None:
        if not self._control.stop_tensors:
            self._control.stop_tensors = why
            self._stops += 1
            self._look_again = time.monotonic() + _LOOK_AGAIN_S
            self.note(f"from here on statistics only: {reason}")

    def _begin_again(self) -> None:
        """Take tensors again if there is room for some steps: by trying, since a quota shows in no other way."""
        need = _STEPS_OF_ROOM * 2**self._stops * self._step_bytes
        disk = os.statvfs(self._directory)
        if disk.f_bavail - need / disk.f_frsize < self._plan["keep_free"] * disk.f_blocks:
            return
        try:
            with tempfile.TemporaryFile(dir=self._directory) as file:
                os.posix_fallocate(file.fileno(), 0, need + mmap.PAGESIZE)
            while self._not_in_store and self._store is not None:
                self._store.add(*self._not_in_store[0])
                self._not_in_store.pop(0)
        except OSError:
            return
        self._limit_step, self._may_begin_again = None, False
        self._control.stop_tensors = 0
        self.note("there is room on the disk again: tensors are kept from the next step on")

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
            self._check_limits()

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


_DIED = "the training process disappeared without detaching: it was killed, or crashed in native code"


def main(memory_fd: int, socket_fd: int) -> int:
    """Run the writer on inherited file descriptors; the configuration comes on standard input."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what ends the training ends us only after we are done
    config = json.load(sys.stdin)
    os.nice(_NICE)
    connection = socket.socket(fileno=socket_fd)
    training = os.pidfd_open(config["pid"])
    memory = memoryview(mmap.mmap(memory_fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    directory = Path(config["directory"])
    _raise_file_limit()
    with contextlib.ExitStack() as stack:
        answer: dict[str, Any] = {}
        try:
            stack.enter_context(locked_soon(directory, (config.get("attempt") or {}).get("wait_s", 0.0)))
            writer, before, attempt, answer = _begin(directory, config, memory)
        except CannotResume as error:
            connection.sendall(json.dumps({"refused": str(error)}).encode() + b"\n")
            return 1
        except Exception as error:
            connection.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
            return 1
        connection.sendall(json.dumps(answer).encode() + b"\n")
        try:
            held = None
            if config["plan"]["flight"] is not None:
                held = Held(directory, config["plan"], len(memory) - PAGE, writer, before, attempt)
            for messages in _Source(connection, training, len(memory)):
                if held is not None:
                    held.take(messages)
                    continue
                needed = max(facts.get("need", 0) for _, _, facts in messages)
                writer.take(messages if before is None else before.only_new(messages), needed=needed)
            if held is not None:
                held.finish()
        except Exception as error:
            # Another writer would do no better: neither a full disk nor a fault of ours goes away by that.
            why = f"the trace could not be written: {_words(error)}"
            with contextlib.suppress(OSError):  # that file may be on the same disk
                print(why, file=sys.stderr, flush=True)
            Control(memory).failed = True
            writer.end = {"how": "failed", "detail": why, "books": {}}
        connection.close()
        try:
            writer.finish()
        except Exception as error:
            print(f"the trace could not be sealed: {_words(error)}", file=sys.stderr)
            return 1
    return 0


def _begin(
    directory: Path, config: dict[str, Any], memory: memoryview
) -> tuple[Writer, Predecessor | None, Attempt, dict[str, Any]]:
    """Return the writer, what was there before it, the attempt that it records, and the answer to the training.

    Raises:
        CannotResume: as `take_up`.
    """
    before = None
    answer: dict[str, Any] = {}
    succeeds = "predecessor" in config
    if succeeds:
        attempt = Attempt.of(config, directory)
        for name in SHARED_FILES:
            cut_torn_line(directory / name)
        before = Predecessor(directory, config["predecessor"], Control(memory).released, attempt.number)
    elif config.get("attempt") is not None:
        attempt, before, answer = take_up(directory, config)
    else:
        attempt = Attempt()
    try:
        if config["trace"] is not None and not (before and (directory.parent / trace_format.TRACE_FILE).exists()):
            write_trace_file(directory.parent, config)
        changes = changes_of_plan(directory, config["plan"]) if attempt.number and not succeeds else None
        if not succeeds:
            _write_model_file(directory, config["model"])
        writer = Writer(directory, config["plan"], memory, before, attempt)
        writer.begin()
    except Exception:
        if attempt.number and not attempt.begun:
            with contextlib.suppress(Exception):
                attempt.seal(directory, {}, durable=False)  # as it was before we came
        raise
    if succeeds:
        writer.note(f"the writer process is gone ({config['predecessor']['why']}); another goes on from here")
    if changes is not None:
        writer.note(f"resumed from step {attempt.first_step} on by another plan: {changes}")
    return writer, before, attempt, answer


class _Source:
    """What the training sends, until it says goodbye or is gone: lists of whole messages that came together.

    Processes that the training has forked may hold its end of the socket open, so its death is watched too.
    """

    def __init__(self, connection: socket.socket, training: int, memory_bytes: int) -> None:
        self._connection = connection
        self._training = training
        self._rest_s = min(_REST_S, memory_bytes / _RING_BYTES_A_SECOND)
        self._together_bytes = memory_bytes // 16
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(training, select.POLLIN)
        self._buffer = bytearray()
        connection.setblocking(False)

    def __iter__(self) -> Iterator[list[Message]]:
        dead = False
        position = 0
        while True:
            open_ = self._receive()
            messages: list[Message] = []
            for message in self._parse():
                messages.append(message)
                # The training may be waiting for the memory of these.
                if message[0] - position >= self._together_bytes:
                    yield messages
                    messages, position = [], message[0]
            if messages:
                yield messages
                position = messages[-1][0]
                if "end" in messages[-1][2]:
                    return
            if dead or not open_:
                return
            time.sleep(self._rest_s)
            # Death is looked at before the socket is read again: what was sent before it is there.
            dead = any(fd == self._training for fd, _ in self._poll.poll())

    def _receive(self) -> bool:
        """Read what is there; return whether more may come."""
        while True:
            try:
                data = self._connection.recv(1 << 18)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            if not data:
                return False
            self._buffer += data

    def _parse(self) -> Iterator[Message]:
        """Take whole messages out of the buffer."""
        begin = 0
        while len(self._buffer) - begin >= MESSAGE.size:
            position, count, text_bytes = MESSAGE.unpack_from(self._buffer, begin)
            rows_begin = begin + MESSAGE.size
            text_begin = rows_begin + count * ROW_BYTES
            if text_begin + text_bytes > len(self._buffer):
                break
            begin = text_begin + text_bytes
            rows = np.frombuffer(self._buffer[rows_begin:text_begin], _ROW_DTYPE)
            yield position, rows, json.loads(self._buffer[text_begin:begin]) if text_bytes else {}
        del self._buffer[:begin]


def _write_model_file(directory: Path, model: dict[str, Any], *, durable: bool = False) -> None:
    trace_format.write_whole(directory / trace_format.MODEL_FILE, json.dumps(model, indent=1) + "\n", durable=durable)


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _appending(path: Path) -> Any:
    return path.open("a", encoding="utf-8")


def _words(error: Exception) -> str:
    """What an error says, in one line; of one that is no fault of the system, its name as well."""
    text = " ".join(str(error).split())
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
