"""The numbers to reach: in which result each is found, and which floor of the same run stands beside it.

A floor is what the same bytes or rows cost when nothing is done but what cannot be left out. Where recording itself
cannot be taken apart like that, a bare block held against its own neighbours says how much is chance.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.results import Row, text

Tables = dict[str, list[Row]]
Figure = Callable[[Tables], float]
Floor = Callable[[Tables], str]


@dataclass(frozen=True)
class Bar:
    """A number to reach, the part that measures it, and what stands beside it."""

    what: str
    part: str
    limit: float
    least: bool
    found: Figure
    floor: Floor = lambda tables: ""

    def met(self, value: float) -> bool:
        """Return whether a value reaches the bar."""
        return value >= self.limit if self.least else value <= self.limit


def one(rows: list[Row], column: str, **where: object) -> Any:
    """Return a cell of the only row in which other columns have these values.

    Raises:
        LookupError: there is no such row, or more than one, or nothing is in the cell.
    """
    found = [row for row in rows if all(row[name] == value for name, value in where.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows have {where}")
    if found[0][column] is None:
        raise LookupError(f"nothing is known of {column}")
    return found[0][column]


def _at_most(what: str, part: str, limit: float, found: Figure, floor: Floor = lambda tables: "") -> Bar:
    return Bar(what, part, limit, False, found, floor)


def _at_least(what: str, part: str, limit: float, found: Figure, floor: Floor = lambda tables: "") -> Bar:
    return Bar(what, part, limit, True, found, floor)


def _cell(table: str, column: str, **where: object) -> Figure:
    return lambda tables: one(tables[table], column, **where)


def _beside(*modes: str, table: str, column: str) -> Floor:
    """Name modes of the overhead, with what they cost."""
    return lambda tables: ", ".join(f"{mode} {text(one(tables[table], column, mode=mode))}" for mode in modes)


def _overhead() -> Iterable[Bar]:
    for name in ("gpt", "resnet"):
        floor = _beside("copy", "copy and write", table=name, column="ratio")
        yield _at_most(f"{name}, full, × bare", "overhead", 1.25, _cell(name, "ratio", mode="full"), floor)
        saved = _cell(name, "ratio", way="torch.save a tensor")
        ours = lambda tables, name=name: f"hookrec {text(one(tables[name], 'ratio', way='hookrec'))}"  # noqa: E731
        yield _at_least(f"{name}, `torch.save` in hooks, × bare", "peers", 1.9, saved, ours)
    for name in ("gpt", "resnet"):
        chance = _beside("bare again", table=name, column="ratio")
        yield _at_most(f"{name}, statistics, × bare", "overhead", 1.06, _cell(name, "ratio", mode="statistics"), chance)
    floor = _beside("copy", "copy and write", table="mlp", column="us a record")
    yield _at_most("mlp, full, µs a record", "overhead", 30, _cell("mlp", "us a record", mode="full"), floor)
    for name in ("mlp", "gpt", "resnet"):
        chance = _beside("bare again", table=name, column="ratio")
        found = _cell(name, "ratio", mode="not sampled")
        yield _at_most(f"{name}, steps not sampled, × bare", "overhead", 1.01, found, chance)


def _peers() -> Iterable[Bar]:
    """Each workload, hookrec and the cheapest of the others that keep the same."""
    for name in ("mlp", "gpt", "resnet"):
        for keeps, ours in (("tensors", "hookrec"), ("statistics", "hookrec statistics")):

            def cheapest(tables: Tables, name: str = name, keeps: str = keeps) -> Row:
                others = (row for row in tables[name] if row["keeps"] == keeps and "hookrec" not in row["way"])
                return _first(sorted(others, key=lambda row: row["step ms"]))

            def found(tables: Tables, name: str = name, ours: str = ours, cheapest: Any = cheapest) -> float:
                return one(tables[name], "ratio", way=ours) / cheapest(tables)["ratio"]

            def floor(tables: Tables, cheapest: Any = cheapest) -> str:
                row = cheapest(tables)
                return f"{row['way']} {text(row['ratio'])} × bare"

            yield _at_most(f"{name}, {ours} to the cheapest other way to keep {keeps}", "peers", 1, found, floor)


def _growth() -> Iterable[Bar]:
    """Costs of sizes far apart, the largest to the smallest."""

    def spread(table: str, column: str, size: str, least: int, most: int) -> Figure:
        def found(tables: Tables) -> float:
            rows = [row for row in tables[table] if least <= row[size] <= most]
            if not rows or rows[-1][size] != most:
                raise LookupError(f"{table} up to {most} were not measured")
            costs = [row[column] for row in rows]
            return max(costs) / min(costs)

        return found

    sizes = spread("records a step", "us a record", "records a step", 10, 10_000)
    yield _at_most("10 to 10,000 records a step, largest µs a record to smallest", "linear", 1.2, sizes)
    sizes = spread("bytes a step", "step GB/s", "MB a step", 64, 1_000)

    def floor(tables: Tables) -> str:
        rows = (row for row in tables["bytes a step"] if row["MB a step"] >= 64)
        return "memcpy and write " + ", ".join(f"{text(row['memcpy + write GB/s'])}" for row in rows) + " GB/s"

    yield _at_most("100 MB to 1 GB a step, largest GB/s to smallest", "linear", 1.2, sizes, floor)
    sizes = spread("steps", "us a record", "steps", 10, 100_000)
    yield _at_most("10 to 100,000 steps, largest µs a record to smallest", "linear", 1.2, sizes)


def _memory() -> Iterable[Bar]:
    above, writer = "training, above the bare one", "writer process"
    most = lambda tables: max(  # noqa: E731
        one(tables["memory"], column, process=above) for column in ("MB after a tenth", "MB at the end")
    )
    ring = lambda tables: f"and the ring, {text(one(tables['memory'], 'ring MB', process=above))}"  # noqa: E731
    yield _at_most("training's memory above the bare one, without the ring, MB", "memory", 32, most, ring)
    for process in (above, writer):
        end = lambda tables, process=process: (  # noqa: E731
            f"{text(one(tables['memory'], 'MB at the end', process=process))} at the end"
        )
        found = _cell("memory", "more", process=process)
        yield _at_most(f"{process}, grown by after a tenth of 10,000 steps, MB", "memory", 4, found, end)


def _reading() -> Iterable[Bar]:
    small, large = "one tensor of 8 KB, warm", "one layer of 4 MB tensors"
    zarr = _cell(small, "us", store="zarr", reader="zarr-python")
    found = _cell(small, "us", store="zarr", reader="replay")
    yield _at_most(
        "`trace.tensor` of 8 KB, warm, µs", "reading", 60, found, lambda tables: f"zarr-python {text(zarr(tables))}"
    )
    dd = _cell(large, "cold GB/s", store="zarr", reader="dd")
    found = _cell(large, "cold, to dd", store="zarr", reader="replay")
    yield _at_least(
        "one layer of 4 MB over 200 steps, cold, of `dd`",
        "reading",
        0.8,
        found,
        lambda tables: f"dd {text(dd(tables))} GB/s",
    )


def _records() -> Iterable[Bar]:
    answers = "answers"
    filters = {
        "filter by statistics": "pyarrow reads statistics",
        "filter for the one with NaN": "pyarrow reads n nan",
        "filter by layer and steps": "pyarrow reads step and stream",
    }
    for what, floor in filters.items():
        beside = lambda tables, floor=floor: f"{floor} {text(one(tables[answers], 's', what=floor))}"  # noqa: E731
        found = _million(_cell(answers, "s", what=what))
        yield _at_most(f"10 million records, {what}, s", "records", 0.3, found, beside)
    yield _at_most("10 million records, opened, s", "records", 0.2, _million(_cell(answers, "s", what="open")))
    pyarrow = _cell(answers, "s", what="pyarrow writes the table")
    ours = _cell(answers, "s", what="export")
    yield _at_least(
        "Parquet of 10 million records, of pyarrow's speed",
        "records",
        0.7,
        _million(lambda tables: pyarrow(tables) / ours(tables)),
        lambda tables: f"pyarrow {text(pyarrow(tables))} s",
    )
    size = "a trace of statistics"
    found = _million(lambda tables: _first(tables[size])["bytes a record"])
    yield _at_most("a record of statistics, sealed, bytes", "records", 32, found)


def _million(found: Figure) -> Figure:
    """Take a figure for one of ten million records only where there were so many."""

    def checked(tables: Tables) -> float:
        if _first(tables["a trace of statistics"])["records"] < 10_000_000:
            raise LookupError("there were fewer records")
        return found(tables)

    return checked


def _first(rows: list[Row]) -> Row:
    if not rows:
        raise LookupError("there is no row")
    return rows[0]


BARS = (*_overhead(), *_peers(), *_growth(), *_memory(), *_reading(), *_records())
SHOWN_BY_TESTS = (
    "the training killed at random moments: `tests/test_recording.py`, in flight mode `tests/test_flight.py`",
    "the writer killed at random moments: `tests/test_restart.py`",
)
"""Bars of which a number would say nothing: one kill that costs a committed step is one too many. Most are `slow`."""
