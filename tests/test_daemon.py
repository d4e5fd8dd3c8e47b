"""The daemon alerts, seals and saves as it should, over whatever it finds.

It is asked of a `Daemon` whose rounds are called by hand, with the time as a number.
"""

import contextlib
import io
import json
import os
import platform
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import hookrec
import replay
from hookrec import daemon_command
from hookrec.daemon import Daemon, watch
from hookrec.events import Events
from hookrec.findings import Conditions
from hookrec.journal import Journal
from hookrec.judging import Pace
from hookrec.quota import Quota
from hookrec.watched import Duties
from replay.alerts import AlertFile, read_alerts
from tests.live_traces import WrittenTrace


class Now(Executor):
    """Does at once what it is given."""

    def submit(self, function, /, *arguments, **more):
        future: Future = Future()
        try:
            future.set_result(function(*arguments, **more))
        except Exception as error:
            future.set_exception(error)
        return future


class Post:
    """A way to send that keeps what it was given."""

    name = "post"

    def __init__(self):
        self.got = []

    def put(self, trace, number, alert):
        self.got.append((trace.name, alert.layer))


@dataclass(frozen=True)
class Found:
    """What a rule of a test finds."""

    layer: str | None
    first_step: int | None = None
    rule: str = "rule"
    severity: str = "warning"
    rank: int | None = 0
    kind: str | None = "output"
    last_step: int | None = None
    message: str = "found"
    advice: str = "look"


class Bench:
    """A daemon whose rounds are called by hand."""

    def __init__(self, root: Path, *when: str, check=None, seal_after=60.0, quota=None):
        self.said = io.StringIO()
        self.post = Post()
        journal = Journal(self.said)
        duties = Duties(
            Conditions(when), check, [self.post], seal_after, journal, Now(), Now(), Now(), lambda: None, Pace()
        )
        (root / ".hookrec-daemon").mkdir(exist_ok=True)
        self.daemon = Daemon(root, duties, when, None if quota is None else Quota(quota, journal))
        self.now = 0.0

    def look(self, seconds: float = 1.0) -> float:
        self.now += seconds
        return self.daemon.look(self.now)


def layers(path: Path) -> list[str | None]:
    return [alert.layer for alert in read_alerts(path)]


def test_the_first_record_of_each_layer_for_which_a_condition_holds_is_an_alert(tmp_path):
    trace = WrittenTrace(tmp_path / "a", ("x", "y", "z"))
    bench = Bench(tmp_path, "n_nan > 0")
    trace.commit(0)
    bench.look()
    trace.commit(1, n_nan={"y": 2})
    bench.look()
    trace.commit(2, 3, n_nan={"x": 1, "y": 5})
    bench.look()

    found = [(alert.layer, alert.first_step, alert.rule, alert.rank) for alert in read_alerts(tmp_path / "a")]
    assert found == [("y", 1, "n_nan > 0", 0), ("x", 2, "n_nan > 0", 0)]
    assert "n_nan 2, absmax" in read_alerts(tmp_path / "a")[0].message  # a count, and no 2.0
    assert bench.post.got == [("a", "y"), ("a", "x")]
    assert bench.said.getvalue().count("alert: ") == 2


def test_traces_that_were_finished_before_are_judged_once(tmp_path):
    trace = WrittenTrace(tmp_path / "deep/er/a")
    trace.commit(0, n_nan={"1": 1})
    trace.seal()
    first = Bench(tmp_path, "n_nan > 0")
    first.look()
    first.look()
    first.daemon.save()

    second = Bench(tmp_path, "n_nan > 0")
    second.look()
    third = Bench(tmp_path, "n_nan > 0", "n_nan >= 0")
    third.look()

    assert first.post.got == [("a", "1")]
    assert second.post.got == [("a", "1")]  # it was never marked as sent
    assert "alert: " not in second.said.getvalue()
    assert [(a.rule, a.layer) for a in read_alerts(tmp_path / "deep/er/a")] == [
        ("n_nan > 0", "1"),
        ("n_nan >= 0", "0"),
        ("n_nan >= 0", "1"),
    ]
    assert third.said.getvalue().count("alert: ") == 2


