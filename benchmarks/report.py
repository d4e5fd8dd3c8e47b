"""The page of all figures: `python -m benchmarks.report [--only PART ...] [--small] [--render] [--results FOLDER]`.

Each part is a command of its own, in a process of its own, and leaves one JSON file; the page is made of the files that
are there. So a part can be measured again without the others, and `--render` makes the page again without measuring.
What was not measured is listed as that, never left out. Parts are named in `PARTS`, the bars that they are held to in
`benchmarks.bars`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bars import BARS, SHOWN_BY_TESTS, Bar, Tables
from benchmarks.results import FOLDER, Row, text

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
LIMIT_S = 900
PARTS = {
    "peers": (("peers",), ("peers", "mlp", "--rounds", "1", "--steps", "1", "--way", "hookrec")),
    "overhead": (("__main__",), ("__main__", "mlp", "--rounds", "1", "--steps", "1")),
    "linear": (("linear",), ("linear", "--small")),
    "reading": (("reading",), ("reading", "--small")),
    "records": (("records", "--records", "10000000"), ("records", "--records", "160000")),
    "memory": (("memory",), ("memory", "--steps", "20")),
}
"""Of each part the module and its arguments, and those with which it takes seconds."""


def measure(part: str, results: Path, *, small: bool) -> None:
    """Run a part and keep what it found; what was kept before stays if it fails."""
    module, *arguments = PARTS[part][small]
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json"]
    print(f"{part}: {' '.join(command[1:])}", file=sys.stderr, flush=True)
    begin = time.monotonic()
    # What a part leaves that takes too long and is killed goes with the folder.
    with tempfile.TemporaryDirectory(prefix="hookrec-benchmark-", ignore_cleanup_errors=True) as folder:
        environment = os.environ | {"TMPDIR": folder}
        pipe = subprocess.PIPE
        done = subprocess.run(command, stdout=pipe, text=True, timeout=LIMIT_S, check=True, env=environment)
    document = json.loads(done.stdout)
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{part}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"{part}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def render(documents: dict[str, dict[str, Any]], pictures: Path) -> str:
    """Return the page as Markdown; draw its plots into a folder beside it."""
    lines = ["# Benchmarks", "", "Made by `python -m benchmarks.report`; no figure here is typed by hand.", ""]
    lines += ["| what | bar | found | | floor |", "| --- | --- | --- | --- | --- |"]
    for bar in BARS:
        lines.append(_bar(bar, documents))
    lines += ["", "Shown by tests, most of them marked `slow`:", "", *(f"* {row}" for row in SHOWN_BY_TESTS)]
    for part in PARTS:
        lines += ["", f"## {part}", ""]
        if part not in documents:
            lines.append("Not measured.")
            continue
        document = documents[part]
        packages = ", ".join(f"{name} {version}" for name, version in document["packages"].items())
        machine = f"{document['processor']}, {document['cores']} cores, {document['memory_gb']} GB, load"
        lines.append(f"`{document['command']}`, {document['time']}; {machine} {document['load']} at the beginning;")
        lines.append(f"Linux {document['kernel']}, Python {document['python']}, {packages}.")
        for title, rows in document["tables"].items():
            lines += ["", f"### {title}", "", *_table(rows)]
        if part == "linear":
            lines += ["", *_plots(document["tables"], pictures)]
    return "\n".join(lines) + "\n"


def _bar(bar: Bar, documents: dict[str, dict[str, Any]]) -> str:
    aim = f"{'≥' if bar.least else '≤'} {bar.limit:g}"
    try:
        tables = documents[bar.part]["tables"]
        value = bar.found(tables)
    except LookupError:
        return f"| {bar.what} | {aim} | | not measured | |"
    try:
        floor = bar.floor(tables)
    except LookupError:
        floor = "not measured"
    return f"| {bar.what} | {aim} | {text(value)} | {'reached' if bar.met(value) else 'missed'} | {floor} |"


def _table(rows: list[Row]) -> list[str]:
    if not rows:
        return ["Nothing was found."]
    names = list(rows[0])
    cells = [[text(row[name]).replace("|", "\\|") for name in names] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (names, ["---"] * len(names), *cells)]


def _plots(tables: Tables, pictures: Path) -> list[str]:
    from matplotlib.figure import Figure

    pictures.mkdir(parents=True, exist_ok=True)
    lines = []
    for title, y in (("records a step", "us a record"), ("bytes a step", "step GB/s"), ("steps", "us a record")):
        rows = tables[title]
        x = next(iter(rows[0]))
        figure = Figure(figsize=(5, 3), layout="constrained")
        axes = figure.subplots()
        axes.plot([row[x] for row in rows], [row[y] for row in rows], marker="o")
        axes.set(xlabel=x, ylabel=y, xscale="log", ylim=(0, None))
        name = f"linear-{title.replace(' ', '-')}.svg"
        figure.savefig(pictures / name, metadata={"Date": None})
        lines.append(f"![{y}, by {x}]({pictures.name}/{name})")
    return lines


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, help="may be repeated; all if not given")
    parser.add_argument("--small", action="store_true", help="to see that it runs; says nothing about speed")
    parser.add_argument("--render", action="store_true", help="measure nothing, make the page again")
    parser.add_argument("--results", type=Path, default=FOLDER, help="where the JSON files are")
    parser.add_argument("--page", type=Path, default=PAGE)
    chosen = parser.parse_args()
    if chosen.small and (chosen.results == FOLDER or chosen.page == PAGE):
        parser.error("what --small finds says nothing; give it --results and --page of its own")
    failed = []
    for part in () if chosen.render else chosen.only or PARTS:
        try:
            measure(part, chosen.results, small=chosen.small)
        except (subprocess.SubprocessError, json.JSONDecodeError) as error:
            failed.append(f"{part}: {error}")
    files = {part: chosen.results / f"{part}.json" for part in PARTS}
    documents = {part: json.loads(file.read_text()) for part, file in files.items() if file.exists()}
    if not documents:
        sys.exit(f"There are no results in {chosen.results}; run `python -m benchmarks.report` without --render.")
    chosen.page.write_text(render(documents, chosen.page.parent / "pictures"))
    print(f"{chosen.page}: {', '.join(documents)}", file=sys.stderr)
    if failed:
        sys.exit("Not measured: " + "; ".join(failed))


if __name__ == "__main__":
    main()
