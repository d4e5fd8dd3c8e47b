"""Ten wrong uses of each command: a clear sentence on standard error, an exit status that says so, nothing half done.

What the commands answer when they are asked well is the affair of other files.
"""

import json
import shutil
import sys

import click
import pytest
from click.testing import CliRunner

from hookrec.cli import main as hookrec_main
from replay.cli import main as replay_main
from replay.log import Log
from tests.live_traces import WrittenTrace
from tests.stored import write_stored

slow = pytest.mark.slow
PROGRAMS = {"replay": replay_main, "hookrec": hookrec_main}

# By command, what it takes besides a trace. {out} is a file that is not there yet, in a folder that is.
ASKED = {
    "replay alerts": [],
    "replay check": [],
    "replay diff": ["{trace}"],
    "replay export": ["{out}.parquet"],
    "replay first": ["n_nan > 0"],
    "replay info": [],
    "replay ls": [],
    "replay plot": ["{out}.svg"],
    "replay show": ["0"],
    "replay sql": ["from records"],
    "replay stats": [],
    "replay tail": [],
    "replay trend": [],
    "replay verify": [],
    "hookrec convert": ["{out}"],
    "hookrec pin": [],
    "hookrec recover": [],
    "hookrec rerun": [],
    "hookrec tensorboard": ["{out}"],
    "hookrec unpin": [],
}
# What takes no trace to read.
OTHERS = {
    "replay list",
    *(f"hookrec {name}" for name in ("attach", "daemon", "detach", "estimate", "run", "set", "status", "trigger")),
}
WRITING = ("replay export", "replay plot", "hookrec convert", "hookrec tensorboard")


def test_each_command_is_looked_at():
    there = {f"{name} {command}" for name, group in PROGRAMS.items() for command in group.list_commands(None)}

    assert set(ASKED) | OTHERS == there


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("recorded") / "a"
    write_stored(path)
    return path


@pytest.fixture
def place(recorded, tmp_path):
    """A folder with a trace in it, `a`; whatever a command leaves there is seen."""
    shutil.copytree(recorded, tmp_path / "a")
    return tmp_path


def ask(line, *arguments):
    program, command = line.split()
    return CliRunner().invoke(PROGRAMS[program], [command, *map(str, arguments)], prog_name=program)


def asked(line, place, trace="a"):
    words = {"trace": place / "a", "out": place / "out"}
    return [place / trace, *(word.format(**words) for word in ASKED[line])]


def assert_is_refused(result, *, statuses=(1, 2), most=4):
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in statuses, result.output
    assert result.stdout == ""  # what is asked for, and nothing else, goes there
    said = [line for line in result.stderr.splitlines() if line]
    assert [line.startswith("Error: ") for line in said].count(True) == 1, result.stderr
    assert len(said) <= most, result.stderr
    assert "Traceback" not in result.stderr


def files(place):
    return {path.relative_to(place) for path in place.rglob("*")}


def not_there(place):
    return "missing"


def a_file(place):
    (place / "file").write_text("mine")
    return "file"


def an_empty_folder(place):
    (place / "empty").mkdir()
    return "empty"


def trace_json_damaged(place):
    (place / "a/trace.json").write_text('{"format": ')
    return "a"


def of_a_newer_version(place):
    identity = json.loads((place / "a/trace.json").read_text())
    (place / "a/trace.json").write_text(json.dumps({**identity, "version": 99}))
    return "a"


def without_its_rank(place):
    shutil.rmtree(place / "a/rank-00000")
    return "a"


PLACES = (
    *(not_there, trace_json_damaged),
    *(pytest.param(wrong, marks=slow) for wrong in (a_file, an_empty_folder, of_a_newer_version, without_its_rank)),
)
ANSWERS = {trace_json_damaged: ("replay verify",), without_its_rank: ("replay verify", "replay alerts")}
"""To verify is to say what is damaged, and alerts are beside the ranks."""