def test_what_was_sent_is_not_sent_again_after_a_restart(tmp_path):
    WrittenTrace(tmp_path / "a", ("x", "y")).commit(0, n_nan={"x": 1, "y": 1})
    Bench(tmp_path, "n_nan > 0").look()
    first, _ = read_alerts(tmp_path / "a")
    AlertFile(tmp_path / "a").mark_sent(first.id, "post", "2026-12-02T12:00:00.000+00:00")

    bench = Bench(tmp_path, "n_nan > 0")
    bench.look()

    assert bench.post.got == [("a", "y")]


def test_a_restart_goes_on_where_the_log_was_left(tmp_path):
    trace = WrittenTrace(tmp_path / "a")
    trace.commit(0)
    first = Bench(tmp_path, "n_nan > 0")
    first.look()
    first.daemon.save()
    trace.commit(1, n_nan={"0": 1})

    read = []
    second = Bench(tmp_path, "n_nan > 0")
    ask = second.daemon._duties.conditions.ask
    second.daemon._duties.conditions.ask = lambda records, *told: (
        read.extend(records["step"].to_pylist()) or ask(records, *told)
    )
    second.look()

    assert set(read) == {1}
    assert layers(tmp_path / "a") == ["0"]


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{", '{"rules": "x"}'),
        *(f'{{"rules": RULES, "traces": {traces}}}' for traces in ("3", "[]", '{"a": 3}', '{"a": null}', '{"a": {}}')),
        *(
            f'{{"rules": RULES, "traces": {{"a": {{"stamp": STAMP, {more}}}}}}}'
            for more in ('"places": 3', '"places": {"0": [1]}', '"places": {}, "unchecked": "x"')
        ),
    ],
)
def test_whatever_an_earlier_daemon_left_is_no_trouble(tmp_path, content):
    trace = WrittenTrace(tmp_path / "a")
    trace.commit(0, n_nan={"0": 1})
    stat = (tmp_path / "a/trace.json").stat()
    rules = json.dumps(Bench(tmp_path, "n_nan > 0").daemon._rules)
    content = content.replace("RULES", rules).replace("STAMP", json.dumps([stat.st_ino, stat.st_mtime_ns]))
    (tmp_path / ".hookrec-daemon/places.json").write_text(content)

    bench = Bench(tmp_path, "n_nan > 0")
    bench.look()
    bench.daemon.save()

    assert layers(tmp_path / "a") == ["0"]


def test_rules_come_in_by_one_seam_and_are_told_what_is_new(tmp_path):
    asked = []

    def check(trace, since):
        asked.append((trace.path.name, since, trace.steps[-1]))
        return [Found("0"), Found(None, rule="whole", rank=None, kind=None)]

    trace = WrittenTrace(tmp_path / "a")
    bench = Bench(tmp_path, check=check)
    for step in range(3):
        trace.commit(step)
        bench.look(5)
    bench.look(5)
    bench.look(5)

    assert asked == [("a", 0, 0), ("a", 1, 1), ("a", 2, 2)]
    assert [(a.rule, a.layer, a.rank, a.severity) for a in read_alerts(tmp_path / "a")] == [
        ("rule", "0", 0, "warning"),
        ("whole", None, None, "warning"),
    ]


def test_findings_with_numbers_of_numpy_are_alerts(tmp_path, monkeypatch):
    WrittenTrace(tmp_path / "a").commit(3)

    def check(trace, *, rules=None, thresholds=None, since=None):
        return [Found("0", first_step=np.int64(since), rank=np.int32(0), last_step=trace.steps[-1])]

    monkeypatch.setattr(replay, "check", check)
    bench = Bench(tmp_path, check=daemon_command.by_the_rules)
    bench.look()
    bench.look()

    assert [(a.rule, a.rank, a.first_step, a.last_step) for a in read_alerts(tmp_path / "a")] == [("rule", 0, 3, 3)]


