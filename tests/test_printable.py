"""No text of a trace reaches a terminal with control characters in it, whichever command prints it."""

import io
import json
import re
from collections.abc import Iterable

import numpy as np
import pytest
from click.testing import CliRunner

from hookrec.cli import main as hookrec_main
from hookrec.findings import as_alert, ended
from hookrec.journal import Journal
from replay.alerts import AlertFile
from replay.cli import main
from replay.printable import printable, printable_lines
from tests.handwritten import Written, write_trace

EVIL = "a\x1b]0;title\x07\x1b[2J\nFORGED\r\u202egnp.exe\u2066\x9b31m"
"""Escape sequences, a line of its own, and controls of the direction of writing."""

OURS = re.compile(r"\x1b\[(?:0|1|31|33)m")
"""Bold and coloured words of our own."""

NUMBERS = np.arange(4, dtype=np.float32)
BROKEN = np.array([1, 2, np.nan, np.inf], np.float32)


def evil_trace(path, factor: float = 1.0, kind: str = "output"):
    """A trace that holds evil in all texts that a reader prints."""
    records = [
        Written(layer, values * np.float32(factor), step, what, path=place)
        for step, values in enumerate((NUMBERS, NUMBERS, BROKEN))
        for layer, what, place in ((EVIL, kind, EVIL), (EVIL, "output", ""), (EVIL + "2", "output", ""))
    ]
    write_trace(path, *records)
    rank = path / "rank-00000"
    package = {"host": EVIL, "command": [EVIL], "packages": {EVIL: EVIL}, "git": {"commit": EVIL, "changed": True}}
    for file, more in (
        (path / "trace.json", {"id": EVIL, "created": EVIL, "provenance": package}),
        (rank / "end.json", {"how": EVIL, "detail": EVIL, "time": EVIL}),
    ):
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    module = {"name": EVIL + "3", "class": EVIL, "leaf": True, "recorded": True, "parameters": [], "aliases": []}
    (rank / "model.json").write_text(json.dumps({"modules": [{**module, "why": EVIL}]}))
    (rank / "scalars.jsonl").write_text(json.dumps({"step": 0, "time": 1.0, "values": {EVIL: 1.0}}) + "\n")
    (rank / "notes.jsonl").write_text(json.dumps({"step": 0, "layer": EVIL, "note": EVIL}) + "\n")
    fired = {"step": 0, "time": 1.0, "by": EVIL, "why": EVIL, "detail": EVIL, "first_step": 0}
    (rank / "triggers.jsonl").write_text(json.dumps(fired) + "\n")
    AlertFile(path).append([as_alert(ended(0, {"how": EVIL, "detail": EVIL}), EVIL, EVIL)])
    return path


COMMANDS = {
    "alerts": [["A"]],
    "check": [["A", "-v"], ["A", "--only", EVIL], ["A", "--json"]],
    "diff": [["A", "B"], ["A", "C"], ["A", "B", "--layers", EVIL + "nowhere"]],
    "export": [["A", "OUT.parquet"], ["A", EVIL + ".csv"]],
    "first": [["A", "n_nan > 0"], ["A", EVIL], ["A", "numel > 99"]],
    "info": [["A"], ["A" + EVIL]],
    "list": [["ABOVE"]],
    "ls": [["A"], ["A", "--where", "numel > 99"], ["A", "--where", f"layer > '{EVIL}'"]],
    "plot": [["A", "OUT.svg"], ["A", "OUT.png", "--heatmap"], ["A", "OUT.svg", "--histogram", EVIL], ["A", EVIL]],
    "show": [["A", EVIL], ["A", EVIL, "--path", EVIL], ["A", EVIL, "--kind", "input"], ["A", "nowhere"]],
    "sql": [["A", "select * from records"], ["A", f'select 1 as "{EVIL}"'], ["A", "select * from modules, scalars"]],
    "stats": [["A"], ["A", "--layers", EVIL + "nowhere"]],
    "tail": [["A"], ["A", "B", "--records"]],
    "trend": [["A"]],
    "verify": [["A"], ["DAMAGED"]],
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evil")
    found = {name: evil_trace(folder / name, factor) for name, factor in (("A", 1.0), ("B", 2.0), ("DAMAGED", 1.0))}
    found["C"] = evil_trace(folder / "C", kind=EVIL)
    shard = next((found["DAMAGED"] / "rank-00000/tensors.zarr").rglob("c/0/0"))
    shard.write_bytes(b"\xff" + shard.read_bytes()[1:])
    return {**{name: str(path) for name, path in found.items()}, "ABOVE": str(folder)}


def check(text: str, arguments: Iterable[str] = ()) -> None:
    text = OURS.sub("", text)
    assert all(c.isprintable() or c == "\n" for c in text), text
    if not any(EVIL in word for word in arguments):  # a user's own words may have more lines
        assert not re.search("^(FORGED|title)", text, re.M), text


def test_each_command_is_tried():
    assert sorted(COMMANDS) == main.list_commands(None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("terminal", [False, True])
def test_no_command_prints_control_characters(tmp_path, monkeypatch, traces, command, terminal):
    for module in ("replay.command_line", "replay.cli"):
        monkeypatch.setattr(f"{module}.on_terminal", lambda: terminal)
    for arguments in COMMANDS[command]:
        words = [traces.get(word, word.replace("OUT", str(tmp_path / "out"))) for word in arguments]

        result = CliRunner().invoke(main, [command, *words], color=True)

        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert result.output or command == "export"
        check(result.output, arguments)  # standard output and error


def test_hookrec_prints_no_control_characters(tmp_path, traces):
    for arguments in (["recover", traces["A"]], ["convert", traces["A"], str(tmp_path / "copy")], ["pin", "a" + EVIL]):
        check(CliRunner().invoke(hookrec_main, arguments, color=True).output, arguments)


def test_the_journal_of_the_daemon_prints_no_control_characters():
    said = io.StringIO()

    Journal(said).say("alert", f"{EVIL}: {EVIL}")

    check(said.getvalue())
    assert len(said.getvalue().splitlines()) == 1


def test_text_of_any_writing_stays_as_it_is():
    assert printable("层.0 größer ≤ 'x' 🙂") == "层.0 größer ≤ 'x' 🙂"
    assert printable("a\n\x1b") == "a\\n\\x1b"
    assert printable_lines("a\n\x1b") == "a\n\\x1b"
