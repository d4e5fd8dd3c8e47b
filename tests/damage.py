"""Damages files of small traces at random and reads them: `python -m tests.damage [--inputs 1000] [TARGET ...]`.

A reader may give what was written, or raise an error of `replay`. Whatever else it does ends this process with a status
that is not 0: another exception, another value, a crash, memory past a limit, a minute without an answer. An input is
known by its target and its number, so each can be made again. The reader that the file belongs to sees each input; now
and then whatever reads a trace sees one.
"""

import argparse
import faulthandler
import functools
import json
import random
import re
import resource
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import replay
from hookrec.findings import as_alert, ended
from replay import hdf5_segments
from replay.alerts import AlertFile, read_alerts, read_sent
from replay.catalog import entry_of
from replay.documents import read_end, read_identity, read_modules, read_notes, read_scalars, read_triggers
from replay.dropping import drop, finish_dropping, read_dropped, shards
from replay.follow import Follower
from replay.log import Log
from replay.log_segments import segments_of
from replay.seal import locked, read_streams, seal
from replay.verify import verify
from replay.zarr_store import forget_rows
from tests.stored import SHAPES, write_stored

RANK = "rank-00000"
TIME = "2026-12-02T12:00:00.000+00:00"
ROOM_BYTES = 1 << 30
"""How much more memory than for a whole trace may be asked for."""
STEPS = 6
EVERYTHING = 500
"""One of so many inputs is shown to whatever reads a trace."""

ARRAY = f"{RANK}/tensors.zarr/0/output/data/zarr.json"
SHARD = f"{RANK}/tensors.zarr/0/output/data/c/0/0"
CHUNKS = f"{RANK}/tensors-compressed.h5"
_VALUES = (
    *("null", "true", "-1", "0", "1", "3", "1e999", "-1e999", "NaN", "1.5", "0.1", str(2**31), str(2**63), str(10**30)),
    *(str(10**13), "1" + "0" * 400, "-1" + "0" * 400),
    *('""', '"a"', '"../../x"', '"/etc/passwd"', '"\\ud800"', '"a\\u0000"', "[]", "{}", "[1]", '{"a": 1}', "[[[]]]"),
    *("9" * 5000, "[" * 5000, "[" * 200_000, '{"a":' * 5000),
)
_TOKEN = re.compile(rb'-?\d+(?:\.\d+)?|"(?:[^"\\]|\\.)*"|null|true|false|\[[^\[\]]*\]|\{[^{}]*\}')


class Target(NamedTuple):
    """A file of a trace, who reads it first of all, and how the trace is written that has it."""

    file: str
    read: Callable[["Written"], Any]
    store: str = "zarr"
    codec: str | None = None
    sealed: bool = False


