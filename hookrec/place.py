"""Where a trace comes to lie: its folder and that of this process's rank, which are made if they may be.

What is there already is never overwritten, and what was made for a recording that could not begin goes again.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

from hookrec.control import working_directory
from hookrec.errors import AttachError


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the path of a trace as it is from everywhere.

    Raises:
        AttachError: it is no path.
    """
    if "\0" in os.fsdecode(path):
        raise AttachError(f"{os.fsdecode(path)!r} has a null byte in it, which no path has. Choose another.")
    try:
        return Path(os.path.abspath(path))
    except OSError:
        raise AttachError(
            f"{path} is relative, and the working directory of this process is gone. Give an absolute path."
        ) from None


def make_directories(path: Path, rank: int, ranks: int, undo: contextlib.ExitStack, *, resume: bool) -> Path:
    """Make the directories of the trace and of this process's rank, as far as they are not there.

    Raises:
        AttachError: something is there already.
        OSError: they cannot be made.
    """
    if path.exists() and not path.is_dir():
        raise AttachError(f"{path} is a file. A trace is a directory: choose another path.")
    rank_directory = path / f"rank-{rank:05}"
    there = rank_directory.exists() or (path / "trace.json").exists()
    if resume and there:
        with contextlib.suppress(OSError):  # whatever is wrong with it is found by the writer, which has words for it
            rank_directory.mkdir()
        return rank_directory
    if rank_directory.exists() or (ranks == 1 and (path / "trace.json").exists()):
        raise AttachError(
            f"{path} holds a trace already, and it is not overwritten. "
            "Choose another path, or remove that directory first; resume=True goes on in it."
        )
    if ranks == 1 and path.exists() and any(path.iterdir()):
        raise AttachError(f"{path} is not empty and is no trace. Choose a new directory, such as {path / 'trace'}.")
    if not path.exists():
        path.mkdir(parents=True, exist_ok=True)
        undo.callback(_remove_empty, path)
    rank_directory.mkdir()
    undo.callback(_remove_empty, rank_directory)
    return rank_directory


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):  # to look into it may take a file more than there are
        for leftover in path.iterdir():
            if leftover.is_file() and leftover.stat().st_size == 0:
                leftover.unlink()
    with contextlib.suppress(OSError):
        path.rmdir()


def rank_of_process() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as torch.distributed or its launcher has them.

    Raises:
        AttachError: the launcher's variables are no numbers.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        try:
            return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except ValueError:
            raise AttachError(
                f"RANK={os.environ['RANK']!r} and WORLD_SIZE={os.environ['WORLD_SIZE']!r} in the environment are no "
                "numbers. Unset them, or start by torchrun, which sets both."
            ) from None
    return 0, 1


def identity() -> dict[str, Any]:
    """Return what `trace.json` says of the training: command, folder, version of torch, seed."""
    return {
        "command": sys.orig_argv,
        "cwd": working_directory(),
        "packages": {"torch": torch.__version__},
        "seed": torch.initial_seed(),
    }
