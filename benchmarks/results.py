"""How results of a benchmark are kept: a JSON file each, with what is needed to judge and to repeat them.

`benchmarks/results/NAME.json` has the machine, the versions, the command, the load of the machine when it began, and
rows. `benchmarks.report` makes the page of them, so that no figure in it is typed by hand.
"""

import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
_PACKAGES = ("torch", "numpy", "pyarrow", "zarr", "h5py", "safetensors", "tensorstore", "torchlens", "nnsight")

Row = dict[str, Any]


def facts() -> dict[str, Any]:
    """Return machine, versions, command, time and load."""
    import torch

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "command": f"python -m {_module()} {' '.join(sys.argv[1:])}".rstrip(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load": round(os.getloadavg()[0], 2),
    }


def progress(text: str) -> None:
    """Say on stderr what is measured next."""
    print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def show(rows: list[Row]) -> None:
    """Print rows of the same members as a table."""
    if not rows:
        return
    names = list(rows[0])
    cells = [names, *([text(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    for line in cells:
        numbers = (
            cell.ljust(width) if cells[1][column] and not cells[1][column][0].isdigit() else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(numbers).rstrip())


def text(value: object) -> str:
    """Return a value as a cell shows it, to three digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def finish(name: str, tables: dict[str, list[Row]], began: dict[str, Any], *, as_json: bool, keep: bool) -> None:
    """Print tables, or all as JSON, and keep them where that is wanted."""
    document = {**began, "tables": {title: [_numbers(row) for row in rows] for title, rows in tables.items()}}
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        print(f"{began['processor']}, {began['cores']} cores, load {began['load']}, {began['threads']} threads")
        for title, rows in document["tables"].items():
            print(f"\n{title}")
            show(rows)
    if keep:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def _numbers(row: Row) -> Row:
    """JSON has no NaN."""
    return {name: None if value != value else value for name, value in row.items()}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else sys.argv[0]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
