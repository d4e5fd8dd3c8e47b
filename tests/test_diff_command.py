"""The command `replay diff`: its exit status, its words, its JSON; on a terminal, in no time, interrupted."""

import json
import math
import os
import pty
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner

from replay.cli import main
from tests.handwritten import Written, write_trace


def trace(path, *, steps=2, factor=1.0, layers=("x", "y", "z"), **options):
    """Layers of which the second multiplies."""
    generator = np.random.default_rng(0)
    records = []
    for step in range(steps):
        for number, layer in enumerate(layers):
            values = generator.standard_normal((3, 4)).astype(np.float32)
            records.append(Written(layer, values * np.float32(factor if number == 1 else 1), step))
    return write_trace(path, *records, **options)


@pytest.fixture
def run():
    def invoke(*arguments):
        return CliRunner().invoke(main, ["diff", *map(str, arguments)])

    return invoke


def test_the_exit_status_is_the_answer(tmp_path, run):
    a, same, other = trace(tmp_path / "a"), trace(tmp_path / "same"), trace(tmp_path / "b", factor=1.1)
    less = trace(tmp_path / "less", layers=("x", "y"))

    assert run(a, same).exit_code == 0
    assert run(a, other).exit_code == 1
    assert run(a, less).exit_code == 1
    assert run(a, tmp_path / "nothing").exit_code == 2
    assert run(a).exit_code == 2
    assert run().exit_code == 2
    assert run(a, same, "--layers", "w").exit_code == 2


def test_it_says_the_first_divergence_and_the_layers_by_their_error(tmp_path, run):
    a, b = trace(tmp_path / "a"), trace(tmp_path / "b", factor=1.1)

    lines = run(a, b).output.splitlines()

    assert lines[0].startswith("first divergence: step 0, layer 'y' (output): max abs ")
    assert "relative 0.1, tolerance 1.3e-06; its inputs were not recorded" in lines[0]
    assert lines[2] == "1 of 3 layers and kinds differ; by the size of the error:"
    assert lines[4].split() == [
        *("layer", "kind", "differ", "step", "max_abs", "relative", "cosine", "max_ulp", "tolerance")
    ]
    assert lines[5].split()[:5] == ["y", "output", "2", "of", "2"]
    assert len(lines) == 6


def test_a_weight_is_told_from_the_bias_of_its_layer(tmp_path, run):
    values = np.arange(1, 5, dtype=np.float32)
    for name, weight, bias in (("a", 1.0, 1.0), ("b", 1.1, 2.0)):
        pair = (("weight", values * np.float32(weight)), ("bias", values * np.float32(bias)))
        write_trace(tmp_path / name, *(Written("fc", v, kind="param", path=path) for path, v in pair))

    text, data = run(tmp_path / "a", tmp_path / "b"), run(tmp_path / "a", tmp_path / "b", "--json")

    lines = text.output.splitlines()
    assert "2 of 2 layers, kinds and paths differ; by the size of the error:" in lines
    assert [line.split()[:3] for line in lines[-2:]] == [["fc", "param", "bias"], ["fc", "param", "weight"]]
    assert [(row["path"], row["records"]) for row in json.loads(data.output)["layers"]] == [("bias", 1), ("weight", 1)]


def test_it_says_that_there_is_none(tmp_path, run):
    a, b = trace(tmp_path / "a"), trace(tmp_path / "b", steps=1)

    assert run(a, b).output.splitlines() == [
        "no difference: 3 records compared, all within tolerance",
        "only in A: step 1",
        "the largest error is 0, of layer 'x' (output) at step 0",
    ]


def test_it_lists_what_has_no_partner(tmp_path, run):
    a, b = trace(tmp_path / "a"), trace(tmp_path / "b", layers=("x", "y", "w"))

    lines = run(a, b).output.splitlines()

    assert lines[0].startswith("no divergence: 4 records compared")
    assert lines[1:3] == ["only in A: z output, 2 records", "only in B: w output, 2 records"]


def test_json_has_the_numbers(tmp_path, run):
    a, b = trace(tmp_path / "a"), trace(tmp_path / "b", factor=1.1, layers=("x", "y", "w"))

    found = json.loads(run(a, b, "--json").output)

    assert not found["equal"]
    assert (found["first"]["step"], found["first"]["layer"]) == (0, "y")
    assert found["first"]["relative"] == pytest.approx(0.1, rel=1e-5)
    assert found["first"]["sentence"].startswith("first divergence: step 0")
    assert [row["layer"] for row in found["layers"]] == ["y", "x"]
    assert [row["layer"] for row in found["only_a"]] == ["z"]
    assert json.loads(run(a, a, "--json").output)["first"] is None


