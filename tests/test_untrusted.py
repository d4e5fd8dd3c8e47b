"""Traces of strangers, whole by all checksums, whose numbers lie: each reader answers, or says what is wrong."""

import contextlib
import json
import tracemalloc

import pytest
from click.testing import CliRunner

import replay
from replay.catalog import entry_of
from replay.cli import main
from replay.convert import convert
from replay.dropping import read_dropped, shards
from replay.errors import TraceDamaged
from replay.files import Files
from replay.follow import Follower
from replay.format import RECORD_SCHEMA
from replay.log import Log, LogWriter
from replay.ragged import Shards
from replay.seal import seal
from replay.verify import verify
from tests.stored import SHAPES, write_stored

LIES = {
    "stream": (-1, -(2**31), 3, 2**31 - 1),
    "mode": (7, 255),
    "kept": (11, 255),
    "row": (-1, 2**62),
    "offset": (-1, 2**62),
    "nbytes": (-1, 0, 1, 2**62),
    "numel": (-1, 2**62),
    "step": (-1, 2**62),
    "call": (-1,),
    "n_nan": (-1, 2**62),
}
QUICK = {("stream", -1), ("stream", -(2**31)), ("mode", 7), ("nbytes", -1), ("nbytes", 0), ("nbytes", 1)}


def lie(rank, column: str, value: int) -> None:
    """Write the log of a rank anew, with another number in its third record, as a writer would: with its checksum."""
    table = Log(rank).refresh().table()
    columns = {name: table[name].to_numpy().copy() for name in RECORD_SCHEMA.names}
    columns[column][2] = value
    (rank / "records-00000.arrows").unlink()
    log = LogWriter(rank)
    log.append(columns)
    log.close()


def each_tensor(path) -> None:
    trace = replay.open(path)
    for step in range(3):
        for layer in SHAPES:
            with contextlib.suppress(replay.ReplayError):
                trace.tensor(step, layer)


def readers(path):
    """Yield whatever reads a trace."""
    for name in ("not_kept", "nbytes", "steps", "notes", "endings"):
        yield lambda name=name: getattr(replay.open(path), name)
    yield lambda: replay.open(path).records().to_pylist()
    yield lambda: replay.open(path).records(where="l2 > 1").to_pylist()
    yield lambda: replay.open(path).sql("select count(*), max(layer), max(mode) from records").to_pylist()
    yield lambda: list(replay.open(path).select().tensors())
    yield lambda: each_tensor(path)
    yield lambda: replay.diff(path, path)
    yield lambda: replay.check(replay.open(path))
    yield lambda: list(verify(path))
    yield lambda: entry_of(path, path.parent)
    yield lambda: [table.to_pylist() for table in Follower(path).read()]
    yield lambda: shards(path / "rank-00000")
    yield lambda: convert(path, path.with_name("copy"), "zarr", "zstd")
    yield lambda: seal(path / "rank-00000", "recovered", None, {})


@pytest.mark.parametrize("store", ["zarr", pytest.param("hdf5", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("column", "value"),
    [
        pytest.param(column, value, marks=() if (column, value) in QUICK else pytest.mark.slow)
        for column, values in LIES.items()
        for value in values
    ],
)
def test_a_log_that_lies_is_read_or_named(tmp_path, store, column, value):
    write_stored(tmp_path / "a", store, steps=3, sealed=False)
    lie(tmp_path / "a/rank-00000", column, value)

    for read in readers(tmp_path / "a"):
        with contextlib.suppress(replay.ReplayError):
            read()


@pytest.mark.parametrize(("column", "value", "words"), [("stream", -1, "stream -1"), ("mode", 7, "mode 7")])
def test_it_is_said_what_no_table_knows(tmp_path, column, value, words):
    write_stored(tmp_path / "a", steps=3, sealed=False)
    lie(tmp_path / "a/rank-00000", column, value)

    with replay.open(tmp_path / "a") as trace:
        for ask in (trace.records, lambda: trace.records(where="true"), lambda: trace.sql("select 1 from records")):
            with pytest.raises(TraceDamaged, match=words):
                ask()
    with pytest.raises(TraceDamaged, match=words):
        list(Follower(tmp_path / "a").read())


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("scalars.jsonl", '{"step": 0, "time": 1.0, "values": {"loss": 1' + "0" * 400 + "}}"),
        ("scalars.jsonl", '{"step": 0, "time": 1' + "0" * 400 + ', "values": {"loss": 1}}'),
        ("scalars.jsonl", '{"step": 1' + "0" * 30 + ', "time": 1.0, "values": {"loss": 1}}'),
    ],
)
def test_a_number_that_none_of_ours_can_be_is_damage(tmp_path, file, line):
    write_stored(tmp_path / "a", steps=1)
    (tmp_path / "a/rank-00000" / file).write_text(line + "\n")

    with pytest.raises(TraceDamaged, match=file):
        replay.open(tmp_path / "a").scalars()


@pytest.mark.parametrize(
    "provenance", [{"command": "a"}, {"command": [1, None]}, {"git": "x"}, {"git": [1]}, {"packages": 3}]
)
def test_facts_of_other_types_are_printed_as_they_are(tmp_path, provenance):
    write_stored(tmp_path / "a", steps=1)
    file = tmp_path / "a/trace.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "provenance": provenance}))
    (tmp_path / "a/rank-00000/notes.jsonl").write_text('{"step": null, "layer": null, "note": "of no step"}\n')

    result = CliRunner().invoke(main, ["info", str(tmp_path / "a")])

    assert result.exit_code == 0, result.output
    assert "all layers: of no step" in result.output


def test_dropped_tensors_of_streams_that_are_not_there_take_no_memory(tmp_path):
    write_stored(tmp_path / "a", steps=2)
    rank = tmp_path / "a/rank-00000"
    said = {"why": "x", "time": "y", "bytes": 0, "streams": {"1": 1, str(10**13): 5}}
    (rank / "tensors-dropped.json").write_text(json.dumps(said))
    table = Log(rank).refresh().table(["stream", "kept", "row"])

    tracemalloc.start()
    kept = read_dropped(rank).kept(table)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert kept.tolist() == [True, False, True, False, False, False]
    assert most < 10_000_000


def test_a_shared_place_takes_no_memory_for_bytes_that_are_not_there(tmp_path):
    (tmp_path / "data/c").mkdir(parents=True)
    (tmp_path / "data/c/0").write_bytes(bytes(100))
    place = Shards(tmp_path)

    assert place.read(Files(0), 10, 20) == bytes(20)
    for offset, nbytes in ((0, 101), (0, 1 << 62), (1 << 40, 8), (-8, 8), (0, -1)):
        with pytest.raises(TraceDamaged, match=r"bytes were committed|cannot be read"):
            place.read(Files(0), offset, nbytes)
