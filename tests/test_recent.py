"""A trace whose last steps are in memory is to rules what the trace on the disk is, however long it has become."""

import json

import numpy as np
import pytest

import replay
from replay import recent
from replay.check import check
from replay.follow import Follower
from replay.grid import BACKGROUND, Records
from replay.recent import Window, known_steps
from tests.live_traces import WrittenTrace

BACK = BACKGROUND


class Followed:
    """A trace that is written and followed, and what a rule that looks from a step on is given of it."""

    def __init__(self, path, *, begin_after=0, ranks=1):
        self.path = path
        self.traces = [WrittenTrace(path, ("a", "b"), rank=rank) for rank in range(ranks)]
        self.steps = 0
        self.window = Window()
        self.commit(begin_after)
        places = {}
        if begin_after:
            earlier = Follower(path)
            assert sum(1 for _ in earlier.read())
            places = earlier.places
        self.follower = Follower(path, places)
        self.window.begin(at_the_beginning=not begin_after)

    def commit(self, count):
        for first in range(self.steps, self.steps + count, 10):
            for trace in self.traces:
                steps = range(first, min(first + 10, self.steps + count))
                trace.commit(*steps, n_nan={"a": first % 70 == 0, "b": 1})
        self.steps += count

    def follow(self, count):
        self.commit(count)
        for records in self.follower.read():
            self.window.add(records)

    def recent(self, since):
        return self.window.recent(self.path, self.follower.directories, since, BACK)

    def learn(self, since):
        assert self.recent(since) is None
        with replay.open(self.path) as trace:
            self.window.learn(known_steps(trace, self.window.first_step))

    def assert_same_as_soon_as_it_is_here(self):
        for _ in range(2 * BACK):
            if self.recent(self.steps - 1) is not None:
                break
            self.follow(1)
        self.assert_same(self.steps - 1)

    def assert_same(self, since):
        found = self.recent(since)
        assert found is not None
        with replay.open(self.path) as trace:
            here, there = Records(found, since), Records(trace, since)
            assert here.earlier == there.earlier
            np.testing.assert_array_equal(here.steps, there.steps)
            assert here.table.to_pylist() == there.table.to_pylist()
            assert check(found, since=since) == check(trace, since=since)
            assert check(trace, since=since)
        assert "_ranks" not in vars(found), "it was read from the disk after all"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("count", [1, BACK - 1, BACK, BACK + 1, BACK + 150])
def test_rules_find_the_same_in_it(tmp_path, count, ranks):
    followed = Followed(tmp_path / "a", ranks=ranks)
    followed.follow(count)
    followed.follow(10)
    followed.assert_same(count)
    followed.follow(10)
    followed.assert_same(count + 10)


def test_what_lies_before_it_is_let_go(tmp_path):
    followed = Followed(tmp_path / "a")
    for _ in range(8):
        followed.follow(60)
        followed.assert_same(followed.steps - 60)

    assert followed.window._rows <= (BACK + 120) * 2


def test_one_that_begins_in_the_middle_is_used_when_it_reaches_back_far_enough(tmp_path):
    followed = Followed(tmp_path / "a", begin_after=50)
    followed.follow(BACK)
    assert followed.recent(240) is None
    with replay.open(tmp_path / "a") as trace:
        followed.window.learn(known_steps(trace, followed.window.first_step))
    assert followed.recent(240) is None, "rules would miss the steps from 40 to 49"
    followed.follow(20)

    followed.assert_same(260)


def test_what_else_a_rule_asks_for_is_read(tmp_path):
    followed = Followed(tmp_path / "a")
    followed.follow(300)
    found = followed.recent(290)

    with replay.open(tmp_path / "a") as trace, found:
        assert found.records("b", steps=[1, 2]).to_pylist() == trace.records("b", steps=[1, 2]).to_pylist()
        assert found.records(where="n_nan > 0").to_pylist() == trace.records(where="n_nan > 0").to_pylist()
        assert found.records(steps=slice(5, None)).to_pylist() == trace.records(steps=slice(5, None)).to_pylist()
        assert found.steps == trace.steps
        assert (found.layers, found.count, found.identity) == (trace.layers, trace.count, trace.identity)


def test_it_begins_anew_where_steps_are_superseded(tmp_path):
    followed = Followed(tmp_path / "a")
    followed.follow(30)
    followed.steps = 20
    followed.follow(5)

    assert followed.recent(20) is None


def test_it_holds_no_more_than_fits_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(recent, "_MOST_ROWS", 100)
    followed = Followed(tmp_path / "a")
    followed.follow(60)

    assert followed.recent(40) is None
    assert followed.window._rows <= 100


def test_ranks_that_are_resumed_one_after_the_other_lose_nothing_of_each_other(tmp_path):
    followed = Followed(tmp_path / "a", ranks=2)
    followed.follow(BACK)
    for trace in followed.traces:  # each is seen to go on from step 190 before the other is
        resume(trace, attempt=1, first_step=BACK - 10)
        trace.commit(BACK - 10, BACK - 9)
        followed.follow(0)
    followed.steps = BACK - 8
    followed.follow(20)

    followed.learn(since=BACK)

    followed.assert_same_as_soon_as_it_is_here()


def test_ranks_of_which_one_was_read_further_than_the_other_before_a_restart_are_both_there(tmp_path):
    followed = Followed(tmp_path / "a", ranks=2)
    followed.traces[0].commit(*range(20))
    followed.follow(0)
    followed.window, followed.follower = Window(), Follower(tmp_path / "a", followed.follower.places)
    followed.window.begin(at_the_beginning=False)
    followed.traces[1].commit(*range(20))
    followed.steps = 20
    followed.follow(10)

    followed.learn(since=0)

    followed.assert_same_as_soon_as_it_is_here()


def test_a_rank_that_lags_changes_nothing_that_was_let_go(tmp_path):
    followed = Followed(tmp_path / "a", ranks=2)
    followed.traces[0].commit(*range(BACK + 100))
    followed.follow(0)
    assert followed.recent(BACK + 50) is not None
    followed.traces[1].commit(*range(BACK + 100))
    followed.steps = BACK + 100
    followed.follow(10)

    followed.assert_same(followed.steps - 1)


def test_what_it_learns_of_a_time_before_it_began_anew_does_not_count(tmp_path):
    followed = Followed(tmp_path / "a", ranks=2)
    followed.window.begin(at_the_beginning=False)
    followed.follow(5)
    assert followed.recent(0) is None
    with replay.open(tmp_path / "a") as trace:
        known = known_steps(trace, followed.window.first_step)
    resume(followed.traces[1], attempt=1, first_step=0)
    followed.traces[1].commit(0, 1)
    followed.follow(0)

    followed.window.learn(known)

    assert followed.recent(0) is None, "it has lost what rank 0 had"


def resume(trace, *, attempt, first_step):
    """Let a trace go on from a step, in a segment of its own."""
    trace._log.begin_segment()
    line = {"attempt": attempt, "first_step": first_step, "segment": trace._log.segment, "time": "", "plan": {}}
    with (trace.rank / "attempts.jsonl").open("a") as file:
        file.write(json.dumps({**line, "provenance": {}, "before": None}) + "\n")
