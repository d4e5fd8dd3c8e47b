"""A file, or a folder of them, for others is new and whole: never over one that is there, never half written.

What is being written has another name, ending in `.partial`, and is removed if it does not come to an end. Of two who
write the same, one is refused: the file of the other name is locked by whoever writes it.
"""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replay.errors import BadQuery
from replay.format import ALERTS_FILE, PINNED_FILE, SENT_FILE, TRACE_FILE
from replay.ranks import PATTERN

_OF_TRACE = re.compile("|".join([*map(re.escape, (TRACE_FILE, ALERTS_FILE, SENT_FILE, PINNED_FILE)), PATTERN]))


@contextmanager
def new_file(target: Path, *, overwrite: bool, partial: Path | None = None) -> Iterator[Path]:
    """Give a path to write to, which becomes `target` at the end of the block, and goes if the block fails.

    Args:
        target: the file.
        overwrite: whether it may be there already.
        partial: the path to write to, on the same file system; beside the target if None.

    Raises:
        BadQuery: the file exists and may not be replaced, is no file, cannot be written, or is being written.
    """
    partial = _partial(target) if partial is None else partial
    try:
        _check(target, overwrite=overwrite)
        if partial.is_symlink() or not partial.is_file():
            partial.unlink(missing_ok=True)  # it would be followed, or waited for
        with _alone(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW):
            try:
                yield partial
                _check(target, overwrite=overwrite)  # in hours somebody may have come before
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
        BadQuery: there is something of that name, or it cannot be written, or is being written.
    """
    partial = _partial(target)
    if target.exists():
        raise BadQuery(f"{target} exists already. Choose another folder, or remove that one first.")
    try:
        partial.mkdir(exist_ok=True)
        with _alone(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW):
            try:
                for left in partial.iterdir():  # by one that was killed
                    shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
                yield partial
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise BadQuery(f"{target} cannot be written: {error.strerror or error}. Choose another folder.") from None


def check_place(target: Path) -> None:
    """Refuse a place where what is written would be taken for a part of a trace.

    Raises:
        BadQuery: it is such a place, or no name.
    """
    if not target.name or target.name == "..":
        raise BadQuery(f"{str(target)!r} is no name of something new. Name a file or a folder that is not there yet.")
    whole = target.parent.resolve() / target.name
    for folder in whole.parents:
        if _OF_TRACE.fullmatch(whole.relative_to(folder).parts[0]) and (folder / TRACE_FILE).is_file():
            raise BadQuery(f"{target} cannot be written: it would be a part of the trace {folder}. Name another place.")


def _partial(target: Path) -> Path:
    check_place(target)
    return target.with_name(target.name + ".partial")


@contextmanager
def _alone(partial: Path, flags: int) -> Iterator[None]:
    """Hold a file or folder, which is made if the flags say so, against others who would write it."""
    busy = BadQuery(f"{partial} is being written by another process. Wait for it, or name another.")
    fd = os.open(partial, flags | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        except OSError:
            pass  # a file system without locks
        try:
            if not os.path.samestat(os.fstat(fd), partial.stat()):
                raise busy
        except FileNotFoundError:
            raise busy from None  # it came to its end this moment
        yield
    finally:
        os.close(fd)


def _check(target: Path, *, overwrite: bool) -> None:
    if target.is_dir():
        raise BadQuery(f"{target} is a directory. Name a file in it.")
    if not target.parent.is_dir():
        raise BadQuery(f"{target} cannot be written: {target.parent} is no directory. Make it first.")
    if target.exists() and not target.is_file():
        raise BadQuery(f"{target} is no file of data, and is not replaced. Choose another file.")
    if target.exists() and not overwrite:
        raise BadQuery(f"{target} exists already. Choose another file, or pass overwrite=True (--overwrite).")
