"""What Prometheus gets from a daemon is what the traces have, in few series."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from click.testing import CliRunner

import replay
from hookrec import metrics
from hookrec.cli import main
from hookrec.errors import DaemonError
from hookrec.metrics import Pulse, served
from replay.alerts import AlertFile
from replay.catalog import find_traces
from tests.live_traces import WrittenTrace
from tests.test_alerts import alert

pytest.importorskip("prometheus_client")


def scrape(address: str) -> dict[str, float]:
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(address, timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            words = ",".join(f"{key}={labels[key]}" for key in sorted(labels))
            found[f"{name}{{{words}}}" if words else name] = value
    return found


def scraped(root, pulse=None) -> dict[str, float]:
    traces = find_traces(root, lambda *_: None).traces
    with served("127.0.0.1:0", root, lambda: traces, pulse or Pulse()) as address:
        return scrape(address)


def test_each_trace_has_its_numbers_its_state_and_its_alerts_by_rule(tmp_path):
    live = WrittenTrace(tmp_path / "deep/live", width=100)
    live.commit(0, 10, 20)
    done = WrittenTrace(tmp_path / "done")
    done.commit(0)
    done.seal()
    WrittenTrace(tmp_path / "died").seal("died")
    WrittenTrace(tmp_path / "torn").close()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/trace.json").write_text("{")
    AlertFile(tmp_path / "deep/live").append([alert("0"), alert("1"), alert("0", rule='a "b"\n')])

    found = scraped(tmp_path)

    assert found["hookrec_trace_steps{trace=deep/live}"] == 3
    assert found["hookrec_trace_records{trace=deep/live}"] == 6
    assert found["hookrec_trace_tensor_bytes{trace=deep/live}"] == replay.open(live.path).nbytes == 6 * 400
    assert found["hookrec_trace_alerts{rule=n_nan > 0,trace=deep/live}"] == 2
    assert found['hookrec_trace_alerts{rule=a "b"\\n,trace=deep/live}'] == 1
    states = {
        name: next(s for s in metrics.STATES if found[f"hookrec_trace_state{{state={s},trace={name}}}"])
        for name in ("deep/live", "done", "died", "torn", "bad")
    }
    assert states == {"deep/live": "live", "done": "sealed", "died": "died", "torn": "died", "bad": "damaged"}
    assert [found[f"hookrec_traces{{state={state}}}"] for state in metrics.STATES] == [1, 2, 1, 1]
    assert "hookrec_trace_steps{trace=bad}" not in found


def test_old_traces_and_those_past_a_limit_are_counted_and_have_no_series(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "MOST", 2)
    for day in range(1, 5):
        WrittenTrace(tmp_path / f"{day}", created=f"2026-12-0{day}T12:00:00.000+00:00").seal()
    os.utime(tmp_path / "4/rank-00000/end.json", (1e9, 1e9))

    found = scraped(tmp_path)

    assert {name for name in found if name.startswith("hookrec_trace_steps")} == {
        *("hookrec_trace_steps{trace=2}", "hookrec_trace_steps{trace=3}")
    }
    assert found["hookrec_traces{state=sealed}"] == 4
    assert found["hookrec_traces_without_series"] == 2


def test_no_layer_is_in_any_label(tmp_path):
    trace = WrittenTrace(tmp_path / "a", ("encoder.0.attn", "encoder.1.attn"))
    trace.commit(0)
    AlertFile(tmp_path / "a").append([alert("encoder.0.attn")])

    assert not [name for name in scraped(tmp_path) if "encoder" in name]


@pytest.mark.parametrize("name", ["a\nb", 'say "x"\\', "层", os.fsdecode(b"\xff"), "x" * 200])
def test_any_name_of_a_folder_can_be_scraped(tmp_path, name):
    WrittenTrace(tmp_path / name).seal()

    found = scraped(tmp_path)

    assert len([name for name in found if name.startswith("hookrec_trace_steps{")]) == 1


def test_a_trace_that_vanishes_between_two_scrapes_is_no_trouble(tmp_path):
    with served("127.0.0.1:0", tmp_path, lambda: [tmp_path / "gone"], Pulse()) as address:
        assert scrape(address)["hookrec_traces{state=damaged}"] == 1


def test_the_rounds_of_the_daemon_and_how_late_it_is(tmp_path, monkeypatch):
    pulse = Pulse()
    for _ in range(3):
        pulse.beat(time.monotonic() - 0.25)
    time.sleep(0.2)

    found = scraped(tmp_path, pulse)

    assert found["hookrec_daemon_rounds_total"] == 3
    assert 0.75 <= found["hookrec_daemon_round_seconds_total"] < 1
    assert 0.25 <= found["hookrec_daemon_last_round_seconds"] < 0.4
    assert 0.2 <= found["hookrec_daemon_lag_seconds"] < 5


def test_two_that_ask_at_once_have_the_traces_read_once(tmp_path, monkeypatch):
    WrittenTrace(tmp_path / "a")
    asked = []
    with served("127.0.0.1:0", tmp_path, lambda: asked.append(1) or [tmp_path / "a"], Pulse()) as address:
        scrape(address)
        scrape(address)

    assert len(asked) == 1


@pytest.mark.parametrize("where", ["9464", "host", ":9464", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000", "a:²"])
def test_what_is_no_address_is_refused(tmp_path, where):
    result = CliRunner().invoke(main, ["daemon", str(tmp_path), "--metrics", where])

    assert (result.exit_code, "is no address" in result.output) == (1, True), result.output


def test_an_address_that_is_taken_or_not_ours_is_refused(tmp_path):
    with (
        served("127.0.0.1:0", tmp_path, list, Pulse()) as address,
        pytest.raises(DaemonError, match="cannot be served"),
        served(re.findall(r"//(.*)/", address)[0], tmp_path, list, Pulse()),
    ):
        pass
    with pytest.raises(DaemonError, match="cannot be served"), served("192.0.2.1:9464", tmp_path, list, Pulse()):
        pass


def test_without_the_library_one_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)

    result = CliRunner().invoke(main, ["daemon", str(tmp_path), "--metrics", "127.0.0.1:0"])

    assert result.exit_code == 1
    assert "pip install 'hookrec[metrics]'" in result.output


def test_a_daemon_serves_them_as_long_as_it_runs(tmp_path):
    trace = WrittenTrace(tmp_path / "a")
    command = [sys.executable, "-m", "hookrec.cli", "daemon", str(tmp_path), "--json", "--no-rules"]
    command += ["--metrics", "127.0.0.1:0", "--when", "n_nan > 0", "--poll", "0.1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as daemon:
        address = json.loads(daemon.stderr.readline())["address"]
        trace.commit(0, n_nan={"0": 1})
        while json.loads(daemon.stderr.readline())["event"] != "alert":
            pass
        found = scrape(address)
        daemon.send_signal(signal.SIGTERM)
        status = daemon.wait(20)

    assert status == 0
    assert found["hookrec_trace_alerts{rule=n_nan > 0,trace=a}"] == 1
    assert found["hookrec_daemon_rounds_total"] > 0
    assert found["hookrec_daemon_lag_seconds"] < 5
