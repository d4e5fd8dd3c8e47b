"""Builds the native kernel when the package is built, by whatever C compiler there is.

Where there is none, the package `ziglang` from PyPI, which is one, is asked for as a requirement of the build. If
compiling fails all the same, the package is built without the kernel: plain torch operations take its place, slower.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SOURCE = "hookrec/native/capture.c"
_LIBRARY = "hookrec/native/libcapture.so"
_FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-lm"]


def _compiler() -> list[str] | None:
    if "CC" in os.environ:
        return shlex.split(os.environ["CC"])
    return next(([path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles `capture.c` and puts the library into the wheel."""

    def dependencies(self) -> list[str]:
        """Ask for a compiler where there is none."""
        return [] if _compiler() else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before files are collected."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        compiler = _compiler() or [sys.executable, "-m", "ziglang", "cc"]
        source, library = root / _SOURCE, root / _LIBRARY
        command = [*compiler, str(source), *_FLAGS, "-o", str(library)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            if os.environ.get("HOOKREC_REQUIRE_NATIVE") == "1":
                raise RuntimeError(f"{shlex.join(command)} failed:\n{result.stderr}")
            self.app.display_warning(f"The native kernel was not built ({command[0]} failed); torch takes its place.")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(f"/{_LIBRARY}")
