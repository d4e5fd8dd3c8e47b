"""How a script runs under `hookrec run`: as it would without us, but for what is in HOOKREC_RUN.

This file is the program of a fresh interpreter, so that nothing of the command line is in the script's process: no
click, no replay, and a `replay.py` beside the script is the script's. `sys.argv`, `sys.path[0]`, `__main__` and its
`__file__`, `__spec__` and `__loader__` are what the interpreter makes them, since `multiprocessing`, `pickle` and
launchers look there. `runpy.run_path` would put the old `__main__` back before threads and `atexit` functions are done.

An exception leaves by the interpreter's own way, which knows exit codes and signals; only our frames are taken out of
what is printed.
"""

import builtins
import importlib.util
import io
import json
import os
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

_OURS = str(Path(__file__).resolve().parent) + os.sep


def main() -> None:
    """Run what the arguments name."""
    task = json.loads(os.environ.pop("HOOKREC_RUN"))
    target, *arguments = sys.argv[1:]
    flags = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    sys.orig_argv[:] = [sys.orig_argv[0], *flags, *(("-m",) if task["module"] else ()), target, *arguments]
    # The folder of this file must not be where the script's imports are looked for.
    if not sys.flags.safe_path:
        del sys.path[0]
    _load("hookrec")
    if task["listen"]:
        from hookrec.control import listen

        listen()
    if task["path"] is not None:
        from hookrec.autorecord import AutoRecord

        AutoRecord(task["path"], task["options"], None if task["quiet"] else _say, task.get("stop_after"))
    try:
        if task["module"]:
            _run_module(target, arguments)
        else:
            _run_script(target, arguments)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = _without_ours(error.__traceback__)
        sys.excepthook = _hiding(sys.excepthook)
        raise


def _run_script(script: str, arguments: list[str]) -> None:
    sys.argv[:] = [script, *arguments]
    if Path(script).is_dir() or _is_zip(script):
        sys.path.insert(0, os.path.abspath(script))
        _fresh_main()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    path = os.path.abspath(script)
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(script).resolve().parent))
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = _fresh_main()
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    vars(module)["__cached__"] = None
    exec(code, vars(module))


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv[:] = ["-m", *arguments]
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    _fresh_main()
    runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]


def _fresh_main() -> ModuleType:
    module = ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    vars(module)["__annotations__"] = {}
    main._first = sys.modules["__main__"]  # type: ignore[attr-defined] # its functions need it until the end
    sys.modules["__main__"] = module
    return module


def _is_zip(path: str) -> bool:
    import zipfile

    return zipfile.is_zipfile(path)


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this package, and of `runpy` where it leads from us to a module."""
    kept: list[TracebackType] = []
    began = False
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(_OURS) and (began or file != "<frozen runpy>"):
            kept.append(traceback)
            began = True
        traceback = traceback.tb_next
    for number, entry in enumerate(kept):
        entry.tb_next = kept[number + 1] if number + 1 < len(kept) else None
    return kept[0] if kept else None


def _hiding(hook: Callable[..., Any]) -> Callable[..., Any]:
    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
        traceback = sys.last_traceback = _without_ours(traceback)
        error.__traceback__ = traceback
        return hook(kind, error, traceback)

    return excepthook


def _say(line: str) -> None:
    if sys.stderr is not None:
        print(f"hookrec: {line}", file=sys.stderr)


def _load(name: str) -> None:
    """Import our package by its place, as the writer does: the script's folder may have one of the name."""
    place = Path(__file__).resolve().parent.parent / name / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    main()