class Written:
    """A trace as it was written, and whoever reads it."""

    def __init__(self, path: Path, target: Target) -> None:
        self.path, self.rank = path, path / RANK
        hdf5_segments._SEGMENT_ROWS = 8  # small files, since each is written many times
        self.tensors = write_stored(path, target.store, target.codec, steps=STEPS, sealed=target.sealed)
        line = {"step": 3, "time": 1.0, "by": "call", "why": "x", "detail": None, "first_step": 1}
        (self.rank / "triggers.jsonl").write_text((json.dumps(line) + "\n") * 2)
        alerts = AlertFile(path)
        found = [as_alert(ended(rank, {"how": "died"}, 0), "0" * 32, TIME) for rank in range(3)]
        alerts.append(found)
        alerts.mark_sent(found[0].id, "webhook", TIME)
        if target.file.endswith("dropped.json"):
            with locked(self.rank):
                drop(self.rank, shards(self.rank)[:1], "a quota", TIME)
        self.log = Log(self.rank).refresh().table()

    def readers(self) -> Iterator[Callable[[], Any]]:
        """Yield whatever reads the trace: functions that raise an error of `replay` or give what was written."""
        for name in ("status", "endings", "silent", "layers", "notes", "triggers", "not_kept", "nbytes", "steps"):
            yield lambda name=name: getattr(replay.open(self.path), name)
        yield lambda: replay.open(self.path).scalars()
        yield lambda: replay.open(self.path).modules()
        yield lambda: replay.open(self.path).records(where="l2 > 1")
        yield lambda: replay.open(self.path).sql("select count(*), sum(l2), max(layer) from records")
        yield lambda: list(verify(self.path))
        yield lambda: entry_of(self.path, self.path.parent)
        yield self.read_log
        yield self.read_tensors
        yield self._follow
        yield lambda: read_alerts(self.path)
        yield lambda: read_sent(self.path)
        yield lambda: shards(self.rank)
        yield lambda: finish_dropping(self.rank)
        yield self._drop
        yield self._seal
        yield self.read_tensors

    def read_log(self) -> None:
        """What is there of the log must be its beginning, up to the end of a commit."""
        found = Log(self.rank).refresh().table()
        if not found.equals(self.log.slice(0, len(found))) or len(found) % 3:
            raise AssertionError(f"wrong records: {found.to_pylist()}")

    def read_log_in_all_ways(self) -> None:
        """Read the log as a trace, a follower and `replay verify` do."""
        _tried(self.read_log)
        _tried(self._follow)
        for segment in segments_of(self.rank):
            _tried(lambda segment=segment: list(segment.batches()))

    def read_tensors(self) -> None:
        """Read each tensor by itself, so that one that is damaged hides no other."""
        with replay.open(self.path) as trace:
            streams = {(s.layer, s.kind, s.path): s.id for s in read_streams(self.rank)}
            for step in range(STEPS):
                for key in streams:
                    _tried(lambda step=step, key=key: self._tensor(trace, step, *key))

    def _tensor(self, trace: replay.Trace, step: int, layer: str, kind: str, path: str) -> None:
        data = trace.tensor(step, layer, kind, path=path).tobytes()
        # Names have no checksum. Whatever the layer is called by now, the bytes are those of the step.
        if data not in [self.tensors.get((step, name)) for name in SHAPES]:
            raise AssertionError(f"a wrong tensor of step {step}, {layer!r}")

    def forget(self) -> None:
        """Note in an array that tensors will be dropped."""
        forget_rows(self.rank / "tensors.zarr", read_streams(self.rank)[0], 3)

    def _follow(self) -> None:
        count = sum(len(table) for table in Follower(self.path).read())
        if count > len(self.log):
            raise AssertionError(f"{count} records of {len(self.log)}")

    def _drop(self) -> None:
        with locked(self.rank):
            drop(self.rank, shards(self.rank)[:1], "a quota", TIME)

    def _seal(self) -> None:
        with locked(self.rank):
            seal(self.rank, "recovered", None, {})


TARGETS = {
    "log": Target(f"{RANK}/records-00000.arrows", Written.read_log_in_all_ways),
    "sealed log": Target(f"{RANK}/records-00000.parquet", Written.read_log_in_all_ways, sealed=True),
    "streams": Target(f"{RANK}/streams.jsonl", Written.read_tensors),
    "segments": Target(f"{RANK}/segments.jsonl", Written.read_tensors, "hdf5"),
    "trace": Target("trace.json", lambda written: read_identity(written.path)),
    "model": Target(f"{RANK}/model.json", lambda written: read_modules(written.rank)),
    "end": Target(f"{RANK}/end.json", lambda written: read_end(written.rank), sealed=True),
    "notes": Target(f"{RANK}/notes.jsonl", lambda written: read_notes(written.rank)),
    "scalars": Target(f"{RANK}/scalars.jsonl", lambda written: list(read_scalars(written.rank))),
    "triggers": Target(f"{RANK}/triggers.jsonl", lambda written: read_triggers(written.rank)),
    "dropped": Target(f"{RANK}/tensors-dropped.json", lambda written: read_dropped(written.rank), sealed=True),
    "array": Target(ARRAY, Written.forget, sealed=True),
    "alerts": Target("alerts.jsonl", lambda written: read_alerts(written.path)),
    "sent": Target("alerts-sent.jsonl", lambda written: read_sent(written.path)),
    "tensors": Target(SHARD, Written.read_tensors),
    "tensors, zstd": Target(SHARD, Written.read_tensors, codec="zstd"),
    "tensors, lz4": Target(SHARD, Written.read_tensors, codec="lz4"),
    "tensors, blosc": Target(SHARD, Written.read_tensors, codec="blosc"),
    "tensors, hdf5 zstd": Target(CHUNKS, Written.read_tensors, "hdf5", "zstd"),
    "tensors, hdf5 blosc": Target(CHUNKS, Written.read_tensors, "hdf5", "blosc", sealed=True),
    "tensors, hdf5": Target(f"{RANK}/tensors-00000.h5", Written.read_tensors, "hdf5"),
}


