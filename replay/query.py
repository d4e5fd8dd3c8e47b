"""How DuckDB sees a trace: which tables there are, and what a query may not do.

The log is never copied into DuckDB. It is read through a pyarrow dataset, so that only the columns and
row groups that a query needs are touched. Layer, kind, path, dtype and shape are looked up by the number of the
stream in a list, not joined: that is faster, and DuckDB keeps the order of the rows of one table, not of a join.

A query may come from a stranger (a notebook, a web page). It has no file system, no extensions and no variables of
ours, and cannot give itself any: the settings are locked before it runs.
"""

import contextlib
import dataclasses
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.errors import BadQuery, NotRecorded, ReplayError, TraceDamaged
from replay.format import KEPT, MODES, RECORD_SCHEMA, STATISTICS, Stream
from replay.log_rows import NUMBER
from replay.log_tail import UNREADABLE
from replay.records import check_rows

if TYPE_CHECKING:
    import duckdb

Tensor = Callable[..., NDArray[Any]]

_NO_ACCESS: dict[str, Any] = {
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "temp_directory": "",  # DuckDB would write there what does not fit into memory
}
_NAME = pa.dictionary(pa.int32(), pa.string())
_OF_STREAM = {"layer": _NAME, "kind": _NAME, "path": _NAME, "dtype": _NAME, "shape": pa.list_(pa.int64())}
_IN_LOG = {name: RECORD_SCHEMA.field(name).type for name in ("step", "call", "micro", *STATISTICS)}
_TYPES = {"rank": pa.int32(), "mode": _NAME, "kept": pa.bool_(), **_OF_STREAM, **_IN_LOG}
_KEY = ("rank", "step", "layer", "kind", "call", "path")
RECORDS = pa.schema([(name, _TYPES[name]) for name in (*_KEY, "micro", "mode", "dtype", "shape", "kept", *STATISTICS)])
"""The columns of `Trace.records`."""
_COLUMNS = (*RECORDS.names, "nbytes", "stream")
_MADE_OF = {"rank": (), "kept": ("kept", "row", "stream"), **dict.fromkeys(_OF_STREAM, ("stream",))}
"""The columns of the log that a column is made of, where that is not the one of its name."""
_LOOKS_FURTHER = re.compile(rf"select|from|values|columns|records|streams|log_|getvariable|#|{NUMBER}", re.IGNORECASE)
"""What is in a condition that reads other rows or columns than those it names."""

_ANSWER_ROWS = 1 << 16

MODULES = pa.schema(
    [("rank", pa.int32()), *((name, pa.string()) for name in ("layer", "class"))]
    + [(name, pa.bool_()) for name in ("leaf", "recorded")]
)
"""The columns of the table `modules`."""


@dataclass(frozen=True)
class Part:
    """What one rank adds to the tables.

    Attributes:
        rank: its number.
        log: its records, perhaps filtered: `pyarrow.dataset.Dataset`s of the log's schema, one after the other, or
            `LogRows`, to find rows by number.
        streams: its table of streams.
        dropped: by stream, how many of its first rows have no tensor any more.
    """

    rank: int
    log: Any
    streams: Sequence[Stream]
    dropped: Mapping[int, int]


def connect() -> "duckdb.DuckDBPyConnection":
    """Return a connection to a DuckDB that sees nothing but the tables it is given."""
    import duckdb

    return duckdb.connect(config=_NO_ACCESS)


def rows_where(parts: Sequence[Part], where: str | None, limit: int | None = None) -> pa.Table:
    """Return the records for which a condition holds, in the order of execution.

    Args:
        parts: the ranks.
        where: a condition in DuckDB's SQL; all records if None.
        limit: how many are wanted, the first ones. No more of the log is read than they need.

    Raises:
        BadQuery: the condition cannot be understood.
        TraceDamaged: the log cannot be read.
    """
    most = "" if limit is None else f"limit {limit}"
    if where is None or not _LOOKS_FURTHER.search(where):
        return columns_where(parts, where, _names(RECORDS.names), most).cast(RECORDS)
    # Of a subquery DuckDB makes a join, from which rows come in any order.
    number = NUMBER
    while number in where.casefold():
        number += " again"
    with connect() as connection, _damage_named(parts):
        _add_records(connection, parts, numbers=number)
        found = _rows_where(connection, where, _COLUMNS, _names(RECORDS.names), f'order by rank, "{number}" {most}')
    return found.cast(RECORDS)