@pytest.mark.parametrize("wrong", PLACES)
@pytest.mark.parametrize("line", ASKED)
def test_a_place_without_a_trace_that_can_be_read(line, wrong, place):
    trace = wrong(place)
    before = files(place)
    if line in ANSWERS.get(wrong, ()):
        assert ask(line, *asked(line, place, trace)).exit_code == (line == "replay verify")
        return

    assert_is_refused(ask(line, *asked(line, place, trace)))

    assert files(place) == before


def log_damaged(place):
    (log,) = (place / "a/rank-00000").glob("records-*")
    log.write_bytes(b"PAR1 and nothing that could be a log PAR1")


def streams_missing(place):
    (place / "a/rank-00000/streams.jsonl").unlink()


@pytest.mark.parametrize("damage", [log_damaged, streams_missing])
@pytest.mark.parametrize("line", ASKED)
def test_a_damaged_trace(line, damage, place):
    damage(place)
    before = files(place)

    result = ask(line, *asked(line, place))

    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert "Traceback" not in result.output
    if result.exit_code and line not in ("replay verify", "hookrec recover"):
        assert_is_refused(result)
    written = {path.parts[0] for path in files(place) - before} - {"a"}
    # A conversion keeps what it has for the same command to go on, as its help says.
    assert not written or result.exit_code == 0 or (line, written) == ("hookrec convert", {"out.partial"})


@pytest.mark.parametrize("line", ASKED)
def test_an_option_that_is_none(line, place):
    before = files(place)

    refused = ask(line, *asked(line, place), "--nonsense")

    assert_is_refused(refused, statuses=(2,))
    assert files(place) == before


@pytest.mark.parametrize("line", [*ASKED, *sorted(OTHERS)])
def test_too_few_arguments_and_too_many(line, place):
    program, name = line.split()
    command = PROGRAMS[program].get_command(click.Context(PROGRAMS[program]), name)
    arguments = [p for p in command.params if isinstance(p, click.Argument)]

    if any(argument.required for argument in arguments):
        assert_is_refused(ask(line), statuses=(2,))
    if not any(argument.nargs == -1 for argument in arguments):
        assert_is_refused(ask(line, *["1"] * 9), statuses=(2,))


OPTIONS = {
    "--where": ("nothing > 1", "(", "l2 >", "", "1; drop table records"),
    "--step": ("-1", "one", "9" * 30),
    "--steps": ("1:2:3:4", "x"),
    "--limit": ("0", "x"),
    "--stat": ("median",),
    "--poll": ("0", "x"),
    "--rank": ("-1", "x"),
    "--call": ("-1",),
    "--tolerance": ("-1", "x"),
    "--threshold": ("nothing=1", "dead-relu", "dead-relu=x"),
    "--only": ("nothing",),
    "--skip": ("nothing",),
    "--rules": ("/nowhere/rules.py",),
    "--map": ("nothing",),
    "--ranks": ("1", "x,y"),
    "--noise": ("/nowhere/trace",),
    "--format": ("csv",),
    "--partition": ("nothing",),
    "--store": ("csv",),
    "--compression": ("zip",),
    "--factory": ("nowhere", "no_such_module:f"),
    "--since": ("-1",),
    "--fail-on": ("nothing",),
    "--pair": ("nothing",),
}
CASES = [
    (f"{name} {command}", option, value)
    for name, group in PROGRAMS.items()
    for command in group.list_commands(None)
    if f"{name} {command}" in ASKED
    for parameter in group.get_command(click.Context(group), command).params
    for option in parameter.opts
    for value in OPTIONS.get(option, ())
]
QUICK = {(option, values[0]) for option, values in OPTIONS.items()}


