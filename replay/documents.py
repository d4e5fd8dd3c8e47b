"""The JSON files of a trace as their readers need them: what is no document of the format is named, never guessed.

`trace.json` says what the trace is, `model.json` which modules there were, `end.json` how it ended; `notes.jsonl`,
`scalars.jsonl` and `triggers.jsonl` grow by a line at a time, of which those that count are given: `attempts`. Members
that are not known are left alone: a later version may have them.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from replay.attempts import counted, read_attempts
from replay.errors import TraceDamaged, TraceNotFound, TraceTooNew
from replay.format import (
    END_FILE,
    FORMAT,
    LAID_ASIDE,
    MODEL_FILE,
    NOTES_FILE,
    SCALARS_FILE,
    TRACE_FILE,
    TRIGGERS_FILE,
    VERSION,
    parsed,
    whole_lines,
)
from replay.links import refuse_pipes
from replay.ranks import ranks_of


def read_identity(path: Path) -> dict[str, Any]:
    """Return `trace.json`.

    Raises:
        TraceNotFound: there is no trace at the path.
        TraceTooNew: its version is newer than this reader.
        TraceDamaged: it is no such document.
    """
    try:
        there = path.is_dir()
    except OSError as error:  # a name that is too long, or a folder that is closed to us
        raise TraceNotFound(f"{path} cannot be looked at: {error.strerror}. Check the path.") from None
    if not there:
        what = "is a file" if path.exists() else "does not exist"
        raise TraceNotFound(
            f"{path} {what}. A trace is the directory that was given to hookrec.attach() or `hookrec run`."
        )
    refuse_pipes((path, *ranks_of(path).values()))
    identity = _read(path / TRACE_FILE)
    if identity is None:
        inside = sorted(child.parent.name for child in path.glob(f"*/{TRACE_FILE}"))
        if ranks_of(path):
            # Ranks make their folders before the writer of rank 0 has started, which takes a second.
            raise TraceNotFound(
                f"{path} has no {TRACE_FILE} yet: a recording is being begun there, or was ended before it had begun. "
                "Look again in a few seconds."
            )
        if inside:
            hint = f"Traces are inside, such as {path / inside[0]}; replay list {path} shows them all."
        elif (path.absolute().parent / TRACE_FILE).exists():
            hint = f"The trace is the directory above, {path.absolute().parent}."
        else:
            hint = "A trace is the directory that was given to hookrec.attach() or `hookrec run`."
        raise TraceNotFound(f"{path} is no trace: it has no {TRACE_FILE}. {hint}")
    version = identity.get("version")
    if identity.get("format") != FORMAT or not isinstance(version, int) or isinstance(version, bool):
        raise TraceDamaged(f"{path / TRACE_FILE} does not say that it is a {FORMAT}, or which version.")
    if version > VERSION:
        raise TraceTooNew(
            f"{path} has version {version} of the format; this replay reads up to {VERSION}. Upgrade hookrec."
        )
    _check(path / TRACE_FILE, identity, plan=dict, provenance=dict, created=str)
    return identity


def read_modules(rank_directory: Path) -> list[dict[str, Any]]:
    """Return the modules of `model.json`; none if it is not there yet."""
    path = rank_directory / MODEL_FILE
    model = _read(path)
    if model is None:
        return []
    _check(path, model, modules=list)
    for module in model["modules"]:
        _check(path, module, name=str, recorded=bool, parameters=list, aliases=list)
    modules: list[dict[str, Any]] = model["modules"]
    return modules


def read_end(rank_directory: Path) -> dict[str, Any] | None:
    """Return `end.json`; None if the rank is not sealed."""
    return _end_in(rank_directory / END_FILE)


def read_laid_aside(rank_directory: Path) -> dict[str, Any] | None:
    """Return `end.json` of a rank that was taken up again and has no commit since; None if there was none."""
    return _end_in(rank_directory / LAID_ASIDE.format(read_attempts(rank_directory).last))


def _end_in(path: Path) -> dict[str, Any] | None:
    end = _read(path)
    if end is not None:
        _check(path, end, how=str, time=str, books=dict)
    return end


def read_notes(rank_directory: Path, attempt: int | None = None) -> list[dict[str, Any]]:
    """Return what could not be recorded, and why; `attempt` as of `replay.open`."""
    step_or_null, text_or_null = (int, type(None)), (str, type(None))
    return list(_lines(rank_directory / NOTES_FILE, 0, attempt, step=step_or_null, note=str, layer=text_or_null))


def read_triggers(rank_directory: Path, attempt: int | None = None) -> list[dict[str, Any]]:
    """Return which triggers have fired, at which step and why; `attempt` as of `replay.open`."""
    text_or_null, step_or_null = (str, type(None)), (int, type(None))
    path = rank_directory / TRIGGERS_FILE
    return list(_lines(path, 0, attempt, step=int, by=str, why=str, detail=text_or_null, first_step=step_or_null))


def read_scalars(
    rank_directory: Path, since: int | None = None, attempt: int | None = None
) -> Iterator[tuple[int, float, str, float]]:
    """Yield step, time, name and value of the numbers that were logged.

    Args:
        rank_directory: where the rank lies.
        since: a step; what is long before it may be left out, so that the end of a long file is found in no time.
        attempt: as of `replay.open`.
    """
    path = rank_directory / SCALARS_FILE
    # Those of the latest attempt that count are in order, whatever is between them.
    start = 0 if since is None or attempt is not None else _where_since(path, since)
    for line in _lines(path, start, attempt, step=int, time=(int, float), values=dict):
        for name, value in line["values"].items():
            try:
                yield line["step"], float(line["time"]), name, float(value)
            except (TypeError, ValueError, OverflowError):
                raise TraceDamaged(f"{path} has a value that is no number: {name!r} is {value!r}.") from None


def _where_since(path: Path, since: int) -> int:
    """Return a byte at which a line begins and before which no line is of the step `since`: lines are in order."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return 0
    back = 1 << 16
    while back < size:
        with path.open("rb") as file:
            file.seek(size - back)
            skipped, line = file.readline(), file.readline()
        try:
            if parsed(line)["step"] < since:
                return size - back + len(skipped)
        except (ValueError, TypeError, KeyError):
            return 0  # whoever reads from the beginning is told what is wrong with it
        back *= 4
    return 0


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise TraceDamaged(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise TraceDamaged(f"{path} holds a {type(found).__name__}, where an object belongs.")
    return found


def _lines(path: Path, start: int, attempt: int | None, **members: type | tuple[type, ...]) -> Iterator[dict[str, Any]]:
    """Yield the lines that count."""
    lines = whole_lines(path, start)[0]  # before the attempts are looked at
    yield from counted(_parsed_lines(lines, path, start, **members), path.parent, attempt)


def _parsed_lines(
    lines: Iterable[str], path: Path, start: int, **members: type | tuple[type, ...]
) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            found = parsed(line)
        except ValueError as error:
            where = f"Line {number}" + (f" after byte {start:,}" if start else "")
            raise TraceDamaged(f"{where} of {path} cannot be read: {error}") from None
        _check(path, found, **members)
        if "attempt" in found:
            _check(path, found, attempt=int)
        yield found


def _check(path: Path, found: Any, **members: type | tuple[type, ...]) -> None:
    """Raise TraceDamaged where an object lacks a member, or has it of another type."""
    if not isinstance(found, dict):
        raise TraceDamaged(f"{path} has a {type(found).__name__}, where an object belongs.")
    for name, kind in members.items():
        if name not in found:
            raise TraceDamaged(f"{path} has no {name!r}, which version {VERSION} demands.")
        value = found[name]
        if not isinstance(value, kind) or (isinstance(value, int) and not -(2**63) <= value < 2**63):
            raise TraceDamaged(f"{path} has {name!r} as {value!r:.80}, which version {VERSION} does not.")
