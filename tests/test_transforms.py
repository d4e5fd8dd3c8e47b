"""A user's function over records: what it returns is recorded beside them, and it cannot change the training."""

import json
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

import hookrec
import replay
from hookrec.errors import AttachError
from hookrec.plan import plan_of
from hookrec.plan_options import options_of
from replay.verify import verify
from tests.oracle import Oracle, differences, leaves, recorded
from tests.samples import convolutional, train

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = (4, 1, 8, 8)


def row_sums(layer, kind, tensor):
    return tensor.sum(dim=-1) if kind == "output" else None


def watched(path, transform, steps=2, **plan) -> tuple[replay.Trace, Oracle]:
    """The trace of a training, which must be the same without a recorder, and what its layers computed."""
    model, twin = convolutional(), convolutional()
    oracle = Oracle(leaves(twin))
    with hookrec.attach(model, path, keep_free=0, transform=transform, **plan) as rec:
        losses = train(model, SHAPE, steps, rec)
    assert rec._recording._failed is False
    assert losses == train(twin, SHAPE, steps, oracle)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert list(verify(path)) == []
    return replay.open(path), oracle


def notes(path) -> list[tuple[str, str]]:
    lines = (path / "rank-00000/notes.jsonl").read_text().splitlines()
    return [(line["layer"], line["note"]) for line in map(json.loads, lines)]


@pytest.mark.parametrize("given", [row_sums, "tests.test_transforms:row_sums"])
def test_the_result_is_a_layer_of_its_own_beside_the_original(tmp_path, given):
    trace, oracle = watched(tmp_path / "a", {"[04]": given})

    found = recorded(trace)
    assert differences({k: v for k, v in found.items() if "/" not in k[1]}, oracle.records) == []
    results = {k: v for k, v in found.items() if "/" in k[1]}
    assert set(results) == {(s, f"{layer}/row_sums", "output", 0, "") for s in range(2) for layer in "04"}
    for step in range(2):
        whole = torch.frombuffer(bytearray(oracle.records[step, "4", "output", 0, ""]), dtype=torch.float32)
        expected = whole.reshape(4, 3).sum(dim=-1)
        np.testing.assert_array_equal(trace.tensor(step, "4/row_sums"), expected)
        (record,) = trace.records(layers="4/row_sums", steps=step).to_pylist()
        np.testing.assert_allclose(record["l2"], np.linalg.norm(expected.double()), rtol=1e-4)
    plan = json.loads((tmp_path / "a/trace.json").read_text())["plan"]
    assert plan["transform"] == {"[04]": "tests.test_transforms:row_sums"}


def test_a_function_that_does_what_it_must_not_changes_no_training(tmp_path):
    def rude(layer, kind, tensor):
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        torch.rand(3)
        tensor.numpy()[...] = np.nan
        tensor.zero_()
        tensor.data.add_(1)
        with torch.enable_grad():
            return (tensor.requires_grad_() * 2).sum()

    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.random()
    random.seed(3)
    np.random.seed(3)

    trace, oracle = watched(tmp_path / "a", {"*": rude})

    assert (random.random(), np.random.random()) == expected
    found = recorded(trace)
    assert differences({k: v for k, v in found.items() if "/" not in k[1]}, oracle.records) == []
    assert len([k for k in found if "/" in k[1]]) == len(oracle.records)


@pytest.mark.parametrize("error", [ValueError, SystemExit, RecursionError])
def test_what_a_function_raises_is_noted_once_a_layer_and_the_rest_is_recorded(tmp_path, error):
    count = 0

    def failing(layer, kind, tensor):
        nonlocal count
        count += 1
        raise error(f"number {count}")

    trace, oracle = watched(tmp_path / "a", {"[01]": failing})

    assert differences(recorded(trace), oracle.records) == []
    assert count == 2 * 2 * 2
    assert [layer for layer, _ in notes(tmp_path / "a")] == ["0/failing", "1/failing"]
    assert f"{error.__name__}: number 1" in notes(tmp_path / "a")[0][1]