@pytest.mark.parametrize(
    ("line", "option", "value"), [pytest.param(*case, marks=() if case[1:] in QUICK else slow) for case in CASES]
)
def test_a_value_that_an_option_does_not_take(line, option, value, place):
    before = files(place)

    refused = ask(line, *asked(line, place), f"{option}={value}")

    assert_is_refused(refused)
    assert files(place) == before


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("replay show", ["nothing"]),
        ("replay show", ["0", "--step", "99"]),
        ("replay show", ["0", "--kind", "nothing"]),
        ("replay show", ["0", "--rank", "9"]),
        ("replay show", ["0", "--step", "1"]),  # statistics alone
        ("replay sql", ["select nothing from records"]),
        ("replay sql", ["selec"]),
        ("replay sql", ["from nowhere"]),
        ("replay sql", [""]),
        ("replay sql", ["from 'a/trace.json'"]),
        ("replay first", ["nothing = 1"]),
        ("replay plot", ["{out}.gif"]),
        ("replay plot", ["{out}.svg", "--layers", "nothing"]),
        ("replay plot", ["{out}.svg", "--tensor", "nothing"]),
        ("replay plot", ["{out}.svg", "--histogram", "0", "--heatmap"]),
        ("replay export", ["{out}.csv"]),
        ("replay export", ["{out}.npz", "--layers", "nothing"]),
        ("hookrec rerun", ["--layer", "nothing"]),
        ("hookrec rerun", ["--step", "99"]),
    ],
)
def test_a_name_or_a_question_that_the_trace_does_not_answer(line, arguments, place):
    before = files(place)

    refused = ask(line, place / "a", *(word.format(out=place / "out") for word in arguments))

    assert_is_refused(refused, most=9 if line == "replay sql" else 4)  # with the tables and columns that there are
    assert files(place) == before


TARGETS = {
    "replay export": ("parquet", "npz", "arrow", "safetensors"),
    "replay plot": ("svg", "png", "html"),
    "hookrec convert": ("",),
    "hookrec tensorboard": ("",),
}


@pytest.mark.parametrize("where", ["there", "missing/{}", "file/{}", "x" * 300])
@pytest.mark.parametrize("line", WRITING)
def test_a_target_that_is_there_or_cannot_be(line, where, place):
    (place / "file").write_text("mine")
    for ending in TARGETS[line]:
        name = where.format("out") + (f".{ending}" if ending else "")
        if where == "there":
            (place / name).write_text("mine")
        before = files(place)

        result = ask(line, place / "a", place / name)

        if line in ("hookrec convert", "hookrec tensorboard") and where.startswith("missing"):
            assert result.exit_code == 0  # a folder is made with those above it
            continue
        assert_is_refused(result)
        assert files(place) == before
        assert where != "there" or (place / name).read_text() == "mine"


def test_a_folder_that_is_there_is_not_written_into(place):
    (place / "out").mkdir()
    (place / "out" / "mine").write_text("mine")

    for line in ("hookrec convert", "replay export"):
        more = ["--partition", "layer"] if line == "replay export" else []
        assert_is_refused(ask(line, place / "a", place / "out", *more))

    assert files(place / "out") == {(place / "out" / "mine").relative_to(place / "out")}


@pytest.mark.parametrize("line", [*ASKED, "replay list"])
def test_a_trace_that_is_being_written(line, place):
    shutil.rmtree(place / "a")
    trace = WrittenTrace(place / "a", width=3)
    trace.commit(0, 1)
    if line == "replay tail":
        trace.seal()  # else it would go on for ever, as it should
    try:
        result = ask(line, *([place] if line == "replay list" else asked(line, place)))
    finally:
        if line != "replay tail":
            trace.close()

    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert "Traceback" not in result.output
    if line == "hookrec convert":
        assert_is_refused(result)
        assert not (place / "out").exists()
    elif line == "replay first":
        assert (result.exit_code, result.stderr) == (1, "")
    elif line == "hookrec rerun":
        assert result.exit_code == 3
    else:
        assert result.exit_code == 0, result.output


class _ClosedPipe:
    """Standard output whose reader has gone: `replay ... | head`."""

    encoding = "utf-8"
    errors = "strict"

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self):
        raise BrokenPipeError(32, "Broken pipe")

    def isatty(self):
        return False


