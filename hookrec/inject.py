"""How a CPython that has never heard of us comes to listen.

From Python 3.14 on there is a door for this: `sys.remote_exec`. Before, a debugger stops the process for a moment and
calls `Py_AddPendingCall(PyRun_SimpleString, code)` in it. That call only puts the code into a queue; the interpreter
runs it itself, in its main thread, between two bytecodes, as it runs signal handlers. So nothing of Python's is touched
while the process is stopped, and it does not matter what it was doing. The code's text is put into memory that comes
from `mmap`, since `malloc` may be in the middle of something. The code imports hookrec, listens, and never raises.

A debugger that is older than the processor breaks what it stops: gdb 13 cannot restore the registers of processors with
AMX, and the system call that it has interrupted fails in the process. So the debugger shows on a process of ours first
that it can call a function and leave no trace. The process's symbols are not loaded (`auto-solib-add off`): torch has
hundreds of megabytes of them, and the training would stand still meanwhile.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hookrec.client import Unreachable, check_process, socket_of

_STOPPED_S = 120.0  # to end a debugger in the middle of a call would do harm
_REMOTE_EXEC = (3, 14)
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_HERE = Path(__file__).resolve().parent

Say = Callable[[str], None]


def make_listen(pid: int, wait_s: float, debugger: str | None, say: Say) -> Path:
    """Make a process listen; return its socket.

    Args:
        pid: the process.
        wait_s: seconds to wait until its main thread comes to run Python code.
        debugger: "gdb" or "lldb"; None for the first that works.
        say: is told what happens.

    Raises:
        Unreachable: it cannot be done, and the process was left as it was.
    """
    check_process(pid)
    version = python_of(pid)
    _check_torch(pid)
    code = code_to_listen()
    if version >= _REMOTE_EXEC:
        _by_remote_exec(pid, version, code)
    else:
        _check_rights(pid)
        tool = _working_debugger(debugger, say)
        say(f"hookrec: process {pid} does not listen; {tool} stops it for a moment")
        if not _call(tool, pid, code):
            raise Unreachable(
                f"{tool} could not call into process {pid}; it goes on as before. Restart the training under "
                "`hookrec run`, or call hookrec.listen() in it."
            )
    return _wait(pid, wait_s)


def code_to_listen() -> str:
    """Return the code that is run in the other process: it listens, or keeps silent."""
    return (
        "try:\n"
        " import sys as _s, importlib.util as _u\n"
        " if 'hookrec' not in _s.modules:\n"
        f"  _p = _u.spec_from_file_location('hookrec', {str(_HERE / '__init__.py')!r})\n"
        "  _m = _s.modules['hookrec'] = _u.module_from_spec(_p); _p.loader.exec_module(_m)\n"
        " _s.modules['hookrec'].listen()\n"
        "except BaseException as _e:\n"
        " try: print('hookrec: this process cannot listen:', repr(_e), file=_s.stderr)\n"
        " except BaseException: pass\n"
        "for _n in '_s _u _p _m _n'.split(): globals().pop(_n, None)\n"
    )


def python_of(pid: int) -> tuple[int, int]:
    """Return the version of the CPython that a process runs.

    Raises:
        Unreachable: it runs none, or one that hookrec does not run on.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError as error:
        raise Unreachable(f"Process {pid} cannot be looked at: {error.strerror}. Is it yours?") from None
    found = re.search(r"/(?:libpython|python)(3)\.(\d+)[^/\n]*$", maps, re.MULTILINE)
    if found is None:
        name = re.search(r"/(lib|bin)/python3?\.?(\d*)", maps)
        what = "its Python cannot be told" if name else "it maps no libpython3"
        raise Unreachable(f"Process {pid} is no CPython that hookrec could reach: {what}.")
    version = int(found[1]), int(found[2])
    if version < (3, 11):
        raise Unreachable(f"Process {pid} runs Python {version[0]}.{version[1]}; hookrec needs 3.11 or later.")
    return version


def _check_torch(pid: int) -> None:
    maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    if "libtorch" not in maps:
        raise Unreachable(f"Process {pid} has not loaded torch, so there is nothing to record in it.")


