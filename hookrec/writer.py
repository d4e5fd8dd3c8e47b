"""The writer process: takes what a training sends, writes tensors, then commits the step.

It is a process of its own so that writing costs the training neither its GIL nor a page cache, and so that there is
somebody left when the training is killed: it then takes what is still in the socket and the ring, commits the steps
that are whole and seals the trace. It never imports torch.
"""

import contextlib
import datetime
import importlib.metadata
import json
import math
import mmap
import os
import platform
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from hookrec.ring import KEPT, LIMIT, MESSAGE, RING_FULL, ROW, ROW_BYTES, STORE_FAILED, Control
from replay import format as trace_format
from replay.format import STATISTICS, Locations, Stream
from replay.log import LogWriter
from replay.seal import locked, seal
from replay.zarr_store import ZarrWriter, stride_of

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

# To be woken by each small step takes a core from the training in the middle of it, 25 µs a record on a small net. So
# the writer rests when it has caught up, and then takes several steps at once. The ring holds what comes meanwhile.
_REST_S = 0.01

_ENVIRONMENT = ("CUDA_", "CUBLAS_", "NCCL_", "OMP_", "MKL_", "PYTORCH_", "TORCH_", "SLURM_JOB_ID", "RANK", "WORLD_SIZE")
_PACKAGES = ("torch", "numpy", "hookrec", "transformers", "lightning", "accelerate")


