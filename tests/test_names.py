"""A name that is not there is said to be none, by each command and in Python; one mistake ends all commands alike."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import replay
from hookrec.cli import main as hookrec_main
from replay.cli import main
from tests.handwritten import Written, write_trace

WHERE = {
    "diff": ["B"],
    "export": ["OUT.parquet"],
    "plot": ["OUT.svg"],
}
"""What commands need besides a trace."""

CHOOSING = [
    name for name in main.list_commands(None) if "kinds" in {p.name for p in main.get_command(None, name).params}
]


@pytest.fixture
def traces(tmp_path):
    values = np.arange(6, dtype=np.float32)
    for name in "AB":
        records = [
            Written(layer, values, step, kind)
            for step in range(2)
            for layer in ("fc1", "fc2", "head")
            for kind in ("output", "grad_output")
        ]
        write_trace(tmp_path / name, *records)
    return tmp_path


def ask(traces, command, *words):
    more = [word.replace("OUT", str(traces / "out")) for word in WHERE.get(command, [])]
    more = [str(traces / word) if word == "B" else word for word in more]
    return CliRunner().invoke(main, [command, str(traces / "A"), *more, *words])


def test_the_commands_that_choose_records_are_known():
    assert {"diff", "export", "ls", "plot", "stats", "tail", "trend"} <= set(CHOOSING)


@pytest.mark.parametrize("command", CHOOSING)
@pytest.mark.parametrize(
    ("option", "name", "there"),
    [
        ("--kinds", "foo", "'output', 'grad_output'"),
        ("--kinds", "output,foo", "'output', 'grad_output'"),
        ("--layers", "nowhere.*", "'fc1', 'fc2', 'head'"),
    ],
)
def test_a_name_that_is_not_there_is_refused_by_each_command(traces, command, option, name, there):
    result = ask(traces, command, option, name)

    assert result.exit_code == 2
    assert repr(name.rpartition(",")[2]) in result.stderr
    assert there in result.stderr
    assert not (traces / "out.parquet").exists()


@pytest.mark.parametrize("command", CHOOSING)
def test_names_may_have_commas_between_them_in_each_command(traces, command):
    assert ask(traces, command, "--layers", "fc1, head", "--kinds", "output,grad_output").exit_code == 0
    for file in traces.glob("out.*"):
        file.unlink()
    assert ask(traces, command, "--layers", "fc1", "--layers", "head", "--kinds", "output").exit_code == 0


def test_commas_choose_what_repeating_the_option_does(traces):
    once = ask(traces, "stats", "--layers", "fc1,head", "--kinds", "output", "--json")
    twice = ask(traces, "stats", "--layers", "fc1", "--layers", "head", "--kinds", "output", "--json")

    assert [row["layer"] for row in json.loads(once.stdout)] == ["fc1", "head"] * 2
    assert once.stdout == twice.stdout


def test_python_is_told_too(traces):
    with replay.open(traces / "A") as trace:
        for ask_for in (trace.records, trace.select):
            with pytest.raises(replay.BadQuery, match=r"no kind 'foo' in .*; there are 'output', 'grad_output'\."):
                ask_for(kinds=("output", "foo"))
            with pytest.raises(replay.BadQuery, match=r"no layer 'fc3' in .*'fc1', 'fc2', 'head'"):
                ask_for(layers="fc3")
        with pytest.raises(replay.BadQuery, match=r"no statistic 'l3'; there are numel"):
            replay.Records(trace).grid("output")["l3"]


def test_of_many_names_those_that_are_like_it_are_listed(tmp_path):
    values = np.zeros(1, np.float32)
    write_trace(tmp_path / "a", *(Written(f"blocks.{n}.attention", values) for n in range(50)))

    with (
        replay.open(tmp_path / "a") as trace,
        pytest.raises(replay.BadQuery, match=r"'blocks\.7\.attention'.*and 45 more"),
    ):
        trace.records(layers="blocks.7.atention")


def test_a_trace_without_a_record_yet_has_no_wrong_names(tmp_path):
    write_trace(tmp_path / "a", sealed=False)

    with replay.open(tmp_path / "a") as trace:
        assert len(trace.records(layers="fc1", kinds="output")) == 0


def test_following_several_traces_a_name_may_be_in_one_of_them(tmp_path):
    values = np.zeros(1, np.float32)
    paths = [write_trace(tmp_path / layer, Written(layer, values)) for layer in ("a", "b")]

    assert [len(found) for _, found in replay.follow_all(paths, layers="b")] == [1]
    with pytest.raises(replay.BadQuery, match="no layer 'c'"):
        list(replay.follow_all(paths, layers="c"))


def test_what_one_of_two_traces_lacks_is_a_difference_and_no_mistake(tmp_path):
    values = np.zeros(1, np.float32)
    left = [Written("a", values), Written("a", values, kind="grad_output"), Written("b", values)]
    write_trace(tmp_path / "a", *left)
    write_trace(tmp_path / "b", left[0])

    found = replay.diff(tmp_path / "a", tmp_path / "b", kinds=("output", "grad_output"), layers=("a", "b"))

    assert found.first is None
    assert found.only_a["layer"].to_pylist() == ["a", "b"]


OTHERS = {"first": ["n_nan > 0"], "show": ["fc1"], "sql": ["select 1"]}


@pytest.mark.parametrize("command", main.list_commands(None))
def test_a_trace_that_is_not_there_ends_each_command_with_2(tmp_path, command):
    more = [word.replace("OUT", str(tmp_path / "out")) for word in WHERE.get(command, OTHERS.get(command, []))]

    result = CliRunner().invoke(main, [command, str(tmp_path / "nowhere"), *more])

    assert result.exit_code == 2
    assert "nowhere does not exist" in result.stderr


@pytest.mark.parametrize("words", [["recover"], ["convert", "b"], ["pin"], ["unpin"], ["daemon"]])
def test_likewise_the_commands_of_hookrec(tmp_path, words):
    command, *more = words

    result = CliRunner().invoke(hookrec_main, [command, str(tmp_path / "nowhere"), *more])

    assert result.exit_code == 2
    assert "nowhere does not exist" in result.stderr


@pytest.mark.parametrize(
    "command", [c for c in CHOOSING if "where" in {p.name for p in main.get_command(None, c).params}]
)
def test_a_condition_that_cannot_be_understood_ends_each_command_with_2(traces, command):
    result = ask(traces, command, "--where", "l3 > 1")

    assert result.exit_code == 2
    assert "l3" in result.stderr
