"""What `replay verify` says of whole and of damaged traces, and that no damage gives a wrong value without a word."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

import replay
from replay.cli import main
from replay.errors import ReplayError, StepNotCommitted
from replay.format import CODECS
from replay.seal import locked, seal
from replay.verify import verify
from tests.stored import write_stored

KINDS = [("zarr", None, True), ("zarr", "zstd", True), ("zarr", "blosc", True), ("hdf5", None, True)]
KINDS += [("zarr", None, False), ("hdf5", None, False), ("hdf5", "zstd", True), ("hdf5", "lz4", False)]


def damages(path: Path) -> list:
    return [problem for problem in verify(path) if problem.damage]


@pytest.mark.parametrize(("store", "codec", "sealed"), KINDS)
def test_a_whole_trace_has_no_problem(tmp_path, store, codec, sealed):
    write_stored(tmp_path, store, codec, sealed=sealed)

    assert list(verify(tmp_path)) == []


def test_each_damaged_record_is_named_and_the_others_are_read(tmp_path):
    write_stored(tmp_path)
    shard = tmp_path / "rank-00000/tensors.zarr/0/output/data/c/0/0"
    data = bytearray(shard.read_bytes())
    data[5] ^= 1  # row 0 is step 0
    data[4 * 40 * 2 + 7] ^= 128  # row 2 is step 3, since step 1 has no tensor
    shard.write_bytes(data)

    found = damages(tmp_path)

    assert [(p.rank, p.step, p.layer, p.kind, p.call, p.path) for p in found] == [
        (0, 0, "0", "output", 0, ""),
        (0, 3, "0", "output", 0, ""),
    ]


def test_the_exit_status_says_whole_damaged_or_no_trace(tmp_path):
    write_stored(tmp_path / "a")
    run = CliRunner().invoke

    whole = run(main, ["verify", str(tmp_path / "a")])
    (tmp_path / "a/rank-00000/streams.jsonl").write_text("{\n")
    damaged = run(main, ["verify", str(tmp_path / "a"), "--json"])
    nothing = run(main, ["verify", str(tmp_path)])

    assert (whole.exit_code, damaged.exit_code, nothing.exit_code) == (0, 1, 2)
    assert whole.stdout == ""
    assert "rank-00000/streams.jsonl" in {problem["file"] for problem in json.loads(damaged.stdout)["problems"]}


def test_one_rank_does_not_hide_another(tmp_path):
    write_stored(tmp_path)
    write_stored(tmp_path, rank=1)
    (tmp_path / "rank-00000/streams.jsonl").unlink()
    (tmp_path / "trace.json").write_text("[]")
    shard = tmp_path / "rank-00001/tensors.zarr/0/output/data/c/0/0"
    shard.write_bytes(bytes(shard.stat().st_size))

    found = damages(tmp_path)

    assert {p.file for p in found if p.file} >= {"trace.json", "rank-00000/streams.jsonl"}
    assert {p.step for p in found if p.rank == 1 and p.layer == "0"} == {0, 2, 3, 4, 5}


def test_a_commit_that_a_crash_cut_off_is_said_and_no_damage(tmp_path):
    write_stored(tmp_path, sealed=False)
    log = tmp_path / "rank-00000/records-00000.arrows"
    log.write_bytes(log.read_bytes()[:-20])

    found = list(verify(tmp_path))

    assert [(p.file, p.damage) for p in found] == [("rank-00000/records-00000.arrows", False)]
    assert "cut off" in found[0].message


def test_a_commit_in_the_middle_that_is_damaged_is_damage(tmp_path):
    write_stored(tmp_path, sealed=False)
    log = tmp_path / "rank-00000/records-00000.arrows"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)

    assert [p.file for p in damages(tmp_path)] == ["rank-00000/records-00000.arrows"]


def test_counts_of_the_ending_are_held_to_the_log(tmp_path):
    write_stored(tmp_path)
    end = tmp_path / "rank-00000/end.json"
    end.write_text(end.read_text().replace('"records": 18', '"records": 19'))

    assert [p.file for p in damages(tmp_path)] == ["rank-00000/end.json"]


def test_a_swapped_name_in_the_table_of_streams_is_refused_by_the_reader(tmp_path):
    write_stored(tmp_path)
    table = tmp_path / "rank-00000/streams.jsonl"
    table.write_text(table.read_text().replace('"layer": "0"', '"layer": "1"'))

    with pytest.raises(ReplayError, match="location"):
        replay.open(tmp_path)


@pytest.mark.parametrize(("name", "first"), [("0/output/data", 1), ("nothing/data", 0)])
def test_a_virtual_dataset_that_shows_other_rows_is_named(tmp_path, name, first):
    """Only other libraries read by it; ours read the segments."""
    write_stored(tmp_path, "hdf5")
    master = tmp_path / "rank-00000/tensors.h5"
    with h5py.File(master, "r+") as file:
        attributes = dict(file["0/output/data"].attrs)
        layout = h5py.VirtualLayout((5, 40), "<f4")
        layout[:] = h5py.VirtualSource("tensors-00000.h5", name, (65_536, 40))[first : first + 5]
        del file["0/output/data"]
        file["0/output"].create_virtual_dataset("data", layout).attrs.update(
            {key: attributes[key] for key in ("layer", "kind", "path", "dtype")}
        )

    assert [(p.file, "join" in p.message) for p in damages(tmp_path)] == [("rank-00000/tensors.h5", True)]


@pytest.mark.parametrize("codec", CODECS)
def test_an_index_of_chunks_that_shows_others_is_named(tmp_path, codec):
    write_stored(tmp_path, "hdf5", codec)
    file = tmp_path / "rank-00000/tensors-compressed.h5"
    data = bytearray(file.read_bytes())
    root = data.rindex(b"TREE\x01\x00\x05\x00")  # five chunks of the last stream, a scalar: keys of 24 bytes
    data[root + 24 + 24 : root + 24 + 24 + 8] = data[root + 24 + 32 + 24 : root + 24 + 32 + 24 + 8]
    file.write_bytes(data)

    assert [(p.file, "chunks" in p.message) for p in damages(tmp_path)] == [("rank-00000/tensors-compressed.h5", True)]


def test_compressed_records_without_their_file_are_named(tmp_path):
    write_stored(tmp_path, "hdf5", "zstd", sealed=False)
    (tmp_path / "rank-00000/tensors-compressed.h5").unlink()

    with locked(tmp_path / "rank-00000"):
        seal(tmp_path / "rank-00000", "recovered", None, {})

    found = damages(tmp_path)
    assert len([p for p in found if p.step is not None and "tensors-compressed.h5" in p.message]) == 15
    assert [p.file for p in found if p.step is None] == ["rank-00000/tensors-compressed.h5"]


def test_a_line_of_triggers_that_is_none_is_named(tmp_path):
    write_stored(tmp_path)
    (tmp_path / "rank-00000/triggers.jsonl").write_text('{"step": "x"}\n')

    assert [p.file for p in damages(tmp_path)] == ["rank-00000/triggers.jsonl"]


def test_an_interrupt_ends_without_a_traceback(tmp_path):
    write_stored(tmp_path)
    code = (
        "import os, signal, replay.verify as v; from replay.cli import main\n"
        "v.read_modules = lambda _: os.kill(os.getpid(), signal.SIGINT)\n"
        f"main(['verify', {str(tmp_path)!r}])"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert ended.returncode in (1, 130, -signal.SIGINT)
    assert "Traceback" not in ended.stderr
    assert "Aborted" in ended.stderr


UNPROTECTED = ("model.json", "notes.jsonl", "scalars.jsonl", "trace.json", "end.json", "writer.lock")
"""Small texts without a checksum: a letter of a note may be another, and no tensor depends on it."""


class Fuzz:
    """Damages one place of one file, and asks everything of the trace."""

    def __init__(self, directory: Path, store: str, codec: str | None, *, sealed: bool) -> None:
        self.whole, self.broken = directory / "whole", directory / "broken"
        self.sealed = sealed
        self.tensors = write_stored(self.whole, store, codec, sealed=sealed)
        self.files = sorted(p.relative_to(self.whole) for p in self.whole.rglob("*") if p.is_file())
        self.files = [p for p in self.files if (self.whole / p).stat().st_size]

    def once(self, rng: np.random.Generator) -> None:
        shutil.rmtree(self.broken, ignore_errors=True)
        # Segments of HDF5 are sparse files of hundreds of megabytes, so they are linked and only the victim is copied.
        victim = self.files[rng.integers(len(self.files))]
        subprocess.run(["cp", "-r", "--sparse=always", self.whole, self.broken], check=True)
        path = self.broken / victim
        size = path.stat().st_size
        reach = min(size, 1 << 13) if path.name.startswith("tensors-0") else size
        at = int(rng.integers(reach))
        with path.open("r+b") as file:
            if cut := bool(rng.integers(4) == 0):
                file.truncate(at)
            else:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ (1 << rng.integers(8))]))
        self.hold(victim, f"{victim} {'cut at' if cut else 'flipped at'} {at} of {size}")

    def hold(self, victim: Path, what: str) -> None:
        named = list(verify_in_process(self.broken))
        wrong = 0
        try:
            with replay.open(self.broken) as trace:
                for (step, layer), data in self.tensors.items():
                    try:
                        assert trace.tensor(step, layer).tobytes() == data, f"wrong value: {what}"
                    except StepNotCommitted:
                        wrong += 1
                    except ReplayError:
                        wrong += 1
        except ReplayError:
            wrong += 1
        if wrong:
            assert named, f"nothing is named: {what}"


def verify_in_process(path: Path) -> list:
    return list(verify(path))


def fuzz(tmp_path: Path, rounds: int, seed: int) -> None:
    for number, (store, codec, sealed) in enumerate(KINDS):
        work = Fuzz(tmp_path / str(number), store, codec, sealed=sealed)
        rng = np.random.default_rng([seed, number])
        for _ in range(rounds):
            work.once(rng)


def test_no_damage_gives_a_wrong_value_or_hides_itself(tmp_path):
    fuzz(tmp_path, 12, 1)


@pytest.mark.slow
def test_no_damage_gives_a_wrong_value_or_hides_itself_500_times(tmp_path):
    fuzz(tmp_path, 84, 2)
