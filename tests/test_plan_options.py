"""What `attach` takes can be said on the command line and in a file, and what makes no sense is refused."""

import inspect
import json

import click
import pytest
from click.testing import CliRunner

import hookrec
from hookrec.cli import main
from hookrec.control_commands import attach as attach_command
from hookrec.errors import AttachError
from hookrec.plan import PLAN_OPTIONS, Plan, plan_of
from hookrec.plan_options import changes_of, options_of, plan_options
from hookrec.run_command import run as run_command

# Found in the process; --out; and what is of one start of a training, for which `run` has --resume and --resume-at.
NOT_FOR_COMMANDS = {"model", "path", "resume"}


@click.command()
@plan_options
def ask(plan_file, **given):
    click.echo(json.dumps(options_of(plan_file, given)))


def said(*arguments: str) -> dict:
    result = CliRunner().invoke(ask, arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.mark.parametrize("command", [run_command, attach_command], ids=["run", "attach"])
def test_each_argument_of_attach_is_an_option_with_a_help_of_its_own(command):
    arguments = set(inspect.signature(hookrec.attach).parameters) - NOT_FOR_COMMANDS
    options = {parameter.name: parameter for parameter in command.params}

    assert arguments == set(PLAN_OPTIONS)
    assert arguments <= set(options)
    helps = [options[name].help for name in arguments]
    assert all(help and help.endswith(".") for help in helps)
    assert len(set(helps)) == len(helps)


@pytest.mark.parametrize("command", ["attach", "detach", "set", "status", "trigger"])
def test_the_help_of_a_command_ends_with_its_exit_codes_in_a_paragraph_of_their_own(command):
    paragraphs = CliRunner().invoke(main, [command, "--help"]).output.split("\n\n")

    place = next(place for place, text in enumerate(paragraphs) if text.startswith("  Exit codes: 0 done"))
    assert paragraphs[place].endswith("in time.")
    assert paragraphs[place + 1].startswith("Options:")
    assert all(line.startswith("  ") for text in paragraphs[1:place] for line in text.splitlines())


def test_what_is_said_on_the_command_line_is_what_attach_is_given():
    options = said(
        *("--layers", "a.*, b", "--layers", "c", "--kinds", "output,update", "--ops", "add,mul"),
        *("--every", "3", "--no-containers", "--store", "zarr", "--compression", "zstd", "--ring", "64MB"),
        *("--when-full", "skip", "--clock", "forward", "--max-bytes", "1GB", "--keep-free", "0.2"),
        *("--durability", "power", "--restart", "2", "--flight", "4", "--after", "0"),
        *("--triggers", "loss > 3 * median(loss, 100)", "--triggers", "n_nan > 0"),
        *("--trigger-rest", "7", "--trigger-limit", "2", "--signals", "SIGUSR1", "--tensors"),
    )

    assert plan_of(**options) == Plan(
        layers=("a.*", "b", "c"),
        kinds=("output", "update"),
        ops=("add", "mul"),
        every=3,
        compression="zstd",
        ring_bytes=64 * 10**6,
        when_full="skip",
        clock="forward",
        max_bytes=10**9,
        keep_free=0.2,
        durability="power",
        restart=2,
        flight=4,
        after=0,
        triggers=("loss > 3 * median(loss, 100)", "n_nan > 0"),
        trigger_rest=7,
        trigger_limit=2,
        signals=("SIGUSR1",),
    )


def test_the_command_line_goes_over_the_file_also_to_take_something_back(tmp_path):
    (tmp_path / "plan.toml").write_text('compression = "zstd"\ncontainers = true\nevery = 2\n')

    options = said("--plan", str(tmp_path / "plan.toml"), "--compression", "none", "--no-containers")

    assert options == {"compression": None, "containers": False, "every": 2}


def test_nothing_said_is_nothing_given():
    assert said() == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"after": 3}, "after is of flight mode"),
        ({"trigger_rest": 0, "trigger_limit": 1}, "trigger_rest and trigger_limit are of flight mode"),
        ({"triggers": "n_nan > 0"}, "triggers is of flight mode"),
        ({"signals": ["SIGUSR1"]}, "signals is of flight mode"),
        ({"ring": 1}, "A ring of 1 bytes is too small"),
        ({"ring": "999KB"}, "A ring of 999,000 bytes is too small"),
        ({"ring": 0}, "is no size"),
        ({"every": True}, "every is True"),
        ({"every": 1.0}, "every is 1.0"),
        ({"restart": -1}, "restart is -1"),
        ({"flight": 0}, "flight is 0"),
        ({"flight": 1, "after": -1}, "after is -1"),
        ({"keep_free": float("nan")}, "keep_free is nan"),
        ({"kinds": ()}, "kinds is empty"),
        ({"layers": [None]}, "takes a string or several"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(AttachError, match=words):
        plan_of(**options)


def test_the_least_ring_is_a_megabyte():
    assert plan_of(ring="1MB").ring_bytes == 10**6


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["every=1", "every=2"], "every is given twice"),
        (["=1"], "is no assignment"),
        ([""], "is no assignment"),
    ],
)
def test_assignments_that_say_nothing_clear_are_refused(assignments, words):
    with pytest.raises(click.UsageError, match=words):
        changes_of(tuple(assignments))


@pytest.mark.parametrize(
    "assignment",
    [
        "every=",
        "every=²",
        "every=-1",
        "every=1e3",
        f"every={'1' * 5000}",
        "every=0x10",
        "layers=",
        "kinds=,",
        "tensors=2",
        "tensors=",
        "when_full=on",
        "containers=perhaps",
    ],
)
def test_values_that_are_none_are_named_by_the_plan(assignment):
    name = assignment.partition("=")[0]
    changes = changes_of((assignment,))

    with pytest.raises(AttachError, match=name):
        Plan().changed(changes)
