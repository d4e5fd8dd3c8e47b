"""A file for others is new and whole: never over one that is there unasked, never half written under its name."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replay.errors import BadQuery


@contextmanager
def new_file(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a path to write to, which becomes `target` at the end of the block, and goes if the block fails.

    Raises:
        BadQuery: the file exists and may not be replaced, is no file, or cannot be written.
    """
    partial = target.with_name(target.name + ".partial")
    try:
        _check(target, overwrite=overwrite)
        try:
            yield partial
            partial.replace(target)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise BadQuery(f"{target} cannot be written: {error.strerror or error}. Choose another file.") from None


def _check(target: Path, *, overwrite: bool) -> None:
    if target.is_dir():
        raise BadQuery(f"{target} is a directory. Name a file in it.")
    if not target.parent.is_dir():
        raise BadQuery(f"{target} cannot be written: {target.parent} is no directory. Make it first.")
    if target.exists() and not target.is_file():
        raise BadQuery(f"{target} is no file of data, and is not replaced. Choose another file.")
    if target.exists() and not overwrite:
        raise BadQuery(f"{target} exists already. Choose another file, or pass overwrite=True (--overwrite).")
