"""The command `replay sql`: a query by its words, or from standard input, and what it finds."""

import sys
from pathlib import Path

import click

import replay
from replay.command_line import (
    attempt_option,
    json_option,
    limit_option,
    print_json_rows,
    print_rows,
    say,
    trace_argument,
)


@click.command(
    epilog="""\b
Examples:
  replay sql runs/a "select layer, max(absmax) from records group by 1 order by 2 desc"
  replay sql runs/a "select step, value from scalars where name = 'loss' order by step"
  replay sql runs/a "select class, sum(nbytes) from records join modules using (rank, layer) group by 1"
  replay sql runs/a "select step, list_aggregate(tensor(r), 'median') from records r where layer = 'fc1'"
  replay sql runs/a "describe records"
  replay sql runs/a - < query.sql

Ends with 0, also where no row is found, and with 2 if the query cannot be answered.
"""
)
@trace_argument
@click.argument("query")
@limit_option
@attempt_option
@json_option
def sql(trace: Path, query: str, limit: int, attempt: int | None, as_json: bool) -> None:
    """Answer a query in DuckDB's SQL over the tables records, streams, scalars and modules.

    tensor(records) is the list of a record's values. A query reads no other files and writes none. QUERY may be "-" for
    standard input. With --json all rows are printed.
    """
    import pyarrow as pa

    parts = replay.open(trace, attempt).sql_parts(sys.stdin.read() if query == "-" else query)
    if as_json:
        print_json_rows(row for part in parts for batch in part.to_batches(1024) for row in batch.to_pylist())
        return
    found = next(parts)
    while len(found) < limit and (part := next(parts, None)) is not None:
        found = pa.concat_tables([found, part])
    print_rows(found.slice(0, limit).to_pylist(), False, found.column_names)
    if (more := len(found) + sum(map(len, parts)) - limit) > 0:
        say(f"{more:,} more; --limit shows them.", err=True)
