"""Where the ranks lie in a trace: a folder each, `rank-00000` and on.

What else is named after one, such as `rank-00000.partial` of a conversion or a copy that somebody put beside it, is no
rank to any reader.
"""

import re
from pathlib import Path

PATTERN = r"rank-[0-9]+"


def name_of(rank: int) -> str:
    """Return the name of the folder of a rank."""
    return f"rank-{rank:05}"


def ranks_of(trace: Path) -> dict[int, Path]:
    """Return the folders of the ranks that are there by their numbers, in order; none where there is no trace."""
    found: dict[int, Path] = {}
    for path in sorted(trace.glob("rank-[0-9]*")):
        if re.fullmatch(PATTERN, path.name) and path.is_dir():
            found.setdefault(int(path.name.removeprefix("rank-")), path)
    return dict(sorted(found.items()))
