"""Streams that share a place are to everybody what streams with a place of their own are."""

import io
import json
import shutil
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from click.testing import CliRunner

import replay
from hookrec.cli import main as hookrec_main
from hookrec.journal import Journal
from hookrec.quota import Quota, bytes_on_disk
from replay import dropping
from replay.cli import main
from replay.convert import convert
from replay.dropping import drop, finish_dropping, read_dropped, shards
from replay.stores import STORES
from replay.verify import verify
from tests.handwritten import Written, write_trace

NOW = "2026-12-02T12:00:00.000+00:00"
LENGTHS = [7, 2, 2000, 9, 1024, 7, 3000, 0, 5, 2000]
"""float32 elements by step; those of 4096 bytes go by direct I/O. From the third length on they share a place."""
SHARED = "rank-00000/tensors.zarr/0/output~3"


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr("replay.ragged.SHARD_BYTES", 1 << 13)
    monkeypatch.setattr("replay.ragged._INNER_BYTES", 1 << 12)
    monkeypatch.setattr("replay.hdf5_segments._FIRST_SEGMENT_BYTES", 1 << 13)
    monkeypatch.setattr("replay.hdf5_segments._SEGMENT_BYTES", 1 << 13)


def values(step: int) -> np.ndarray:
    return np.arange(LENGTHS[step], dtype=np.float32) + step


def written(path: Path, **more) -> Path:
    records = [Written(layer, values(step), step) for step in range(len(LENGTHS)) for layer in ("0", "1")]
    path = write_trace(path, *records, **more)
    (path / "rank-00000/model.json").write_text('{"modules": []}')
    return path


def tensors(path: Path) -> dict[tuple[int, str], list[float]]:
    return {(r["step"], r["layer"]): tensor.tolist() for r, tensor in replay.open(path).select().tensors()}


WANTED = {(step, layer): values(step).tolist() for step in range(len(LENGTHS)) for layer in ("0", "1")}


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("store", STORES)
def test_verify_finds_a_whole_trace_whole(tmp_path, small_files, sealed, store):
    path = written(tmp_path / "a", sealed=sealed, store=store)

    assert tensors(path) == WANTED
    assert list(verify(path)) == []


def test_the_last_file_ends_with_the_inner_chunk_of_its_last_tensor(tmp_path):
    """So it is no larger than it looks to programs that copy it: 256 KiB, and an index of 4096 chunks."""
    assert (written(tmp_path / "a") / SHARED / "data/c/0").stat().st_size == 256 * 1024 + 4096 * 16 + 4


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("begin/c/0", "It is not the begin of the records"),
        ("shape/c/0/0", "It is not the shape of the records"),
        ("data/c/0", "Its index is not what"),
        ("data/zarr.json", "It is no JSON object"),
        ("step/zarr.json", "It is missing"),
    ],
)
def test_verify_names_what_is_damaged_beside_the_tensors(tmp_path, small_files, file, what):
    path = written(tmp_path / "a")
    damaged = path / SHARED / file
    if what == "It is missing":
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")

    (problem,) = verify(path)

    assert problem.file == f"{SHARED}/{file}"
    assert problem.message.startswith(what)


@pytest.mark.parametrize("name", ["begin", "numel", "shape", "step", "call", "micro"])
def test_verify_names_what_is_damaged_in_the_file_that_joins_the_segments(tmp_path, small_files, name):
    path = written(tmp_path / "a", store="hdf5")
    with h5py.File(path / "rank-00000/tensors.h5", "r+") as file:
        values = file["0/output~3"][name]
        values[(0,) * values.ndim] += 1

    (problem,) = verify(path)

    assert problem.file == "rank-00000/tensors.h5"
    assert problem.message == f"'{name}' of place 0/output~3 is not what the log has."


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda line: {**line, "places": []}, "does not say where row"),
        (lambda line: {**line, "places": [[0, *line["places"][0][1:]]]}, "a line that is no segment"),
        (lambda line: {**line, "places": [[line["places"][0][0], 0, -1, 0]]}, "a line that is no segment"),
        (lambda line: {**line, "places": [[*line["places"][0][:2], 1, line["places"][0][3]]]}, "where .* ends"),
    ],
)
def test_a_damaged_table_of_segments_gives_no_wrong_tensor(tmp_path, small_files, change, what):
    path = written(tmp_path / "a", store="hdf5")
    table = path / "rank-00000/segments.jsonl"
    lines = [json.loads(line) for line in table.read_text().splitlines()]
    at = next(number for number, line in enumerate(lines) if line.get("places"))
    lines[at] = change(lines[at])
    table.write_text("".join(json.dumps(line) + "\n" for line in lines))

    with pytest.raises(replay.TraceDamaged, match=what):
        replay.open(path).tensor(2, "0")
    assert list(verify(path)) != []


