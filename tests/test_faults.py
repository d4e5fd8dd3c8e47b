"""What goes wrong around a recording costs at most the recording, and never a committed step or a wrong value."""

import errno
import json
import mmap
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from torch import nn

import hookrec
import replay
from hookrec import room, writer
from hookrec.messages import ROW_DTYPE
from hookrec.ring import STORE_FAILED
from replay.log import Log as LogReader


def net(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, 8))


def train(model: nn.Module, steps: int, width: int = 64) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.full((32, width), float(step))).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ended(path) -> replay.Trace:
    """Open a trace once its writer is done."""
    deadline = time.monotonic() + 20
    while replay.open(path).status == "live" and time.monotonic() < deadline:
        time.sleep(0.05)
    return replay.open(path)  # what was committed between a look at the log and one at the lock is missing above


def writer_of(recorder: hookrec.Recorder) -> subprocess.Popen:
    return recorder._recording._writer._process


def test_a_ring_that_is_full_drops_whole_steps_and_says_so(tmp_path):
    model = net(512)
    with hookrec.attach(model, tmp_path / "a", ring="1MiB", when_full="skip", keep_free=0) as recorder:
        writer_of(recorder).send_signal(signal.SIGSTOP)
        train(model, 12, 512)
        writer_of(recorder).send_signal(signal.SIGCONT)
        time.sleep(0.5)
        train(model, 1, 512)

    trace = replay.open(tmp_path / "a")
    kept = [set(trace.records(steps=step)["kept"].to_pylist()) for step in trace.steps]
    assert len(trace.records()) == 13 * 6
    assert kept[0] == kept[12] == {True}
    assert {False} in kept
    assert {True, False} not in kept
    with pytest.raises(replay.NotRecorded, match="the ring was full"):
        trace.tensor(kept.index({False}), "0")
    assert np.all(trace.tensor(12, "2", "grad_output") == 1)


def test_a_dropped_step_leaves_the_tensors_of_the_step_before(tmp_path):
    """The last part of one step and the first of the next come together, and then the next one is dropped."""
    memory = memoryview(mmap.mmap(-1, 1 << 20))
    stream = {"id": 0, "placed": True, "layer": "0", "kind": "output", "path": "", "dtype": "uint8", "shape": [4096]}
    rows = np.zeros(1, ROW_DTYPE)
    rows["nbytes"], rows["checksum"] = 4096, -1

    def part(step: int, value: int, facts: dict) -> tuple:
        place = 4096 * (1 + value)
        memory[place : place + 4096] = bytes([value]) * 4096
        row = rows.copy()
        row["step"], row["place"] = step, place
        return place, row, facts

    (tmp_path / "rank-00000").mkdir()
    plan = {"tensors": True, "store": "zarr", "compression": None, "max_bytes": 1 << 40, "keep_free": 0}
    plan["durability"] = "process"
    one = writer.Writer(tmp_path / "rank-00000", plan, memory)
    one.take([part(0, 1, {"streams": [stream], "commit": True}), part(1, 2, {})])
    one.take([part(1, 3, {"commit": True, "drop_tensors": True})])
    one.take([part(2, 4, {"commit": True})])
    one.finish()

    columns = LogReader(tmp_path / "rank-00000").refresh().table(["step", "kept", "row"]).to_pydict()
    assert columns == {"step": [0, 1, 1, 2], "kept": [0, 2, 2, 0], "row": [0, -1, -1, 1]}
    data = zarr.open_array(str(tmp_path / "rank-00000/tensors.zarr/0/output/data"), mode="r")
    assert data[:, 0].tolist() == [1, 4]


@pytest.mark.parametrize(("needed", "given_back"), [(0, 4096), (4096, 4096), (4097, 8192)])
def test_what_is_not_committed_stays_in_the_ring_unless_the_training_waits_for_it(tmp_path, needed, given_back):
    one, messages = sent_at_once(tmp_path, memoryview(mmap.mmap(-1, 1 << 20)), 2)
    del messages[1][2]["commit"]

    one.take(messages, needed=needed)

    assert one._control.released == given_back
    one.finish()


def sent_at_once(path, memory, steps, **plan):
    """A writer, and messages of a step of one tensor of 4096 bytes each."""
    (path / "rank-00000").mkdir()
    facts = {"tensors": True, "store": "zarr", "compression": None, "max_bytes": 1 << 40, "keep_free": 0}
    one = writer.Writer(path / "rank-00000", {**facts, "durability": "process", **plan}, memory)
    stream = {"id": 0, "placed": True, "layer": "0", "kind": "output", "path": "", "dtype": "uint8", "shape": [4096]}
    messages = []
    for step in range(steps):
        row = np.zeros(1, ROW_DTYPE)
        row["step"], row["nbytes"], row["numel"], row["place"] = step, 4096, 4096, 4096 * (1 + step)
        messages.append((4096 * (1 + step), row, {"streams": [stream] * (not step), "commit": True}))
    return one, messages


