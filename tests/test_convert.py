"""Traces written anew in another store: the same tensors, statistics and order, whatever interrupts it."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import textwrap

import pytest
import zarr
from click.testing import CliRunner

import replay
from hookrec.cli import main
from replay.command_line import progress
from replay.convert import convert
from replay.dropping import drop, shards
from replay.errors import CannotConvert, NotRecorded
from replay.seal import seal
from replay.verify import verify
from tests.stored import write_stored


def everything(path, tensors) -> tuple:
    with replay.open(path) as trace:
        read = {(step, layer): trace.tensor(step, layer).tobytes() for step, layer in tensors}
        return (
            read,
            trace.records().to_pylist(),
            trace.scalars().to_pylist(),
            trace.notes,
            trace.modules(),
            trace.status,
        )


def test_a_trace_goes_through_both_stores_and_is_the_same(tmp_path):
    tensors = write_stored(tmp_path / "a")
    want = everything(tmp_path / "a", tensors)
    assert want[0] == tensors

    convert(tmp_path / "a", tmp_path / "b", "hdf5", None)
    convert(tmp_path / "b", tmp_path / "d", "hdf5", "lz4")
    convert(tmp_path / "d", tmp_path / "c", "zarr", "zstd")

    for name in "bcd":
        assert everything(tmp_path / name, tensors) == want
        assert list(verify(tmp_path / name)) == []
    assert (tmp_path / "b/rank-00000/tensors.h5").exists()
    assert zarr.open(tmp_path / "c/rank-00000/tensors.zarr/0/output/data")[4].tobytes() == tensors[5, "0"]
    identity = json.loads((tmp_path / "c/trace.json").read_text())
    assert identity["plan"] == {"store": "zarr", "compression": "zstd"}
    assert identity["converted_from"] == {
        "path": str(tmp_path / "d"),
        "id": "0" * 32,
        "store": "hdf5",
        "compression": "lz4",
    }
    ends = [json.loads((tmp_path / name / "rank-00000/end.json").read_text()) for name in "ab"]
    assert ends[0] == ends[1]


def test_all_ranks_and_the_files_beside_them_come_along(tmp_path):
    tensors = [write_stored(tmp_path / "a", rank=rank) for rank in (0, 1)]
    (tmp_path / "a/alerts.jsonl").write_text('{"id": "x"}\n')
    (tmp_path / "a/pinned").touch()

    convert(tmp_path / "a", tmp_path / "b", "zarr", "lz4")

    with replay.open(tmp_path / "b") as trace:
        for rank, records in enumerate(tensors):
            for (step, layer), data in records.items():
                assert trace.tensor(step, layer, rank=rank).tobytes() == data
    assert (tmp_path / "b/alerts.jsonl").read_text() == '{"id": "x"}\n'
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert names == {"alerts.jsonl", "pinned", "trace.json", "rank-00000", "rank-00001"}


def test_nothing_that_a_link_leads_to_is_copied(tmp_path):
    write_stored(tmp_path / "a")
    secret = tmp_path / "secret"
    secret.write_text('{"step": 0, "time": 1, "values": {"secret": 1}, "layer": null, "note": "secret"}\n')
    rank = tmp_path / "a/rank-00000"
    links = ("rank-00000/notes.jsonl", "rank-00000/scalars.jsonl", "rank-00000/zz", "zz.txt", "alerts.jsonl", "pinned")
    for link in links:
        (tmp_path / "a" / link).unlink(missing_ok=True)
        (tmp_path / "a" / link).symlink_to(secret)
    (rank / "folder").symlink_to(tmp_path, target_is_directory=True)
    (rank / "own.txt").write_text("not of the format")

    done = CliRunner().invoke(main, ["convert", str(tmp_path / "a"), str(tmp_path / "b")])

    assert done.exit_code == 0
    copied = [path for path in (tmp_path / "b").rglob("*") if path.is_file() or path.is_symlink()]
    assert not any(path.is_symlink() or b"secret" in path.read_bytes() for path in copied if path.name != "trace.json")
    for name in (*links, "rank-00000/folder", "rank-00000/own.txt"):
        assert f"{tmp_path / 'a' / name} is a link, or no file of a trace" in done.stderr
    assert done.stderr.count("is a link") == len(links) + 2


@pytest.mark.parametrize("name", ["rank-00000", "rank-00000/model.json"])
def test_a_link_that_cannot_be_left_out_is_refused(tmp_path, name):
    write_stored(tmp_path / "a")
    (tmp_path / "a" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "a" / name).symlink_to(tmp_path / "elsewhere")

    with pytest.raises(CannotConvert, match=f"{name} is a link"):
        convert(tmp_path / "a", tmp_path / "b", "zarr", None)


def test_a_torn_trace_gives_a_sealed_one_with_what_was_committed(tmp_path):
    tensors = write_stored(tmp_path / "a", sealed=False)
    log = tmp_path / "a/rank-00000/records-00000.arrows"
    log.write_bytes(log.read_bytes()[:-20])

    convert(tmp_path / "a", tmp_path / "b", "hdf5", None)

    with replay.open(tmp_path / "b") as trace:
        assert (trace.status, trace.steps, trace.endings[0]["how"]) == ("sealed", [0, 1, 2, 3, 4], "recovered")
        assert trace.tensor(4, "0").tobytes() == tensors[4, "0"]


def test_a_damaged_tensor_is_left_out_with_its_reason_and_a_note(tmp_path):
    tensors = write_stored(tmp_path / "a")
    shard = tmp_path / "a/rank-00000/tensors.zarr/0/output/data/c/0/0"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])

    ended = CliRunner().invoke(main, ["convert", str(tmp_path / "a"), str(tmp_path / "b")])

    assert (ended.exit_code, "1 tensors" in ended.stderr) == (3, True)
    with replay.open(tmp_path / "b") as trace:
        with pytest.raises(NotRecorded, match="damaged"):
            trace.tensor(0, "0")
        assert trace.tensor(2, "0").tobytes() == tensors[2, "0"]
        assert trace.notes[-1] == {
            "step": 0,
            "layer": "0",
            "note": "the output was damaged before the trace was converted",
        }
    assert list(verify(tmp_path / "b")) == []


def test_dropped_tensors_stay_dropped_and_are_no_damage(tmp_path):
    tensors = write_stored(tmp_path / "a")
    victims = [shard for shard in shards(tmp_path / "a/rank-00000") if shard.stream.layer == "0"]
    drop(tmp_path / "a/rank-00000", victims, "a quota", "2026-01-01T00:00:00Z")
    assert list(verify(tmp_path / "a")) == []

    assert convert(tmp_path / "a", tmp_path / "b", "zarr", "zstd").damaged == 0

    with replay.open(tmp_path / "b") as trace:
        with pytest.raises(NotRecorded, match="make room"):
            trace.tensor(2, "0")
        assert trace.tensor(2, "层").tobytes() == tensors[2, "层"]
        assert trace.notes[-1]["note"].startswith("5 tensors were dropped by a quota")


@pytest.mark.parametrize(
    ("store", "compression", "sealed"),
    [("zarr", None, True), ("zarr", "zstd", False), ("hdf5", None, True), ("hdf5", "zstd", True)],
)
def test_a_conversion_that_was_killed_goes_on_where_it_was(tmp_path, monkeypatch, store, compression, sealed):
    """A log that is not sealed comes in batches of three records here, one that is in a single batch."""
    monkeypatch.setattr("replay.log_tail._FEW", 1 << 30)
    tensors = write_stored(tmp_path / "a", steps=30, sealed=sealed)
    write_stored(tmp_path / "a", steps=4, rank=1)
    code = f"""
        import os, pathlib, signal
        import replay.convert as c
        import replay.log_tail
        c._BLOCK_ROWS = 10
        replay.log_tail._FEW = 1 << 30
        def progress(done, total):
            if done >= 40:
                os.kill(os.getpid(), signal.SIGKILL)
        c.convert(pathlib.Path("a"), pathlib.Path("b"), {store!r}, {compression!r}, progress)
    """
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, env=_environment(), check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "b").exists()
    with pytest.raises(replay.TraceNotFound):
        replay.open(tmp_path / "b.partial")
    done = []

    convert(tmp_path / "a", tmp_path / "b", store, compression, lambda now, _: done.append(now))

    assert done[0] == (90 if sealed else 45)  # 40, or 42, were there
    assert everything(tmp_path / "b", tensors)[:5] == everything(tmp_path / "a", tensors)[:5]
    assert list(verify(tmp_path / "b")) == []
    assert not (tmp_path / "b.partial").exists()


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
@pytest.mark.parametrize("where", ["replay.convert.seal", "replay.convert.verify_rank", "pathlib.Path.rename"])
def test_an_interruption_at_the_end_is_resumed_too(tmp_path, monkeypatch, store, where):
    tensors = write_stored(tmp_path / "a")
    want = everything(tmp_path / "a", tensors)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "a", tmp_path / "b", store, None)
    assert not (tmp_path / "b").exists()
    convert(tmp_path / "a", tmp_path / "b", store, None)

    assert everything(tmp_path / "b", tensors) == want
    assert list(verify(tmp_path / "b")) == []
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"trace.json", "rank-00000"}


def test_a_copy_that_is_not_what_was_written_gets_no_name(tmp_path, monkeypatch):
    write_stored(tmp_path / "a")

    def seal_and_damage(rank, *facts):
        seal(rank, *facts)
        shard = rank / "tensors.zarr/0/output/data/c/0/0"
        shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])

    monkeypatch.setattr("replay.convert.seal", seal_and_damage)
    ended = CliRunner().invoke(main, ["convert", str(tmp_path / "a"), str(tmp_path / "b")])

    assert (ended.exit_code, "is not what was written" in ended.stderr) == (2, True)
    assert not (tmp_path / "b").exists()


def test_progress_is_a_bar_on_a_terminal(tmp_path):
    write_stored(tmp_path / "a")
    ours, theirs = pty.openpty()

    with os.fdopen(ours, "rb", 0) as terminal:
        command = [sys.executable, "-m", "hookrec.cli", "convert", "a", "b"]
        with subprocess.Popen(command, cwd=tmp_path, env=_environment(), stderr=theirs) as ended:
            os.close(theirs)
            shown = b""
            with contextlib.suppress(OSError):  # nobody has the other end open any more
                while part := terminal.read(1 << 12):
                    shown += part

    shown = shown.decode()
    assert ended.returncode == 0
    assert "records" in shown
    assert "18/18" in shown
    assert "━" in shown


def test_progress_is_lines_now_and_then_where_there_is_no_terminal(capsys):
    with progress("records", every_s=0) as tell:
        tell(1_000, 2_000)
    with progress("records") as tell:
        tell(1, 2)

    assert capsys.readouterr().err == "1,000 of 2,000 records\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    write_stored(tmp_path / "a")
    (tmp_path / "closed").mkdir(mode=0o500)

    ended = CliRunner().invoke(main, ["convert", str(tmp_path / "a"), str(tmp_path / "closed/b")])

    assert (ended.exit_code, "cannot be written" in ended.stderr) == (1, True)


def _environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_what_cannot_be_converted_is_refused(tmp_path):
    write_stored(tmp_path / "a", sealed=False)
    (tmp_path / "there").mkdir()
    (tmp_path / "foreign.partial").mkdir()
    (tmp_path / "foreign.partial/x").touch()

    for target, store, compression, why in (
        ("there", "zarr", None, "exists"),
        ("a/b", "zarr", None, "inside"),
        ("foreign", "zarr", None, "Remove it"),
        ("b", "hdf5", "gzip", "no store"),
        ("b", "tape", None, "no store"),
    ):
        with pytest.raises(CannotConvert, match=why):
            convert(tmp_path / "a", tmp_path / target, store, compression)
    with (tmp_path / "a/rank-00000/writer.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CannotConvert, match="is being recorded"):
            convert(tmp_path / "a", tmp_path / "b", "zarr", None)
    assert not (tmp_path / "b.partial").exists()
    ended = CliRunner().invoke(main, ["convert", str(tmp_path / "nothing"), str(tmp_path / "b")])
    assert (ended.exit_code, "does not exist" in ended.stderr) == (2, True)


def test_another_store_than_the_interrupted_one_is_refused(tmp_path):
    write_stored(tmp_path / "a")
    partial = tmp_path / "b.partial"
    partial.mkdir()
    (partial / "converting.json").write_text("{}")

    with pytest.raises(CannotConvert, match="another"):
        convert(tmp_path / "a", tmp_path / "b", "zarr", "zstd")