def columns_where(parts: Sequence[Part], where: str | None, columns: str, further: str = "") -> pa.Table:
    """Return columns that are worked out from the records for which a condition holds; memory is that of the answer.

    Args:
        parts: the ranks.
        where: a condition in DuckDB's SQL; all records if None.
        columns: the columns, in SQL. Those that were given by a user do not belong here.
        further: what follows the condition, such as `group by`.

    Raises:
        BadQuery: the condition cannot be understood.
        TraceDamaged: the log cannot be read.
    """
    with connect() as connection, _damage_named(parts):
        _add_records(connection, parts)
        return _rows_where(connection, "true" if where is None else where, _COLUMNS, columns, further)


def found_where(parts: Sequence[Part], where: str) -> list[pa.Table] | None:
    """Return the rows for which a condition holds, by number, in ascending order.

    The columns that the condition does not name are not read. That it can be answered so is not certain: `rows_where`
    answers all others, and says what is wrong with those that have no answer.

    Args:
        parts: the ranks, each with a log that is `LogRows`.
        where: a condition in DuckDB's SQL.

    Returns:
        A table a rank, with `NUMBER` and those columns of the log that were read to find them; None if the condition
        has no answer, or perhaps looks at more than a row at a time.

    Raises:
        TraceDamaged: the log cannot be read.
    """
    import duckdb

    if _LOOKS_FURTHER.search(where):
        return None
    columns = [name for name in _COLUMNS if name in where.casefold()]
    trouble: list[ReplayError] = []
    with connect() as connection:
        parts = [dataclasses.replace(part, log=[_scan(part, columns, trouble)]) for part in parts]
        try:
            _add_records(connection, parts, columns)
            known = [name for name in columns if name in _IN_LOG]
            found = _rows_where(connection, where, columns, _names(["rank", NUMBER, *known]))
        except (duckdb.Error, BadQuery):
            if trouble:
                raise trouble[0] from None
            return None
    ranks, numbers = found["rank"].to_numpy(), found[NUMBER].to_numpy()
    if not np.all((np.diff(ranks) > 0) | (np.diff(numbers) > 0)):  # which costs less than to sort what is in order
        found = found.take(np.lexsort((numbers, ranks)))
    ends = np.searchsorted(found["rank"].to_numpy(), [part.rank for part in parts], side="right").tolist()
    found = found.drop_columns("rank")
    return [found.slice(begin, end - begin) for begin, end in itertools.pairwise((0, *ends))]


def _scan(part: Part, columns: Sequence[str], trouble: list[ReplayError]) -> pa.RecordBatchReader:
    """Rows of a rank, by number, with the columns of the log that some columns of records are made of."""
    made_of = (name for column in columns for name in _MADE_OF.get(column, (column,)))
    schema = pa.schema([RECORD_SCHEMA.field(name) for name in dict.fromkeys(made_of)])

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            for table in part.log.scan(schema.names, numbered=True):
                check_rows(table, len(part.streams), Path(f"Rank {part.rank}"))
                yield from table.to_batches()
        except UNREADABLE as error:
            trouble.append(_damaged(part, error))
            raise
        except TraceDamaged as error:  # DuckDB makes another error of it
            trouble.append(error)
            raise

    return pa.RecordBatchReader.from_batches(schema.append(pa.field(NUMBER, pa.int64())), batches())


