"""The options of commands that say what to record: a plan from a file, and what the command line has to add."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hookrec.errors import AttachError
from hookrec.plan import CLOCKS, DURABILITIES, KINDS, STORES, WHEN_FULL, plan_of, read_plan


def plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say what to record."""
    for option in (
        click.option("--keep-free", type=float, help="Share of the file system to leave free."),
        click.option("--durability", type=click.Choice(DURABILITIES), help="What a committed step outlives."),
        click.option("--max-bytes", help="Bytes of tensors past which only statistics are recorded, such as 50GB."),
        click.option("--clock", type=click.Choice(CLOCKS), help="What ends a step."),
        click.option("--when-full", type=click.Choice(WHEN_FULL), help="When the disk is slower than the training."),
        click.option("--ring", help="Shared memory to the writer process, such as 512MB."),
        click.option("--store", type=click.Choice(STORES), help="Layout of the tensors on the disk."),
        click.option("--tensors/--no-tensors", default=None, help="Keep tensors, or their statistics alone."),
        click.option("--every", type=click.IntRange(1), help="Record steps 0, N, 2 × N, …."),
        click.option(
            "--kinds", multiple=True, help=f"What to record of each layer; may be repeated. {', '.join(KINDS)}."
        ),
        click.option("--containers/--no-containers", default=None, help="Choose among all modules, not leaves alone."),
        click.option("--layers", multiple=True, help="Glob over layer names, such as 'blocks.0.*'; may be repeated."),
        click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="TOML file with these options."),
    ):
        command = option(command)
    return command


def options_of(plan_file: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for `attach`: those of the file, and over them those that were given.

    Raises:
        click.UsageError: they make no plan.
    """
    try:
        options = read_plan(plan_file) if plan_file is not None else {}
        options |= {name: _split(value) for name, value in given.items() if value not in (None, ())}
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
        if name in ("layers", "kinds"):
            value = _split((value,))
        elif value.lower() in ("true", "yes", "on", "false", "no", "off"):
            value = value.lower() in ("true", "yes", "on")
        elif value.isdigit():
            value = int(value)
        changes[name] = value
    return changes


def _split(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return [part.strip() for text in value for part in text.split(",") if part.strip()]
