"""The options of commands that say what to record: a plan from a file, and what the command line has to add.

They are derived from the plan, so that whatever `attach` takes can be said here too: an option is an argument of
`plan_of`, its type is the argument's annotation, and its help is what the docstring of `Plan` says of it.
"""

import inspect
import re
import tomllib
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from hookrec.errors import AttachError
from hookrec.plan import (
    CLOCKS,
    COMPRESSIONS,
    DURABILITIES,
    KINDS,
    STORES,
    TENSOR_DTYPES,
    WHEN_FULL,
    Plan,
    plan_of,
    read_plan,
)

_NONE = "none"  # a word for None, by which the command line takes back what a file with a plan says
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "store": STORES,
    "tensor_dtype": (None, *TENSOR_DTYPES),
    "compression": COMPRESSIONS,
    "when_full": WHEN_FULL,
    "clock": CLOCKS,
    "durability": DURABILITIES,
}
_SCHEDULES = ("steps", "tensor_steps")  # where a number alone is a step
_LISTS = ("layers", "kinds", "ops", "signals")  # may be given with commas too; conditions have commas of their own
_MORE = {
    "steps": "Such as 0:100,1000:2000:10 or ::100x3.",
    "tensor_steps": "Such as ::100.",
    "layers": "Such as 'blocks.0.*'.",
    "kinds": f"There are {', '.join(KINDS)}.",
    "ring": "Such as 512MB.",
    "max_bytes": "Such as 50GB.",
    "triggers": "Such as 'n_nan > 0'.",
    "signals": "Such as SIGUSR1.",
    "transform": "Such as 'encoder.*=mymodule:mean'.",
    "rules": """Each as in TOML, such as 'layers="encoder.*", tensors=false'.""",
}


def plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say what to record."""
    explained = _explained(inspect.cleandoc(Plan.__doc__ or ""))
    for name, parameter in reversed(list(inspect.signature(plan_of).parameters.items())):
        command = _option(name, parameter.annotation, explained.get(name, ""))(command)
    option = click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="TOML file with these options.")
    return option(command)


def _option(name: str, annotation: Any, explanation: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    flag = f"--{name.replace('_', '-')}"
    help = " ".join(filter(None, (f"{explanation[:1].upper()}{explanation[1:]}", _MORE.get(name))))
    kinds = typing.get_args(annotation) or (annotation,)
    if bool in kinds:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=help)
    if name in _CHOICES:
        return click.option(flag, name, type=click.Choice([choice or _NONE for choice in _CHOICES[name]]), help=help)
    if name == "transform" or any(typing.get_origin(kind) is Iterable for kind in kinds):
        return click.option(flag, name, multiple=True, help=f"{help} May be repeated.")
    number = next((kind for kind in (int, float) if kind in kinds and str not in kinds), str)
    return click.option(flag, name, type=number, help=help)


def _explained(docstring: str) -> dict[str, str]:
    """Return what a docstring says of each attribute."""
    entries = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", docstring, re.MULTILINE)
    explained = {name: " ".join(text.split()) for name, text in entries}
    return {name.removesuffix("_bytes") if name == "ring_bytes" else name: text for name, text in explained.items()}


def options_of(plan_file: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for `attach`: those of the file, and over them those that were given.

    Raises:
        click.UsageError: they make no plan.
    """
    try:
        options = read_plan(plan_file) if plan_file is not None else {}
        options |= {name: _meant(name, value) for name, value in given.items() if value not in (None, ())}
        plan_of(**options)
    except AttachError as error:
        raise click.UsageError(str(error)) from None
    return options


def changes_of(assignments: tuple[str, ...]) -> dict[str, Any]:
    """Return what assignments such as `every=1` or `layers=a.*,b.*` say, with numbers and booleans as such.

    Raises:
        click.ClickException: one is no assignment.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or not name:
            raise click.UsageError(f"{assignment!r} is no assignment; write for example every=1 or layers='blk.3.*'.")
        value: Any = text.strip()
        if name in changes:
            raise click.UsageError(f"{name} is given twice.")
        if name in _LISTS:
            value = _split((value,))
        elif name == "rules":
            value = _rules(value) if value else []
        elif value.lower() in ("true", "yes", "on", "false", "no", "off"):
            value = value.lower() in ("true", "yes", "on")
        elif name not in _SCHEDULES and re.fullmatch("[0-9]{1,18}", value):
            value = int(value)
        changes[name] = value
    return changes


def _meant(name: str, value: Any) -> Any:
    if name in _LISTS:
        return _split(value)
    if name == "transform":
        return dict(_function(text) for text in value)
    if name == "rules":
        return [rule for text in value for rule in _rules(text)]
    return None if name in _CHOICES and value == _NONE else list(value) if isinstance(value, tuple) else value


def _function(text: str) -> tuple[str, str]:
    glob, sign, place = text.rpartition("=")
    if not sign:
        raise click.UsageError(f"{text!r} is no transform; write for example 'encoder.*=mymodule:mean'.")
    return glob, place


def _rules(text: str) -> list[Any]:
    """Return the rules that a text has: what is in an inline table of TOML, such a table, or an array of them."""
    value = text if text.lstrip().startswith(("[", "{")) else f"{{{text}}}"
    try:
        found = tomllib.loads(f"rules = {value}")["rules"]
    except tomllib.TOMLDecodeError as error:
        raise click.UsageError(
            f"""{text!r} is no rule as TOML has it ({error}); write for example 'layers="encoder.*", every=10'."""
        ) from None
    return found if isinstance(found, list) else [found]


def _split(texts: tuple[str, ...]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]
