"""Where a trace comes from, as `trace.json` has it: the machine, the command, the versions, the state of the code."""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replay import format as trace_format

_ENVIRONMENT = ("CUDA_", "CUBLAS_", "NCCL_", "OMP_", "MKL_", "PYTORCH_", "TORCH_", "SLURM_JOB_ID", "RANK", "WORLD_SIZE")
_PACKAGES = ("torch", "numpy", "hookrec", "transformers", "lightning", "accelerate")


def provenance_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a training comes from; of ranks after the first, which say no more, where it runs."""
    found = {"host": platform.node(), "platform": platform.platform(), "pid": config["pid"]}
    if config["trace"] is None:
        return found
    cwd = config["trace"]["cwd"]
    return {
        **found,
        "command": config["trace"]["command"],
        "cwd": cwd,
        "python": platform.python_version(),
        "packages": {**_versions(), **config["trace"]["packages"]},
        "git": _git(cwd),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_ENVIRONMENT)},
        "seed": config["trace"]["seed"],
    }


def write_trace_file(root: Path, config: Mapping[str, Any]) -> None:
    """Write `trace.json` as the writer's configuration has it."""
    identity = {
        "format": trace_format.FORMAT,
        "version": trace_format.VERSION,
        "id": uuid.uuid4().hex,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "ranks": config["trace"]["ranks"],
        "plan": config["plan"],
        "provenance": provenance_of(config),
    }
    trace_format.write_whole(root / trace_format.TRACE_FILE, json.dumps(identity, indent=1) + "\n")


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _git(cwd: str) -> dict[str, Any] | None:
    """The commit that the training's folder is at, and whether files differ from it."""
    if shutil.which("git") is None:
        return None
    try:
        run = {"cwd": cwd, "capture_output": True, "text": True, "timeout": 2, "check": True}
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **run).stdout.strip()  # type: ignore[call-overload]
        status = subprocess.run(["git", "status", "--porcelain", "-uno"], **run).stdout  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(status.strip())}
