"""What nothing can cost less than: the same bytes, in the same hooks, without anything that a recorder does.

`copied` copies what leaf modules return, and its gradients, into one place of memory after the other; `written` has
another process write them to a file as well, past the page cache where the file system allows. The memory is there
before the first step, as the recorder's ring is, and no larger: when it is full of what is not written yet, a step
waits. Neither computes a statistic, names a tensor, or could find one again.
"""

import contextlib
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, frombuffer, nn, uint8

RING = 512 * 10**6
"""As much as `hookrec.attach` takes if it is not told."""
EndOfStep = Callable[[], None]
_SPAN = struct.Struct("=QQ")
_WRITER = """
import mmap, os, struct, sys
ring, path = int(sys.argv[1]), sys.argv[2]
memory = memoryview(mmap.mmap(ring, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
flags = os.O_CREAT | os.O_WRONLY
try:
    file = os.open(path, flags | os.O_DIRECT)
except OSError:
    file = os.open(path, flags)
os.write(1, struct.pack("=Q", 0))
while len(span := sys.stdin.buffer.read(16)) == 16:
    place, end = struct.unpack("=QQ", span)
    while place < end:
        begin = place % len(memory)
        place += os.pwrite(file, memory[begin : min(begin + end - place, len(memory))], place)
    os.write(1, struct.pack("=Q", end))
"""
"""Takes spans of bytes, counted from the first ever copied, and answers each with its end when it is written."""


@contextlib.contextmanager
def copied(model: nn.Module, nbytes: int = RING) -> Iterator[EndOfStep]:
    """Copy what flows through a model into memory of so many bytes, and do nothing with it."""
    with _shared(nbytes) as (_, memory), _hooks(model, memory, lambda end: None):
        yield lambda: None


@contextlib.contextmanager
def written(model: nn.Module, path: Path, nbytes: int = RING) -> Iterator[EndOfStep]:
    """Copy what flows through a model, and let another process write a step as it ends; wait for it at the end."""
    with contextlib.ExitStack() as stack:
        fd, memory = stack.enter_context(_shared(nbytes))
        command = [sys.executable, "-c", _WRITER, str(fd), str(path)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0, "pass_fds": (fd,)}
        writer = stack.enter_context(subprocess.Popen(command, **pipes))
        spans, ends = writer.stdin, writer.stdout
        assert spans is not None
        assert ends is not None
        done = sent = place = 0

        def wait() -> None:
            nonlocal done
            if len(answer := ends.read(8)) < 8:
                raise OSError(f"The process that writes {path} ended.")
            (done,) = struct.unpack("=Q", answer)

        def make_room(end: int) -> None:
            nonlocal place
            place = end
            if end - sent > len(memory):
                raise ValueError(f"A step has more than {len(memory):,} bytes; give it more memory.")
            while end - done > len(memory):
                wait()

        def end_step() -> None:
            nonlocal sent
            spans.write(_SPAN.pack(sent, place))
            sent = place

        wait()  # until it has started, as a recorder's writer has when `attach` returns
        with _hooks(model, memory, make_room):
            yield end_step
        while done < sent:
            wait()
        spans.close()


@contextlib.contextmanager
def _shared(nbytes: int) -> Iterator[tuple[int, Tensor]]:
    """Make memory that another process may have as well, all of it there."""
    fd = os.memfd_create("hookrec-benchmark")
    nbytes -= nbytes % mmap.PAGESIZE
    try:
        os.ftruncate(fd, nbytes)
        # The map is closed with the last tensor that looks at it.
        yield fd, frombuffer(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=uint8)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _hooks(model: nn.Module, memory: Tensor, make_room: Callable[[int], None]) -> Iterator[None]:
    """Copy, each tensor from a page's beginning; say before each copy to which byte it goes, counted from the first."""
    place = 0

    def copy(tensor: Tensor) -> None:
        nonlocal place
        left = len(memory) - place % len(memory)
        begin = place if tensor.nbytes <= left else place + left
        end = begin + -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        make_room(end)
        at = begin % len(memory)
        memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        place = end

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        copy(output.detach())
        output.register_hook(copy)

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            if next(module.children(), None) is None:
                hooks.callback(module.register_forward_hook(hook).remove)
        yield