def test_a_damaged_tensor_is_named_and_the_others_are_read(tmp_path, small_files):
    path = written(tmp_path / "a")
    shard = path / SHARED / "data/c/0"
    shard.write_bytes(b"\x01" + shard.read_bytes()[1:])

    assert [(p.step, p.layer) for p in verify(path)] == [(2, "0")]
    with pytest.raises(replay.TraceDamaged, match="checksum differs"):
        replay.open(path).tensor(2, "0")
    assert replay.open(path).tensor(3, "0").tolist() == WANTED[3, "0"]


@pytest.mark.parametrize("store", STORES)
def test_a_torn_trace_is_recovered_for_other_programs(tmp_path, small_files, store):
    path = written(tmp_path / "a", sealed=False, store=store)

    result = CliRunner().invoke(hookrec_main, ["recover", str(path)])

    assert result.exit_code == 0
    assert tensors(path) == WANTED
    if store == "zarr":
        place = zarr.open_group(path / SHARED, mode="r")
    else:
        place = h5py.File(path / "rank-00000/tensors.h5")["0/output~3"]
    steps = place["step"][:].tolist()
    assert steps == [2, 3, 4, 6, 7, 8, 9]
    for i, step in enumerate(steps):
        begin, numel = place["begin"][i], place["numel"][i]
        assert place["data"][begin : begin + numel].reshape(place["shape"][i]).tolist() == WANTED[step, "0"]


@pytest.mark.parametrize("target", [("hdf5", None), ("hdf5", "zstd"), ("zarr", "zstd"), ("zarr", None)])
def test_a_conversion_gives_each_store_what_it_can_hold(tmp_path, target):
    path = written(tmp_path / "a")

    convert(path, tmp_path / "b", *target)
    convert(tmp_path / "b", tmp_path / "c", "zarr", None)

    assert tensors(tmp_path / "b") == tensors(tmp_path / "c") == WANTED
    layouts = [
        json.loads(line)["layout"] for line in (tmp_path / "b/rank-00000/streams.jsonl").read_text().splitlines()
    ]
    assert ("ragged" in layouts) == (target[1] is None)
    streams = [path / "rank-00000/streams.jsonl" for path in (path, tmp_path / "c")]
    assert streams[0].read_text() == streams[1].read_text()


def test_they_are_exported_like_all_others(tmp_path):
    import pandas as pd

    path = written(tmp_path / "a")

    tree = replay.open(path).select(layers="0").to_xarray()
    replay.open(path).select().to_parquet(tmp_path / "out.parquet", tensors=True)

    by_length = [node for node in tree.leaves if node.data.shape[1] == 2000]
    assert [node.step.values.tolist() for node in by_length] == [[2, 9]]
    assert by_length[0].data.values.tolist() == [WANTED[2, "0"], WANTED[9, "0"]]
    table = pd.read_parquet(tmp_path / "out.parquet")
    assert {
        (r.step, r.layer): list(r.values_) for r in table.rename(columns={"values": "values_"}).itertuples()
    } == WANTED


def test_ls_joins_many_shapes_to_a_line_and_json_does_not(tmp_path):
    path = str(written(tmp_path / "a"))

    lines = CliRunner().invoke(main, ["ls", path]).stdout.splitlines()
    rows = json.loads(CliRunner().invoke(main, ["ls", path, "--layers", "0", "--json"]).stdout)

    assert [line.split() for line in lines if "shapes" in line] == [
        [layer, "output", "float32", "8", "shapes", "10", "10", "0", "9"] for layer in ("0", "1")
    ]
    assert sorted(row["shape"] for row in rows) == [[n] for n in sorted(set(LENGTHS))]


