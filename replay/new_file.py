"""A file, or a folder of them, for others is new and whole: never over one that is there, never half written.

What is being written has another name, ending in `.partial`, and is removed if it does not come to an end.
"""

import contextlib
import shutil
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
        partial.unlink(missing_ok=True)  # left by one that was killed, or a link that would be followed
        try:
            yield partial
            partial.replace(target)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise BadQuery(f"{target} cannot be written: {error.strerror or error}. Choose another file.") from None


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a folder to write to, which becomes `target` at the end of the block, and goes if the block fails.

    Raises:
        BadQuery: there is something of that name, or it cannot be written.
    """
    partial = target.with_name(target.name + ".partial")
    if target.exists():
        raise BadQuery(f"{target} exists already. Choose another folder, or remove that one first.")
    try:
        try:
            shutil.rmtree(partial, ignore_errors=True)  # left by one that was killed
            partial.mkdir()
            yield partial
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise BadQuery(f"{target} cannot be written: {error.strerror or error}. Choose another folder.") from None


def _check(target: Path, *, overwrite: bool) -> None:
    if target.is_dir():
        raise BadQuery(f"{target} is a directory. Name a file in it.")
    if not target.parent.is_dir():
        raise BadQuery(f"{target} cannot be written: {target.parent} is no directory. Make it first.")
    if target.exists() and not target.is_file():
        raise BadQuery(f"{target} is no file of data, and is not replaced. Choose another file.")
    if target.exists() and not overwrite:
        raise BadQuery(f"{target} exists already. Choose another file, or pass overwrite=True (--overwrite).")
