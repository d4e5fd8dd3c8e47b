"""Rules find the same in records that are read from the log in parts as in records that are in memory."""

import numpy as np
import pytest
from click.testing import CliRunner

import replay
from replay import passes
from replay.check import examine
from replay.check_command import check
from replay.format import STATISTICS
from replay.log import Log, LogWriter
from tests.written import module, write_trace

LAYERS = (("emb", "Embedding"), ("fc", "Linear"), ("act", "ReLU"), ("tanh", "Tanh"), ("head", "Linear"))


def random_trace(path, seed):
    """Write a training in which much goes wrong, and several calls, dtypes and modes meet in a step."""
    rng = np.random.default_rng(seed)
    modules = [module(name, kind, ("weight", [30, 20]), ("bias", [20])) for name, kind in LAYERS]
    ranks, count = int(rng.integers(1, 4)), int(rng.integers(25, 35))
    others = ("input", "grad_output", "param", "param_grad", "update")
    kinds = ["output", *(kind for kind in others if rng.random() < 0.8)]
    places = [
        (name, kind, path)
        for kind in kinds
        for name, _ in LAYERS
        for path in (("weight", "bias") if kind.startswith(("param", "update")) else ("", "0")[: rng.integers(1, 3)])
    ]
    dtypes = {place: rng.choice(["float32", "float16", "bfloat16"]) for place in places}
    masked = places[int(rng.integers(len(places)))] if rng.random() < 0.5 else None
    trouble = int(rng.integers(0, 2 * count))
    scaled = rng.random() < 0.5
    for rank in range(ranks):
        records = []
        for step in range(0, 2 * count, 2):
            for place in places:
                if rng.random() < 0.02:
                    continue
                for call in range(int(rng.choice([1, 1, 1, 3]))):
                    records.append(_record(rng, step, place, call, dtypes[place], wrong=step >= trouble))
                    if place == masked:
                        records[-1] |= {"n_neginf": 10}
        scalars = [(step, "loss", float(rng.normal() + 3)) for step in range(0, 2 * count, 2)]
        if scaled:
            scalars += [
                (step, "hookrec/grad_scale", 2.0 ** int(rng.integers(4, 16))) for step in range(0, 2 * count, 2)
            ]
            scalars += [(step, "hookrec/skipped", float(rng.random() < 0.2)) for step in range(0, 2 * count, 2)]
        write_trace(path, records, modules, scalars, rank)
        _in_segments(path / f"rank-{rank:05}", rows=len(records) // 5 + 1)
    return path


def _record(rng, step, place, call, dtype, *, wrong):
    name, kind, path = place
    numel = int(rng.choice([0, 1, 50, 100], p=[0.01, 0.01, 0.2, 0.78]))
    scale = 10.0 ** rng.normal(0, 2 if wrong else 0.2)
    facts = {"step": step, "layer": name, "kind": kind, "path": path, "call": call, "dtype": dtype}
    facts |= {"mode": "eval" if rng.random() < 0.1 else "train", "numel": numel}
    if not numel:
        return facts | dict.fromkeys(STATISTICS[1:5], 0) | dict.fromkeys(STATISTICS[5:], np.nan)
    facts |= {"mean": scale * rng.normal(), "std": scale, "l2": scale * numel**0.5, "min": -3 * scale, "max": 2 * scale}
    facts |= {"absmax": 3 * scale, "n_zero": int(rng.integers(0, numel + 1))}
    if wrong and rng.random() < 0.01:
        facts |= {rng.choice(["n_nan", "n_posinf", "n_neginf"]): int(rng.integers(1, numel + 1))}
    return facts


def _in_segments(directory, rows):
    """Write the log of a rank again, in several segments."""
    table = Log(directory).refresh().table()
    for path in directory.glob("records-*"):
        path.unlink()
    log = LogWriter(directory)
    for begin in range(0, len(table), rows):
        part = table.slice(begin, rows)
        log.append({name: part[name].to_numpy() for name in part.column_names})
        if begin + 2 * rows < len(table):
            log.begin_segment()
    log.close()


@pytest.fixture
def from_the_log(monkeypatch):
    """Have no records kept in memory."""
    monkeypatch.setattr(passes, "_FEW", 0)


@pytest.mark.parametrize(("seed", "since"), [(0, None), (2, 40)])
def test_rules_find_the_same(tmp_path, monkeypatch, seed, since):
    path = random_trace(tmp_path / "a", seed)
    monkeypatch.setattr("replay.grid.BACKGROUND", 10)
    in_memory = examine(replay.open(path), since=since)

    monkeypatch.setattr(passes, "_FEW", 0)
    from_the_log = examine(replay.open(path), since=since)

    assert from_the_log == in_memory
    assert len(in_memory.findings) > 2


def test_grids_are_the_same_to_the_last_bit(tmp_path, monkeypatch):
    path = random_trace(tmp_path / "a", 5)
    in_memory = replay.Records(replay.open(path))
    kinds = dict.fromkeys(place.kind for place in in_memory.places)
    expected = {kind: {name: in_memory.grid(kind)[name] for name in (*STATISTICS, "scale")} for kind in kinds}

    monkeypatch.setattr(passes, "_FEW", 0)
    from_the_log = replay.Records(replay.open(path))

    assert from_the_log.places == in_memory.places
    for kind, grids in expected.items():
        for name, grid in grids.items():
            np.testing.assert_array_equal(from_the_log.grid(kind)[name], grid)


def test_the_table_of_all_records_is_there_for_rules_that_want_it(tmp_path, monkeypatch, from_the_log):
    monkeypatch.setattr("replay.grid.BACKGROUND", 10)
    trace = replay.open(random_trace(tmp_path / "a", 0))

    records = replay.Records(trace, since=40)

    expected = trace.records(steps=slice(int(records.steps[0]), None))
    assert str(records.table.to_pylist()) == str(expected.to_pylist())
    assert records.count == len(expected) == records.rows_of_place.sum()
    key = expected.select(["rank", "layer", "kind", "path"]).to_pylist()
    places = [{name: getattr(place, name) for name in key[0]} for place in records.places]
    assert [places[number] for number in records.place_of_row] == key
    assert [key[row] for row in records.first_row] == places
    assert [place.dtype for place in records.places] == expected["dtype"].take(records.first_row).to_pylist()


def test_arrays_that_do_not_fit_are_read_again(tmp_path, monkeypatch, from_the_log):
    path = random_trace(tmp_path / "a", 1)
    kept = replay.Records(replay.open(path))
    expected = [kept.grid("output")[name].copy() for name in STATISTICS]

    monkeypatch.setattr("replay.grid._KNOWN_BYTES", 1)
    records = replay.Records(replay.open(path))

    for name, grid in zip(STATISTICS * 2, expected * 2, strict=True):
        np.testing.assert_array_equal(records.grid("output")[name], grid)
    assert len(records._known) == 1


def test_progress_is_told_of_each_rule_and_while_records_are_read(tmp_path, from_the_log):
    told = []

    examine(replay.open(random_trace(tmp_path / "a", 0)), progress=lambda done, total: told.append((done, total)))

    assert told == sorted(told)
    assert {done for done, _ in told} == set(range(20))
    assert {total for _, total in told} == {20}
    assert len(told) > 40


def test_the_command_says_how_far_it_is_where_it_takes_long(tmp_path, monkeypatch):
    path = random_trace(tmp_path / "a", 0)
    monkeypatch.setattr("replay.command_line.FIRST_S", 0.0)

    result = CliRunner().invoke(check, [str(path)])

    assert result.stderr == "0 of 20 rules\n"
