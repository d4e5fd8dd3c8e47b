"""Places that are odd, full, slow or closed: a recording there costs the training nothing but the recording."""

import contextlib
import os
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import hookrec
import replay
from hookrec import writer
from replay.verify import verify
from tests.oracle import differences, recorded
from tests.test_faults import ended, net, train

ROOT = os.geteuid() == 0


def record(path: Path, steps: int, **options) -> tuple[list[float], list[str]]:
    """Train under a recorder; return the losses and the warnings."""
    during = options.pop("during", lambda step, recorder: None)
    options = {"keep_free": 0, **options}
    model = net()
    losses = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with hookrec.attach(model, path, **options) as recorder:
            for step in range(steps):
                during(step, recorder)
                losses += train(model, 1)
    return losses, [str(warning.message) for warning in warned]


@contextlib.contextmanager
def small_disk(path: Path, size: str):
    """A file system of its own, in memory."""
    path.mkdir()
    if not ROOT or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path]).returncode:
        pytest.skip("to mount a file system takes root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.parametrize("store", ["zarr", pytest.param("hdf5", marks=pytest.mark.slow)])
def test_a_file_system_without_direct_io_keeps_every_tensor(tmp_path, store):
    record(tmp_path / "reference", 10)
    with small_disk(tmp_path / "disk", "1g") as disk:
        _, warned = record(disk / "a", 10, store=store)

        assert warned == []
        assert differences(recorded(replay.open(disk / "a")), recorded(replay.open(tmp_path / "reference"))) == []
        assert list(verify(disk / "a")) == []


def test_a_disk_that_fills_up_ends_the_tensors_and_not_the_training(tmp_path):
    bare, _ = record(tmp_path / "reference", 300)
    with small_disk(tmp_path / "disk", "8m") as disk:
        losses, warned = record(disk / "a", 300)

        assert np.array_equal(losses, bare, equal_nan=True)
        assert 1 <= len(warned) <= 2, warned
        trace = ended(disk / "a")
        assert trace.steps == list(range(len(trace.steps)))
        assert len(trace.steps) > 20
        for _, tensor in trace.select().tensors():
            assert tensor.size
        kept = trace.records(where="kept")["step"].to_pylist()
        assert max(kept) < 300


def test_when_there_is_room_again_so_are_tensors(tmp_path):
    with small_disk(tmp_path / "disk", "64m") as disk:
        filler = disk / "filler"

        def during(step, recorder):
            if step == 20:
                filler.write_bytes(bytes(50 << 20))
            if step == 60:
                filler.unlink()
            time.sleep(0.01)

        _, warned = record(disk / "a", 400, during=during, keep_free=0.3)

        kept = set(replay.open(disk / "a").records(where="kept")["step"].to_pylist())
        assert [word for text in warned for word in ("only statistics", "recorded again") if word in text] == [
            "only statistics",
            "recorded again",
        ]
        assert {0, 399} <= kept
        assert len(kept) < 400
        assert "there is room on the disk again" in str(replay.open(disk / "a").notes)
        assert list(verify(disk / "a")) == []


def test_a_folder_made_read_only_keeps_what_it_can(tmp_path):
    """Files that are open go on; to root it is no hindrance at all."""
    bare, _ = record(tmp_path / "reference", 60)

    def during(step, recorder):
        if step == 20:
            for folder in (tmp_path / "a", *(tmp_path / "a").rglob("*")):
                if folder.is_dir():
                    folder.chmod(0o555)

    losses, warned = record(tmp_path / "a", 60, during=during)
    for folder in (tmp_path / "a", *(tmp_path / "a").rglob("*")):
        if folder.is_dir():
            folder.chmod(0o755)

    assert losses == bare
    assert len(warned) <= 2
    assert replay.open(tmp_path / "a").steps == list(range(60))


SLOW = """
import os, sys, time
sys.path.insert(0, {root!r})
write = os.pwritev
def slow(*arguments):
    time.sleep(0.02)
    return write(*arguments)
os.pwritev = slow
from hookrec.writer_main import main
sys.exit(main(*map(int, sys.argv[1:])))
"""


@pytest.mark.parametrize("when_full", ["block", "skip"])
def test_a_slow_disk_delays_the_training_or_costs_tensors_as_the_plan_says(tmp_path, monkeypatch, when_full):
    root = os.fspath(Path(writer.__file__).parent.parent)
    start = subprocess.Popen

    def start_slow(command, **options):
        return start([sys.executable, "-c", SLOW.format(root=root), *command[3:]], **options)

    model = net(512)
    with monkeypatch.context() as patch:
        patch.setattr("hookrec.writer_process.subprocess.Popen", start_slow)
        recorder = hookrec.attach(model, tmp_path / "a", ring="1MiB", when_full=when_full, keep_free=0)
    with recorder:
        train(model, 15, 512)

    trace = replay.open(tmp_path / "a")
    assert trace.steps == list(range(15))
    assert set(trace.not_kept) == ({"dropped: the ring was full"} if when_full == "skip" else set())
    waited = [row["value"] for row in trace.scalars().to_pylist() if row["name"] == "hookrec/wait_s"]
    assert (sum(waited) > 0.1) == (when_full == "block")


@pytest.mark.parametrize("leap", [-1e8, pytest.param(1e8, marks=pytest.mark.slow)])
def test_a_clock_that_leaps_changes_no_record(tmp_path, monkeypatch, leap):
    now = time.time
    record(tmp_path / "reference", 20)

    def during(step, recorder):
        if step == 10:
            monkeypatch.setattr(time, "time", lambda: now() + leap)

    record(tmp_path / "a", 20, during=during)

    trace = replay.open(tmp_path / "a")
    assert (trace.status, trace.steps) == ("sealed", list(range(20)))
    assert differences(recorded(trace), recorded(replay.open(tmp_path / "reference"))) == []
    times = {row["step"]: row["time"] for row in trace.scalars().to_pylist()}
    assert abs(times[15] - times[5]) > 9e7


def test_the_ring_takes_nothing_of_dev_shm(tmp_path):
    """It is a memfd, so a container with a tiny /dev/shm, or with none, has as large a ring as another."""

    def links() -> list[str]:
        return [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]  # noqa: PTH115

    model = net()
    with hookrec.attach(model, tmp_path / "a", ring="64MB", keep_free=0):
        train(model, 2)
        of_ring = [link for link in links() if "hookrec-ring" in link]

    assert set(of_ring) == {"/memfd:hookrec-ring (deleted)"}
    assert replay.open(tmp_path / "a").steps == [0, 1]


def test_files_have_the_rights_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        record(tmp_path / "a", 2)
    finally:
        os.umask(before)

    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in (tmp_path / "a").rglob("*")}
    assert modes == {(True, 0o750), (False, 0o640)}