def records_where(records: pa.Table, where: str, connection: "duckdb.DuckDBPyConnection | None" = None) -> pa.Table:
    """Return those of some records for which a condition holds, in their order.

    Args:
        records: as `Trace.records` returns them.
        where: a condition in DuckDB's SQL.
        connection: from `connect`; whoever asks often keeps one, since to make it takes ten times as long as to ask.

    Raises:
        BadQuery: the condition cannot be understood.
    """
    if connection is None:
        with connect() as connection:
            return records.take(numbers_where(records, where, connection))
    return records.take(numbers_where(records, where, connection))


def numbers_where(records: pa.Table, where: str, connection: "duckdb.DuckDBPyConnection") -> NDArray[np.int64]:
    """Return the numbers, from 0, of those of some records for which a condition holds, sorted.

    Args:
        records: as of `records_where`.
        where: as of `records_where`.
        connection: as of `records_where`.

    Raises:
        BadQuery: the condition cannot be understood.
    """
    # Most often nothing is found. So DuckDB gives numbers, and reads no column but those of the condition.
    connection.register("records", records.append_column(NUMBER, pa.array(np.arange(len(records)))))
    try:
        numbers: NDArray[np.int64] = _rows_where(connection, where, RECORDS.names, _names([NUMBER]))[NUMBER].to_numpy()
        return np.sort(numbers)
    finally:
        connection.unregister("records")


def _rows_where(
    connection: "duckdb.DuckDBPyConnection", where: str, columns: Sequence[str], wanted: str, further: str = ""
) -> pa.Table:
    import duckdb

    try:
        where.encode()
    except UnicodeEncodeError:
        raise BadQuery(f"The condition {where!r} cannot be understood: it is no UTF-8.") from None
    try:
        # By itself first, so that what is said of its syntax is never of the brackets that are put around it.
        if not where.strip() or len(connection.extract_statements(f"select 1 where\n{where}")) != 1:
            raise BadQuery(
                f"The condition {where!r} cannot be understood: it is not one condition. Join several by `and`, `or`."
            )
        return connection.sql(f"select {wanted} from records where (\n{where}\n) {further}").to_arrow_table()
    except duckdb.Error as error:
        reason = _reason(error).splitlines()[0]
        raise BadQuery(
            f"The condition {where!r} cannot be understood: {reason} The columns are {', '.join(columns)}."
        ) from None


def answer(
    query: str, parts: Sequence[Part], more: Mapping[str, tuple[pa.Schema, Callable[[], pa.Table]]], tensor: Tensor
) -> pa.Table:
    """Return what a query in DuckDB's SQL finds.

    Args:
        query: a statement that gives rows.
        parts: the ranks; they make the tables `records` and `streams`.
        more: further tables by name: their columns, and what makes them if the query names them.
        tensor: `Trace.tensor`, for the function `tensor(records)`.

    Raises:
        BadQuery: the query cannot be understood, or wants what it may not have.
        TraceDamaged: the log, or a tensor that the query looks at, cannot be read.
    """
    with _asked(query, parts, more, tensor) as relation:
        found = relation.to_arrow_table()
    return _plain(found)


def answer_parts(
    query: str, parts: Sequence[Part], more: Mapping[str, tuple[pa.Schema, Callable[[], pa.Table]]], tensor: Tensor
) -> Iterator[pa.Table]:
    """Yield what `answer` returns in parts, one at least, as they are found. Arguments and errors are those of it."""
    with _asked(query, parts, more, tensor) as relation:
        reader = relation.to_arrow_reader(_ANSWER_ROWS)
        if any(map(pa.types.is_decimal, reader.schema.types)):
            yield _plain(reader.read_all())  # only all of them tell whether they fit into int64
            return
        yield _plain(reader.schema.empty_table())
        for batch in reader:
            yield _plain(pa.Table.from_batches([batch]))


