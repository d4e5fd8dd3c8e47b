"""How much memory may still be taken, before the system ends a process for it.

A ring is populated when it is made. What is not there then is not refused by an error: the system kills somebody, most
likely the training. So it is asked first, the system as a whole and each control group that we are in, as a container
or a batch job is. What pages of files take there can be had back, and counts as free.
"""

from collections.abc import Iterator
from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that can be taken; None if nobody says.

    Args:
        proc: where the system tells of itself.
        groups: where control groups are, of version 1 (`memory` below it) or 2.
    """
    return min((*_of_system(proc), *_of_groups(proc, groups)), default=None)


def _of_system(proc: Path) -> Iterator[int]:
    for name, value in _numbers(proc / "meminfo"):
        if name == "MemAvailable:":
            yield value * 1024


def _of_groups(proc: Path, groups: Path) -> Iterator[int]:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if not controllers:
            yield from _above(groups, name, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _above(groups / "memory", name, *names)


def _above(root: Path, name: str, limit: str, used: str, files: str) -> Iterator[int]:
    """Yield what a group and each one around it have left. In a container its own name may not be there."""
    below = [part for part in name.split("/") if part not in ("", "..")]
    for depth in range(len(below) + 1):
        group = root.joinpath(*below[:depth])
        try:
            most, taken = int((group / limit).read_text()), int((group / used).read_text())
        except (OSError, ValueError):  # "max", or no such group
            continue
        back = next((value for name, value in _numbers(group / "memory.stat") if name == files), 0)
        yield max(0, most - taken + back)


def _numbers(path: Path) -> Iterator[tuple[str, int]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        name, _, value = line.partition(" ")
        if (digits := value.split()) and digits[0].isdecimal():
            yield name, int(digits[0])