MEMORY = Path("/sys/fs/cgroup/memory")
HUNGRY = """
import sys
sys.path.insert(0, sys.argv[2])
import torch, hookrec
from pathlib import Path
from tests.test_flight import net, train
model = net()
hookrec.attach(model, sys.argv[1], flight=4, ring="8MB", keep_free=0)
Path(sys.argv[3], "cgroup.procs").write_text(str(__import__("os").getpid()))
def before_step(step):
    if step == 30:
        hoard = []
        while True:
            hoard.append(bytearray(b"x" * (1 << 24)))
train(model, 31, before_step=before_step)
"""


def test_a_training_that_the_oom_killer_ends_leaves_its_last_steps(tmp_path):
    group = MEMORY / f"hookrec-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(600 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        arguments = [tmp_path / "a", Path(__file__).parent.parent, group]
        result = subprocess.run([sys.executable, "-c", HUNGRY, *arguments], capture_output=True, text=True)
    finally:
        group.rmdir()

    if result.returncode != -9:
        pytest.skip(f"the limit of the cgroup does not hold here: {result.stderr[-300:]}")
    trace = ended(tmp_path / "a")
    assert trace.steps == list(range(30))
    assert sorted(set(trace.records(where="kept")["step"].to_pylist())) == [25, 26, 27, 28, 29]
    assert trace.triggers[0]["by"] == "died"