@pytest.mark.parametrize(
    ("made", "said"),
    [(3, "returned a int"), ([torch.ones(1)], "returned a list"), (torch.ones(1, device="meta"), "meta")],
)
def test_what_is_no_tensor_with_values_is_noted(tmp_path, made, said):
    trace, oracle = watched(tmp_path / "a", {"0": lambda layer, kind, tensor: made}, steps=1)

    assert differences(recorded(trace), oracle.records) == []
    assert any(layer == "0/<lambda>" and said in note for layer, note in notes(tmp_path / "a"))


def test_layers_and_operations_that_a_function_calls_are_not_recorded(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def again(layer, kind, tensor):
        return model[1](tensor) + 1

    with hookrec.attach(
        model, tmp_path / "a", kinds="output", ops="add", keep_free=0, transform={"0": again}, clock="manual"
    ) as rec:
        x = torch.ones(2, 3)
        first = model[0](x).detach()
        expected = model[1](first).detach() + 1
        rec.step()
        model(x)
        rec.step()

    trace = replay.open(tmp_path / "a")
    records = [(r["layer"], r["call"]) for r in trace.records(steps=1).to_pylist()]
    assert sorted(records) == [("0", 0), ("0/again", 0), ("1", 0)]
    np.testing.assert_array_equal(trace.tensor(1, "0/again"), expected)


def test_the_last_glob_that_matches_decides_and_rules_speak_of_results_by_their_names(tmp_path):
    def one(layer, kind, tensor):
        return torch.ones(5)

    def two(layer, kind, tensor):
        return torch.full((5,), 2.0)

    trace, _ = watched(
        tmp_path / "a",
        {"*": one, "4": two},
        steps=3,
        rules=[
            {"layers": "[0-9]", "tensors": False},
            {"layers": "*/one", "kinds": "output", "every": 2},
            {"layers": ["*/*"], "kinds": "grad_output", "record": False},
        ],
    )

    kept = {(r["step"], r["layer"], r["kind"]) for r in trace.records().to_pylist() if r["kept"]}
    assert kept == {(s, f"{n}/one", "output") for s in (0, 2) for n in "01235"} | {
        (s, "4/two", "output") for s in range(3)
    }


def test_other_threads_are_recorded_while_one_is_in_a_function(tmp_path):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    inside, done = threading.Event(), threading.Event()

    def waits(layer, kind, tensor):
        inside.set()
        assert done.wait(60)

    with hookrec.attach(
        model, tmp_path / "a", kinds="output", clock="manual", keep_free=0, transform={"0": waits}
    ) as rec:
        thread = threading.Thread(target=lambda: model[0](torch.ones(1)))
        thread.start()
        assert inside.wait(60)
        model[1](torch.ones(2))
        done.set()
        thread.join()
        rec.step()

    assert sorted(replay.open(tmp_path / "a").records()["layer"].to_pylist()) == ["0", "1"]


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (3, "takes functions by globs"),
        ({3: row_sums}, "takes functions by globs"),
        ({"*": 3}, "takes a function, or its place"),
        ({"*": "row_sums"}, "takes a function, or its place"),
        ({"*": "no_such_module:row_sums"}, "cannot be imported: ModuleNotFoundError"),
        ({"*": "tests.test_transforms:no_such"}, "cannot be imported: AttributeError"),
        ({"*": "tests.test_transforms:SHAPE"}, "is a tuple, and no function"),
    ],
)
def test_what_is_no_function_is_refused_before_anything_is_made(tmp_path, transform, said):
    with pytest.raises(AttachError, match=said):
        hookrec.attach(nn.Linear(1, 1), tmp_path / "a", transform=transform)

    assert not (tmp_path / "a").exists()


def test_the_command_line_has_functions_by_their_places():
    options = options_of(None, {"transform": ("encoder.*=my.module:mean", "*=other:f")})

    assert options == {"transform": {"encoder.*": "my.module:mean", "*": "other:f"}}
    assert plan_of(**options).as_json()["transform"] == options["transform"]