def test_steps_that_come_while_rules_rest_are_judged_later(tmp_path):
    asked = []
    trace = WrittenTrace(tmp_path / "a")
    bench = Bench(tmp_path, check=lambda trace, since: asked.append(since) or [])
    for step in range(6):
        trace.commit(step)
        bench.look(0.1)
    trace.seal()
    for _ in range(5):
        bench.look(1)

    assert asked[0] == 0
    assert asked[1] == 1
    assert len(asked) < 5
    assert bench.daemon._watched[tmp_path / "a"].done


def test_the_rules_over_all_traces_share_a_tenth_of_a_processor(tmp_path):
    asked = Counter()

    def check(trace, since):
        asked[trace.path.name] += 1
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        return []

    traces = [WrittenTrace(tmp_path / name) for name in "abcd"]
    bench = Bench(tmp_path, check=check)
    for step in range(16):
        for trace in traces:
            trace.commit(step)
        bench.look(0.5)

    # 4 traces of 0.05 s are judged once in 2 s.
    assert set(asked) == set("abcd")
    assert set(asked.values()) <= {3, 4}


def test_a_rule_that_fails_is_said_once_and_asked_again(tmp_path):
    failures = [ValueError("oh"), ValueError("oh")]

    def check(trace, since):
        if failures:
            raise failures.pop()
        return [Found("0", first_step=since)]

    trace = WrittenTrace(tmp_path / "a")
    trace.commit(7)
    trace.seal()
    bench = Bench(tmp_path, check=check)
    for _ in range(8):
        bench.look(20)

    assert bench.said.getvalue().count("cannot judge") == 1
    assert [alert.first_step for alert in read_alerts(tmp_path / "a")] == [7]


def test_a_trace_whose_writer_is_gone_is_sealed_after_a_while(tmp_path):
    trace = WrittenTrace(tmp_path / "a")
    trace.commit(0)
    bench = Bench(tmp_path, seal_after=10)
    for _ in range(20):
        bench.look(1)
    assert replay.open(tmp_path / "a").status == "live"

    trace.close()
    for _ in range(10):
        bench.look(1)
    assert replay.open(tmp_path / "a").status == "torn"
    for _ in range(3):
        bench.look(1)

    opened = replay.open(tmp_path / "a")
    assert (opened.status, opened.endings[0]["how"], opened.steps) == ("sealed", "recovered", [0])
    assert [alert.rule for alert in read_alerts(tmp_path / "a")] == ["ended"]


def test_each_attempt_that_fails_is_an_alert(tmp_path):
    bench, model = Bench(tmp_path), nn.Linear(2, 2)
    for how in ("exception", "detached", "exception"):
        with (
            contextlib.suppress(ZeroDivisionError),
            hookrec.attach(model, tmp_path / "a", keep_free=0, clock="manual", resume=True) as recorder,
        ):
            model(torch.ones(1, 2))
            recorder.step()
            if how == "exception":
                raise ZeroDivisionError
        for _ in range(4):
            bench.look(61)

    assert [(alert.rule, alert.kind) for alert in read_alerts(tmp_path / "a")] == [
        ("ended", None),
        ("ended", "attempt 2"),
    ]


def test_a_rank_whose_writer_has_not_begun_is_not_touched(tmp_path):
    WrittenTrace(tmp_path / "a").seal()
    (tmp_path / "a/rank-00001").mkdir()
    bench = Bench(tmp_path, seal_after=0)
    for _ in range(5):
        bench.look()

    assert list((tmp_path / "a/rank-00001").iterdir()) == []


def test_a_trace_of_another_machine_is_given_longer(tmp_path):
    trace = WrittenTrace(tmp_path / "a", identity={"provenance": {"host": platform.node() + "x"}})
    trace.close()
    bench = Bench(tmp_path, seal_after=10)
    for _ in range(50):
        bench.look(10)
    assert replay.open(tmp_path / "a").status == "torn"

    for _ in range(20):
        bench.look(10)

    assert replay.open(tmp_path / "a").status == "sealed"


def test_a_training_that_died_is_an_alert(tmp_path):
    WrittenTrace(tmp_path / "well").seal("detached")
    WrittenTrace(tmp_path / "ill").seal("died")
    bench = Bench(tmp_path)
    bench.look()
    bench.look()

    assert bench.post.got == [("ill", None)]
    assert "rank 0 ended: died" in read_alerts(tmp_path / "ill")[0].message


