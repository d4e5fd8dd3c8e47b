"""A quota drops the oldest tensors and nothing else, and what was dropped says so, also after a kill in the middle."""

import io
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from click.testing import CliRunner
from torch import nn

import hookrec
import replay
from hookrec.cli import main as hookrec_main
from hookrec.journal import Journal
from hookrec.quota import Quota, bytes_on_disk
from replay import dropping
from replay.catalog import entry_of
from replay.dropping import drop, finish_dropping, read_dropped, shards
from replay.seal import locked
from tests.live_traces import WrittenTrace

NOW = "2026-12-02T12:00:00.000+00:00"
WIDTH = 1 << 16  # 256 KiB a tensor


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of 4 rows."""
    monkeypatch.setattr("replay.zarr_store._SHARD_ROWS", 4)


def sealed(path: Path, steps: int = 2, **more) -> Path:
    trace = WrittenTrace(path, width=WIDTH, **more)
    for step in range(steps):
        trace.commit(step)
    return trace.seal()


def keep(root: Path, limit: int, journal: Journal | None = None) -> None:
    traces = sorted(path for path in root.iterdir() if (path / "trace.json").exists())
    Quota(limit, journal or Journal(io.StringIO())).keep(traces, NOW)


def have(path: Path) -> list[bool]:
    """Whether each record has its tensor; those that have one are compared with what was written."""
    trace = replay.open(path)
    found = []
    for record in trace.records().to_pylist():
        if record["kept"]:
            tensor = trace.tensor(record["step"], record["layer"])
            assert np.all(tensor == record["step"])
        else:
            with pytest.raises(replay.NotRecorded, match=r"dropped by the quota of .* bytes on 2026-12-02"):
                trace.tensor(record["step"], record["layer"])
        found.append(record["kept"])
    return found


def test_the_tensors_of_the_oldest_trace_go_first_and_no_statistics(tmp_path):
    sealed(tmp_path / "a young", created="2026-12-01T13:00:00.000+00:00")
    sealed(tmp_path / "z old", created="2026-12-01T13:30:00.000+01:00")
    records = replay.open(tmp_path / "z old").records().drop_columns("kept")

    keep(tmp_path, bytes_on_disk(tmp_path / "a young") + 500_000)

    assert have(tmp_path / "z old") == [False] * 4
    assert have(tmp_path / "a young") == [True] * 4
    assert replay.open(tmp_path / "z old").records().drop_columns("kept") == records
    assert bytes_on_disk(tmp_path) < bytes_on_disk(tmp_path / "a young") + 500_000


def test_within_a_trace_the_oldest_shards_go_first_and_no_more_than_needed(tmp_path, small_shards):
    trace = WrittenTrace(tmp_path / "a", width=WIDTH)
    for step in range(12):
        trace.commit(step)
        for path in trace.rank.glob(f"tensors.zarr/*/output/data/c/{step // 4}/0"):
            os.utime(path, (step, step))
    trace.seal()
    size = bytes_on_disk(tmp_path / "a")

    keep(tmp_path, size - 3 * WIDTH * 4)

    kept = np.array(have(tmp_path / "a")).reshape(12, 2)
    assert kept[:4].sum() == 4  # of one layer, one shard went: four rows
    assert np.all(kept[4:])


def test_nothing_goes_while_the_traces_fit(tmp_path):
    sealed(tmp_path / "a")

    keep(tmp_path, bytes_on_disk(tmp_path / "a"))

    assert have(tmp_path / "a") == [True] * 4
    assert not (tmp_path / "a/rank-00000/tensors-dropped.json").exists()


def test_what_is_live_torn_or_pinned_is_never_touched_and_that_is_said(tmp_path):
    live = WrittenTrace(tmp_path / "live", width=WIDTH)
    live.commit(0)
    torn = WrittenTrace(tmp_path / "torn", width=WIDTH)
    torn.commit(0)
    torn.close()
    sealed(tmp_path / "pinned")
    assert CliRunner().invoke(hookrec_main, ["pin", str(tmp_path / "pinned")]).exit_code == 0
    said = io.StringIO()

    keep(tmp_path, 1, Journal(said))

    assert have(tmp_path / "live") == have(tmp_path / "torn") == [True] * 2
    assert have(tmp_path / "pinned") == [True] * 4
    assert "all that is left is statistics, or belongs to traces that are live, torn or pinned" in said.getvalue()
    assert CliRunner().invoke(hookrec_main, ["unpin", str(tmp_path / "pinned")]).exit_code == 0
    keep(tmp_path, 1)
    assert have(tmp_path / "pinned") == [False] * 4


def test_a_trace_with_one_live_rank_is_live(tmp_path):
    sealed(tmp_path / "a")
    WrittenTrace(tmp_path / "a", rank=1, width=WIDTH).commit(0)

    keep(tmp_path, 1)

    assert have(tmp_path / "a")[:4] == [True] * 4


@pytest.mark.parametrize("calls", range(12))
def test_a_kill_at_any_moment_leaves_the_tensor_or_the_reason(tmp_path, small_shards, monkeypatch, calls):
    """Each call that changes the disk is, in turn, the last that is made."""
    path = sealed(tmp_path / "a", 10)
    left = itertools.count(calls, -1)

    def dying(real):
        def call(*args, **more):
            if next(left) <= 0:
                raise KeyboardInterrupt
            return real(*args, **more)

        return call

    with monkeypatch.context() as patch:
        for name in ("unlink", "rmdir", "write_text"):
            patch.setattr(Path, name, dying(getattr(Path, name)))
        patch.setattr("replay.format.os.replace", dying(os.replace))
        with pytest.raises(KeyboardInterrupt):
            drop(path / "rank-00000", shards(path / "rank-00000")[:4], "the quota of 1 bytes", NOW)

    between = have(path)
    assert len(between) == 20
    finish_dropping(path / "rank-00000")
    assert have(path) == between
    drop(path / "rank-00000", shards(path / "rank-00000"), "the quota of 1 bytes", NOW)
    assert have(path) == [False] * 20
    assert shards(path / "rank-00000") == []
    assert read_dropped(path / "rank-00000").nbytes == 20 * WIDTH * 4


def test_files_that_a_kill_left_behind_go_at_the_next_look(tmp_path, monkeypatch):
    path = sealed(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(dropping, "_remove_below", lambda *_: None)
        drop(path / "rank-00000", shards(path / "rank-00000"), "the quota of 1 bytes", NOW)
    assert len(shards(path / "rank-00000")) == 2

    keep(tmp_path, 10**12)

    assert shards(path / "rank-00000") == []


def test_an_open_trace_learns_that_its_tensors_are_gone(tmp_path):
    path = sealed(tmp_path / "a")
    trace = replay.open(path)

    keep(tmp_path, 1)

    with pytest.raises(replay.NotRecorded, match="dropped by the quota"):
        trace.tensor(0, "0")
    assert list(trace.refresh().select().tensors()) == []


def test_a_trace_says_how_much_was_dropped(tmp_path, small_shards):
    path = sealed(tmp_path / "a", 6)
    drop(path / "rank-00000", shards(path / "rank-00000")[:1], "the quota of 7 bytes", NOW)

    trace = replay.open(path)

    assert trace.nbytes == entry_of(path, tmp_path).bytes == 8 * WIDTH * 4
    assert trace.not_kept == {f"dropped by the quota of 7 bytes on {NOW}": 4}
    assert sum(1 for _ in trace.select().tensors()) == 8


def test_a_file_that_is_missing_for_no_reason_is_still_damage(tmp_path):
    path = sealed(tmp_path / "a")
    shards(path / "rank-00000")[0].path.unlink()

    with pytest.raises(replay.TraceDamaged, match="cannot be read"):
        [replay.open(path).tensor(0, layer) for layer in ("0", "1")]


def test_to_other_programs_dropped_tensors_are_nan_and_not_zero(tmp_path, small_shards):
    path = sealed(tmp_path / "a", 6)
    shard = shards(path / "rank-00000")[0]
    drop(path / "rank-00000", [shard], "the quota of 7 bytes", NOW)

    array = zarr.open_array(str(path / f"rank-00000/tensors.zarr/{shard.stream.location}/data"), mode="r")

    assert np.all(np.isnan(array[:4]))
    assert np.all(array[4:, 0] == [4, 5])
    assert array.attrs["dropped_rows"] == 4


def test_real_streams_of_every_shape_and_dtype_can_go(tmp_path):
    odd = [torch.empty(0, 3), torch.tensor(1.0), torch.ones(2, 3, 4), torch.ones(3, dtype=torch.bfloat16)]
    odd += [torch.ones(2, dtype=torch.complex64), torch.tensor([True])]
    model = nn.Identity()
    with hookrec.attach(model, tmp_path / "a", clock="manual", keep_free=0):
        for tensor in odd:
            model(tensor)
    rank = tmp_path / "a/rank-00000"
    assert len(shards(rank)) == 5

    drop(rank, shards(rank), "hand", NOW)

    trace = replay.open(tmp_path / "a")
    assert trace.nbytes == 0
    assert trace.tensor(0, "", call=0).shape == (0, 3)
    for call in range(1, 6):
        with pytest.raises(replay.NotRecorded, match="dropped by hand"):
            trace.tensor(0, "", call=call)
    assert len(trace.records()) == 6


def test_a_rank_that_somebody_else_holds_is_left_alone(tmp_path):
    path = sealed(tmp_path / "a")
    said = io.StringIO()

    with locked(path / "rank-00000"):
        keep(tmp_path, 1, Journal(said))

    assert have(path) == [True] * 4
    assert "cannot be dropped" in said.getvalue()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"streams": {"0": -1}, "why": "", "time": "", "bytes": 0}'])
def test_a_damaged_note_of_what_was_dropped_is_named(tmp_path, content):
    path = sealed(tmp_path / "a")
    (path / "rank-00000/tensors-dropped.json").write_text(content)

    with pytest.raises(replay.TraceDamaged, match=r"tensors-dropped\.json"):
        replay.open(path)


def test_pin_wants_a_trace(tmp_path):
    result = CliRunner().invoke(hookrec_main, ["pin", str(tmp_path)])

    assert result.exit_code == 2
    assert "is no trace" in result.output
    assert json.loads("[]") == list(tmp_path.iterdir())
