"""Runs what the pages of `docs/questions` tell a reader to run, and puts what came of it under it.

A page is plain Markdown, the same to a reader and to this script:

    ```console              a line after "$ " is a command for bash, lines after "> " go on with it; what follows, up
                            to the next, is what it said
    ```console exit=1       the same, where the last command ends with 1
    ```python               is run, all such blocks of a page in one namespace
    ```python file=a.py     becomes this file
    ```text                 what the Python block before it printed
    ![…](../pictures/a.svg) the file `a.svg` that a command of the page has made

Pages are run in an empty folder that has `examples` in it, so they write `runs/…` as a reader does who stands in a
checkout; the folder is shown as `/home/me`. Their numbers are those of the machine that ran them last; a test compares
what does not depend on machines.

    python docs/answers.py [PAGE]...        run the pages, all if none is named, and write them anew
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = ROOT / "docs" / "questions"
PICTURES = ROOT / "docs" / "pictures"

_FENCED = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
_PICTURE = re.compile(r"!\[[^\]]*\]\(\.\./pictures/([\w.-]+)\)")
_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(e[-+]?\d+)?")
_TIMEOUT_S = 600


class PageBroken(Exception):
    """A command or a block of a page does not do what the page says."""


@dataclass
class Command:
    """A command of a page, and what the page says that it says."""

    words: str
    shown: list[str] = field(default_factory=list)
    exit: int = 0


def pages() -> list[Path]:
    """Return the pages, in the order of their names."""
    return sorted(QUESTIONS.glob("*.md"))


def commands_of(body: str, info: str) -> list[Command]:
    """Return the commands of a block for the console."""
    found: list[Command] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:]))
        elif found and not found[-1].shown and line.startswith("> "):
            found[-1].words += f"\n{line[2:]}"
        elif found:
            found[-1].shown.append(line)
        else:
            raise PageBroken(f"a block for the console begins with {line!r}, which is no command")
    if found and (status := re.search(r"exit=(\d+)", info)):
        found[-1].exit = int(status[1])
    return found


def commands(page: Path) -> list[Command]:
    """Return all commands of a page."""
    blocks = _FENCED.finditer(page.read_text())
    return [c for b in blocks if b["info"].startswith("console") for c in commands_of(b["body"], b["info"])]


def head(lines: list[str]) -> str:
    """Return what the first line of an output is, whatever its numbers are and however wide its columns."""
    return " ".join(_NUMBER.sub("#", lines[0]).split()) if lines else ""


def run(page: Path, folder: Path) -> str:
    """Run a page in an empty folder; return it with what was said this time.

    Raises:
        PageBroken: a command ended otherwise than the page says, or a block raised.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    environment = _environment(folder)
    namespace: dict[str, Any] = {"__name__": "__page__"}
    printed: str | None = None
    parts, at, text = [], 0, page.read_text()
    for block in _FENCED.finditer(text):
        parts.append(text[at : block.start()])
        at, info, body = block.end(), block["info"], block["body"]
        if info.startswith("console"):
            body = "".join(_said(command, folder, environment, page) for command in commands_of(body, info))
        elif info == "text" and printed is not None:
            body, printed = printed, None
        elif info.startswith("python file="):
            (folder / info.removeprefix("python file=")).write_text(body)
        elif info == "python":
            printed = _printed(body, namespace, folder, page)
        parts.append(f"```{info}\n{body}```")
    return "".join([*parts, text[at:]])


def _said(command: Command, folder: Path, environment: dict[str, str], page: Path) -> str:
    try:
        ended = subprocess.run(
            ["bash", "-c", command.words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PageBroken(f"{page.name}: {command.words}\nhas not ended in {_TIMEOUT_S} s") from None
    if ended.returncode != command.exit:
        raise PageBroken(
            f"{page.name}: {command.words}\nended with {ended.returncode}, not {command.exit}:\n{ended.stdout}"
        )
    said = ended.stdout.replace(str(folder), "/home/me")
    lines = "".join(f"{line.rstrip()}\n" for line in said.splitlines())
    words = command.words.replace("\n", "\n> ")
    return f"$ {words}\n{lines}"


def _printed(code: str, namespace: dict[str, Any], folder: Path, page: Path) -> str:
    said = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(said):
        try:
            exec(compile(code, page.name, "exec"), namespace)
        except Exception as error:
            raise PageBroken(f"{page.name}: {type(error).__name__}: {error}, in\n{code}") from error
    return "".join(f"{line.rstrip()}\n" for line in said.getvalue().splitlines())


def _environment(folder: Path) -> dict[str, str]:
    """Let the commands that a reader has be those of this checkout."""
    programs = folder.parent / f"{folder.name}.bin"
    programs.mkdir()
    for name, module in (("python", ""), ("replay", "-m replay.cli"), ("hookrec", "-m hookrec.cli")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def pictures_of(page: Path) -> list[str]:
    """Return the names of the pictures that a page shows."""
    return _PICTURE.findall(page.read_text())


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """Give a folder for a page to be run in."""
    with tempfile.TemporaryDirectory(prefix="hookrec-docs-") as place:
        folder = Path(place) / "checkout"
        folder.mkdir()
        yield folder


def main(names: list[str]) -> None:
    """Run pages and write them anew."""
    for page in [QUESTIONS / Path(name).name for name in names] or pages():
        print(page.relative_to(ROOT), flush=True)
        with empty_folder() as folder:
            text = run(page, folder)
            for picture in pictures_of(page):
                PICTURES.mkdir(exist_ok=True)
                shutil.copyfile(folder / picture, PICTURES / picture)
        page.write_text(text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    try:
        main(sys.argv[1:])
    except PageBroken as broken:
        sys.exit(str(broken))
