"""Rules of a plan: which layers and kinds are recorded otherwise, against clones taken without our code."""

import json
import re
from pathlib import Path

import click
import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hookrec
import replay
from hookrec.errors import AttachError, HookrecWarning
from hookrec.plan import plan_of, read_plan
from hookrec.plan_options import changes_of, options_of
from replay.cli import main
from replay.verify import verify
from tests.oracle import Oracle, differences, leaves, recorded
from tests.samples import convolutional, train

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = (4, 1, 8, 8)


def watched(path, steps=6, **plan) -> tuple[replay.Trace, Oracle]:
    """The trace of a training, which must be the same without a recorder, and what its layers computed."""
    model, twin = convolutional(), convolutional()
    oracle = Oracle(leaves(twin))
    with hookrec.attach(model, path, keep_free=0, **plan) as rec:
        losses = train(model, SHAPE, steps, rec)
    assert losses == train(twin, SHAPE, steps, oracle)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert list(verify(path)) == []
    return replay.open(path), oracle


def keys(trace) -> set[tuple]:
    return {(r["step"], r["layer"], r["kind"]) for r in trace.records().to_pylist()}


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_each_record_follows_the_last_rule_that_matches_it(tmp_path, store):
    trace, oracle = watched(
        tmp_path / "a",
        store=store,
        rules=[
            {"layers": "*", "kinds": "grad_output", "every": 3},
            {"layers": ["2", "3"], "record": False},
            {"layers": "4", "every": 2},
            {"layers": "4", "kinds": "output", "every": 5},
        ],
    )

    def due(step, layer, kind):
        if layer in ("2", "3"):
            return False
        if layer == "4":
            return step % (5 if kind == "output" else 2) == 0
        return kind == "output" or step % 3 == 0

    assert differences(recorded(trace), {k: v for k, v in oracle.records.items() if due(*k[:3])}) == []


def test_tensors_are_kept_in_part_or_not_at_all_and_statistics_are_of_the_whole(tmp_path):
    trace, oracle = watched(
        tmp_path / "a",
        steps=3,
        tensor_rows=3,
        rules=[
            {"layers": "0", "tensors": False},
            {"layers": "1", "kinds": "output", "tensor_dtype": "bfloat16", "tensor_rows": 2},
            {"layers": "4", "tensor_rows": None, "tensor_steps": "1"},
        ],
    )

    records = trace.records().to_pylist()
    assert {(r["step"], r["layer"], r["kind"], r["call"], r["path"]) for r in records} == set(oracle.records)
    for record in records:
        key = tuple(record[name] for name in ("step", "layer", "kind", "call", "path"))
        values = np.frombuffer(oracle.records[key], np.float32).reshape(record["shape"])
        np.testing.assert_allclose(record["l2"], np.linalg.norm(values.astype(np.float64)), rtol=1e-4)
        assert record["kept"] == (key[1] != "0" and (key[1] != "4" or key[0] == 1)), key
        if record["kept"]:
            stored = values if key[1] == "4" else values[:3]
            if key[1:3] == ("1", "output"):
                stored = values[:2].astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(trace.tensor(*key[:3]), stored)


def test_a_plan_of_statistics_keeps_the_tensors_of_one_layer(tmp_path):
    trace, oracle = watched(tmp_path / "a", steps=2, tensors=False, rules=[{"layers": "4", "tensors": True}])

    assert {(r["layer"], r["kept"]) for r in trace.records().to_pylist()} == {
        (layer, layer == "4") for layer in "012345"
    }
    want = {key: value for key, value in oracle.records.items() if key[1] == "4"}
    assert {key: trace.tensor(*key[:3]).tobytes() for key in want} == want


def test_a_layer_that_is_not_due_has_no_hook_in_that_step(tmp_path):
    model = convolutional()
    hooked = []

    with hookrec.attach(
        model,
        tmp_path / "a",
        every=4,
        rules=[{"layers": "0", "every": 2}, {"layers": "1", "record": False}],
        keep_free=0,
    ):
        for _ in range(5):
            hooked.append("".join(name for name, module in model.named_children() if module._forward_hooks))
            train(model, SHAPE, 1)

    assert hooked == ["02345", "", "0", "", "02345"]


