"""A follower reads each record of a trace once: while it grows, is compacted, or is read on from a saved place."""

import fcntl
import os
import threading

import numpy as np
import pytest

import replay
from replay.follow import Follower
from replay.log import compact
from replay.seal import is_locked, locked
from tests.live_traces import WrittenTrace


def steps(follower: Follower) -> list[int]:
    return [step for table in follower.read() for step in table["step"].to_pylist()]


def test_each_record_is_read_once_as_it_is_committed(tmp_path):
    trace = WrittenTrace(tmp_path / "a", ("0",))
    follower = Follower(tmp_path / "a")
    seen = [steps(follower)]
    for step in range(3):
        trace.commit(step)
        seen.append(steps(follower))

    assert seen == [[], [0], [1], [2]]
    assert steps(follower) == []


def test_a_follower_reads_what_the_trace_has(tmp_path):
    trace = WrittenTrace(tmp_path / "a", ("0", "x"), width=3)
    trace.commit(0, 1, n_nan={"x": 2})

    (table,) = Follower(tmp_path / "a").read()

    assert table.to_pylist() == replay.open(tmp_path / "a").records().to_pylist()
    assert table["layer"].to_pylist() == ["0", "x"] * 2
    assert table["n_nan"].to_pylist() == [0, 2, 0, 2]


@pytest.mark.parametrize("seen", [0, 1, 2])
def test_what_was_read_before_a_segment_is_compacted_is_not_read_again(tmp_path, seen):
    trace = WrittenTrace(tmp_path / "a", ("0",))
    follower = Follower(tmp_path / "a")
    for step in range(2):
        if step == seen:
            assert steps(follower) == list(range(seen))
        trace.commit(step)
    if seen == 2:
        steps(follower)
    trace.close()

    compact(trace.rank / "records-00000.arrows")

    assert steps(follower) == list(range(seen, 2))


def test_a_saved_place_is_right_in_the_middle_of_a_segment_and_after_it(tmp_path):
    trace = WrittenTrace(tmp_path / "a", ("0", "1"))
    trace.commit(0, 1)
    first = Follower(tmp_path / "a")
    assert steps(first) == [0, 0, 1, 1]
    trace.commit(2)

    assert steps(Follower(tmp_path / "a", first.places)) == [2, 2]
    trace.seal()
    assert steps(Follower(tmp_path / "a", first.places)) == [2, 2]


def test_a_follower_goes_on_into_the_next_segment(tmp_path, monkeypatch):
    monkeypatch.setattr("replay.log.COMPACT_ROWS", 4)
    trace = WrittenTrace(tmp_path / "a", ("0", "1"))
    follower = Follower(tmp_path / "a")
    seen = []
    for step in range(7):
        trace.commit(step)
        if step % 3 == 0:
            seen += steps(follower)
    seen += steps(follower)

    assert len(list(trace.rank.glob("*.parquet"))) == 3
    assert seen == np.repeat(np.arange(7), 2).tolist()


def test_a_rank_that_comes_later_is_followed_too(tmp_path):
    WrittenTrace(tmp_path / "a", ("0",)).commit(0)
    follower = Follower(tmp_path / "a")
    assert steps(follower) == [0]

    WrittenTrace(tmp_path / "a", ("0",), rank=1).commit(5)

    assert [table["rank"].to_pylist() for table in follower.read()] == [[1]]


def test_a_layer_that_comes_later_has_its_name(tmp_path):
    trace = WrittenTrace(tmp_path / "a", ("0",))
    trace.commit(0)
    follower = Follower(tmp_path / "a")
    assert steps(follower) == [0]

    trace.add("late")
    trace.commit(1)

    assert [table["layer"].to_pylist() for table in follower.read()] == [["0", "late"]]


def test_records_whose_streams_are_not_seen_yet_are_not_lost(tmp_path):
    trace = WrittenTrace(tmp_path / "a", ("0",))
    trace.commit(0)
    follower = Follower(tmp_path / "a")
    assert steps(follower) == [0]
    before = (trace.rank / "streams.jsonl").read_text()
    trace.add("late")
    trace.commit(1)
    after = (trace.rank / "streams.jsonl").read_text()
    (trace.rank / "streams.jsonl").write_text(before)
    for _ in range(2):
        with pytest.raises(replay.TraceDamaged, match="records of stream 1, and 1 streams"):
            steps(follower)
    places = follower.places

    (trace.rank / "streams.jsonl").write_text(after)

    assert steps(Follower(tmp_path / "a", places)) == [1, 1]
    assert steps(follower) == [1, 1]
    assert steps(follower) == []


def test_a_torn_batch_is_left_for_the_next_look(tmp_path):
    trace = WrittenTrace(tmp_path / "a", ("0",))
    trace.commit(0)
    log = trace.rank / "records-00000.arrows"
    whole = log.stat().st_size
    trace.commit(1)
    data = log.read_bytes()
    log.write_bytes(data[: whole + 100])
    follower = Follower(tmp_path / "a")
    assert steps(follower) == [0]

    log.write_bytes(data)

    assert steps(follower) == [1]


def test_a_log_that_has_not_grown_is_not_opened(tmp_path, monkeypatch):
    trace = WrittenTrace(tmp_path / "a", ("0",))
    trace.commit(0)
    follower = Follower(tmp_path / "a")
    steps(follower)

    monkeypatch.setattr("replay.log_tail.TailReader.read", lambda self: pytest.fail("it was opened"))

    assert steps(follower) == []


def test_a_segment_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("replay.log.COMPACT_ROWS", 2)
    trace = WrittenTrace(tmp_path / "a", ("0", "1"))
    for step in range(3):
        trace.commit(step)
    (trace.rank / "records-00000.parquet").unlink()

    with pytest.raises(replay.TraceDamaged, match="lacks its segment 0"):
        steps(Follower(tmp_path / "a"))


def test_whoever_looks_at_a_lock_keeps_no_writer_from_taking_it(tmp_path):
    (tmp_path / "writer.lock").touch()
    looking = os.open(tmp_path / "writer.lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    timer = threading.Timer(0.02, os.close, (looking,))
    timer.start()

    with locked(tmp_path):
        assert is_locked(tmp_path)
        with pytest.raises(BlockingIOError), locked(tmp_path):
            pass

    timer.join()
    assert not is_locked(tmp_path)