def test_max_bytes_is_passed_by_a_step_at_most_whatever_the_ring_holds(tmp_path):
    one, messages = sent_at_once(tmp_path, memoryview(mmap.mmap(-1, 1 << 20)), 20, max_bytes=5 * 4096 + 1)

    one.take(messages[:12])
    one.take(messages[12:])
    one.finish()

    columns = LogReader(tmp_path / "rank-00000").refresh().table(["kept", "nbytes"]).to_pydict()
    assert columns["kept"] == [0] * 6 + [4] * 14
    note = json.loads((tmp_path / "rank-00000/notes.jsonl").read_text())["note"]
    assert "max_bytes=20,481 was reached in step 5, which is kept whole; there are 24,576 bytes" in note


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_tensors_begin_again_when_there_is_room_again(tmp_path, monkeypatch, error):
    monkeypatch.setattr(room, "_LOOK_AGAIN_S", 0.0)
    one, messages = sent_at_once(tmp_path, memoryview(mmap.mmap(-1, 1 << 20)), 6)
    append, fallocate = one._store.append, os.posix_fallocate

    def refuse(*arguments):
        raise OSError(error, os.strerror(error))

    one.take(messages[:1])
    one._store.append, os.posix_fallocate = refuse, refuse
    try:
        for message in messages[1:3]:
            one.take([message])
        assert one._control.stop_tensors == STORE_FAILED
        one._store.append = append
        one.take([messages[3]])  # there is no room yet
        assert one._control.stop_tensors == STORE_FAILED
    finally:
        os.posix_fallocate = fallocate
    one.take([messages[4]])  # room is seen when it is committed
    assert one._control.stop_tensors == 0
    one.take([messages[5]])
    one.finish()

    assert LogReader(tmp_path / "rank-00000").refresh().table(["kept"])["kept"].to_pylist() == [0, 5, 5, 5, 5, 0]
    notes = [json.loads(line)["note"] for line in (tmp_path / "rank-00000/notes.jsonl").read_text().splitlines()]
    assert [note.partition(":")[0] for note in notes] == [
        "from here on statistics only",
        "there is room on the disk again",
    ]
    data = zarr.open_array(str(tmp_path / "rank-00000/tensors.zarr/0/output/data"), mode="r")
    assert data.shape[0] == 2