@contextlib.contextmanager
def _asked(
    query: str, parts: Sequence[Part], more: Mapping[str, tuple[pa.Schema, Callable[[], pa.Table]]], tensor: Tensor
) -> "Iterator[duckdb.DuckDBPyRelation]":
    """Give what DuckDB answers; what goes wrong while it is read is raised as `answer` says."""
    import duckdb

    with connect() as connection, _damage_named(parts):
        trouble: list[ReplayError] = []
        tables = {"records": _COLUMNS, "streams": _streams(parts[:0]).column_names}
        tables |= {name: schema.names for name, (schema, _) in more.items()}
        try:
            _add_records(connection, parts)
            _add_tensor(connection, tensor, trouble)
            for name, (_, table) in more.items():
                if name in query.casefold():
                    connection.register(name, table())
            relation = connection.sql(query)
            if relation is None:
                raise BadQuery(f"{query!r} asks for no rows. {_there(tables)}")
            yield relation
        except (duckdb.Error, pa.ArrowException, OSError) as error:  # Arrow's, where rows are read one after the other
            if trouble:
                raise trouble[0] from None
            raise BadQuery(f"The query cannot be answered: {_reason(error)}\n{_there(tables)}") from None


@contextlib.contextmanager
def _damage_named(parts: Sequence[Part]) -> Iterator[None]:
    """Raise TraceDamaged where a log cannot be read, which DuckDB reports as it does a mistake in a query."""
    import duckdb

    try:
        yield
    except (duckdb.Error, BadQuery) as error:
        cause = error if isinstance(error, duckdb.Error) else error.__context__
        if not isinstance(cause, (duckdb.InvalidInputException, pa.ArrowException, OSError)):
            raise
        for part in parts:
            try:
                for dataset in part.log:
                    for _ in dataset.to_batches():
                        pass
            except UNREADABLE as damage:
                raise _damaged(part, damage) from None
        raise


def _damaged(part: Part, damage: Exception) -> TraceDamaged:
    return TraceDamaged(f"The log of rank {part.rank} cannot be read: {damage}")


def _add_records(
    connection: "duckdb.DuckDBPyConnection",
    parts: Sequence[Part],
    columns: Sequence[str] = _COLUMNS,
    numbers: str | None = None,
) -> None:
    """Make the tables `streams` and `records`, and lock the settings.

    Args:
        connection: to what.
        parts: the ranks. A log that can be read but once has numbers, and rows that are known to be of streams.
        columns: those that `records` has.
        numbers: the name of one more, in which the rows of a rank are numbered.
    """
    connection.register("streams", _streams(parts))
    connection.execute(f"set variable modes = {list(MODES)}")
    views = []
    for part in parts:
        rank = part.rank
        once = isinstance(part.log[0], pa.RecordBatchReader)
        for place, log in enumerate(part.log):
            connection.register(f"log_{rank}_{place}", log)
        pieces = (f"select * from log_{rank}_{place}" for place in range(len(part.log)))
        connection.execute(f"create view log_{rank} as {' union all '.join(pieces)}")
        for name in _OF_STREAM.keys() & set(columns):
            connection.execute(
                f"set variable {name}_{rank} = (select list({name} order by stream) from streams where rank = {rank})"
            )
        dropped = [part.dropped.get(stream.id, 0) for stream in part.streams]
        connection.execute(f"set variable dropped_{rank} = {dropped}::bigint[]")
        of_stream = {name: f"getvariable('{name}_{rank}')[stream + 1]" for name in _OF_STREAM}
        made = {
            "rank": f"{rank}::integer",
            "mode": "getvariable('modes')[mode + 1]",
            "kept": f"kept = {KEPT} and row >= getvariable('dropped_{rank}')[stream + 1]",
            **of_stream,
        }
        wanted = dict.fromkeys((*columns, *(("rank", NUMBER) if once else ())))
        made_of = ", ".join(f'{made.get(name, _names([name]))} as "{name}"' for name in wanted)
        if numbers is not None:
            made_of += f', row_number() over () as "{numbers}"'
        views.append(f"select {made_of} from log_{rank}")
        if not once:
            odd = connection.sql(
                f"select stream, mode from log_{rank} "
                f"where stream not between 0 and {len(part.streams) - 1} or mode >= {len(MODES)} limit 1"
            )
            check_rows(odd.to_arrow_table(), len(part.streams), Path(f"Rank {rank}"))
    connection.execute("create view records as " + " union all ".join(views))
    connection.execute("set lock_configuration = true")