def test_what_ended_long_ago_is_noted_and_not_sent(tmp_path):
    trace = WrittenTrace(tmp_path / "a")
    trace.commit(0, n_nan={"0": 1})
    trace.seal()
    os.utime(trace.rank / "end.json", (1e9, 1e9))
    bench = Bench(tmp_path, "n_nan > 0")
    bench.look()

    assert layers(tmp_path / "a") == ["0"]
    assert bench.post.got == []


def test_damage_is_said_once_and_the_others_are_followed(tmp_path):
    (tmp_path / "no json").mkdir()
    (tmp_path / "no json/trace.json").write_text("{")
    trace = WrittenTrace(tmp_path / "bad log")
    trace.commit(0)
    trace.seal()
    (trace.rank / "records-00000.parquet").write_bytes(b"PAR1")
    trace = WrittenTrace(tmp_path / "no streams")
    trace.commit(0)
    (trace.rank / "streams.jsonl").write_text("")
    (tmp_path / "no ranks").mkdir()
    shutil.copy(trace.path / "trace.json", tmp_path / "no ranks")
    (tmp_path / "dangling").symlink_to("nowhere")
    good = WrittenTrace(tmp_path / "good")
    bench = Bench(tmp_path, "n_nan > 0")
    for _ in range(5):
        bench.look(40)
    good.commit(0, n_nan={"0": 1})
    bench.look(40)

    assert layers(tmp_path / "good") == ["0"]
    for name in ("no json", "bad log", "no streams"):
        assert bench.said.getvalue().count(f"{name} cannot be followed") == 1
    assert len(bench.said.getvalue().splitlines()) == 4


def test_traces_that_may_not_be_read_keep_neither_rules_nor_quota_from_the_others(tmp_path, monkeypatch):
    for name in ("a", "b"):
        trace = WrittenTrace(tmp_path / name, width=10_000)
        trace.commit(0, n_nan={"0": 1})
        trace.seal()
    real = Path.exists

    def exists(path, **more):
        if "a/rank" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **more)

    monkeypatch.setattr(Path, "exists", exists)
    bench = Bench(tmp_path, "n_nan > 0", quota=1)
    for _ in range(5):
        bench.look(61)

    assert bench.post.got == [("b", "0")]
    assert replay.open(tmp_path / "b").nbytes == 0
    assert bench.said.getvalue().count("a cannot be followed: ") == 1
    assert bench.said.getvalue().count("Tensors of") == 1


def test_a_rank_that_cannot_be_read_hides_nothing_of_the_others(tmp_path):
    ranks = [WrittenTrace(tmp_path / "a", rank=rank) for rank in range(3)]
    for rank in ranks:
        rank.commit(0, n_nan={"0": 1})
    (ranks[1].rank / "streams.jsonl").write_text("")
    bench = Bench(tmp_path, "n_nan > 0")
    bench.look()
    ranks[2].commit(1, n_nan={"1": 1})
    bench.look(60)

    assert [(alert.rank, alert.layer) for alert in read_alerts(tmp_path / "a")] == [(0, "0"), (2, "0"), (2, "1")]
    assert bench.said.getvalue().count("cannot be followed") == 1


def test_a_condition_that_fails_on_some_records_is_said_and_the_others_are_asked(tmp_path):
    WrittenTrace(tmp_path / "a", ("x",)).commit(0, n_nan={"x": 1})
    WrittenTrace(tmp_path / "b", ("7",)).commit(0)
    bench = Bench(tmp_path, "cast(layer as int) > 3", "n_nan > 0")
    for _ in range(3):
        bench.look()

    assert bench.post.got == [("a", "x"), ("b", "7")]
    assert bench.said.getvalue().count("cannot be understood") == 1


def test_a_file_of_alerts_that_is_damaged_keeps_no_new_ones_away(tmp_path):
    WrittenTrace(tmp_path / "a").commit(0, n_nan={"0": 1})
    (tmp_path / "a/alerts.jsonl").write_text("{}\n")
    bench = Bench(tmp_path, "n_nan > 0")
    bench.look()

    assert bench.post.got == [("a", "0")]
    assert "Old alerts are not sent: Line 1 of" in bench.said.getvalue()


