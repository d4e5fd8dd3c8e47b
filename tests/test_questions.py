"""The pages of `docs/questions`: what they tell a reader to run does what they show."""

import re
import shlex

import click
import pytest
from click.shell_completion import ShellComplete

from docs import answers
from hookrec.cli import main as hookrec_main
from replay.cli import main as replay_main

PROGRAMS = {"replay": replay_main, "hookrec": hookrec_main}
PAGES = {page.stem: page for page in answers.pages()}
QUICK = "nan"
"""The page that is run each time: one training and three commands."""


def told(page: str) -> str:
    return PAGES[page].read_text()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in PAGES if name != "README"]
)
def test_a_page_says_what_its_commands_say(name, tmp_path):
    page, new = PAGES[name], tmp_path / PAGES[name].name
    folder = tmp_path / "checkout"
    folder.mkdir()

    new.write_text(answers.run(page, folder))

    shown, said = answers.commands(page), answers.commands(new)
    assert [(c.words, answers.head(c.shown)) for c in said] == [(c.words, answers.head(c.shown)) for c in shown]
    for picture in answers.pictures_of(page):
        assert (folder / picture).stat().st_size > 1000


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_and_options_of_a_page_are_there(page):
    shown = [command.words for command in answers.commands(PAGES[page])]
    shown += re.findall(r"`((?:replay|hookrec) [a-z]+ [^`…]*)`", told(page))

    for line in shown:
        for program, *words in simple_commands(line):
            if program in PROGRAMS:
                assert_takes(PROGRAMS[program], words, line)


def simple_commands(line: str) -> list[list[str]]:
    """What a line of the shell is made of: its commands without what they are joined by."""
    parts, found = shlex.shlex(line, posix=True, punctuation_chars=True), [[]]
    parts.whitespace_split = True
    for part in parts:
        if set(part) <= set("|;&<>"):
            found.append([])
        else:
            found[-1].append(part)
    return [words for words in found if words]


def assert_takes(group: click.Group, words: list[str], line: str) -> None:
    command = group.get_command(click.Context(group), words[0])
    assert command is not None, line
    words = [word if word != "PID" else "1" for word in words[1:]]
    if command.name == "run":  # what stands behind the script is the script's
        assert "-o" in words
        return
    command.make_context(line, words)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_of_a_page_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", told(page), flags=re.DOTALL)

    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (answers.QUESTIONS / target).exists(), target


def test_each_page_is_in_the_table():
    listed = set(re.findall(r"\]\(([\w-]+)\.md\)", told("README")))

    assert listed == set(PAGES) - {"README"}


def page_of(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text)
    folder = tmp_path / "checkout"
    folder.mkdir(exist_ok=True)
    return page, folder


def test_a_page_is_written_with_what_was_said_this_time(tmp_path):
    page, folder = page_of(
        tmp_path,
        "# A\n\n```console\n$ echo 'a b' |\n>   tr a c\nold\n$ cat a.txt; pwd\n```\n\n"
        '```python\nx = 3\n```\n\n```python\nprint("x =", x)\n```\n\n```text\nold\n```\n\n```sh\nleft alone\n```\n',
    )
    (folder / "a.txt").write_text("of a file\n")

    new = answers.run(page, folder)

    assert new == (
        "# A\n\n```console\n$ echo 'a b' |\n>   tr a c\nc b\n$ cat a.txt; pwd\nof a file\n/home/me\n```\n\n"
        '```python\nx = 3\n```\n\n```python\nprint("x =", x)\n```\n\n```text\nx = 3\n```\n\n```sh\nleft alone\n```\n'
    )


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ("```console\n$ exit 3\n```\n", "ended with 3, not 0"),
        ("```console exit=1\n$ true\n```\n", "ended with 0, not 1"),
        ("```console\nnothing asked\n```\n", "is no command"),
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
    ],
)
def test_a_page_that_does_not_do_what_it_says_is_broken(block, why, tmp_path):
    page, folder = page_of(tmp_path, block)

    with pytest.raises(answers.PageBroken, match=why):
        answers.run(page, folder)


def test_the_head_of_an_output_does_not_depend_on_numbers_and_widths():
    assert answers.head(["error   steps 21 to 1,068, -2e-08", "x"]) == answers.head(["error steps 3 to 4, 0.5"])
    assert answers.head(["step  layer"]) != answers.head(["step  kind"])


@pytest.mark.parametrize(("program", "begun", "whole"), [("replay", "ver", "verify"), ("hookrec", "rec", "recover")])
def test_the_shell_completes_commands_and_options(program, begun, whole):
    shell = ShellComplete(PROGRAMS[program], {}, program, f"_{program.upper()}_COMPLETE")

    assert [item.value for item in shell.get_completions([], begun)] == [whole]
    assert "--help" in [item.value for item in shell.get_completions([whole], "--h")]
