"""Records that are found by some columns and then read by number, against plain Python over all records."""

import math
import shutil
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import replay
from replay import log_parquet
from replay.cli import main
from replay.format import RECORD_SCHEMA
from replay.log import LogWriter
from replay.log_rows import NUMBER
from replay.verify import verify
from tests.live_traces import WrittenTrace

LAYERS = ("a.one", "a.two", "from.b", "from")
COMMITS = 6


def commit(log: LogWriter, rng: np.random.Generator, step: int) -> None:
    rows = 2 * len(LAYERS)
    columns = {field.name: np.zeros(rows, field.type.to_pandas_dtype()) for field in RECORD_SCHEMA}
    columns["step"][:], columns["stream"][:] = step, np.tile(np.arange(len(LAYERS)), 2)
    columns["call"][:], columns["kept"][:], columns["row"][:] = np.repeat([0, 1], rows // 2), 1, -1
    columns["n_nan"][:], columns["mode"][:] = rng.integers(0, 2, rows), step % 2
    columns["l2"][:] = rng.choice([1.5, 20.0, np.nan], rows)
    log.append(columns)


@pytest.fixture(scope="module", params=["live", "sealed"])
def trace(request, tmp_path_factory):
    """Two ranks whose logs have several segments each, and, of the live ones, an open one behind them."""
    path = tmp_path_factory.mktemp(request.param) / "a"
    rng = np.random.default_rng(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replay.log.COMPACT_ROWS", 16)
        patch.setattr("replay.log_parquet._GROUP_ROWS", 5)
        for rank in (0, 1):
            written = WrittenTrace(path, LAYERS, rank=rank)
            for step in range(COMMITS - 1 + rank):
                commit(written._log, rng, step)
            written.seal() if request.param == "sealed" else written.close()
    return replay.open(path)


@pytest.mark.parametrize(
    ("where", "holds"),
    [
        ("n_nan > 0", lambda r: r["n_nan"] > 0),
        ("L2 > 10 and Step between 1 and 3", lambda r: not r["l2"] <= 10 and 1 <= r["step"] <= 3),  # NaN is greatest
        ("layer like 'a.%' and call = 1", lambda r: r["layer"].startswith("a.") and r["call"] == 1),
        ("layer = 'from'", lambda r: r["layer"] == "from"),
        ("not kept and mode = 'eval' and rank = 1", lambda r: not r["kept"] and r["mode"] == "eval" and r["rank"] == 1),
        ('"stream" = 2 and shape = [0]', lambda r: r["layer"] == "from.b"),
        ("greatest(*columns('n_.*')) > 0", lambda r: r["n_nan"] > 0),
        ("true", lambda r: True),
        ("l2 < 0", lambda r: False),
    ],
)
def test_a_condition_finds_what_plain_python_finds(where, holds, trace):
    expected = [record for record in trace.records().to_pylist() if holds(record)]

    found = trace.records(where=where)

    assert str(found.to_pylist()) == str(expected)  # as text, in which a NaN is like another
    assert found.schema == trace.records().schema
    assert sum(map(len, trace.record_parts(where=where))) == len(expected)


@pytest.mark.parametrize("segments", [1, 2])
def test_sql_sees_a_log_in_parts_as_one_table_in_order(segments, trace, monkeypatch):
    monkeypatch.setattr("replay.log._PART_SEGMENTS", segments)
    keys = ("rank", "step", "layer", "call")
    expected = [tuple(record[key] for key in keys) for record in trace.records().to_pylist()]
    found = [record for record in trace.records().to_pylist() if record["n_nan"] > 0]

    sealed = len(list((trace.path / "rank-00000").glob("*.parquet")))
    assert len(trace._ranks[0].log.datasets()) == math.ceil(sealed / segments)
    assert [
        tuple(row.values()) for row in trace.sql("select rank, step, layer, call from records").to_pylist()
    ] == expected
    assert trace.sql("select count(*) n, sum(step) s from records where n_nan > 0").to_pylist() == [
        {"n": len(found), "s": sum(record["step"] for record in found)}
    ]
    assert trace.sql("select step from records where rank = 1 limit 3 offset 17")["step"].to_pylist() == [2, 2, 2]


def test_a_damaged_segment_in_one_of_the_parts_is_named(trace, tmp_path, monkeypatch):
    monkeypatch.setattr("replay.log._PART_SEGMENTS", 1)
    shutil.copytree(trace.path, tmp_path / "a")
    segment = tmp_path / "a/rank-00001/records-00001.parquet"
    data = bytearray(segment.read_bytes())
    data[4:200] = bytes(196)
    segment.write_bytes(data)

    with pytest.raises(replay.TraceDamaged, match="The log of rank 1 cannot be read"):
        replay.open(tmp_path / "a").sql("select sum(l2), sum(step), sum(n_nan) from records")
    result = CliRunner().invoke(main, ["sql", str(tmp_path / "a"), "from records"])
    assert (result.exit_code, result.stderr.startswith("Error: The log of rank 1")) == (2, True), result.output


def test_how_rows_are_numbered_is_no_column(trace):
    with pytest.raises(replay.BadQuery, match="cannot be understood"):
        trace.records(where=f'"{NUMBER.upper()}" > 3')


def test_a_condition_with_a_subquery_sees_all_records(trace):
    expected = [record for record in trace.records().to_pylist() if record["l2"] == 20]

    found = trace.records(where="l2 = (select max(l2) from records where l2 < 100)")

    assert str(found.to_pylist()) == str(expected)


def test_a_condition_with_a_subquery_finds_records_in_the_order_of_execution(tmp_path):
    for rank in (0, 1):  # so many that DuckDB gives several threads some of them
        written = WrittenTrace(tmp_path / "a", [f"{n}" for n in range(50)], rank=rank)
        for step in range(0, 4000, 500):
            written.commit(*range(step, step + 500))
        written.seal()
    trace = replay.open(tmp_path / "a")
    where = "layer in (select layer from streams where stream between 4 and 12)"
    expected = [(rank, step, f"{n}") for rank in (0, 1) for step in range(4000) for n in range(4, 13)]

    found = trace.records(where=where)

    assert list(zip(*(found[name].to_pylist() for name in ("rank", "step", "layer")), strict=True)) == expected
    assert trace.first(where)["layer"] == "4"
    assert trace.first(where)["step"] == 0


def test_parts_of_what_a_condition_finds_are_the_whole_in_its_order(trace, monkeypatch):
    monkeypatch.setattr("replay.search._LOOKED_AT", 7)
    monkeypatch.setattr("replay.rank._PART_ROWS", 2)
    told = []

    parts = list(trace.record_parts(where="n_nan > 0", progress=lambda *done: told.append(done)))

    assert len(parts) > 4
    assert str(pa.concat_tables(parts).to_pylist()) == str(trace.records(where="n_nan > 0").to_pylist())
    assert [total for _, total in told] == [trace.count] * len(told)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1][0] == trace.count


@pytest.mark.parametrize("where", ["layer = 'none'", "l2 = (select max(l2) from records where l2 < 100)"])
def test_parts_of_nothing_and_of_a_subquery_are_one_part_at_least(where, trace):
    parts = list(trace.record_parts(where=where))

    assert str(pa.concat_tables(parts).to_pylist()) == str(trace.records(where=where).to_pylist())


def test_a_condition_that_fails_at_a_later_record_is_refused_as_one_that_fails_at_the_first(trace, monkeypatch):
    monkeypatch.setattr("replay.search._LOOKED_AT", 7)

    with pytest.raises(replay.BadQuery, match="cannot be understood"):
        list(trace.record_parts(where="cast(case when step < 3 then '1' else 'x' end as integer) = 1"))


@pytest.mark.parametrize("steps", [2, slice(1, 4), slice(0, None, 2), [0, 3]])
def test_rows_are_found_within_steps_and_layers(steps, trace):
    wanted = {2} if steps == 2 else set(range(COMMITS)[steps] if isinstance(steps, slice) else steps)
    expected = [r for r in trace.records().to_pylist() if r["step"] in wanted and r["layer"][:2] == "a."]

    assert str(trace.records("a.*", steps=steps).to_pylist()) == str(expected)
    found = trace.records("a.*", steps=steps, where="n_nan > 0").to_pylist()
    assert str(found) == str([r for r in expected if r["n_nan"]])


def test_what_a_resumed_training_took_back_is_not_found(tmp_path, monkeypatch):
    written = WrittenTrace(tmp_path / "a", LAYERS)
    rng = np.random.default_rng(3)
    for step in (0, 1, 2):
        commit(written._log, rng, step)
    written._log.begin_segment()
    line = '{"attempt": 1, "first_step": 1, "segment": 1, "time": "", "plan": {}, "provenance": {}, "before": null}\n'
    (written.rank / "attempts.jsonl").write_text(line)
    for step in (1, 2):
        commit(written._log, rng, step)
    trace = replay.open(written.seal())

    found = trace.records(where="l2 > 0")

    assert found["step"].to_pylist() == [step for step in (0, 1, 2) for _ in range(8)]
    assert str(found.to_pylist()) == str(trace.records().to_pylist())
    earlier = replay.open(tmp_path / "a", attempt=0)
    assert earlier.records(where="l2 > 0")["step"].to_pylist() == [step for step in (0, 1, 2) for _ in range(8)]
    assert (
        str(earlier.records(where="l2 > 0").to_pylist())
        == str(earlier.records().to_pylist())
        != str(trace.records().to_pylist())
    )


@pytest.mark.parametrize("column", ["mean", "l2"])
def test_damage_is_named_in_a_column_of_the_condition_and_in_any_other(column, tmp_path):
    written = WrittenTrace(tmp_path / "a", LAYERS)
    for step in range(3):
        commit(written._log, np.random.default_rng(step), step)
    path = written.seal()
    (segment,) = written.rank.glob("*.parquet")
    chunk = pq.read_metadata(segment).row_group(0).column(RECORD_SCHEMA.names.index(column))
    data = bytearray(segment.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 4
    segment.write_bytes(data)

    with pytest.raises(replay.TraceDamaged, match="cannot be read"):
        replay.open(path).records(where="l2 > 10")
    with pytest.raises(replay.TraceDamaged, match="cannot be read"):
        replay.open(path).records()


def sealed_segment(path) -> tuple[Path, Path]:
    """Write a sealed trace; return it and its only segment."""
    written = WrittenTrace(path, LAYERS)
    commit(written._log, np.random.default_rng(0), 1)
    written.seal()
    (segment,) = written.rank.glob("*.parquet")
    return path, segment


def test_what_is_said_of_columns_with_one_value_is_left_aside_where_it_is_damaged(tmp_path):
    trace, segment = sealed_segment(tmp_path / "a")
    right = replay.open(trace).records(where="n_zero = 0").to_pylist()
    assert len(right) == 2 * len(LAYERS)
    whole = segment.read_bytes()
    assert b'"n_zero": 0' in whole

    segment.write_bytes(whole.replace(b'"n_zero": 0', b'"n_zero": 8'))

    assert str(replay.open(trace).records(where="n_zero = 0").to_pylist()) == str(right)
    assert ["hookrec:constants is damaged" in problem.message for problem in verify(trace)] == [True]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"n_zero": 8}', "n_zero what is not so"),
        (b'{"kept": 300}', "constants is damaged"),
        (b'{"kept": null}', "constants is damaged"),
        (b"[[[", "constants is damaged"),
        (b"7", "constants is damaged"),
    ],
)
def test_a_lie_about_columns_with_one_value_is_found(text, words, tmp_path, monkeypatch):
    trace, segment = sealed_segment(tmp_path / "a")
    monkeypatch.setattr(log_parquet, "_constants", lambda table: b"%08x %s" % (google_crc32c.value(text), text))
    table = pq.read_table(segment)

    with segment.open("wb") as file:
        log_parquet.write_segment(table, file)

    assert [words in problem.message for problem in verify(trace)] == [True]
    assert len(replay.open(trace).records()) == len(table)


def test_damage_of_pages_that_need_not_be_read_is_found(tmp_path):
    trace, segment = sealed_segment(tmp_path / "a")
    chunk = pq.read_metadata(segment).row_group(0).column(RECORD_SCHEMA.names.index("n_zero"))
    data = bytearray(segment.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 4
    segment.write_bytes(data)

    assert [problem.damage for problem in verify(trace)] == [True]
    assert replay.open(trace).records()["n_zero"].to_pylist() == [0] * 2 * len(LAYERS)