def test_options_reach_the_comparison(tmp_path, run):
    a, b = trace(tmp_path / "a", steps=4), trace(tmp_path / "b", steps=4, factor=1.001)
    trace(a, steps=4, factor=1.1, rank=1)

    assert run(a, b, "--tolerance", "0.01").exit_code == 0
    assert run(a, b, "--tolerance", "float32=0.01").exit_code == 0
    assert run(a, b, "--layers", "x", "--layers", "z").exit_code == 0
    assert run(a, b, "--noise", b).exit_code == 0
    assert "only in A: 3 steps" not in run(a, b, "--steps", "1").output
    assert run(a, "--ranks", "0,1").output.startswith("first divergence: step 0, layer 'y'")
    assert run(a, b, "--map", "x=z", "--map", "z=x").output.startswith("first divergence: step 0, layer 'x', 'z' in B")
    assert json.loads(run(a, b, "--stop", "--json").output)["compared"] == 3
    assert json.loads(run(a, b, "--shift", "2", "--json").output)["compared"] == 6


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("1:3", 2), (":3", 3), ("2:", 2), ("::2", 2), ("0,2:4", 3)])
def test_steps_are_written_as_slices_are(tmp_path, run, text, count):
    a = trace(tmp_path / "a", steps=4)

    assert json.loads(run(a, a, "--steps", text, "--json").output)["compared"] == 3 * count


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "one"], "is no step, range or list"),
        (["--steps", "1:2:3:4"], "is no step, range or list"),
        (["--steps", "1,2:"], "is no step, range or list"),
        (["--steps", ""], "is no step, range or list"),
        (["--steps", "9"], "has none of the steps"),
        (["--steps", "-1"], "has none of the steps"),
        (["--tolerance", "small"], "is no number"),
        (["--tolerance", "bf16=1"], "names a dtype 'bf16'"),
        (["--tolerance", "nan"], "is a number from 0"),
        (["--ranks", "0"], "is not two ranks"),
        (["--ranks", "0,x"], "is not two ranks"),
        (["--ranks", "0,5"], "has no rank 5"),
        (["--map", "x"], "no such file"),
        (["--map", "=x"], "matches no layer"),
        (["--noise", "nowhere"], "does not exist"),
        (["--shift", "100"], "no step in common"),
        (["--kinds", "gradients"], "no kind 'gradients'"),
    ],
)
def test_whatever_is_wrong_is_one_message_and_2(tmp_path, run, arguments, words):
    a = trace(tmp_path / "a")

    result = run(a, a, *arguments)

    assert result.exit_code == 2
    assert words in result.output
    assert result.output.startswith("Error: ")
    assert len(result.output.splitlines()) == 1


def test_odd_names_of_layers_are_printed(tmp_path, run):
    layers = ("", "層.0", "a[b]*?", "with space", "[red]no markup[/red]")
    a, b = trace(tmp_path / "a", layers=layers), trace(tmp_path / "b", layers=layers, factor=2)

    result = run(a, b)

    assert result.output.startswith("first divergence: step 0, layer '層.0' (output)")
    assert "max_abs" in result.output
    assert run(a, b, "--layers", "a[b]*?").exit_code == 0


def test_a_folder_that_cannot_be_written_is_read(tmp_path, run):
    a = trace(tmp_path / "a")
    for path in (a, a / "rank-00000"):
        path.chmod(0o500)

    assert run(a, a).exit_code == 0


def command(*arguments):
    return [sys.executable, "-m", "replay.cli", "diff", *map(str, arguments)]


def test_four_hundred_tensors_are_compared_within_a_second(tmp_path):
    generator = np.random.default_rng(0)
    values = generator.standard_normal((400, 4000)).astype(np.float32)
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, factor in zip(paths, (1, 1 + 3e-7), strict=True):
        write_trace(path, *(Written(f"l{n}", v * np.float32(factor)) for n, v in enumerate(values)))

    seconds = [math.inf]
    while min(seconds) >= 1 and len(seconds) < 16:  # others may have the machine for a while
        begin = time.perf_counter()
        assert subprocess.run(command(*paths), capture_output=True, check=False).returncode == 0
        seconds.append(time.perf_counter() - begin)

    assert min(seconds) < 1


def test_neither_torch_nor_duckdb_are_brought_in(tmp_path):
    a = trace(tmp_path / "a")
    code = (
        f"import sys, replay; replay.diff({str(a)!r}, {str(a)!r}); import replay.diff_command; "
        "print([m for m in ('torch', 'hookrec', 'duckdb', 'matplotlib', 'rich') if m in sys.modules])"
    )

    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_terminal_gets_a_bar_and_an_interrupt_ends_without_a_traceback(tmp_path):
    generator = np.random.default_rng(0)
    values = generator.standard_normal((200, 10)).astype(np.float32)
    a = write_trace(tmp_path / "a", *(Written(f"l{n}", v) for n, v in enumerate(values)))
    slow = (
        "import sys, time, replay.diff as _; from replay.cli import main; module = sys.modules['replay.diff']; "
        "fast = module.distance\n"
        "def slow(*a, **k): time.sleep(0.05); return fast(*a, **k)\n"
        "module.distance = slow; main()"
    )
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", slow, "diff", str(a), str(a)], stdout=follower, stderr=follower, close_fds=True
    )
    os.close(follower)
    shown = b""
    while b"comparing" not in shown:
        shown += os.read(leader, 1024)

    process.send_signal(signal.SIGINT)

    assert process.wait(30) == 130
    try:
        while more := os.read(leader, 1024):
            shown += more
    except OSError:
        pass  # the other end of the terminal is closed
    os.close(leader)
    assert b"interrupted" in shown
    assert b"Traceback" not in shown


def test_how_far_it_is_is_told_where_there_is_no_terminal(tmp_path, run, monkeypatch):
    monkeypatch.setattr("replay.command_line.FIRST_S", 0.0)

    told = run(trace(tmp_path / "a", steps=4), tmp_path / "a")

    assert told.exit_code == 0
    assert told.stderr == "83 of 1,000 thousandths compared\n"  # of 12 tensors one; the next line is ten seconds later


@pytest.mark.parametrize("wrong", ["x", "0,1,2", "-1", "9"])
def test_an_attempt_that_is_none_is_refused(tmp_path, run, wrong):
    refused = run(trace(tmp_path / "a"), tmp_path / "a", f"--attempt={wrong}")

    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "attempt" in refused.stderr
