"""Alerts are in their file once, whatever happens to it, and go out at least once by each way."""

import dataclasses
import http.server
import io
import json
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import replay
from hookrec import delivery
from hookrec.delivery import AT_MOST, NotSent, Outbox
from hookrec.errors import DaemonError
from hookrec.journal import Journal
from replay.alerts import Alert, AlertFile, alert_id, count_alerts, read_alerts, read_sent
from replay.cli import main
from tests.live_traces import WrittenTrace

SILENT = Journal(io.StringIO())


def alert(layer: str = "0", rule: str = "n_nan > 0", message: str = "found") -> Alert:
    return Alert(
        id=alert_id("t", rule, 0, layer, "output"),
        time="2026-12-02T12:00:00.000+00:00",
        trace_id="t",
        rule=rule,
        severity="error",
        rank=0,
        layer=layer,
        kind="output",
        first_step=3,
        last_step=3,
        message=message,
        advice="look",
    )


def test_an_alert_is_written_once_by_however_many(tmp_path):
    first, second = AlertFile(tmp_path), AlertFile(tmp_path)

    assert first.append([alert("0"), alert("0"), alert("1")]) == [(1, alert("0")), (2, alert("1"))]
    assert second.append([alert("1"), alert("2")]) == [(3, alert("2"))]
    assert first.append([alert("2"), alert("3", rule="other")]) == [(1, alert("3", rule="other"))]

    assert [found.layer for found in read_alerts(tmp_path)] == ["0", "1", "2", "3"]
    assert count_alerts(tmp_path) == 4


@pytest.mark.parametrize("cut", [1, 7, 200])
def test_a_line_that_was_cut_off_is_as_if_never_written(tmp_path, cut):
    AlertFile(tmp_path).append([alert("0"), alert("1")])
    path = tmp_path / "alerts.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert [found.layer for found in read_alerts(tmp_path)] == ["0"]

    AlertFile(tmp_path).append([alert("0"), alert("1")])

    assert [found.layer for found in read_alerts(tmp_path)] == ["0", "1"]


def test_nothing_is_written_where_a_link_leads(tmp_path):
    (tmp_path / "mine").write_text("no newline at the end")
    for name in ("alerts.jsonl", "alerts-sent.jsonl"):
        (tmp_path / name).symlink_to(tmp_path / "mine")

    with pytest.raises(OSError, match=r"alerts\.jsonl"):
        AlertFile(tmp_path).append([alert()])
    with pytest.raises(OSError, match=r"alerts-sent\.jsonl"):
        AlertFile(tmp_path).mark_sent("a", "webhook", "now")

    assert (tmp_path / "mine").read_text() == "no newline at the end"


def test_a_long_line_that_was_cut_off_leaves_nothing_behind_a_short_one(tmp_path):
    AlertFile(tmp_path).append([alert("0")])
    with (tmp_path / "alerts.jsonl").open("a") as file:
        file.write("x" * 10_000)

    AlertFile(tmp_path).append([alert("1")])

    assert [found.layer for found in read_alerts(tmp_path)] == ["0", "1"]
    assert "x" not in (tmp_path / "alerts.jsonl").read_text()