def test_a_trace_that_vanishes_or_is_replaced_is_no_trouble(tmp_path):
    for name in ("gone", "moved", "replaced"):
        WrittenTrace(tmp_path / name).commit(0, n_nan={"0": 1})
    bench = Bench(tmp_path, "n_nan > 0")
    bench.look()
    shutil.rmtree(tmp_path / "gone")
    shutil.rmtree(tmp_path / "replaced")
    (tmp_path / "moved").rename(tmp_path / "moved here")
    WrittenTrace(tmp_path / "replaced", identity={"id": "1" * 32}).commit(0, n_nan={"1": 1})
    for _ in range(3):
        bench.look()

    assert layers(tmp_path / "moved here") == ["0"]
    assert layers(tmp_path / "replaced") == ["1"]
    assert sorted(bench.post.got) == sorted(
        [("gone", "0"), ("moved", "0"), ("replaced", "0"), ("moved here", "0"), ("replaced", "1")]
    )
    assert "cannot" not in bench.said.getvalue()


def test_alerts_that_cannot_be_written_wait(tmp_path, monkeypatch):
    trace = WrittenTrace(tmp_path / "a")
    trace.commit(0, n_nan={"0": 1})
    bench = Bench(tmp_path, "n_nan > 0")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("replay.alerts.os.pwrite", full)
        for _ in range(3):
            bench.look()
        bench.daemon.save()
    assert bench.post.got == []
    assert bench.said.getvalue().count("1 alerts of") == 1
    after_a_kill = Bench(tmp_path, "n_nan > 0")
    after_a_kill.look()
    bench.look()

    assert layers(tmp_path / "a") == ["0"]
    assert after_a_kill.post.got == [("a", "0")]


def test_live_traces_do_not_wait_for_thousands_of_old_ones(tmp_path, monkeypatch):
    for name in "abcdef":
        trace = WrittenTrace(tmp_path / name)
        trace.commit(0, n_nan={"0": 1})
        trace.seal()
    WrittenTrace(tmp_path / "z live").commit(0, n_nan={"0": 1})
    monkeypatch.setattr("hookrec.daemon._ROUND_S", 0.0)
    bench = Bench(tmp_path, "n_nan > 0")

    waits = [bench.look(0.01)]
    assert bench.post.got == [("z live", "0"), ("a", "0")]
    waits += [bench.look(0.01) for _ in range(5)]

    assert {name for name, _ in bench.post.got} == {*"abcdef", "z live"}
    assert waits == [0.0] * 6


def test_the_quota_is_kept(tmp_path):
    trace = WrittenTrace(tmp_path / "a", width=100_000)
    trace.commit(0)
    bench = Bench(tmp_path, quota=1)
    bench.look()
    assert replay.open(tmp_path / "a").nbytes > 0
    trace.seal()
    bench.look(61)

    assert replay.open(tmp_path / "a").nbytes == 0
    assert "to keep the quota" in bench.said.getvalue()


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_folder_that_is_made_anew_is_watched_anew(tmp_path, how):
    folder = tmp_path / "a"
    folder.mkdir()
    events = Events(Journal(io.StringIO()))
    events.watch([tmp_path, folder])

    shutil.rmtree(folder) if how == "removed" else folder.rename(tmp_path / "b")
    folder.mkdir()
    time.sleep(0.2)
    events.wait(5)
    new = events.watch([tmp_path, folder])
    (folder / "x").touch()
    begin = time.monotonic()
    events.wait(5)
    seconds = time.monotonic() - begin
    events.close()

    assert new
    assert seconds < 3


def test_more_folders_than_can_be_watched_are_polled(tmp_path, monkeypatch):
    monkeypatch.setattr("hookrec.daemon._WALK_SHARE", 0.0)  # on a busy machine they are walked through more seldom
    for number in range(300):
        (tmp_path / str(number)).mkdir()
    bench = Bench(tmp_path, "n_nan > 0")
    bench.look()
    events = Events(Journal(bench.said))
    threads = threading.active_count()

    watched = events.watch(bench.daemon.folders(logs=True))
    extra = threading.active_count() - threads
    again = events.watch(bench.daemon.folders(logs=True))
    WrittenTrace(tmp_path / "299/a").commit(0, n_nan={"0": 1})
    bench.look()
    events.close()

    assert watched
    assert not again
    assert extra <= 256
    assert layers(tmp_path / "299/a") == ["0"]