def answers_in_json(line):
    program, name = line.split()
    command = PROGRAMS[program].get_command(click.Context(PROGRAMS[program]), name)
    return "--json" in {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize(
    ("line", "json_too"),
    [(line, json) for line in [*ASKED, "replay list"] for json in (False, True) if not json or answers_in_json(line)],
)
def test_a_pipe_that_is_closed(line, json_too, place, monkeypatch, capsys):
    program, name = line.split()
    arguments = [place] if line == "replay list" else asked(line, place)
    monkeypatch.setattr(sys, "stdout", _ClosedPipe())

    with pytest.raises(SystemExit) as ended:
        PROGRAMS[program].main([name, *map(str, arguments), *(["--json"] if json_too else [])], prog_name=program)

    monkeypatch.undo()
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "Broken pipe" not in said
    assert isinstance(ended.value.code, int | None | bool)


@pytest.mark.parametrize("methods", [("refresh",), ("table", "dataset")])
@pytest.mark.parametrize("line", ASKED)
def test_ctrl_c(line, methods, place, monkeypatch):
    reads = []

    def interrupted(log, *arguments, **more):
        reads.append(log)
        raise KeyboardInterrupt

    for method in methods:
        monkeypatch.setattr(Log, method, interrupted)
    before = files(place)

    result = ask(line, *asked(line, place))

    if not reads:
        pytest.skip("it does not read the log in this way")
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (1, 130)
    assert "Traceback" not in result.output
    left = {path.parts[0] for path in files(place) - before} - {"a"}
    assert not left or (line, left) == ("hookrec convert", {"out.partial"})  # from where it goes on


@pytest.mark.parametrize(
    ("line", "arguments", "statuses"),
    [
        ("replay list", ["{place}/missing"], (1, 2)),
        ("replay list", ["{place}/file"], (1, 2)),
        ("hookrec attach", ["0", "-o", "{place}/out"], (2,)),
        ("hookrec attach", ["x", "-o", "{place}/out"], (2,)),
        ("hookrec attach", ["4194304", "-o", "{place}/out"], (3,)),
        ("hookrec attach", ["1"], (2,)),
        ("hookrec attach", ["1", "-o", "{place}/out", "--plan", "{place}/missing.toml"], (1, 2)),
        ("hookrec attach", ["1", "-o", "{place}/out", "--every", "0"], (1, 2)),
        ("hookrec daemon", ["{place}/file"], (1, 2)),
        ("hookrec daemon", ["{place}/a", "--when", "nothing > ("], (1, 2)),
        ("hookrec daemon", ["{place}/a", "--quota", "much"], (1, 2)),
        ("hookrec daemon", ["{place}/a", "--webhook", "nowhere"], (1, 2)),
        ("hookrec daemon", ["{place}/a", "--run", "{place}/no-such-program"], (1, 2)),
        ("hookrec detach", ["4194304"], (3,)),
        ("hookrec detach", ["x"], (2,)),
        ("hookrec run", ["{place}/script.py"], (2,)),
        ("hookrec run", ["-o", "{place}/out", "{place}/missing.py"], (2,)),
        ("hookrec run", ["-o", "{place}/file", "{place}/script.py"], (2,)),
        ("hookrec run", ["-o", "{place}/a", "{place}/script.py"], (2,)),
        ("hookrec run", ["-o", "{place}/out", "--every", "0", "{place}/script.py"], (2,)),
        ("hookrec run", ["-o", "{place}/out", "--ring", "much", "{place}/script.py"], (2,)),
        ("hookrec run", ["-o", "{place}/out", "--kinds", "nothing", "{place}/script.py"], (2,)),
        ("hookrec run", ["-o", "{place}/out", "--plan", "{place}/file", "{place}/script.py"], (2,)),
        ("hookrec run", ["--idle", "-o", "{place}/out", "{place}/script.py"], (2,)),
        ("hookrec set", ["4194304", "every=1"], (3,)),
        ("hookrec set", ["4194304", "every"], (1, 2)),
        ("hookrec status", ["4194304"], (3,)),
        ("hookrec trigger", ["4194304", "why"], (3,)),
    ],
)
def test_wrong_uses_of_what_takes_no_trace(line, arguments, statuses, place):
    (place / "file").write_text("mine = [")
    (place / "script.py").write_text("raise SystemExit('it was run')")
    before = files(place)

    refused = ask(line, *(word.format(place=place) for word in arguments))

    assert_is_refused(refused, statuses=statuses)
    assert files(place) == before
