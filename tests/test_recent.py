"""A trace whose last steps are in memory is to rules what the trace on the disk is, however long it has become."""

import numpy as np
import pytest

import replay
from replay import recent
from replay.check import check
from replay.follow import Follower
from replay.grid import BACKGROUND, Records
from replay.recent import Window
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
        followed.window.learn(np.asarray(trace.steps))
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
