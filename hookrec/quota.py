"""Which tensors go when the traces below a folder take more than their quota: the oldest of the oldest sealed trace.

Statistics never go, nor does anything of a trace that is live, torn or pinned. How a tensor goes is known by
`replay.dropping`.
"""

import datetime
import os
from collections.abc import Sequence
from pathlib import Path

from hookrec.journal import Journal
from replay.documents import read_identity
from replay.dropping import Shard, drop, finish_dropping, on_disk, shards
from replay.errors import ReplayError
from replay.format import PINNED_FILE
from replay.ranks import ranks_of
from replay.seal import is_sealed, locked


class Quota:
    """Keeps the traces below a folder within a number of bytes on the disk.

    Args:
        limit_bytes: the number.
        journal: is told what went, and what could not.
    """

    def __init__(self, limit_bytes: int, journal: Journal) -> None:
        self._limit = limit_bytes
        self._journal = journal
        self._sizes: dict[Path, int] = {}  # of sealed traces, which do not grow

    def keep(self, traces: Sequence[Path], time: str) -> None:
        """Drop tensors until the traces fit, or until nothing is left that may go.

        Args:
            traces: their directories.
            time: now (RFC 3339).
        """
        self._sizes = {trace: self._sizes[trace] for trace in traces if trace in self._sizes}
        excess = sum(self._size(trace) for trace in traces) - self._limit
        for trace in _oldest_first(traces) if excess > 0 else ():
            if excess <= 0:
                break
            try:
                freed, count = self._drop_from(trace, excess, time) if _may_go(trace) else (0, 0)
            except (OSError, ReplayError) as error:
                self._journal.complain((trace, "quota"), f"Tensors of {trace} cannot be dropped: {error}")
                continue
            finally:
                self._sizes.pop(trace, None)
            if count:
                self._journal.say(
                    "dropped", f"{count} files of tensors of {trace}, {freed:,} bytes, to keep the quota", trace=trace
                )
            excess -= freed
        if excess > 0:
            self._journal.complain(
                "quota",
                f"The quota is exceeded by {excess:,} bytes, and all that is left is statistics, or belongs to traces "
                "that are live, torn or pinned. Remove traces, unpin some, or raise the quota.",
            )
        else:
            self._journal.forget("quota")

    def _size(self, trace: Path) -> int:
        if trace in self._sizes:
            return self._sizes[trace]
        sealed = False
        try:
            sealed = _is_sealed(trace)
            for rank in ranks_of(trace).values() if sealed else ():
                finish_dropping(rank)
        except (OSError, ReplayError) as error:
            self._journal.complain((trace, "quota"), f"Tensors of {trace} cannot be dropped: {error}")
        size = bytes_on_disk(trace)
        if sealed:
            self._sizes[trace] = size
        return size

    def _drop_from(self, trace: Path, excess: int, time: str) -> tuple[int, int]:
        """Drop the oldest tensors of a trace; return the bytes and the number of files."""
        files = [
            (shard.time_s, shard.number, rank, shard) for rank in ranks_of(trace).values() for shard in shards(rank)
        ]
        files.sort(key=lambda file: file[:2])
        victims: dict[Path, list[Shard]] = {}
        freed = count = 0
        for _, _, rank, shard in files:
            if freed >= excess:
                break
            victims.setdefault(rank, []).append(shard)
            freed += shard.nbytes
            count += 1
        why = f"the quota of {self._limit:,} bytes"
        for rank, chosen in victims.items():
            with locked(rank):
                drop(rank, chosen, why, time)
        return freed, count


def bytes_on_disk(directory: Path) -> int:
    """Return what a directory takes on the disk, with all that is in it; links are not followed."""
    total = 0
    folders = [directory]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    total += on_disk(entry.stat(follow_symlinks=False))
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
        except OSError:
            continue  # gone, or not ours to read
    return total


def _is_sealed(trace: Path) -> bool:
    ranks = ranks_of(trace).values()
    return bool(ranks) and all(is_sealed(rank) for rank in ranks)


def _may_go(trace: Path) -> bool:
    return _is_sealed(trace) and not (trace / PINNED_FILE).exists()


def _oldest_first(traces: Sequence[Path]) -> list[Path]:
    dated = []
    for trace in traces:
        try:
            created = datetime.datetime.fromisoformat(read_identity(trace)["created"])
        except (ReplayError, OSError, ValueError):
            continue  # what is not understood is left alone
        if created.tzinfo is None:
            created = created.replace(tzinfo=datetime.UTC)
        dated.append((created, trace))
    return [trace for _, trace in sorted(dated)]