def have(path: Path) -> set[int]:
    """The steps whose tensor of layer 0 is there, and is what it was; those of the others have a reason."""
    trace = replay.open(path)
    found = {record["step"] for record in trace.records("0").to_pylist() if record["kept"]}
    for step in trace.steps:
        if step in found:
            assert trace.tensor(step, "0").tolist() == WANTED[step, "0"]
        else:
            with pytest.raises(replay.NotRecorded, match="dropped by"):
                trace.tensor(step, "0")
    return found


def test_a_quota_drops_the_first_shards_of_a_shared_place(tmp_path, small_files):
    path = written(tmp_path / "a")
    rank = path / "rank-00000"
    first = [shard for shard in shards(rank) if shard.path == path / SHARED / "data/c/0"]
    assert len({shard.path for shard in shards(rank)}) == len(shards(rank))
    tensors_before = replay.open(path).nbytes

    drop(rank, first, "the quota of 1 bytes", NOW)

    # The first shard, of 8,192 bytes, has the 8,000 of step 2, the 36 of step 3; step 4 begins on the next page border.
    assert have(path) == set(range(len(LENGTHS))) - {2, 3}
    assert replay.open(path).nbytes == tensors_before - 8036
    assert list(verify(path)) == []
    assert not first[0].path.exists()
    data = zarr.open_array(path / SHARED / "data", mode="r")
    assert data.attrs["dropped_rows"] == 2048
    assert np.all(np.isnan(data[:2048]))
    assert data[2048:3072].tolist() == WANTED[4, "0"]


def test_a_quota_drops_all_that_it_may_and_statistics_stay(tmp_path, small_files):
    path = written(tmp_path / "a")
    records = replay.open(path).select().to_pandas().drop(columns="kept")

    Quota(1, Journal(io.StringIO())).keep([path], NOW)

    assert have(path) == {7}  # it is empty, so there was nothing to drop
    assert replay.open(path).nbytes == 0
    assert shards(path / "rank-00000") == []
    assert replay.open(path).select().to_pandas().drop(columns="kept").equals(records)
    assert list(verify(path)) == []
    assert bytes_on_disk(path) > 0


def test_files_of_shared_places_that_a_kill_left_behind_go_later(tmp_path, small_files, monkeypatch):
    path = written(tmp_path / "a")
    rank = path / "rank-00000"
    with monkeypatch.context() as patch:
        patch.setattr(dropping, "_remove_shared", lambda *_: None)
        drop(rank, [shard for shard in shards(rank) if shard.path.name == "1"], "the quota of 1 bytes", NOW)
    between = have(path)
    assert (path / SHARED / "data/c/0").exists()

    finish_dropping(rank)

    assert have(path) == between
    assert not (path / SHARED / "data/c/0").exists()
    assert read_dropped(rank).nbytes == 2 * (8000 + 36 + 4096 + 12000)  # the last begins in shard 1


def test_streams_that_are_not_alike_and_share_a_place_are_damage(tmp_path):
    path = written(tmp_path / "a", sealed=False)
    table = path / "rank-00000/streams.jsonl"
    lines = table.read_text().splitlines()
    changed = [line.replace("float32", "int32") if "[9]" in line else line for line in lines]
    table.write_text("\n".join(changed) + "\n")

    result = CliRunner().invoke(hookrec_main, ["recover", str(path)])

    assert result.exit_code == 2
    assert "not alike" in result.output
    assert any("not alike" in problem.message for problem in verify(path))


def test_a_random_tensor_among_hundreds_of_shapes_is_read_within_200_microseconds(tmp_path):
    records = [Written("0", np.full(1 + n % 500, n, np.float32), n) for n in range(1000)]
    trace = replay.open(write_trace(tmp_path / "a", *records))
    seconds = []
    for step in np.random.default_rng(0).permutation(1000).tolist():
        begin = time.perf_counter()
        tensor = trace.tensor(step, "0")
        seconds.append(time.perf_counter() - begin)
        assert tensor.tolist() == [step] * (1 + step % 500)

    assert np.median(seconds) < 200e-6


def test_a_missing_file_is_damage_of_its_tensors_alone(tmp_path, small_files):
    path = Path(shutil.copytree(written(tmp_path / "a"), tmp_path / "b"))
    (path / SHARED / "data/c/0").unlink()

    damaged = {(problem.step, problem.layer) for problem in verify(path) if problem.step is not None}

    assert damaged == {(2, "0"), (3, "0")}
