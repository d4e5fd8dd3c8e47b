"""What a trace may not have in it: links where something is written, and where it is read files that never end.

A trace may come from a stranger, as an archive that was unpacked. A link in it would let whoever finishes that trace
write, or remove, wherever the link leads; a pipe or a device in the place of a file would keep a reader waiting for
ever. So before a rank is written to all of it is looked at, once, and before a trace is read the folders that have
names of the format in them. Whoever can change the trace while it is looked at could write there by himself.
"""

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from replay.errors import TraceDamaged


def refuse_link(path: Path) -> None:
    """Raise TraceDamaged if a path is a link."""
    if path.is_symlink():
        raise _link(path)


def refuse_links(rank_directory: Path) -> None:
    """Make sure that what is written into a rank goes into it, and nowhere else.

    Raises:
        TraceDamaged: there is a link in it, or it is one, or something that is neither file nor folder.
    """
    refuse_link(rank_directory)
    folders = [rank_directory]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    raise _link(Path(entry.path))
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    raise _odd(Path(entry.path))


def refuse_pipes(folders: Iterable[Path]) -> None:
    """Make sure that what is in folders can be read to an end; links are followed, also such as lead nowhere.

    Raises:
        TraceDamaged: something in one of them is neither file nor folder.
    """
    for folder in folders:
        # A folder that cannot be read is named by whoever reads the files in it.
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False) and _is_odd(entry):
                    raise _odd(Path(entry.path))


def _is_odd(entry: "os.DirEntry[str]") -> bool:
    try:
        mode = entry.stat().st_mode
    except OSError:
        return False  # gone, or a link that leads nowhere
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _link(path: Path) -> TraceDamaged:
    return TraceDamaged(
        f"{path} is a link, and nothing is written where one leads. If it is yours, put what it leads to in its place."
    )


def _odd(path: Path) -> TraceDamaged:
    return TraceDamaged(f"{path} is no file, as a trace has them, but a pipe, a socket or a device. Remove it.")
