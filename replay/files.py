"""How bytes reach a file and come back: past the page cache where that works, with few files open.

Direct I/O takes whole pages only, from page borders in memory to page borders in the file. Where a file system has
none, or refuses it at the first write, writing goes on through the page cache. Either way it is the system that decides
when bytes reach the disk itself; what is to outlast a loss of power is brought there by `sync`.
"""

import contextlib
import errno
import fcntl
import os
import resource
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import google_crc32c
import numpy as np

from replay.errors import TraceDamaged

PAGE = 4096
VECTOR = 1024
"""The most parts that one call writes: IOV_MAX."""
DIRECT_BYTES = 65_536
"""Records from this size on, and smaller ones of whole pages, begin on page borders and go by direct I/O."""

_OPEN_FILES = 400


def stride_of(nbytes: int) -> int:
    """Return the bytes that a record takes in a file where it is not compressed: whole pages, if it goes directly."""
    return nbytes if nbytes < DIRECT_BYTES else -(-nbytes // PAGE) * PAGE


def memory(nbytes: int) -> memoryview:
    """Return memory that can be written to, and holds anything: to fill it with zeros takes as long as to read."""
    return np.empty(nbytes, np.uint8).data


def checksum(data: memoryview) -> int:
    """Return the CRC-32C of bytes, none of which are copied: the extension takes no memory that can be written to."""
    return int(google_crc32c.value(np.frombuffer(data.toreadonly(), np.uint8)))


class Files:
    """A few open files; the longest unused is closed first.

    Args:
        flags: of `os.open`.
    """

    def __init__(self, flags: int) -> None:
        self._flags = flags | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in the place of a file would be waited for
        self._fds: OrderedDict[tuple[Path, bool], int] = OrderedDict()
        self._unsynced: set[Path] = set()
        self._most = min(_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    def write(self, path: Path, parts: Sequence[memoryview], offset: int, *, direct: bool) -> None:
        """Write parts one behind the other, at most `VECTOR` of them.

        Args:
            path: the file; it is made if it is not there and the flags say so.
            parts: what is written; if directly, then whole pages that begin on page borders.
            offset: where in the file the first part begins.
            direct: past the page cache, if that can be.

        Raises:
            OSError: not all was written.
        """
        fd = self._fd(path, direct)
        self._unsynced.add(path)
        while parts:
            try:
                written = os.pwritev(fd, parts, offset)
            except OSError as error:
                # Some file systems take O_DIRECT at open and refuse it at the first write; what is left of a write
                # that was cut short may not end on a border.
                if not direct or error.errno != errno.EINVAL:
                    raise
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                direct = False
                continue
            offset += written
            whole = 0
            while whole < len(parts) and written >= len(parts[whole]):
                written -= len(parts[whole])
                whole += 1
            parts = [parts[whole][written:], *parts[whole + 1 :]] if whole < len(parts) else []

    def sync(self) -> set[Path]:
        """Bring to the disk itself what was written since the last call; return which files that were.

        Raises:
            OSError: the bytes of one are not there, and are lost.
        """
        written, self._unsynced = self._unsynced, set()
        for path in written:
            os.fdatasync(self._fd(path, direct=(path, True) in self._fds))
        return written

    def read(self, path: Path, offset: int, nbytes: int) -> memoryview:
        """Return committed bytes from an offset on.

        Raises:
            TraceDamaged: they are not all there.
        """
        self.check(path, offset, nbytes)
        data = memory(nbytes)
        self.fill(path, data, offset)
        return data

    def check(self, path: Path, offset: int, nbytes: int) -> None:
        """See that bytes are there before memory is taken for them: a damaged number may be any.

        Raises:
            TraceDamaged: they are not all there.
        """
        try:
            there = os.fstat(self._fd(path, direct=False)).st_size
        except OSError as error:
            raise _unreadable(path, error) from error
        if offset < 0 or nbytes < 0 or there - offset < nbytes:
            raise _too_short(path, offset, nbytes, max(0, there - offset))

    def fill(self, path: Path, data: memoryview, offset: int) -> None:
        """Read committed bytes from an offset on into memory that is there.

        Raises:
            TraceDamaged: they are not all there.
        """
        got = 0
        try:
            fd = self._fd(path, direct=False)
            while got < len(data) and (n := os.preadv(fd, [data[got:]], offset + got)):
                got += n
        except OSError as error:
            raise _unreadable(path, error) from error
        if got != len(data):
            raise _too_short(path, offset, len(data), got)

    def drop(self, path: Path) -> None:
        """Close a file that will not be needed soon."""
        for direct in (False, True):
            if (fd := self._fds.pop((path, direct), None)) is not None:
                _close(fd)

    def close(self) -> None:
        """Close all files."""
        while self._fds:
            _close(self._fds.popitem()[1])

    def _fd(self, path: Path, direct: bool) -> int:
        key = (path, direct)
        fd = self._fds.get(key)
        if fd is not None:
            self._fds.move_to_end(key)
            return fd
        if len(self._fds) >= self._most:
            _close(self._fds.popitem(last=False)[1])
        try:
            fd = os.open(path, self._flags | (os.O_DIRECT if direct else 0), 0o666)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            fd = os.open(path, self._flags, 0o666)  # a file system without direct I/O
        self._fds[key] = fd
        return fd


def _unreadable(path: Path, error: OSError) -> TraceDamaged:
    return TraceDamaged(f"{path} cannot be read: {error}. The records of other files can still be read.")


def _too_short(path: Path, offset: int, nbytes: int, there: int) -> TraceDamaged:
    return TraceDamaged(f"{path} is too short: {nbytes} bytes were committed at {offset}, {there} are there.")


def sync(path: Path) -> None:
    """Bring a file, or the names that a folder has, to the disk itself.

    Raises:
        OSError: that cannot be.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """Bring whatever is in a folder to the disk itself."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(place, name))
        sync(Path(place))


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)