def _streams(parts: Sequence[Part]) -> pa.Table:
    types = {
        "rank": pa.int32(),
        "stream": pa.int32(),
        "layer": pa.string(),
        "kind": pa.string(),
        "path": pa.string(),
        "dtype": pa.string(),
        "shape": pa.list_(pa.int64()),
        "stored_dtype": pa.string(),
        "stored_shape": pa.list_(pa.int64()),
        "location": pa.string(),
    }
    rows = [
        (part.rank, s.id, s.layer, s.kind, s.path, s.whole[0], list(s.whole[1]), s.dtype, list(s.shape), s.location)
        for part in parts
        for s in part.streams
    ]
    columns: list[Any] = list(zip(*rows, strict=True)) or [()] * len(types)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, types.values(), strict=True)]
    return pa.table(arrays, names=list(types))


def modules_of(modules: Mapping[int, Sequence[Mapping[str, Any]]]) -> pa.Table:
    """Return the table `modules`: one row a module of each rank, in the order of `named_modules()`."""
    rows = [{**module, "rank": rank, "layer": module["name"]} for rank, found in modules.items() for module in found]
    return pa.Table.from_pylist([{name: row.get(name) for name in MODULES.names} for row in rows], MODULES)


def _add_tensor(connection: "duckdb.DuckDBPyConnection", tensor: Tensor, trouble: list[ReplayError]) -> None:
    """Make the function `tensor(records)`: the values of a record as a list of doubles, null where it has none."""
    one_at_a_time = threading.Lock()  # DuckDB calls from several threads; a trace's open files are for one

    def values(rank: int, step: int, layer: str, kind: str, call: int, path: str) -> NDArray[np.float64] | None:
        try:
            found = tensor(step, layer, kind, call=call, path=path, rank=rank)
        except NotRecorded:
            return None
        except ReplayError as error:
            trouble.append(error)
            raise
        if found.dtype.kind == "c":
            found = np.abs(found)
        return found.reshape(-1).astype(np.float64)

    # As Arrow's, since of numbers that Python or numpy has, DuckDB makes null of those that are NaN.
    def lists(rank: Any, step: Any, layer: Any, kind: Any, call: Any, path: Any) -> pa.Array:
        keys = (column.to_pylist() for column in (rank, step, layer, kind, call, path))
        with one_at_a_time:
            return pa.array([values(*key) for key in zip(*keys, strict=True)], pa.large_list(pa.float64()))

    types = ["INTEGER", "BIGINT", "VARCHAR", "VARCHAR", "INTEGER", "VARCHAR"]
    make: Any = connection.create_function  # its stubs know fewer names of types than it does
    make("tensor_values", lists, types, "DOUBLE[]", type="arrow", null_handling="special")
    fields = ", ".join(f"record.{name}" for name in _KEY)
    connection.execute(f"create macro tensor(record) as tensor_values({fields})")


def _plain(table: pa.Table) -> pa.Table:
    """Sums of integers as integers, which DuckDB gives 128 bits; no two columns of one name."""
    names: list[str] = []
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_decimal(column.type) and column.type.scale == 0:
            try:
                column = column.cast(pa.int64())
            except pa.ArrowInvalid:
                column = column.cast(pa.float64())
        taken = sum(other == name or other.startswith(f"{name}_") for other in names)
        names.append(f"{name}_{taken}" if name in names else name)
        columns.append(column)
    return pa.table(columns, names=names)


def _names(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _reason(error: Exception) -> str:
    # It guesses at tables of ours that are none of the user's, such as log_0.
    return "\n".join(line for line in str(error).strip().splitlines() if not line.startswith('Did you mean "log_'))


def _there(tables: Mapping[str, Sequence[str]]) -> str:
    lines = (f"  {name}: {', '.join(columns)}" for name, columns in tables.items())
    return "\n".join(("The tables and their columns:", *lines))