def test_a_module_that_comes_in_the_middle_of_a_training_follows_the_rules(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))

    with hookrec.attach(model, tmp_path / "a", rules=[{"layers": "1", "every": 2}], keep_free=0):
        train(model, (3, 2), 1)
        model.append(nn.Linear(2, 2))
        train(model, (3, 2), 3)

    assert {step for step, layer, _ in keys(replay.open(tmp_path / "a")) if layer == "1"} == {2}


def test_parameters_and_inputs_follow_the_rules(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    kinds = ("input", "grad_input", "param", "param_grad", "param_grad_acc", "update")

    with hookrec.attach(
        model,
        tmp_path / "a",
        kinds=kinds,
        keep_free=0,
        rules=[{"every": 2}, {"layers": "0", "kinds": kinds[2:], "record": False}, {"kinds": "update", "steps": "1"}],
    ):
        train(model, (4, 2), 4)

    expected = {(step, "1", kind) for step in (0, 2) for kind in kinds[:-1]}
    expected |= {(step, "0", "input") for step in (0, 2)} | {(1, layer, "update") for layer in "01"}
    assert keys(replay.open(tmp_path / "a")) == expected


def test_operations_follow_the_rules_by_their_own_names(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return torch.relu(x * self.weight) + x + x

    model = nn.Sequential(Twice())
    with hookrec.attach(
        model,
        tmp_path / "a",
        ops=("add", "relu"),
        keep_free=0,
        rules=[{"layers": "0/add#1", "record": False}, {"layers": "0/relu#*", "every": 2}],
    ):
        train(model, (3, 2), 2)

    outputs = {(step, layer) for step, layer, kind in keys(replay.open(tmp_path / "a")) if kind == "output"}
    assert outputs == {(0, "0"), (1, "0"), (0, "0/add#0"), (1, "0/add#0"), (0, "0/relu#0")}


def test_a_layer_with_checkpointing_whose_outputs_are_left_out_has_its_gradients(tmp_path):
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.second(checkpoint(self.first, x.requires_grad_(), use_reentrant=True))

    model, twin = Model(), Model()
    seen = []

    def watch(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: seen.append(gradient.clone()))

    twin.first.register_forward_hook(watch)
    with hookrec.attach(model, tmp_path / "a", keep_free=0, rules=[{"kinds": "output", "record": False}]):
        train(model, (3, 2), 1)

    train(twin, (3, 2), 1)
    trace = replay.open(tmp_path / "a")
    assert keys(trace) == {(0, "first", "grad_output"), (0, "second", "grad_output")}
    np.testing.assert_array_equal(trace.tensor(0, "first", "grad_output"), seen[0])


def test_flight_mode_keeps_the_tensors_that_rules_let_it_keep(tmp_path):
    model = convolutional()

    with hookrec.attach(
        model, tmp_path / "a", flight=1, after=0, keep_free=0, rules=[{"layers": "[0-3]", "tensors": False}]
    ) as rec:
        train(model, SHAPE, 2)
        rec.trigger("now")
        train(model, SHAPE, 2)

    kept = {(r["step"], r["layer"]) for r in replay.open(tmp_path / "a").records().to_pylist() if r["kept"]}
    assert kept == {(step, layer) for step in (0, 1) for layer in "45"}


def test_what_rules_leave_out_is_no_layer_that_was_never_called(tmp_path):
    trace, _ = watched(
        tmp_path / "a", steps=2, rules=[{"layers": "3", "record": False}, {"layers": "5", "steps": "100:"}]
    )

    assert dict(trace.silent) == {
        "3": "not recorded, by rules[0] of the plan",
        "5": "it was not called in a step that rules[1] of the plan takes",
    }


def test_a_step_that_rules_leave_empty_is_not_warned_of(tmp_path):
    watched(tmp_path / "a", steps=2, rules=[{"record": False}])

    assert (tmp_path / "a/rank-00000/notes.jsonl").read_text() == ""


def test_a_glob_that_matches_no_layer_is_warned_of_by_name(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))

    with (
        pytest.warns(HookrecWarning, match=r"layers='encodr.\*' of rules\[0\] matches no recorded layer; .*'0'"),
        hookrec.attach(model, tmp_path / "a", keep_free=0, rules=[{"layers": "encodr.*", "every": 2}]),
    ):
        train(model, (3, 2), 1)

    notes = (tmp_path / "a/rank-00000/notes.jsonl").read_text()
    assert "encodr.*" in notes
    assert len(keys(replay.open(tmp_path / "a"))) == 2


def test_rules_are_changed_while_recording_and_no_tensor_is_filed_in_another_form(tmp_path):
    model, twin = convolutional(), convolutional()
    oracle = Oracle(leaves(twin))
    changes = [
        "rules=[{layers='0', tensor_rows=1}]",
        "rules=[{layers='0', tensor_rows=2, tensor_dtype='float16'}, {layers='[1-9]', record=false}]",
        "rules=",
    ]
    with hookrec.attach(model, tmp_path / "a", keep_free=0, rules=[{"layers": "0", "tensors": False}]) as rec:
        losses = []
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            if step < 3:
                rec.at_boundary(lambda step=step: rec.change(changes_of((changes[step],))))
            optimizer.zero_grad()
            loss = model(torch.randn(SHAPE)).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    assert losses == train(twin, SHAPE, 4, oracle)
    trace = replay.open(tmp_path / "a")
    assert list(verify(tmp_path / "a")) == []
    for step, (rows, dtype) in {1: (1, np.float32), 2: (2, np.float16), 3: (4, np.float32)}.items():
        expected = np.frombuffer(oracle.records[step, "0", "output", 0, ""], np.float32).reshape(4, 4, 6, 6)
        np.testing.assert_array_equal(trace.tensor(step, "0"), expected[:rows].astype(dtype))
    with pytest.raises(replay.NotRecorded, match="statistics"):
        trace.tensor(0, "0")
    assert {step for step, layer, _ in keys(trace) if layer == "4"} == {0, 1, 3}


def test_a_training_that_is_resumed_goes_on_by_the_rules_that_it_is_given(tmp_path):
    for first, rules in ((0, [{"layers": "0", "tensor_rows": 2}]), (1, [{"layers": "0", "tensor_dtype": "float16"}])):
        model = nn.Sequential(nn.Identity(), nn.Identity())
        with hookrec.attach(
            model, tmp_path / "a", keep_free=0, kinds="output", clock="manual", resume=first, rules=rules
        ) as rec:
            model(torch.full((3, 2), 1 / 3))
            rec.step()

    trace = replay.open(tmp_path / "a")
    assert list(verify(tmp_path / "a")) == []
    whole = np.full((3, 2), 1 / 3, np.float32)
    np.testing.assert_array_equal(trace.tensor(0, "0"), whole[:2])
    np.testing.assert_array_equal(trace.tensor(1, "0"), whole.astype(np.float16))
    np.testing.assert_array_equal(trace.tensor(1, "1"), whole)


def test_rules_stand_in_a_file_in_the_trace_and_in_info(tmp_path):
    (tmp_path / "plan.toml").write_text(
        'tensors = false\n[[rules]]\nlayers = "0"\ntensors = true\n[[rules]]\nlayers = ["1"]\nrecord = false\n'
    )
    options = read_plan(tmp_path / "plan.toml")

    with hookrec.attach(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), tmp_path / "a", keep_free=0, **options):
        pass

    written = json.loads((tmp_path / "a/trace.json").read_text())["plan"]["rules"]
    assert written == [{"layers": ["0"], "tensors": True}, {"layers": ["1"], "record": False}]
    assert plan_of(rules=written).as_json()["rules"] == written
    info = CliRunner().invoke(main, ["info", str(tmp_path / "a")]).output
    assert 'rules[0] {"layers": ["0"], "tensors": true}' in info
    assert 'rules[1] {"layers": ["1"], "record": false}' in info


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (('layers="a.*", every=10',), [{"layers": "a.*", "every": 10}]),
        (
            ("{tensors=false}", "kinds=['output'], steps='::5'"),
            [{"tensors": False}, {"kinds": ["output"], "steps": "::5"}],
        ),
        (("[{every=2}, {layers='b', record=false}]",), [{"every": 2}, {"layers": "b", "record": False}]),
    ],
)
def test_rules_are_said_on_the_command_line_as_in_toml(texts, expected):
    assert options_of(None, {"rules": texts}) == {"rules": expected}
    assert [rule for text in texts for rule in changes_of((f"rules={text}",))["rules"]] == expected