def damaged(data: bytes, rng: random.Random, *, text: bool) -> bytes:
    """Return bytes with one to three faults."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice((_cut, _flip, _flip, _overwrite, _remove, _repeat, _insert, *([_replace] * 6 * text)))(
            data, rng
        )
    return data


def _slice(data: bytes, rng: random.Random) -> tuple[int, int]:
    begin = rng.randrange(len(data) + 1)
    return begin, min(len(data), begin + rng.choice((1, 2, 4, 8, 16, 64, 1000)))


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8)) if data else 0):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, rng: random.Random) -> bytes:
    begin, end = _slice(data, rng)
    return (
        data[:begin]
        + rng.choice((bytes(end - begin), b"\xff" * (end - begin), rng.randbytes(end - begin)))
        + data[end:]
    )


def _remove(data: bytes, rng: random.Random) -> bytes:
    begin, end = _slice(data, rng)
    return data[:begin] + data[end:]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    begin, end = _slice(data, rng)
    return data[:end] + data[begin:end] + data[end:]


def _insert(data: bytes, rng: random.Random) -> bytes:
    begin, end = _slice(data, rng)
    return data[:begin] + rng.randbytes(end - begin) + data[begin:]


def _replace(data: bytes, rng: random.Random) -> bytes:
    """Put another JSON value in the place of one."""
    tokens = list(_TOKEN.finditer(data))
    if not tokens:
        return data
    token = rng.choice(tokens)
    return data[: token.start()] + rng.choice(_VALUES).encode() + data[token.end() :]


_WAYS = (_cut, _flip, _flip, _overwrite, _remove, _repeat, _insert)


def _tried(read: Callable[[], Any]) -> None:
    try:
        read()
        outcomes["right"] += 1
    except replay.ReplayError as error:
        outcomes[type(error).__name__] += 1
        if not str(error):
            raise AssertionError(f"{error!r} says nothing") from error


outcomes: Counter[str] = Counter()


def attack(name: str, inputs: int, first: int = 0) -> int:
    """Read damaged files; return how many faults were found."""
    target = TARGETS[name]
    text = target.file.endswith((".json", ".jsonl"))
    faults = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        written = Written(Path(folder) / "a", target)
        file = written.path / target.file
        data = file.read_bytes()
        for read in written.readers():
            _tried(read)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        written = Written(Path(folder) / "b", target)
        file = written.path / target.file
        for number in range(first, first + inputs):
            changed = damaged(data, random.Random(f"{name} {number}"), text=text)
            readers: list[Callable[[], Any]] = [functools.partial(target.read, written)]
            if number % EVERYTHING == 0:
                faulthandler.dump_traceback_later(60, exit=True)
                readers = list(written.readers())
            file.write_bytes(changed)
            for read in readers:
                try:
                    _tried(read)
                except Exception:
                    faults += 1
                    print(f"{name} {number}: {changed[:300]!r}", flush=True)
                    traceback.print_exc(limit=-8)
                    if faults >= 5:
                        return faults
            if number % EVERYTHING == 0:
                shutil.rmtree(written.path)  # some of the readers have changed the trace
                written = Written(written.path, target)
    faulthandler.cancel_dump_traceback_later()
    return faults


def main() -> int:
    """Attack targets one after the other; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all if none")
    parser.add_argument("--inputs", type=int, default=1000, help="of each target")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    chosen = parser.parse_args()
    faults = 0
    for name in chosen.targets or TARGETS:
        outcomes.clear()
        faults += attack(name, chosen.inputs, chosen.first)
        said = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.most_common())
        print(f"{name}: {chosen.inputs:,} inputs: {said}", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
