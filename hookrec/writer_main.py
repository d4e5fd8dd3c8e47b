"""The writer process, from its configuration to the seal.

It is a process of its own so that writing costs the training neither its GIL nor a page cache, and so that there is
somebody left when the training is killed: it then takes what is still in the socket and the ring, commits the steps
that are whole and seals the trace. It never imports torch.
"""

import contextlib
import json
import mmap
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from hookrec.attempt import Attempt, CannotResume, changes_of_plan, locked_soon, take_up
from hookrec.held import Held
from hookrec.messages import Source
from hookrec.provenance import write_trace_file
from hookrec.resume import SHARED_FILES, Predecessor, cut_torn_line
from hookrec.ring import PAGE, Control
from hookrec.writer import Writer, write_model_file
from replay import format as trace_format

# Where there are fewer cores than threads, the training goes first.
_NICE = 10


def main(memory_fd: int, socket_fd: int) -> int:
    """Run the writer on inherited file descriptors; the configuration comes on standard input."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what ends the training ends us only after we are done
    config = json.load(sys.stdin)
    os.nice(_NICE)
    connection = socket.socket(fileno=socket_fd)
    training = os.pidfd_open(config["pid"])
    memory = memoryview(mmap.mmap(memory_fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    directory = Path(config["directory"])
    _raise_file_limit()
    with contextlib.ExitStack() as stack:
        answer: dict[str, Any] = {}
        try:
            stack.enter_context(locked_soon(directory, (config.get("attempt") or {}).get("wait_s", 0.0)))
            writer, before, attempt, answer = _begin(directory, config, memory)
        except CannotResume as error:
            connection.sendall(json.dumps({"refused": str(error)}).encode() + b"\n")
            return 1
        except Exception as error:
            connection.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
            return 1
        connection.sendall(json.dumps(answer).encode() + b"\n")
        try:
            held = None
            if config["plan"]["flight"] is not None:
                held = Held(directory, config["plan"], len(memory) - PAGE, writer, before, attempt)
            for messages in Source(connection, training, len(memory)):
                if held is not None:
                    held.take(messages)
                    continue
                needed = max(facts.get("need", 0) for _, _, facts in messages)
                writer.take(messages if before is None else before.only_new(messages), needed=needed)
            if held is not None:
                held.finish()
        except Exception as error:
            # Another writer would do no better: neither a full disk nor a fault of ours goes away by that.
            why = f"the trace could not be written: {_words(error)}"
            with contextlib.suppress(OSError):  # that file may be on the same disk
                print(why, file=sys.stderr, flush=True)
            Control(memory).failed = True
            writer.end = {"how": "failed", "detail": why, "books": {}}
        connection.close()
        try:
            writer.finish()
        except Exception as error:
            print(f"the trace could not be sealed: {_words(error)}", file=sys.stderr)
            return 1
    return 0


def _begin(
    directory: Path, config: dict[str, Any], memory: memoryview
) -> tuple[Writer, Predecessor | None, Attempt, dict[str, Any]]:
    """Return the writer, what was there before it, the attempt that it records, and the answer to the training.

    Raises:
        CannotResume: as `take_up`.
    """
    before = None
    answer: dict[str, Any] = {}
    succeeds = "predecessor" in config
    if succeeds:
        attempt = Attempt.of(config, directory)
        for name in SHARED_FILES:
            cut_torn_line(directory / name)
        before = Predecessor(directory, config["predecessor"], Control(memory).released, attempt.number)
    elif config.get("attempt") is not None:
        attempt, before, answer = take_up(directory, config)
    else:
        attempt = Attempt()
    try:
        if config["trace"] is not None and not (before and (directory.parent / trace_format.TRACE_FILE).exists()):
            write_trace_file(directory.parent, config)
        changes = changes_of_plan(directory, config["plan"]) if attempt.number and not succeeds else None
        if not succeeds:
            write_model_file(directory, config["model"])
        writer = Writer(directory, config["plan"], memory, before, attempt)
        writer.begin()
    except Exception:
        if attempt.number and not attempt.begun:
            with contextlib.suppress(Exception):
                attempt.seal(directory, {}, durable=False)  # as it was before we came
        raise
    if succeeds:
        writer.note(f"the writer process is gone ({config['predecessor']['why']}); another goes on from here")
    if changes is not None:
        writer.note(f"resumed from step {attempt.first_step} on by another plan: {changes}")
    return writer, before, attempt, answer


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _words(error: Exception) -> str:
    """What an error says, in one line; of one that is no fault of the system, its name as well."""
    text = " ".join(str(error).split())
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"
