"""With durability="power" a commit outlasts the machine: what a loss of power leaves is read after each step.

The disk is a model. It keeps of each file the bytes that it had when it was last synced, of each folder the names.
"""

import contextlib
import json
import mmap
import os
import stat
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

import hookrec
import replay
from hookrec import writer
from hookrec.messages import ROW_DTYPE
from hookrec.provenance import write_trace_file
from hookrec.ring import STORE_FAILED
from replay import hdf5_segments, zarr_store
from replay.seal import locked
from replay.verify import verify
from tests.test_faults import net, train

PLAN = {"tensors": True, "compression": None, "max_bytes": 1 << 40, "keep_free": 0, "durability": "power"}
SIZES = {"0": 4096, "1": 100, "2": 0, "3": 70_000}


class Disk:
    """What is left when the power fails."""

    def __init__(self, files: dict[int, bytes], names: dict[int, dict[str, int]]) -> None:
        self.files, self.names = files, names

    def sync(self, fd: int) -> None:
        """In the place of os.fsync and os.fdatasync."""
        path, facts = Path(f"/proc/self/fd/{fd}").readlink(), os.fstat(fd)
        if stat.S_ISDIR(facts.st_mode):
            self.names[facts.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self.files[facts.st_ino] = path.read_bytes()

    def left(self, folder: Path, copy: Path) -> Path:
        """Make a copy of what is left of a folder."""
        copy.mkdir()
        self._left(folder.stat().st_ino, copy)
        return copy

    def _left(self, inode: int, copy: Path) -> None:
        for name, child in self.names.get(inode, {}).items():
            if child in self.names:
                (copy / name).mkdir()
                self._left(child, copy / name)
            else:
                (copy / name).write_bytes(self.files.get(child, b""))


class Recorded:
    """A writer that is sent a step at a time, and what it was sent."""

    def __init__(self, path: Path, **plan) -> None:
        self.path, self.tensors, self._streams = path, {}, []
        self._memory = memoryview(mmap.mmap(-1, 1 << 20))
        directory = path / "rank-00000"
        directory.mkdir(parents=True)
        begun = {"cwd": "/", "command": [], "packages": {}, "seed": 0, "ranks": 1}
        config = {"pid": 1, "plan": PLAN | plan, "trace": begun}
        write_trace_file(path, config)
        writer.write_model_file(directory, {"modules": []})
        self.writer = writer.Writer(directory, PLAN | plan, self._memory)
        self.writer.begin()
        self.closed = False

    def step(self, number: int) -> None:
        names = [name for name in SIZES if number >= int(name)]  # a stream more in each of the first steps
        new = [_stream(i, names[i]) for i in range(len(self._streams), len(names))]
        self._streams += new
        facts = {"streams": new, "commit": number}
        facts["scalars"] = [{"step": number, "time": 1.0, "values": {"loss": float(number)}}]
        rows = np.zeros(len(names), ROW_DTYPE)
        for i, name in enumerate(names):
            place, data = 4096 + i * 131_072, bytes([number + 1, i]) * (SIZES[name] // 2)
            self._memory[place : place + len(data)] = data
            rows[i]["place"], rows[i]["nbytes"], rows[i]["numel"] = place, len(data), len(data)
            rows[i]["checksum"] = google_crc32c.value(data) if data else 0
            self.tensors[number, name] = data
        rows["step"], rows["stream"] = number, range(len(names))
        self.writer.take([(number + 1, rows, facts)])

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with locked(self.path / "rank-00000"):
                self.writer.finish()

    def assert_whole(self, path: Path, steps: int) -> None:
        """A trace has so many steps, with all that belongs to them."""
        trace = replay.open(path)
        assert trace.steps == list(range(steps))
        assert [row["step"] for row in trace.scalars().to_pylist()] == list(range(steps))
        for (step, name), data in self.tensors.items():
            if step < steps:
                assert trace.tensor(step, name).tobytes() == data


def _stream(number: int, name: str) -> dict:
    facts = {"id": number, "placed": True, "layer": name, "kind": "output", "path": "", "dtype": "uint8"}
    return {**facts, "shape": [SIZES[name]]}


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(zarr_store, "_SHARD_ROWS", 2)
    monkeypatch.setattr(hdf5_segments, "_SEGMENT_ROWS", 2)
    disk = Disk({}, {})
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, disk.sync)
    return disk


@pytest.fixture
def recording(tmp_path):
    with contextlib.ExitStack() as stack:

        def begin(path: str, **plan) -> Recorded:
            recorded = Recorded(tmp_path / "disk" / path, **plan)
            stack.callback(recorded.close)
            return recorded

        yield begin


@pytest.mark.parametrize(("store", "compression"), [("zarr", None), ("hdf5", None), ("hdf5", "zstd")])
def test_whenever_the_power_fails_each_committed_step_is_whole(tmp_path, disk, recording, store, compression):
    recorded = recording("runs/a", store=store, compression=compression)
    for step in range(7):
        recorded.step(step)

        left = disk.left(tmp_path / "disk", tmp_path / f"left-{store}-{step}")
        recorded.assert_whole(left / "runs/a", step + 1)
    recorded.close()
    left = disk.left(tmp_path / "disk", tmp_path / f"left-{store}-end")
    recorded.assert_whole(left / "runs/a", 7)
    assert replay.open(left / "runs/a").status == "sealed"
    assert list(verify(left / "runs/a")) == []


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_a_commit_that_reaches_the_disk_by_itself_names_nothing_that_is_not_there(tmp_path, disk, recording, store):
    """The system may write the log at any time after it was appended to, before anybody asks for it."""
    recorded = recording("runs/a", store=store)
    log = recorded.writer._log
    append, looks = log.append, []

    def append_and_look(columns) -> None:
        files, names = dict(disk.files), dict(disk.names)
        append(columns)
        file = next((recorded.path / "rank-00000").glob("records-*"))
        early = Disk(files | {file.stat().st_ino: file.read_bytes()}, names)
        left = early.left(tmp_path / "disk", tmp_path / f"left-{store}-{len(looks)}")
        recorded.assert_whole(left / "runs/a", len(looks) + 1)
        looks.append(disk.files[file.stat().st_ino] == file.read_bytes())

    log.append = append_and_look
    for step in range(5):
        recorded.step(step)

    assert looks == [True] * 5


def test_the_array_that_shapes_share_is_on_the_disk_as_well(tmp_path, disk):
    directory = tmp_path / "disk" / "runs" / "a" / "rank-00000"
    directory.mkdir(parents=True)
    memory = memoryview(mmap.mmap(-1, 1 << 20))
    write = writer.Writer(directory, PLAN | {"store": "zarr"}, memory)
    write.begin()
    streams = [{**_stream(i, "0"), "shape": [size]} for i, size in enumerate((64, 100, 4096, 300))]
    for step, stream in enumerate(streams):
        rows = np.zeros(1, ROW_DTYPE)
        rows["step"], rows["stream"], rows["place"], rows["numel"] = step, step, 4096, stream["shape"][0]
        rows["nbytes"], rows["checksum"] = stream["shape"][0], -1
        write.take([(step + 1, rows, {"streams": [stream], "commit": step})])

        left = disk.left(tmp_path / "disk", tmp_path / f"left-{step}")
        (left / "runs/a/trace.json").write_text(
            json.dumps({"format": "hookrec-trace", "version": 1, "created": "now", "plan": {}, "provenance": {}})
        )
        with replay.open(left / "runs/a") as trace:
            assert [trace.tensor(number, "0").size for number in range(step + 1)] == [64, 100, 4096, 300][: step + 1]
    with locked(directory):
        write.finish()


def test_without_it_nothing_waits_for_the_disk(disk, recording):
    recorded = recording("a", store="zarr", durability="process")
    for step in range(5):
        recorded.step(step)

    assert disk.files == disk.names == {}


def test_tensors_that_the_disk_refuses_are_not_committed_and_statistics_go_on(recording, monkeypatch):
    recorded = recording("a", store="zarr")
    recorded.step(0)

    def refuse() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(recorded.writer._store, "sync", refuse)
    recorded.step(1)
    monkeypatch.undo()
    recorded.step(2)

    records = replay.open(recorded.path).records()
    assert [(r["step"], r["kept"]) for r in records.to_pylist()] == [(0, True), *[(1, False)] * 2, *[(2, False)] * 3]
    assert recorded.writer._control.stop_tensors == STORE_FAILED
    assert "Input/output error" in replay.open(recorded.path).notes[0]["note"]


@pytest.mark.parametrize("store", ["zarr", pytest.param("hdf5", marks=pytest.mark.slow)])
def test_a_training_is_recorded_in_the_same_way(tmp_path, store):
    bare, model = train(net(), 30), net()
    with hookrec.attach(model, tmp_path / "a", durability="power", store=store, keep_free=0):
        losses = train(model, 30)

    assert losses == bare
    trace = replay.open(tmp_path / "a")
    assert (trace.status, trace.count, trace.not_kept) == ("sealed", 180, {})
    assert list(verify(tmp_path / "a")) == []


def test_another_durability_is_refused(tmp_path):
    with pytest.raises(hookrec.AttachError, match="There is no durability 'disk'; there are 'process', 'power'"):
        hookrec.attach(net(), tmp_path / "a", durability="disk")
