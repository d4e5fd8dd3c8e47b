"""The command `replay diff`: which layer differs first, in a sentence, and the layers by how much they differ.

Its exit status is the answer for scripts, as that of `diff`.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

import replay
from replay.command_line import json_option, names_option, print_json, print_rows, progress, say
from replay.diff import Diff
from replay.errors import BadQuery
from replay.printable import printable

_INTERRUPTED = 130
_COLUMNS = ("layer", "kind", "differ", "step", "max_abs", "relative", "cosine", "max_ulp", "tolerance")


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path), required=False)
@names_option("--layers", "Globs over A's layer names, such as 'blocks.0.*,head'; may be repeated.")
@names_option("--kinds", "Kinds, such as output,grad_output; may be repeated.")
@click.option("--steps", help="Steps of A: 3, 10:20, 0:100:10; separated by commas.")
@click.option("--map", "rules", multiple=True, help="Names 'A=B' of layers, or a TOML or JSON file; may be repeated.")
@click.option("--tolerance", multiple=True, help="Relative tolerance, such as 1e-4 or bfloat16=0.02; may be repeated.")
@click.option("--noise", type=click.Path(path_type=Path), help="A second run of A: what differs there is noise.")
@click.option("--ranks", help="Which rank of A against which of B, such as 0,1; without B, ranks of A.")
@click.option("--shift", default=0, help="Compare step s of A with step s + SHIFT of B.")
@click.option("--attempt", help="Of resumed trainings: 0 or 0,1, up to which attempt of A, and of B; see replay info.")
@click.option("--pair", type=click.Choice(["rows"]), help="Pair the samples of a batch by their values.")
@click.option("--stop", is_flag=True, help="Stop after the step of the first divergence.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 2**31), help="Layers to print.")
@json_option
def diff(
    a: Path,
    b: Path | None,
    layers: tuple[str, ...],
    kinds: tuple[str, ...],
    steps: str | None,
    rules: tuple[str, ...],
    tolerance: tuple[str, ...],
    noise: Path | None,
    ranks: str | None,
    shift: int,
    attempt: str | None,
    pair: str | None,
    stop: bool,
    limit: int,
    as_json: bool,
) -> None:
    """Say which layer differs first between two traces, and by how much.

    Ends with 0 if there is no difference, with 1 if there is one, or a record without a partner, and with 2 if the
    traces cannot be compared or the command is wrong.
    """
    attempts = _attempts(attempt)
    try:
        with _progress() as told:
            found = replay.diff(
                replay.open(a, attempts[0]),
                None if b is None else replay.open(b, attempts[1]),
                layers=layers or None,
                kinds=kinds or None,
                steps=_steps(steps),
                map=rules or None,
                tolerance=_tolerance(tolerance),
                noise=noise,
                ranks=_ranks(ranks),
                shift=shift,
                pair=pair,
                stop=stop,
                rows=False,
                progress=told,
            )
    except KeyboardInterrupt:
        say("interrupted; nothing was found out", err=True)
        sys.exit(_INTERRUPTED)
    if as_json:
        print_json(_as_json(found))
    else:
        _print(found, limit)
    sys.exit(0 if found.equal else 1)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[float], None] | None]:
    """A bar on a terminal, after a second; elsewhere a line now and then, from the third second on."""
    if not sys.stderr.isatty():
        with progress("thousandths compared") as tell:
            yield lambda part: tell(int(1000 * part), 1000)
        return
    import time

    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        update: Callable[[float], None] | None = None

        def told(done: float) -> None:
            nonlocal update
            if update is None and time.monotonic() - began > 1:
                from rich.console import Console
                from rich.progress import Progress

                bar = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
                task = bar.add_task("comparing", total=1.0)
                update = lambda part: bar.update(task, completed=part)  # noqa: E731
            if update is not None:
                update(done)

        yield told


_MOST_STEPS = 10_000_000
"""In a range that is one of several, of which a list is made."""


def _steps(text: str | None) -> Any:
    """Read what --steps says: numbers and ranges as Python's slices have them."""
    if text is None:
        return None
    try:
        parts = [[int(n) if n else None for n in part.split(":")] for part in text.split(",")]
        if len(parts) == 1 and 2 <= len(parts[0]) <= 3:
            return slice(*parts[0])
        chosen: list[int] = []
        for part in parts:
            match part:
                case [int(step)]:
                    chosen.append(step)
                case [begin, int(end), *rest] if len(rest) < 2:
                    steps = range(begin or 0, end, (rest and rest[0]) or 1)
                    if end - (begin or 0) > _MOST_STEPS:
                        raise BadQuery(f"--steps {text!r} has too many for a list. Write one range by itself.")
                    chosen += steps
                case _:
                    raise ValueError
    except ValueError:
        raise BadQuery(
            f"--steps {text!r} is no step, range or list of them; write 3, 10:20, 0:100:10 or 1,5,9."
        ) from None
    return chosen