class Writer:
    """Writes one rank of a trace.

    Args:
        directory: the rank's directory.
        plan: what is recorded, as `trace.json` has it.
        memory: the shared memory.
    """

    def __init__(self, directory: Path, plan: dict[str, Any], memory: memoryview) -> None:
        self._directory = directory
        self._plan = plan
        self._memory = memory
        # The checksum's extension takes no memoryview, but arrays that cannot be written to.
        self._readable = np.frombuffer(memory.toreadonly(), np.uint8)
        self._control = Control(memory)
        self._log = LogWriter(directory)
        self._store = ZarrWriter(directory / trace_format.STORE_DIRECTORIES["zarr"]) if plan["tensors"] else None
        self._locations = Locations()
        self._streams = 0
        self._streams_file = _appending(directory / trace_format.STREAMS_FILE)
        self._scalars_file = _appending(directory / trace_format.SCALARS_FILE)
        self._notes_file = _appending(directory / trace_format.NOTES_FILE)
        self._pending: list[dict[str, NDArray[Any]]] = []
        self._committed_rows: dict[int, int] = {}  # of streams that have rows which are not committed yet
        self._bytes = 0
        self.end: dict[str, Any] = {"how": "died", "detail": _DIED, "books": {}}

    def take(self, position: int, rows: NDArray[Any], facts: dict[str, Any]) -> None:
        """Take a part of a step; with its last part, commit it.

        Raises:
            OSError: what cannot be done without could not be written; the step is not committed.
        """
        if "model" in facts:
            _write_model_file(self._directory, facts["model"])
        self._add_streams(facts.get("streams", ()))
        for note in facts.get("notes", ()):
            self._notes_file.write(json.dumps(note) + "\n")
            self._notes_file.flush()
        if len(rows):
            self._pending.append(self._write_tensors(rows))
        self._control.released = position
        for line in facts.get("scalars", ()):
            line["values"] = {name: _json_number(value) for name, value in line["values"].items()}
            self._scalars_file.write(json.dumps(line) + "\n")
            self._scalars_file.flush()
        if "commit" in facts:
            self._commit(drop_tensors="drop_tensors" in facts)
        self.end = facts.get("end", self.end)

    def _add_streams(self, streams: Any) -> None:
        for found in streams:
            location = None
            if self._store is not None:
                location = self._locations.new(found["layer"], found["kind"], found["path"])
            stream = Stream(id=self._streams, location=location, **{**found, "shape": tuple(found["shape"])})
            self._streams += 1
            self._streams_file.write(stream.to_json() + "\n")
            if self._store is not None:
                try:
                    self._store.add(stream)
                except OSError as error:
                    self._stop_tensors(STORE_FAILED, error)
        if streams:
            self._streams_file.flush()

    def _write_tensors(self, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Write the tensors of a part; return the columns of its records."""
        count = len(rows)
        columns = {name: rows[name].copy() for name in ("step", "stream", "call", "micro", "mode", "kept", "nbytes")}
        columns |= {name: rows[name].copy() for name in STATISTICS}
        row_column = columns["row"] = np.full(count, -1, np.int64)
        offset_column = columns["offset"] = np.full(count, -1, np.int64)
        crc_column = columns["crc32c"] = np.zeros(count, np.uint32)
        kept_column = columns["kept"]
        store = self._store
        places, sizes, streams = rows["place"].tolist(), rows["nbytes"].tolist(), rows["stream"].tolist()
        checksums = rows["checksum"].tolist()
        for i in np.flatnonzero(kept_column == KEPT).tolist():
            stream, place, nbytes = streams[i], places[i], sizes[i]
            if self._control.stop_tensors == STORE_FAILED or store is None:
                kept_column[i] = STORE_FAILED
                continue
            if stream not in self._committed_rows:
                self._committed_rows[stream] = store.rows(stream)
            try:
                row_column[i], offset_column[i] = store.append(
                    stream, self._memory[place : place + stride_of(nbytes)], nbytes
                )
            except OSError as error:
                kept_column[i] = STORE_FAILED
                self._stop_tensors(STORE_FAILED, error)
                continue
            if nbytes:
                # Mostly the kernel has it, which had the bytes in its cache; to read them here would cost the training
                # memory bandwidth.
                known = checksums[i]
                crc_column[i] = known if known >= 0 else google_crc32c.value(self._readable[place : place + nbytes])
                self._bytes += nbytes
        columns["nbytes"][kept_column != KEPT] = 0
        return columns

    def _commit(self, *, drop_tensors: bool) -> None:
        if self._pending:
            columns = {name: np.concatenate([part[name] for part in self._pending]) for name in self._pending[0]}
            self._pending.clear()
            if drop_tensors:
                self._drop_tensors(columns)
            self._log.append(columns)
            self._committed_rows.clear()
            self._control.committed += 1
        if self._store is not None and not self._control.stop_tensors:
            self._check_limits()

    def _drop_tensors(self, columns: dict[str, NDArray[Any]]) -> None:
        """Take back the tensors of a step that the ring was too full to take whole."""
        kept = columns["kept"] == KEPT
        columns["kept"][kept] = RING_FULL
        self._bytes -= int(columns["nbytes"].sum())
        columns["row"][:] = columns["offset"][:] = -1
        columns["nbytes"][:] = columns["crc32c"][:] = 0
        assert self._store is not None
        for stream, count in self._committed_rows.items():
            self._store.rewind(stream, count)

    def _check_limits(self) -> None:
        if self._bytes > self._plan["max_bytes"]:
            self._stop_tensors(
                LIMIT, f"{self._bytes:,} bytes of tensors are recorded, more than max_bytes={self._plan['max_bytes']:,}"
            )
            return
        disk = os.statvfs(self._directory)
        if disk.f_bavail < self._plan["keep_free"] * disk.f_blocks:
            free = disk.f_bavail * disk.f_frsize / 1e9
            self._stop_tensors(
                LIMIT, f"{free:.1f} GB are free on the disk, less than keep_free={self._plan['keep_free']}"
            )

    def _stop_tensors(self, why: int, reason: object) -> None:
        if not self._control.stop_tensors:
            self._control.stop_tensors = why
            note = {"step": None, "layer": None, "note": f"from here on statistics only: {reason}"}
            with contextlib.suppress(OSError):
                self._notes_file.write(json.dumps(note) + "\n")
                self._notes_file.flush()

    def begin(self) -> None:
        """Look at the limits before the first step."""
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
        seal(self._directory, self.end["how"], self.end["detail"], books)


_DIED = "the training process disappeared without detaching: it was killed, or crashed in native code"


def main(memory_fd: int, socket_fd: int) -> int:
    """Run the writer on inherited file descriptors; the configuration comes on standard input."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what ends the training ends us only after we are done
    config = json.load(sys.stdin)
    connection = socket.socket(fileno=socket_fd)
    training = os.pidfd_open(config["pid"])
    memory = memoryview(mmap.mmap(memory_fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    directory = Path(config["directory"])
    _raise_file_limit()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(directory))
            if config["trace"] is not None:
                _write_trace_file(directory.parent, config)
            _write_model_file(directory, config["model"])
            writer = Writer(directory, config["plan"], memory)
            writer.begin()
        except Exception as error:
            connection.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
            return 1
        connection.sendall(b"{}\n")
        try:
            for position, rows, facts in _messages(connection, training):
                writer.take(position, rows, facts)
        except OSError as error:
            Control(memory).failed = True
            writer.end = {"how": "failed", "detail": f"the trace could not be written: {error}", "books": {}}
        connection.close()
        try:
            writer.finish()
        except OSError as error:
            print(f"the trace could not be sealed: {error}", file=sys.stderr)
            return 1
    return 0


def _messages(connection: socket.socket, training: int) -> Any:
    """Yield what the training sends, until it says goodbye or is gone.

    Processes that the training has forked may hold its end of the socket open, so its death is watched too.
    """
    source = _Source(connection, training)
    while head := source.read(MESSAGE.size):
        position, count, text_bytes = MESSAGE.unpack(head)
        body = source.read(count * ROW_BYTES + text_bytes)
        if body is None:
            return
        rows = np.frombuffer(body, _ROW_DTYPE, count)
        facts = json.loads(body[count * ROW_BYTES :]) if text_bytes else {}
        yield position, rows, facts
        if "end" in facts:
            return


class _Source:
    """Reads whole messages from the training, dead or alive."""

    def __init__(self, connection: socket.socket, training: int) -> None:
        self._connection = connection
        self._training = training
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(training, select.POLLIN)
        self._dead = False
        connection.setblocking(False)

    def read(self, nbytes: int) -> bytes | None:
        """Return `nbytes` bytes; None if the training is gone before they came."""
        data = bytearray(nbytes)
        view, got = memoryview(data), 0
        while got < nbytes:
            try:
                n = self._connection.recv_into(view[got:])
            except BlockingIOError:
                if self._dead:
                    return None
                time.sleep(_REST_S)
                # Death is looked at before the socket is read again: what was sent before it is there.
                self._dead = any(fd == self._training for fd, _ in self._poll.poll())
                continue
            except ConnectionResetError:
                return None
            if n == 0:
                return None
            got += n
        return bytes(data)


def _write_trace_file(root: Path, config: dict[str, Any]) -> None:
    cwd = config["trace"]["cwd"]
    provenance = {
        "host": platform.node(),
        "platform": platform.platform(),
        "pid": config["pid"],
        "command": config["trace"]["command"],
        "cwd": cwd,
        "python": platform.python_version(),
        "packages": {**_versions(), **config["trace"]["packages"]},
        "git": _git(cwd),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_ENVIRONMENT)},
        "seed": config["trace"]["seed"],
    }
    identity = {
        "format": trace_format.FORMAT,
        "version": trace_format.VERSION,
        "id": uuid.uuid4().hex,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "plan": config["plan"],
        "provenance": provenance,
    }
    trace_format.write_whole(root / trace_format.TRACE_FILE, json.dumps(identity, indent=1) + "\n")


def _write_model_file(directory: Path, model: dict[str, Any]) -> None:
    trace_format.write_whole(directory / trace_format.MODEL_FILE, json.dumps(model, indent=1) + "\n")


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _git(cwd: str) -> dict[str, Any] | None:
    """The commit that the training's folder is at, and whether files differ from it."""
    if shutil.which("git") is None:
        return None
    try:
        run = {"cwd": cwd, "capture_output": True, "text": True, "timeout": 2, "check": True}
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **run).stdout.strip()  # type: ignore[call-overload]
        status = subprocess.run(["git", "status", "--porcelain", "-uno"], **run).stdout  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(status.strip())}


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _appending(path: Path) -> Any:
    return path.open("a", encoding="utf-8")


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
