"""Links, pipes and devices in the trace of a stranger: nothing is written through one, and nothing waits for ever."""

import json
import os
import shutil
import signal

import pytest
from click.testing import CliRunner

import hookrec.cli
import replay.cli
from replay.dropping import drop, finish_dropping, shards
from replay.errors import TraceDamaged
from replay.format import write_whole
from replay.new_file import new_file
from replay.seal import is_locked, locked
from replay.verify import verify
from tests.samples import convolutional
from tests.stored import write_stored

IN_BOTH = (
    "rank-00000",
    "rank-00000/writer.lock",
    "rank-00000/end.json.partial",
    "rank-00000/records-00000.parquet.partial",
    "rank-00000/not-of-the-format",
)
IN_ZARR = ("", "/zarr.json.partial", "/0/output", "/0/output/step", "/0/output/data/c", "/0/output/data/c/0/0")
IN_HDF5 = ("tensors.h5.partial", "tensors-00000.h5", "segments.jsonl")
LINKS = [
    *(("zarr", name) for name in IN_BOTH),
    *(("zarr", f"rank-00000/tensors.zarr{name}") for name in IN_ZARR),
    *(("hdf5", f"rank-00000/{name}") for name in IN_HDF5),
]


@pytest.fixture
def no_waiting():
    """Fail what waits for ever, as whoever opens a pipe does."""

    def give_up(*_):
        raise TimeoutError("it waits for ever")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 20, 1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def contents(folder):
    """Each file below a folder with its bytes."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put_a_link(trace, name, victim):
    """Put a link to a copy of what is there, outside of the trace, in its place."""
    path = trace / name
    victim.mkdir()
    target = victim / path.name
    if path.exists():
        path.rename(target)
    else:
        target.write_text("mine")
    path.symlink_to(target)


@pytest.mark.parametrize(("store", "name"), LINKS)
def test_a_torn_trace_is_not_sealed_where_a_link_leads(tmp_path, store, name):
    trace = tmp_path / "a"
    write_stored(trace, store, sealed=False)
    put_a_link(trace, name, tmp_path / "victim")
    before = contents(tmp_path / "victim")

    done = CliRunner().invoke(hookrec.cli.main, ["recover", str(trace)])

    assert done.exit_code in (1, 2)
    assert str(trace / name) in done.output or name == "rank-00000/writer.lock"
    assert contents(tmp_path / "victim") == before
    assert not (trace / "rank-00000/end.json").exists()


def test_nothing_is_removed_where_a_link_leads(tmp_path):
    trace = tmp_path / "a"
    write_stored(trace)
    rank = trace / "rank-00000"
    victims = shards(rank)
    (rank / "tensors-dropped.json").write_text(
        json.dumps({"why": "a", "time": "b", "bytes": 1, "streams": {"0": 2**40}})
    )
    put_a_link(trace, "rank-00000/tensors.zarr/0/output/data/c", tmp_path / "victim")
    before = contents(tmp_path / "victim")

    with pytest.raises(TraceDamaged, match="is a link"):
        finish_dropping(rank)
    with pytest.raises(TraceDamaged, match="is a link"), locked(rank):
        drop(rank, victims, "the quota of 1 bytes", "now")

    assert len(before) == 1
    assert contents(tmp_path / "victim") == before


def test_a_training_does_not_resume_where_a_link_leads(tmp_path):
    write_stored(tmp_path / "a")
    put_a_link(tmp_path / "a", "rank-00000/scalars.jsonl", tmp_path / "victim")
    before = contents(tmp_path / "victim")

    with pytest.raises(hookrec.AttachError, match=r"cannot be resumed: .*scalars\.jsonl is a link"):
        hookrec.attach(convolutional(), tmp_path / "a", resume=True, keep_free=0)

    assert contents(tmp_path / "victim") == before


def test_a_file_that_is_being_written_replaces_a_link_of_its_name(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for name in ("a.json.partial", "b.parquet.partial"):
        (tmp_path / name).symlink_to(tmp_path / "mine")

    write_whole(tmp_path / "a.json", "{}")
    with new_file(tmp_path / "b.parquet", overwrite=False) as partial:
        partial.write_text("rows")

    assert (tmp_path / "mine").read_text() == "mine"
    assert ((tmp_path / "a.json").read_text(), (tmp_path / "b.parquet").read_text()) == ("{}", "rows")


def test_no_file_is_made_where_the_link_of_a_pin_leads(tmp_path):
    write_stored(tmp_path / "a")
    (tmp_path / "a/pinned").symlink_to(tmp_path / "made")

    done = CliRunner().invoke(hookrec.cli.main, ["pin", str(tmp_path / "a")])

    assert done.exit_code == 1
    assert "cannot be pinned" in done.output
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("what", "name"),
    [
        *(("pipe", name) for name in ("trace.json", "alerts.jsonl", "rank-00000/end.json", "rank-00000/x")),
        ("device", "rank-00000/notes.jsonl"),
    ],
)
@pytest.mark.usefixtures("no_waiting")
def test_no_command_waits_for_a_pipe_or_reads_a_device(tmp_path, name, what):
    trace = tmp_path / "a"
    write_stored(trace)
    (trace / name).unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(trace / name)
    else:
        (trace / name).symlink_to("/dev/zero")

    for command in ("info", "stats", "verify", "check", "alerts", "list"):
        done = CliRunner().invoke(replay.cli.main, [command, str(trace)])

        assert done.exit_code in (0, 1, 2)
        assert f"{trace / name} is no file" in " ".join(done.output.split()) or command == "list"
        assert "Traceback" not in done.output


@pytest.mark.usefixtures("no_waiting")
def test_a_pipe_in_the_store_is_no_tensor(tmp_path):
    trace = tmp_path / "a"
    write_stored(trace)
    for name in ("data/c/0/0", "zarr.json"):
        (trace / "rank-00000/tensors.zarr/0/output" / name).unlink()
        os.mkfifo(trace / "rank-00000/tensors.zarr/0/output" / name)

    problems = [problem.message for problem in verify(trace)]

    assert len(problems) >= 2
    with replay.open(trace) as opened, pytest.raises(TraceDamaged):
        opened.tensor(0, "0")


@pytest.mark.usefixtures("no_waiting")
def test_a_lock_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "writer.lock")

    assert not is_locked(tmp_path)


def test_a_link_to_a_file_is_read_as_before(tmp_path):
    trace = tmp_path / "a"
    tensors = write_stored(trace)
    shutil.move(trace / "rank-00000", tmp_path / "elsewhere")
    (trace / "rank-00000").symlink_to(tmp_path / "elsewhere")

    with replay.open(trace) as opened:
        assert opened.tensor(0, "0").tobytes() == tensors[0, "0"]