def _tolerance(given: tuple[str, ...]) -> Any:
    if not given:
        return None
    found: dict[str, float] = {}
    for item in given:
        name, _, number = item.rpartition("=")
        try:
            found[name or "*"] = float(number)
        except ValueError:
            raise BadQuery(f"--tolerance {item!r} is no number, nor DTYPE=NUMBER such as bfloat16=0.02.") from None
    return found


def _attempts(text: str | None) -> tuple[int | None, int | None]:
    """Read what --attempt says; one that is left out is the latest."""
    if text is None:
        return None, None
    parts = text.split(",")
    if len(parts) > 2 or not all(part.strip() == "" or part.strip().isdecimal() for part in parts):
        raise BadQuery(f"--attempt {text!r} is not an attempt of A, or one of A and one of B; write 0, ',0' or 0,1.")
    a, b = (int(part) if part.strip() else None for part in [*parts, ""][:2])
    return a, b


def _ranks(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        left, right = (int(n) for n in text.split(","))
    except ValueError:
        raise BadQuery(f"--ranks {text!r} is not two ranks; write 0,1.") from None
    return left, right


def _print(found: Diff, limit: int) -> None:
    by_layer = found.worst
    compared = f"{found.compared:,} records compared"
    if found.first is not None:
        say(printable(found.first), bold=True)
    elif found.equal:
        say(f"no difference: {compared}, all within tolerance", bold=True)
    else:
        but = "tensors could not be read" if found.damaged else "not every record has a partner"
        say(f"no divergence: {compared}, all within tolerance, but {but}", bold=True)
    for name, table in (("A", found.only_a), ("B", found.only_b)):
        rows = table.to_pylist()
        for row in rows[:limit]:
            path = f" {row['path']}" if row["path"] else ""
            steps = f"step {row['first_step']}" if row["records"] == 1 else f"{row['records']:,} records"
            say(printable(f"only in {name}: {row['layer'] or '(root)'} {row['kind']}{path}, {steps}"))
        if len(rows) > limit:
            say(f"only in {name}: {len(rows) - limit:,} more; --limit shows them")
    if set(found.only_a["layer"].to_pylist()) != set(found.only_b["layer"].to_pylist()):
        say("if these are the same layers by other names, say so: --map 'A=B'")
    for note in found.notes:
        say(printable(note))
    differing = [row for row in by_layer if not row["within"]]
    if differing:
        what = "layers, kinds and paths" if any(row["path"] for row in by_layer) else "layers and kinds"
        say(f"\n{len(differing)} of {len(by_layer)} {what} differ; by the size of the error:\n")
        shown = [{**row, "differ": f"{row['outside']} of {row['records']}"} for row in differing[:limit]]
        print_rows(shown, False, _COLUMNS)
        if len(differing) > limit:
            say(f"{len(differing) - limit:,} more; --limit shows them.", err=True)
    elif by_layer:
        most, error = by_layer[0], by_layer[0]["error"]
        say(f"the largest error is {error:.3g}, of layer {most['layer']!r} ({most['kind']}) at step {most['step']}")


def _as_json(found: Diff) -> dict[str, Any]:
    first = found.first
    return {
        "equal": found.equal,
        "first": None if first is None else {**vars(first), "sentence": str(first)},
        "compared": found.compared,
        "layers": found.worst,
        "only_a": found.only_a.to_pylist(),
        "only_b": found.only_b.to_pylist(),
        "notes": found.notes,
    }