def test_a_folder_that_is_watched_from_now_on_is_looked_at_once_more(tmp_path):
    """What came before it was watched is no event."""

    class Waits:
        new = [True, False, False]  # noqa: RUF012
        waited: list[float] = []  # noqa: RUF012

        def watch(self, folders):
            return self.new[len(self.waited)]

        def wait(self, timeout_s, rest_s=0.0):
            self.waited.append(timeout_s)
            time.sleep(min(timeout_s, 0.05))

    events = Waits()
    watch(Bench(tmp_path).daemon, events, 3600.0, lambda: len(events.waited) == 3)

    assert events.waited[0] < 1
    assert events.waited[2] > 3000


@pytest.mark.parametrize("busy_s", [0.0, 0.02, 0.3])
def test_there_is_a_rest_after_each_round_and_alerts_are_still_in_time(tmp_path, busy_s):
    class Waits:
        def __init__(self):
            self.rests = []

        def watch(self, folders):
            return False

        def wait(self, timeout_s, rest_s=0.0):
            self.rests.append(rest_s)

    class Busy:
        pulse = Bench(tmp_path).daemon.pulse

        def look(self, now):
            end = time.thread_time() + busy_s
            while time.thread_time() < end:
                pass
            return 0.0

        def folders(self, *, logs):
            return []

        def save(self):
            pass

    events = Waits()
    watch(Busy(), events, 1.0, lambda: len(events.rests) == 2)

    assert all(min(0.8, 10 * busy_s) <= rest <= 0.8 for rest in events.rests)


def test_an_event_does_not_end_the_rest(tmp_path):
    events = Events(Journal(io.StringIO()))
    events.wake()

    began = time.monotonic()
    events.wait(60.0, 0.5)
    seconds = time.monotonic() - began
    events.close()

    assert 0.5 <= seconds < 30


def test_a_root_that_vanishes_is_said_and_waited_for(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    bench = Bench(root, "n_nan > 0")
    bench.look()
    shutil.rmtree(root)
    for _ in range(3):
        bench.look()
    bench.daemon.save()
    root.mkdir()
    WrittenTrace(root / "a").commit(0, n_nan={"0": 1})
    bench.look()

    assert bench.post.got == [("a", "0")]
    assert bench.said.getvalue().count("cannot be read: No such file or directory") == 1


@pytest.mark.parametrize(
    "where", ["linked", *(pytest.param(name, marks=pytest.mark.slow) for name in ("new", "moved"))]
)
def test_without_a_single_event_an_alert_takes_a_poll(tmp_path, where):
    """As over NFS, where none arrives."""
    root = tmp_path / "root"
    (root / "old").mkdir(parents=True)
    began: list[float] = []
    found: list[float] = []

    class NoEvents:
        def watch(self, folders):
            return False

        def wait(self, timeout_s, rest_s=0.0):
            time.sleep(timeout_s)

    def happen():
        place = tmp_path / "elsewhere/a" if where in ("moved", "linked") else root / "old/deeper/a"
        trace = WrittenTrace(place)
        trace.commit(0)
        if where == "moved":
            (tmp_path / "elsewhere").rename(root / "old/here")
        elif where == "linked":
            (root / "link").symlink_to(tmp_path / "elsewhere")
        time.sleep(0.5)
        trace.commit(1, n_nan={"0": 1})
        began.append(time.monotonic())

    bench = Bench(root, "n_nan > 0")
    bench.post.put = lambda *_: found.append(time.monotonic())
    happening = threading.Thread(target=happen)
    happening.start()
    watch(bench.daemon, NoEvents(), 0.3, lambda: bool(found) or bool(began and time.monotonic() > began[0] + 5))
    happening.join()

    assert found
    assert found[0] - began[0] < 0.3 + 0.5