def test_a_file_that_cannot_grow_is_left_as_it_was(tmp_path, monkeypatch):
    file = AlertFile(tmp_path)
    file.append([alert("0")])
    before = (tmp_path / "alerts.jsonl").read_bytes()
    real = delivery.os.pwrite

    def half(fd, data, offset):
        if len(data) < 100:
            raise OSError(28, "No space left on device")
        return real(fd, data[: len(data) // 2], offset)

    with monkeypatch.context() as patch:
        patch.setattr("replay.alerts.os.pwrite", half)
        with pytest.raises(OSError, match="No space"):
            file.append([alert("1")])

    assert (tmp_path / "alerts.jsonl").read_bytes() == before
    assert file.append([alert("1")]) == [(2, alert("1"))]


def test_any_name_and_any_length_is_one_line(tmp_path):
    odd = ["a\nb", 'say "x"', "层", "\udcff", "\u2028", "x" * 10_000_000]
    AlertFile(tmp_path).append([alert(layer, message=layer) for layer in odd])

    again = AlertFile(tmp_path).append([alert(layer) for layer in odd])

    assert again == []
    found = read_alerts(tmp_path)
    assert [item.layer for item in found[:-1]] == odd[:-1]
    assert found[-1].message.endswith("… (10,000,000 characters)")
    assert (tmp_path / "alerts.jsonl").stat().st_size < 20_000


def test_ids_tell_apart_what_an_alert_is_about():
    about = [("t", "r", 0, "1", "output"), ("u", "r", 0, "1", "output"), ("t", "s", 0, "1", "output")]
    about += [("t", "r", 1, "1", "output"), ("t", "r", 0, "2", "output"), ("t", "r", 0, "1", "input")]
    about += [("t", "r", None, "1", "output"), ("t", "r", 0, None, "output")]

    assert len({alert_id(*what) for what in about}) == len(about)
    assert alert_id(*about[0]) == alert_id(*about[0])


@pytest.mark.parametrize("line", ["{}", "3", "{", '{"id": 1}'])
def test_a_line_that_is_no_alert_is_named_and_keeps_none_out(tmp_path, line):
    (tmp_path / "alerts.jsonl").write_text(line + "\n")

    AlertFile(tmp_path).append([alert()])

    with pytest.raises(replay.TraceDamaged, match=r"Line 1 of .*alerts\.jsonl is no alert"):
        read_alerts(tmp_path)


def test_the_command_shows_them(tmp_path):
    WrittenTrace(tmp_path / "a").seal()
    assert "has no alert" in CliRunner().invoke(main, ["alerts", str(tmp_path / "a")]).stderr
    AlertFile(tmp_path / "a").append([alert("new\nline")])

    words = CliRunner().invoke(main, ["alerts", str(tmp_path / "a")])
    data = CliRunner().invoke(main, ["alerts", str(tmp_path / "a"), "--json"])

    assert words.exit_code == data.exit_code == 0
    assert len(words.stdout.splitlines()) == 2
    assert "new\\nline" in words.stdout
    assert json.loads(data.stdout) == [dataclasses.asdict(alert("new\nline"))]
    assert "is no trace" in CliRunner().invoke(main, ["alerts", str(tmp_path)]).output


class Server:
    """A webhook that answers as it is told, then with 200, and keeps what it got."""

    def __init__(self, *answers: int) -> None:
        self.got: list[dict] = []
        left = list(answers)
        got = self.got

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = left.pop(0) if left else 200
                if status == 200:
                    got.append(json.loads(body))
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def sent_by(outbox: Outbox, tmp_path, *alerts: Alert) -> set[tuple[str, str]]:
    AlertFile(tmp_path).append(alerts)
    for number, item in enumerate(alerts, 1):
        outbox.put(tmp_path, number, item)
    outbox.close()
    return read_sent(tmp_path)


def test_a_webhook_gets_each_alert_and_is_tried_again_when_it_fails(tmp_path):
    server = Server(503, 429)

    sent = sent_by(
        Outbox("webhook", delivery.webhook(server.url), SILENT, pause_s=0.01), tmp_path, alert("0"), alert("1")
    )

    server.close()
    assert [item["layer"] for item in server.got] == ["0", "1"]
    assert server.got[0]["trace"] == str(tmp_path)
    assert server.got[0].keys() >= {"id", "rule", "message", "host"}
    assert sent == {(alert("0").id, "webhook"), (alert("1").id, "webhook")}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_taken_for_success(tmp_path, status):
    server = Server(status)
    said = io.StringIO()

    sent = sent_by(Outbox("webhook", delivery.webhook(server.url), Journal(said), pause_s=0.01), tmp_path, alert())

    server.close()
    assert f"the webhook answered {status}" in said.getvalue()
    assert "sends on to /elsewhere" in said.getvalue()
    assert [item["id"] for item in server.got] == [alert().id]  # by the second attempt
    assert sent == {(alert().id, "webhook")}


def test_what_a_webhook_refuses_is_not_tried_again_and_not_marked(tmp_path):
    server = Server(400)
    said = io.StringIO()

    sent = sent_by(Outbox("webhook", delivery.webhook(server.url), Journal(said)), tmp_path, alert("0"), alert("1"))

    server.close()
    assert [item["layer"] for item in server.got] == ["1"]
    assert sent == {(alert("1").id, "webhook")}
    assert f"Alert {alert('0').id} of {tmp_path} was not sent: the webhook answered 400" in said.getvalue()


def test_a_webhook_that_is_down_is_given_up_after_a_while(tmp_path):
    server = Server()
    server.close()
    said = io.StringIO()
    outbox = Outbox("webhook", delivery.webhook(server.url), Journal(said), pause_s=0.01, give_up_s=0.1)

    assert sent_by(outbox, tmp_path, alert()) == set()

    assert said.getvalue().count("They are tried again") == 1
    assert "was not sent: the webhook cannot be reached" in said.getvalue()


def test_nobody_waits_for_a_webhook_that_does_not_answer(tmp_path):
    outbox = Outbox("webhook", lambda _: time.sleep(30), SILENT)
    begin = time.perf_counter()

    outbox.put(tmp_path, 1, alert())
    outbox.close(0.1)

    assert time.perf_counter() - begin < 5
    assert read_sent(tmp_path) == set()


def test_a_command_gets_the_alert_on_its_standard_input(tmp_path):
    line = (
        f"{sys.executable} -c 'import sys; open(sys.argv[1], \"a\").write(sys.stdin.read())' '{tmp_path}/it is $HOME'"
    )

    sent = sent_by(Outbox("command", delivery.command(line), SILENT), tmp_path, alert())

    text = (tmp_path / "it is $HOME").read_text()
    assert json.loads(text)["id"] == alert().id
    assert text.index("\n") == len(text) - 1  # so that a file of them is JSON Lines
    assert sent == {(alert().id, "command")}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/nowhere/x", "cannot be run: No such file"),
        ("false", "ended with status 1"),
        ("sh -c 'sleep 60 & sleep 60'", "did not end within 0.2 s"),
    ],
)
def test_a_command_that_fails_is_said(line, words):
    begin = time.perf_counter()

    with pytest.raises(NotSent, match=words):
        delivery.command(line, timeout_s=0.2)(b"{}")

    assert time.perf_counter() - begin < 5