def _check_rights(pid: int) -> None:
    """Say what forbids to trace a process, as far as it can be known before it is tried."""
    setting = _PTRACE_SCOPE.read_text().strip() if _PTRACE_SCOPE.exists() else "0"
    if setting == "3" or (setting in ("1", "2") and os.geteuid() != 0):
        raise Unreachable(
            f"The system does not let one process look into another ({_PTRACE_SCOPE} is {setting}). As root: "
            f"`sysctl kernel.yama.ptrace_scope=0`, or run hookrec attach as root; else restart the training "
            "under `hookrec run`."
        )
    tracer = re.search(r"^TracerPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if tracer is not None and tracer[1] != "0":
        raise Unreachable(f"Process {pid} is traced by process {tracer[1]} already (a debugger, or strace).")


def _by_remote_exec(pid: int, version: tuple[int, int], code: str) -> None:
    if sys.version_info[:2] != version:
        raise Unreachable(
            f"Process {pid} runs Python {version[0]}.{version[1]}, and sys.remote_exec needs the same version here. "
            "Run hookrec attach by the training's own Python."
        )
    # The other process opens the file when it comes to it, so it must stay.
    file = tempfile.NamedTemporaryFile("w", prefix="hookrec-", suffix=".py", delete=False)  # noqa: SIM115
    with file:
        file.write(f"{code}\n__import__('os').unlink({file.name!r})\n")
    try:
        sys.remote_exec(pid, file.name)  # type: ignore[attr-defined]
    except (OSError, RuntimeError) as error:
        Path(file.name).unlink(missing_ok=True)
        raise Unreachable(f"Process {pid} could not be reached by sys.remote_exec: {error}") from None


def _working_debugger(wanted: str | None, say: Say) -> str:
    """Return the path of a debugger that can call a function in a process and leave it unharmed.

    Raises:
        Unreachable: there is none.
    """
    names = [wanted] if wanted else ["gdb", "lldb"]
    there = [path for name in names for path in _installed(name)]
    if not there:
        raise Unreachable(
            f"The process does not listen, and {' or '.join(names)} is not installed, by which it could be made to. "
            "Install it, or restart the training under `hookrec run`."
        )
    for path in there:
        if _is_harmless(path):
            return path
        say(f"hookrec: {path} cannot call functions on this machine without harm, so it is not used")
    raise Unreachable(
        "No debugger that is installed can call into a process on this machine without harm; a newer one may. "
        "Else restart the training under `hookrec run`."
    )


def _installed(name: str) -> list[str]:
    """Debuggers of a name; those of Debian have the version in it."""
    candidates = [name, *(f"{name}-{number}" for number in range(30, 13, -1))]
    return [path for candidate in candidates if (path := shutil.which(candidate))]


def _is_harmless(debugger: str) -> bool:
    """Whether a debugger can do its work in a process of ours, which sleeps and would notice harm."""
    child = "import time; print(flush=True)\nwhile 'hookrec_done' not in globals(): time.sleep(0.05)\n"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", child], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            called = _call(debugger, process.pid, "import __main__; __main__.hookrec_done = True\n")
            return called and process.wait(5) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            process.kill()


def _call(debugger: str, pid: int, code: str) -> bool:
    """Put code into the queue of a process by a debugger; return whether it says that it has."""
    with tempfile.NamedTemporaryFile(prefix="hookrec-", suffix=".bin") as text:
        text.write(code.encode() + b"\0")
        text.flush()
        arguments = lldb_script(pid, code) if "lldb" in Path(debugger).name else gdb_script(pid, text.name, len(code))
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [debugger, *arguments], capture_output=True, text=True, timeout=_STOPPED_S, stdin=subprocess.DEVNULL
            )
            return re.search(r"^(hookrec-queued|\(int\) \$\d+ =) 0$", done.stdout, re.MULTILINE) is not None
    return False


def gdb_script(pid: int, file: str, length: int) -> list[str]:
    """Return the arguments by which gdb puts the text of a file into the queue of a process."""
    lines = [
        "set confirm off",
        "set pagination off",
        "set auto-solib-add off",
        "set debuginfod enabled off",
        f"attach {pid}",
        "sharedlibrary libc",
        "sharedlibrary libpython",
        # PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS
        f"set $place = ((void*(*)(void*, unsigned long, int, int, int, long))mmap)(0, {length + 1}, 3, 0x22, -1, 0)",
        f"restore {file} binary $place",  # its own parser takes no expression with a blank in it
        "set $queued = ((int(*)(void*, void*))Py_AddPendingCall)((void*)PyRun_SimpleString, $place)",
        'printf "hookrec-queued %d\\n", $queued',
        "detach",
    ]
    return ["-nx", "-batch", *(part for line in lines for part in ("-ex", line))]


def lldb_script(pid: int, code: str) -> list[str]:
    """Return the arguments by which lldb puts code into the queue of a process."""
    text = code.encode()
    # lldb has no command that copies a file into memory as gdb has, so the text is written by words of eight bytes.
    words = [int.from_bytes(text[i : i + 8].ljust(8, b"\0"), "little") for i in range(0, len(text) + 1, 8)]
    writes = "".join(f"$place[{i}] = {word}UL; " for i, word in enumerate(words))
    mmap = "((void*(*)(void*, unsigned long, int, int, int, long))mmap)"
    lines = [
        "settings set target.preload-symbols false",
        f"process attach --pid {pid}",
        f"expression -- unsigned long *$place = (unsigned long*){mmap}(0, {len(words) * 8}, 3, 0x22, -1, 0)",
        "expression -- unsigned long $run = (unsigned long)(int(*)(const char*))PyRun_SimpleString",
        f"expression -- {writes}(void)0",
        "expression --format d -- ((int(*)(unsigned long, void*))Py_AddPendingCall)($run, $place)",
        "detach",
    ]
    return ["--no-lldbinit", "--batch", *(part for line in lines for part in ("-o", line))]


def _wait(pid: int, wait_s: float) -> Path:
    deadline = time.monotonic() + wait_s
    while (path := socket_of(pid)) is None:
        if time.monotonic() > deadline:
            raise Unreachable(
                f"Process {pid} was asked to listen, and its main thread has run no Python code for {wait_s:g} s. "
                "It will listen when it does; look by `hookrec status`. If it never does, its standard error says why."
            )
        time.sleep(0.1)
    return path
