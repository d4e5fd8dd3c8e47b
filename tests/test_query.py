"""SQL over a trace finds what is there, wherever the log lies, and can do nothing else."""

import json
import math

import duckdb
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hookrec
import replay
from replay.cli import main
from replay.format import RECORD_SCHEMA
from replay.log import LogWriter, compact
from tests.handwritten import Written, write_trace

STEPS = 6


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Three layers over six steps; what comes out of '0' in step 4 has NaNs only."""
    path = tmp_path_factory.mktemp("traces") / "a"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    with hookrec.attach(model, path, clock="manual", keep_free=0) as recorder:
        for step in range(STEPS):
            x = torch.full((4, 3), math.nan) if step == 4 else torch.randn(4, 3)
            model(x).sum().backward()
            recorder.log(loss=step / 2)
            recorder.step()
    return replay.open(path)


def test_an_aggregate_is_what_numpy_makes_of_the_records(trace):
    rows = trace.records(kinds="output", steps=slice(0, 4)).to_pylist()
    expected = {layer: max(row["absmax"] for row in rows if row["layer"] == layer) for layer in ("0", "1", "2")}

    found = trace.sql(
        "select layer, max(absmax) as top from records where kind = 'output' and step < 4 group by 1 order by 1"
    )

    assert dict(zip(found["layer"].to_pylist(), found["top"].to_pylist(), strict=True)) == expected


@pytest.mark.parametrize("condition", ["min > 1e30", "min < 1e30", "min = 'nan'", "isnan(min)", "not min > 1e30"])
def test_a_condition_on_nan_holds_for_the_same_records_in_the_log_as_in_a_plain_table(trace, condition):
    plain = trace.records().append_column("place", [list(range(trace.count))])
    with duckdb.connect() as connection:
        connection.register("plain", plain)
        expected = connection.sql(f"select step, layer, kind from plain where {condition} order by place").fetchall()

    found = trace.records(where=condition)

    assert list(zip(*(found[name].to_pylist() for name in ("step", "layer", "kind")), strict=True)) == expected


def test_a_condition_keeps_schema_and_order(trace):
    every = trace.records()

    found = trace.records(where="true")

    assert found.schema == every.schema
    np.testing.assert_array_equal(found["l2"], every["l2"])


def test_a_limit_gives_the_first_records_in_the_order_of_execution(trace):
    every = trace.records()

    first, last_layer = trace.records(limit=3), trace.records(layers="2", where="step > 0", limit=1)

    assert first.schema == every.schema
    assert first.to_pylist() == every.slice(0, 3).to_pylist()
    assert last_layer["step"].to_pylist() == [1]
    assert len(trace.records(limit=10**9)) == len(every)


def test_tables_beside_the_records_are_there(trace):
    classes = trace.sql(
        "select distinct class from records join modules using (rank, layer) where kind = 'output' order by 1"
    )
    losses = trace.sql("select value from scalars where name = 'loss' order by step")
    locations = trace.sql("select layer, location from streams where kind = 'output' order by stream")

    assert [name.rpartition(".")[2] for name in classes["class"].to_pylist()] == ["ReLU", "Linear"]
    assert losses["value"].to_pylist() == [step / 2 for step in range(STEPS)]
    assert locations.to_pylist()[0] == {"layer": "0", "location": "0/output"}


def test_tensors_can_be_asked_for_their_values(trace):
    expected = [float(np.median(trace.tensor(step, "2"))) for step in range(4)]

    found = trace.sql(
        "select list_aggregate(tensor(r), 'median') as m from records r "
        "where layer = '2' and kind = 'output' and step < 4 order by step"
    )

    assert found["m"].to_pylist() == pytest.approx(expected)


def test_the_values_of_a_tensor_that_are_not_finite_are_what_they_are(tmp_path):
    odd = np.array([1.5, np.nan, np.inf, -np.inf, 0.0], np.float32)
    path = write_trace(
        tmp_path / "a",
        Written("0", odd),
        Written("1", np.array([], np.float32)),
        Written("2", np.array([complex(math.nan, 0), complex(3, 4)], np.complex64)),
    )

    found = replay.open(path).sql(
        "select layer, count(v) as n, count(*) filter (isnan(v)) as n_nan, count(*) filter (isinf(v)) as n_inf "
        "from (select layer, unnest(tensor(r)) as v from records r) group by 1 order by 1"
    )
    whole = replay.open(path).sql("select tensor(r) as v from records r order by layer")["v"].to_pylist()

    assert found.to_pylist() == [
        {"layer": "0", "n": 5, "n_nan": 1, "n_inf": 2},
        {"layer": "2", "n": 2, "n_nan": 1, "n_inf": 0},
    ]
    assert [len(values) for values in whole] == [5, 0, 2]
    np.testing.assert_array_equal(whole[0], odd)
    np.testing.assert_array_equal(whole[2], [math.nan, 5.0])


def test_a_record_without_a_tensor_has_no_values(tmp_path):
    with hookrec.attach(model := nn.ReLU(), tmp_path / "a", clock="manual", keep_free=0, tensors=False):
        model(torch.ones(2))

    assert replay.open(tmp_path / "a").sql("select tensor(records) as t from records").to_pylist() == [{"t": None}]


def test_a_damaged_tensor_is_named_by_a_query_that_looks_at_it(tmp_path):
    with hookrec.attach(model := nn.ReLU(), tmp_path / "a", clock="manual", keep_free=0):
        model(torch.ones(2))
    (shard,) = tmp_path.glob("a/rank-00000/tensors.zarr/*root/output/data/c/0/0")
    shard.write_bytes(b"\x01" + shard.read_bytes()[1:])

    with pytest.raises(replay.TraceDamaged, match="checksum differs"):
        replay.open(tmp_path / "a").sql("select tensor(records) from records")


def _columns(steps):
    columns = {field.name: np.zeros(len(steps), field.type.to_pandas_dtype()) for field in RECORD_SCHEMA}
    return {**columns, "step": np.array(steps, np.int64), "l2": np.array(steps, np.float64)}


def test_compacted_segments_and_the_live_tail_are_one_table_in_order_of_execution(tmp_path):
    hookrec.attach(nn.Identity(), tmp_path / "a", keep_free=0).detach()
    rank = tmp_path / "a/rank-00000"
    for file in (*rank.glob("records-*"), rank / "end.json"):
        file.unlink()
    line = {"id": 0, "layer": "", "kind": "output", "path": "", "dtype": "float32", "shape": [], "location": None}
    (rank / "streams.jsonl").write_text(json.dumps({**line, "layout": "fixed"}) + "\n")
    for steps in ([0, 1, 2], [4, 3]):
        writer = LogWriter(rank)
        writer.append(_columns(steps))
        writer.close()
        if steps[0] == 0:
            compact(rank / "records-00000.arrows")
    trace = replay.open(tmp_path / "a")

    assert trace.sql("select step from records")["step"].to_pylist() == [0, 1, 2, 4, 3]
    assert trace.records(where="l2 > 1", steps=slice(1, None, 1))["step"].to_pylist() == [2, 4, 3]
    assert trace.sql("select sum(step) as s, sum(step) as s from records").to_pylist() == [{"s": 10, "s_1": 10}]


def test_ranks_are_joined_in_order(tmp_path):
    for rank in (0, 1):
        with hookrec.attach(model := nn.ReLU(), tmp_path / f"{rank}", clock="manual", keep_free=0) as recorder:
            for _ in range(2):
                model(torch.full((2,), 1.0 + rank))
                recorder.step()
    (tmp_path / "1/rank-00000").rename(tmp_path / "0/rank-00001")

    found = replay.open(tmp_path / "0").sql("select rank, step, absmax from records")

    assert [tuple(row.values()) for row in found.to_pylist()] == [(0, 0, 1.0), (0, 1, 1.0), (1, 0, 2.0), (1, 1, 2.0)]


def test_an_empty_trace_answers_with_no_rows(tmp_path):
    hookrec.attach(nn.Identity(), tmp_path / "a", keep_free=0).detach()
    trace = replay.open(tmp_path / "a")

    assert trace.sql("select count(*) as n from records").to_pylist() == [{"n": 0}]
    assert len(trace.records(where="l2 > 0")) == 0
    assert trace.sql("from scalars").column_names == ["rank", "step", "time", "name", "value"]


@pytest.mark.parametrize(
    "query",
    [
        "copy records to '{}/out.csv'",
        "copy (select 1) to '{}/out.parquet'",
        "attach '{}/out.db'",
        "export database '{}/out'",
        "select * from read_text('{}/other.txt')",
        "select * from '{}/other.csv'",
        "from glob('{}/*')",
        "set enable_external_access = true",
        "install httpfs",
        "select * from query",  # a variable of the function that asks
    ],
)
def test_a_query_reaches_no_file_and_no_variable(trace, tmp_path, query):
    (tmp_path / "other.txt").write_text("secret")
    (tmp_path / "other.csv").write_text("secret\n1\n")

    with pytest.raises(replay.BadQuery, match="The tables and their columns"):
        trace.sql(query.format(tmp_path))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.csv", "other.txt"]


@pytest.mark.parametrize(
    ("query", "reason"),
    [("select nope from records", '"nope" not found'), ("selec 1", "syntax error"), ("", "asks for no rows")],
)
def test_a_query_that_cannot_be_answered_says_why_and_what_is_there(trace, query, reason):
    result = CliRunner().invoke(main, ["sql", str(trace.path), query])

    assert result.exit_code == 2
    assert result.output.startswith("Error: ")
    assert reason in result.output
    assert "records: rank, step, layer, kind, call, path" in result.output


@pytest.mark.parametrize("query", ["select nope from records", "select nope from nowhere", "selec 1"])
def test_it_names_the_columns_of_all_tables_and_no_table_of_ours(trace, query):
    with pytest.raises(replay.BadQuery) as refused:
        trace.sql(query)

    message = str(refused.value)
    assert "scalars: rank, step, time, name, value" in message
    assert "modules: rank, layer, class, leaf, recorded" in message
    assert "log_" not in message


@pytest.mark.parametrize("condition", ["true); select (1", "true; select 1", "", " "])
def test_a_condition_is_one_condition(trace, condition):
    with pytest.raises(replay.BadQuery, match=r"not one condition|near"):
        trace.records(where=condition)


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ("l2 >", 'near ">"'),
        ("n_nan > 0 and", 'near "and"'),
        ("(l2 > 1", 'near "1"'),
        ("l2 > 1) or (1 = 1", 'near ")"'),
        ("l2 > 1 order by step", 'near "order"'),
    ],
)
def test_what_is_said_of_a_condition_is_of_what_the_user_wrote(trace, condition, reason):
    with pytest.raises(replay.BadQuery) as refused:
        trace.records(where=condition)

    said = str(refused.value).partition(" The columns are ")[0].removeprefix(f"The condition {condition!r} ")
    assert said.startswith("cannot be understood: Parser Error: ")
    assert reason in said


def test_a_table_of_any_columns_is_printed(trace):
    command = ["sql", str(trace.path)]

    text = CliRunner().invoke(main, [*command, "-"], input="select '' as path, null as x, [1, 2.5]::double[] as y")
    objects = CliRunner().invoke(main, [*command, "select layer, date '2026-01-02' as d from streams", "--json"])

    assert text.output.split() == ["path", "x", "y", "[1,", "2.5]"]
    assert json.loads(objects.output)[0] == {"layer": "0", "d": "2026-01-02"}


def test_rows_that_come_in_parts_are_printed_as_all_at_once(trace, monkeypatch):
    monkeypatch.setattr("replay.query._ANSWER_ROWS", 2048)  # DuckDB has no smaller parts
    asked = "select i, i / 7 as x, 'a\n\"' as s, [i] as l, null as n from range(5000) t(i)"
    expected = [{"i": i, "x": i / 7, "s": 'a\n"', "l": [i], "n": None} for i in range(5000)]

    as_json = CliRunner().invoke(main, ["sql", str(trace.path), asked, "--json"])
    table = CliRunner().invoke(main, ["sql", str(trace.path), asked, "--limit", "3000"])

    assert len([part for part in trace.sql_parts(asked) if len(part)]) > 1
    assert as_json.stdout == json.dumps(expected, indent=1) + "\n"
    assert [line.split()[0] for line in table.stdout.splitlines()[1:]] == [f"{i}" for i in range(3000)]
    assert table.stderr == "2,000 more; --limit shows them.\n"
    assert CliRunner().invoke(main, ["sql", str(trace.path), f"{asked} limit 0", "--json"]).stdout == "[]\n"


def test_a_fault_in_a_late_row_is_said_behind_those_before_it(trace):
    asked = "select cast(case when i < 300000 then '1' else 'x' end as integer) as a from range(400000) t(i)"

    answer = CliRunner().invoke(main, ["sql", str(trace.path), asked])

    assert answer.exit_code == 2
    assert "The query cannot be answered: Conversion Error" in answer.stderr
    assert "Traceback" not in answer.output