def test_another_failure_of_the_store_is_for_good(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "_LOOK_AGAIN_S", 0.0)
    one, messages = sent_at_once(tmp_path, memoryview(mmap.mmap(-1, 1 << 20)), 4)
    append = one._store.append

    def refuse(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    one._store.append = refuse
    one.take([messages[0]])
    one._store.append = append
    for message in messages[1:]:
        one.take([message])

    assert one._control.stop_tensors == STORE_FAILED
    one.finish()


@pytest.mark.parametrize("limit", [{"max_bytes": 50_000}, {"keep_free": 0.999}])
def test_past_a_limit_statistics_go_on(tmp_path, limit):
    model = net()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with hookrec.attach(model, tmp_path / "a", **{"keep_free": 0, **limit}):
            for _ in range(10):
                train(model, 1)
                time.sleep(0.03)

    trace = replay.open(tmp_path / "a")
    assert len(trace.records()) == 60
    assert not any(trace.records(steps=9)["kept"].to_pylist())
    assert len(warned) == 1
    assert "only statistics" in str(warned[0].message)
    assert "from here on statistics only" in trace.notes[0]["note"]


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_a_file_that_cannot_grow_ends_the_recording_and_not_the_training(tmp_path, store):
    """HDF5 makes a file of many megabytes for the first tensors, so no tensor is kept there."""
    bare = train(net(), 400)
    model = net()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        recorder = hookrec.attach(model, tmp_path / "a", store=store, keep_free=0)
        # As on a full disk, the writer's writes fail from here on.
        resource.prlimit(writer_of(recorder).pid, resource.RLIMIT_FSIZE, (600_000, 600_000))
        losses = train(model, 400)
        recorder.detach()

    assert losses == bare
    messages = [str(warning.message) for warning in warned]
    assert 1 <= len(messages) <= 2, messages
    assert "only statistics" in messages[0] or "the training goes on" in messages[0]
    trace = ended(tmp_path / "a")
    assert trace.steps == list(range(len(trace.steps)))
    assert len(trace.steps) > 20
    kept = trace.records(where="kept").to_pylist()
    assert bool(kept) == (store == "zarr")
    for record in kept[-1:]:
        trace.tensor(record["step"], record["layer"], record["kind"])


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_a_trace_whose_writer_was_killed_reads_up_to_its_last_whole_commit(tmp_path, store):
    model = net()
    recorder = hookrec.attach(model, tmp_path / "a", store=store, keep_free=0, restart=0)
    for _ in range(5):
        train(model, 1)
        time.sleep(0.2)  # steps that come together are committed together
    writer_of(recorder).kill()
    writer_of(recorder).wait()
    with pytest.warns(hookrec.HookrecWarning):
        recorder.detach()

    trace = replay.open(tmp_path / "a")
    assert trace.status == "torn"
    assert trace.steps == list(range(5))
    assert np.all(trace.tensor(4, "2", "grad_output") == 1)
    log = next((tmp_path / "a/rank-00000").glob("*.arrows"))
    data = log.read_bytes()
    for cut in range(1, 2000, 97):
        log.write_bytes(data[:-cut])
        assert replay.open(tmp_path / "a").steps == list(range(4))


def test_a_forked_child_neither_records_nor_ends_the_recording(tmp_path):
    code = """
import os, sys, hookrec, torch
torch.set_num_threads(1)  # OpenMP's threads are not forked, and a child would wait for them, with or without us
sys.path.insert(0, sys.argv[2])
from test_faults import net, train
model = net()
hookrec.attach(model, sys.argv[1], keep_free=0)
train(model, 1)
child = os.fork()
train(model, 2)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    arguments = [str(tmp_path / "a"), os.path.dirname(__file__)]  # noqa: PTH120
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)

    assert (result.returncode, result.stderr) == (0, "")
    trace = ended(tmp_path / "a")
    assert trace.endings[0]["how"] == "detached"
    assert len(trace.records()) == 3 * 6


@pytest.mark.parametrize(
    ("last", "how"),
    [("", "detached"), ("raise ValueError('x')", "exception"), ("os._exit(3)", "died"), ("os.abort()", "died")],
)
def test_a_recorder_that_nobody_holds_says_how_the_script_ended(tmp_path, last, how):
    code = f"""
import os, sys, hookrec
sys.path.insert(0, sys.argv[2])
from test_faults import net, train
model = net()
hookrec.attach(model, sys.argv[1], keep_free=0)
train(model, 3)
{last}
"""
    arguments = [str(tmp_path / "a"), os.path.dirname(__file__)]  # noqa: PTH120
    subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True)

    trace = ended(tmp_path / "a")
    assert trace.endings[0]["how"] == how
    assert trace.steps == [0, 1, 2]


def test_interrupts_at_any_moment_leave_whole_records(tmp_path):
    model = net(256)
    recorder = hookrec.attach(model, tmp_path / "a", ring="1MiB", keep_free=0)
    for delay in range(6):
        timer = threading.Timer(0.05 + 0.013 * delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            train(model, 10**9, 256)
        timer.join()
    recorder.detach()

    trace = replay.open(tmp_path / "a")
    assert trace.status == "sealed"
    for record in trace.records().to_pylist()[::17]:
        trace.tensor(record["step"], record["layer"], record["kind"], call=record["call"])


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_any_name_of_a_module_is_a_layer(tmp_path, store):
    names = ["a/b", "层", "x" * 300, "zarr.json", "%root", "a|b", " sp ", "A", "a", "__x", "con", "data"]
    model = nn.Module()
    for name in names:
        model._modules[name] = nn.Identity()
    with hookrec.attach(model, tmp_path / "a", clock="manual", store=store, keep_free=0):
        for number, layer in enumerate(model._modules.values()):
            assert layer is not None
            layer(torch.tensor(number))

    trace = replay.open(tmp_path / "a")
    assert [int(trace.tensor(0, name)) for name in names] == list(range(len(names)))


@pytest.mark.parametrize(("store", "compression"), [("zarr", None), ("hdf5", None), ("hdf5", "zstd")])
def test_odd_tensors_are_recorded_in_logical_order_or_named(tmp_path, store, compression):
    odd = [
        torch.empty(0, 3),
        torch.tensor(float("nan")),
        torch.arange(12.0).view(3, 4).t().expand(2, 4, 3),
        torch.arange(5).to(torch.complex64).mul(1j).conj(),
        torch.arange(3).to(torch.complex64).mul(1j).conj().imag,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor([True, False]),
        torch.arange(4, dtype=torch.bfloat16),
        torch.arange(4.0).to(torch.float8_e4m3fn),
        torch.arange(6.0).view(2, *[1] * 40, 3),
    ]
    model, plan = nn.Identity(), {"store": store, "compression": compression}
    with hookrec.attach(model, tmp_path / "a", clock="manual", ring="1MiB", keep_free=0, **plan):
        for tensor in odd:
            model(tensor)
        model(torch.zeros(2_000_000))
        model(torch.eye(3).to_sparse())

    trace = replay.open(tmp_path / "a")
    for call, tensor in enumerate(odd):
        got = trace.tensor(0, "", call=call)
        plain = tensor.resolve_conj().resolve_neg().contiguous()
        assert got.shape == plain.shape
        assert got.tobytes() == (plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    with pytest.raises(replay.NotRecorded, match="larger than the ring"):
        trace.tensor(0, "", call=len(odd))
    assert np.array_equal(trace.tensor(0, "", call=len(odd) + 1), np.eye(3))
    assert "layout sparse_coo: the dense tensor that it stands for" in trace.notes[0]["note"]


def test_a_stream_goes_on_over_many_shards(tmp_path):
    import zarr

    model = nn.Identity()
    with hookrec.attach(model, tmp_path / "a", clock="manual", keep_free=0) as recorder:
        for step in range(5000):
            model(torch.full((2,), float(step)))
            recorder.step()

    trace = replay.open(tmp_path / "a")
    assert [trace.tensor(step, "")[0] for step in (0, 4095, 4096, 4999)] == [0, 4095, 4096, 4999]
    array = zarr.open_array(str(tmp_path / "a/rank-00000/tensors.zarr/%root/output/data"), mode="r")
    assert np.array_equal(array[:, 0], np.arange(5000.0))


def test_after_detach_no_thread_process_or_open_file_is_left(tmp_path):
    def left() -> tuple[int, int, str]:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir())), children

    model = net()
    train(model, 1)
    with hookrec.attach(model, tmp_path / "first", keep_free=0):
        train(model, 1)
    before = left()

    for name in "abc":
        with hookrec.attach(model, tmp_path / name, keep_free=0):
            train(model, 2)

    assert left() == before


def _with_few_files(path: Path) -> None:
    """Train 40 layers under `ulimit -n 64`; called in a process of its own."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
    with hookrec.attach(model, path, keep_free=0):
        train(model, 20)


def test_few_open_files_are_enough(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=_with_few_files, args=(tmp_path / "a",))
    process.start()
    process.join()

    trace = replay.open(tmp_path / "a")
    assert (process.exitcode, trace.status) == (0, "sealed")
    assert trace.count == 20 * 80
    assert not trace.not_kept


def test_a_folder_that_is_removed_ends_at_most_the_recording(tmp_path):
    bare = train(net(), 300)
    model = net()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        recorder = hookrec.attach(model, tmp_path / "a", keep_free=0)
        train(net(), 20)
        shutil.rmtree(tmp_path / "a")
        losses = train(model, 300)
        recorder.detach()

    assert losses == bare
    assert 1 <= len(warned) <= 2
    assert "hookrec" in str(warned[0].message)


def test_two_processes_cannot_write_one_trace(tmp_path):
    code = "import sys, hookrec; from torch import nn; hookrec.attach(nn.Linear(1, 1), sys.argv[1])"
    model = net()
    with hookrec.attach(model, tmp_path / "a", keep_free=0):
        second = subprocess.run([sys.executable, "-c", code, tmp_path / "a"], capture_output=True, text=True)
        train(model, 3)

    assert "holds a trace already" in second.stderr
    assert replay.open(tmp_path / "a").steps == [0, 1, 2]


def test_a_place_where_nothing_can_be_written_is_refused():
    with pytest.raises(hookrec.AttachError, match="cannot be made"):
        hookrec.attach(net(), "/proc/nothing/here")


def test_a_writer_that_stands_still_makes_the_training_wait_and_loses_nothing(tmp_path):
    model = net(512)
    with hookrec.attach(model, tmp_path / "a", ring="1MiB", keep_free=0) as recorder:
        writer_of(recorder).send_signal(signal.SIGSTOP)
        timer = threading.Timer(1, writer_of(recorder).send_signal, [signal.SIGCONT])
        timer.start()
        train(model, 30, 512)
        timer.join()

    trace = replay.open(tmp_path / "a")
    assert trace.count == 30 * 6
    assert not trace.not_kept


def test_of_a_trace_that_cannot_be_sealed_the_reason_is_said(tmp_path):
    model = nn.Linear(1, 1)
    recorder = hookrec.attach(model, tmp_path / "a", clock="manual", keep_free=0)
    model(torch.ones(1, 1))
    recorder.step()
    while not len(replay.open(tmp_path / "a").steps):
        time.sleep(0.001)
    shutil.rmtree(tmp_path / "a")

    with pytest.warns(hookrec.HookrecWarning, match=r"the trace could not be sealed: \[Errno 2\] No such file"):
        recorder.detach()