@pytest.mark.parametrize("text", ["layers=a", "every", "{every=2", "every=2\nlayers='a'", "[1]", "rules=3"])
def test_what_is_no_rule_on_the_command_line_is_refused(text):
    with pytest.raises(click.UsageError, match="rule"):
        options_of(None, {"rules": (text,)})


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"rules": "encoder"}, "takes a list of rules"),
        ({"rules": 3}, "takes a list of rules"),
        ({"rules": ["encoder"]}, "takes a list of rules"),
        ({"rules": [{}]}, r"rules\[0\] says nothing"),
        ({"rules": [{"layers": "a"}]}, r"rules\[0\] says nothing"),
        ({"rules": [{"every": 2}, {"evry": 3}]}, r"rules\[1\] has 'evry'.*mean 'every'"),
        ({"rules": [{"store": "hdf5"}]}, r"rules\[0\] has 'store', which no rule has"),
        ({"rules": [{"every": 0}]}, r"rules\[0\]: every is 0"),
        ({"rules": [{"steps": "x"}]}, r"rules\[0\]: steps is 'x'"),
        ({"rules": [{"tensor_rows": "many"}]}, r"rules\[0\]: tensor_rows is 'many'"),
        ({"rules": [{"tensor_dtype": "int8"}]}, r"rules\[0\]: There is no tensor_dtype"),
        ({"rules": [{"tensors": "yes"}]}, r"tensors of rules\[0\] is 'yes'"),
        ({"rules": [{"tensors": False, "tensor_rows": 2}]}, r"rules\[0\]: tensor_rows says what is kept"),
        ({"rules": [{"record": False, "every": 2}]}, "record=False, and every"),
        ({"rules": [{"record": 0}]}, r"record of rules\[0\] is 0"),
        ({"rules": [{"layers": [], "every": 2}]}, "its layers is empty"),
        ({"rules": [{"kinds": [], "every": 2}]}, "its kinds is empty"),
        ({"rules": [{"kinds": "outputs", "every": 2}]}, "There is no kind 'outputs'"),
        ({"rules": [{"kinds": "param", "every": 2}]}, "about param, and kinds has no such"),
        ({"rules": [{"layers": 3, "every": 2}]}, r"layers of rules\[0\] is 3"),
        ({"rules": [{"tensor_steps": "1"}], "flight": 2}, "flight mode chooses"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_with_its_number(plan, said):
    with pytest.raises(AttachError, match=said):
        plan_of(**plan)


PAGE = (Path(__file__).parents[1] / "docs" / "plan.md").read_text()


class Encoder(nn.Sequential):
    """The model that the page has: `encoder.0`, `encoder.2`, `encoder.drop` and `head`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
        encoder.add_module("drop", nn.Dropout(0.1))
        self.add_module("encoder", encoder)
        self.add_module("head", nn.Linear(4, 3))


@pytest.mark.parametrize("script", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_the_code_of_the_page_does_what_it_says(tmp_path, monkeypatch, script):
    monkeypatch.chdir(tmp_path)
    given = {"model": Encoder(), "train": lambda model, steps: train(model, (4, 6), steps)}

    exec(compile(script, "docs/plan.md", "exec"), given)


def test_the_file_of_the_page_is_a_plan(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "plan.toml").write_text(text)

    plan = plan_of(**read_plan(tmp_path / "plan.toml"))

    assert [rule.layers for rule in plan.rules] == [("encoder.*",), ("head", "encoder.0")]
