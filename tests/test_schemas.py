"""The text, the schemas and the code of the format say the same: examples go through both, and so do real traces."""

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn

import hookrec
import replay
from hookrec.findings import as_alert, ended
from replay.alerts import AlertFile, read_alerts
from replay.dropping import drop, shards
from replay.format import DTYPES, KINDS, RECORD_SCHEMA, WHY_NOT_KEPT

SCHEMAS = Path(__file__).parent.parent / "schemas"
EXAMPLES = sorted(path.stem for path in (SCHEMAS / "examples").iterdir())
PLACES = {"trace": "trace.json", "model": "rank-00000/model.json", "end": "rank-00000/end.json"}
LATER = {
    "dropped": "rank-00000/tensors-dropped.json",
    "alert": "alerts.jsonl",
    "attempt": "rank-00000/attempts.jsonl",
}


def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("schemas") / "a"
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with hookrec.attach(model, path, clock="manual", keep_free=0):
        model(torch.ones(4, 3)).sum().backward()
    return path


@pytest.fixture
def trace(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "a"))


def read_all(path: Path) -> None:
    """Open a trace and look at whatever comes from its JSON files."""
    opened = replay.open(path)
    _ = opened.status, opened.endings, opened.silent, opened.layers, opened.attempts
    read_alerts(path)


@pytest.mark.parametrize("example", EXAMPLES)
def test_schema_and_reader_agree_on_each_example(trace, example):
    verdict, kind, *_ = example.split("-")
    content = json.loads((SCHEMAS / "examples" / f"{example}.json").read_text())
    if kind == "stream":
        streams = trace / "rank-00000/streams.jsonl"
        lines = streams.read_text().splitlines()
        streams.write_text("\n".join([json.dumps(content), *lines[1:]]) + "\n")
    else:
        (trace / (PLACES | LATER)[kind]).write_text(json.dumps(content) + "\n")

    assert validator(kind).is_valid(content) == (verdict == "accept")
    if verdict == "accept":
        read_all(trace)
    else:
        with pytest.raises((replay.TraceDamaged, replay.TraceTooNew)):
            read_all(trace)


def test_what_is_written_fits_the_schemas(trace):
    for kind, place in PLACES.items():
        validator(kind).validate(json.loads((trace / place).read_text()))
    for line in (trace / "rank-00000/streams.jsonl").read_text().splitlines():
        validator("stream").validate(json.loads(line))


def test_what_is_added_later_fits_the_schemas(trace):
    rank = trace / "rank-00000"
    drop(rank, shards(rank)[:1], "the quota of 1 bytes", "2026-12-02T12:00:00.000+00:00")
    with hookrec.attach(nn.Linear(3, 2), trace, clock="manual", keep_free=0, resume=True) as recorder:
        recorder.step()
        recorder.log(loss=1.0)
    AlertFile(trace).append([as_alert(ended(0, {"how": "died"}), "0" * 32, "2026-12-02T12:00:00.000+00:00")])

    for kind, place in LATER.items():
        validator(kind).validate(json.loads((trace / place).read_text()))


def test_the_log_has_the_columns_of_its_schema():
    columns = json.loads((SCHEMAS / "records.schema.json").read_text())["columns"]

    assert [(field.name, str(field.type)) for field in RECORD_SCHEMA] == [(c["name"], c["type"]) for c in columns]
    assert not any(field.nullable for field in RECORD_SCHEMA)


def test_the_text_names_whatever_the_code_knows():
    text = (SCHEMAS / "trace.md").read_text()

    assert set(json.loads((SCHEMAS / "stream.schema.json").read_text())["properties"]["dtype"]["enum"]) == DTYPES
    for name in (*KINDS, *DTYPES, *RECORD_SCHEMA.names):
        assert f"`{name}`" in text or f" {name}" in text, name
    for number, why in WHY_NOT_KEPT.items():
        assert f"| {number} | " in text, why