def test_what_a_command_has_started_ends_with_it(tmp_path):
    with pytest.raises(NotSent):
        delivery.command(f"sh -c 'sleep 60 & echo $! > {tmp_path}/child; wait'", timeout_s=0.3)(b"{}")

    child = Path("/proc") / (tmp_path / "child").read_text().strip() / "stat"
    deadline = time.monotonic() + 5
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_a_command_need_not_read():
    delivery.command("true")(b"x" * 1_000_000)


@pytest.mark.parametrize("url", ["", "example.org", "file:///etc/passwd", "http://", "ftp://x/y"])
def test_an_address_that_is_none_is_refused_at_once(url):
    with pytest.raises(DaemonError, match="no address"):
        delivery.webhook(url)


@pytest.mark.parametrize("line", ["", "'"])
def test_a_command_that_is_none_is_refused_at_once(line):
    with pytest.raises(DaemonError, match="--run"):
        delivery.command(line)


def test_a_rule_that_finds_hundreds_is_sent_a_few_times(tmp_path):
    got: list[dict] = []
    outbox = Outbox("x", lambda document: got.append(json.loads(document)), SILENT)

    for number in range(1, 500):
        outbox.put(tmp_path, number, alert(str(number)))
    outbox.close()

    assert len(got) == AT_MOST
    assert "are not sent" in got[-1]["message"]
    assert "are not sent" not in got[-2]["message"]
