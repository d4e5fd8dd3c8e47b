"""Where the control sockets are, who may use them, and how a line of JSON goes over one.

One folder a user, with mode 0700, holds a socket a process, named by its number. The folder is in XDG_RUNTIME_DIR where
the session has one; a training that was started by cron or by ssh may have none, so who looks for it looks in the other
places as well. The kernel tells both ends whose process the other is. The protocol is in schemas/control.md.

Neither torch nor replay is imported: a training and the command line both read this file.
"""

import contextlib
import json
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any

PROTOCOL = 1
LINE_BYTES = 1 << 20
_CREDENTIALS = struct.Struct("iII")


class NoSocket(OSError):
    """There is no place for a socket, nobody at it, or somebody else."""


def folders() -> list[Path]:
    """Return the folders where sockets of this user may be, the preferred first."""
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    places = [Path(runtime) / "hookrec"] if runtime and Path(runtime).is_absolute() else []
    places += [Path(f"/run/user/{uid}/hookrec"), Path(f"/tmp/hookrec-{uid}")]
    return list(dict.fromkeys(places))


def make_folder() -> Path:
    """Make the folder for a new socket, or take the one that is there.

    Raises:
        NoSocket: nowhere can one be made that is this user's alone.
    """
    reasons = []
    for folder in folders():
        if folder.parent.is_dir():
            try:
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
                check_folder(folder)
                if os.access(folder, os.W_OK):
                    return folder
                reasons.append(f"{folder} cannot be written to")
            except OSError as error:
                reasons.append(str(error) if isinstance(error, NoSocket) else f"{folder}: {error.strerror}")
    raise NoSocket("; ".join(reasons) or "there is no folder for sockets")


def check_folder(folder: Path) -> None:
    """Raise NoSocket unless a folder is this user's alone: in /tmp anybody can make one with our name."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise NoSocket(f"{folder} is not a folder of this user's alone (owner {found.st_uid}, mode {found.st_mode:o})")


def bind(folder: Path) -> tuple[socket.socket, Path]:
    """Listen at a socket that is named by this process.

    A dead process of the same number may have left one; a live one of another container may have the name.
    """
    path = folder / f"{os.getpid()}.sock"
    number = 1
    while path.exists() and not remove_if_dead(path):
        number += 1
        path = folder / f"{os.getpid()}.{number}.sock"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(8)
    except OSError as error:
        listening.close()
        raise NoSocket(f"{path}: {error.strerror or error}") from None
    return listening, path


def remove_if_dead(path: Path) -> bool:
    """Remove a socket at which nobody listens any more; return whether it is gone."""
    try:
        connect(path, 1.0).close()
    except (ConnectionRefusedError, FileNotFoundError):
        path.unlink(missing_ok=True)
        return True
    except OSError:
        return False
    return False


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Connect to a socket.

    Raises:
        OSError: nobody is there.
        NoSocket: somebody else's process is there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        check_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def check_peer(connection: socket.socket) -> None:
    """Raise NoSocket unless the other end is a process of this user's."""
    _, uid = _credentials(connection)
    if uid != os.geteuid():
        raise NoSocket(f"the process at the other end is user {uid}'s")


def peer_of(connection: socket.socket) -> int:
    """Return the number of the process at the other end."""
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, int]:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message as a line."""
    connection.sendall(json.dumps({"hookrec": PROTOCOL, **message}).encode() + b"\n")


def receive(connection: socket.socket) -> dict[str, Any]:
    """Return the message of the next line.

    Raises:
        ValueError: it is none.
        OSError: it did not come in time.
    """
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(65536)
        if not part or len(line) + len(part) > LINE_BYTES:
            raise ValueError("the line is not whole" if not part else f"the line is longer than {LINE_BYTES} bytes")
        line += part
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("the line is nested too deeply") from None
    if not isinstance(message, dict) or not isinstance(message.get("hookrec"), int):
        raise ValueError("the line is no message of hookrec's")
    return message
