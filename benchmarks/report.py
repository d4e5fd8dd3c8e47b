"""The page of all figures: `python -m benchmarks.report [--only PART ...] [--small] [--render] [--results FOLDER]`.

Each part is a command of its own, in a process of its own, and leaves one JSON file; the page is made of the files that
are there. So a part can be measured again without the others, and `--render` makes the page again without measuring.
What was not measured is listed as that, never left out. Parts are named in `PARTS`, the bars that they are held to in
`BARS`.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
Tables = dict[str, list[Row]]


@dataclass(frozen=True)
class Bar:
    """A number to reach, and the floor that stands beside it where it is missed."""

    what: str
    part: str
    limit: float
    least: bool
    found: Callable[[Tables], float]
    floor: Callable[[Tables], str] = lambda tables: ""

    def met(self, value: float) -> bool:
        """Return whether a value reaches the bar."""
        return value >= self.limit if self.least else value <= self.limit


def one(rows: list[Row], column: str, **where: object) -> Any:
    """Return a cell of the only row in which other columns have these values.

    Raises:
        LookupError: there is no such row, or more than one.
    """
    found = [row for row in rows if all(row[name] == value for name, value in where.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows have {where}")
    return found[0][column]


def _way(workload: str, way: str, column: str) -> Callable[[Tables], float]:
    return lambda tables: one(tables[workload], column, way=way)


def _layer(store: str, reader: str, column: str) -> Callable[[Tables], float]:
    return lambda tables: one(tables["one layer of 4 MB tensors"], column, store=store, reader=reader)


def _tensor(store: str, reader: str) -> Callable[[Tables], float]:
    return lambda tables: one(tables["one tensor of 8 KB, warm"], "us", store=store, reader=reader)


BARS = (
    *(Bar(f"{name}, full, × bare", "peers", 1.25, False, _way(name, "hookrec", "ratio")) for name in ("gpt", "resnet")),
    *(
        Bar(f"{name}, torch.save in hooks, × bare", "peers", 1.9, True, _way(name, "torch.save a tensor", "ratio"))
        for name in ("gpt", "resnet")
    ),
    *(
        Bar(f"{name}, statistics, × bare", "peers", 1.06, False, _way(name, "hookrec statistics", "ratio"))
        for name in ("gpt", "resnet")
    ),
    Bar("mlp, µs a record", "peers", 30.0, False, _way("mlp", "hookrec", "us a record")),
    Bar(
        "`trace.tensor` of 8 KB, warm, µs",
        "reading",
        60.0,
        False,
        _tensor("zarr", "replay"),
        lambda tables: f"zarr-python {text(_tensor('zarr', 'zarr-python')(tables))}",
    ),
    Bar(
        "one layer of 4 MB over 200 steps, cold, of `dd`",
        "reading",
        0.8,
        True,
        _layer("zarr", "replay", "cold, to dd"),
        lambda tables: f"dd {text(_layer('zarr', 'dd', 'cold GB/s')(tables))} GB/s",
    ),
)
UNMEASURED = (
    "steps that are not sampled: `python -m benchmarks --mode 'not sampled'`",
    "trainer's memory above the bare run over 10,000 steps: the growth alone is below, by steps",
    "filters and opening of 10 million records, and Parquet export: `python -m benchmarks.records --records 10000000`",
    "kill -9 at 200 random moments: the slow tests",
)
"""Rows of the table of aims that no part measures yet, and what does."""


def measure(part: str, results: Path, *, small: bool) -> None:
    """Run a part and keep what it found; what was kept before stays if it fails."""
    module, *arguments = PARTS[part][small]
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json"]
    print(f"{part}: {' '.join(command[1:])}", file=sys.stderr, flush=True)
    begin = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
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
    lines += ["", "Not measured by this command:", "", *(f"* {row}" for row in UNMEASURED)]
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
    if bar.met(value):
        return f"| {bar.what} | {aim} | {text(value)} | reached | |"
    return f"| {bar.what} | {aim} | {text(value)} | missed | {bar.floor(tables)} |"


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
