"""Steps are recorded, and tensors kept, at the steps that the plan says, and nowhere else."""

import json

import pytest
import torch
from torch import nn

import hookrec
import replay
from hookrec.errors import AttachError
from hookrec.plan import plan_of, read_plan
from hookrec.plan_options import changes_of
from replay.verify import verify
from tests.samples import convolutional, train

SHAPE = (4, 1, 8, 8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":", list(range(30))),
        ("0:3", [0, 1, 2]),
        ("27:", [27, 28, 29]),
        (":4:2", [0, 2]),
        ("::10", [0, 10, 20]),
        ("::10x3", [0, 1, 2, 10, 11, 12, 20, 21, 22]),
        ("5:26:10x2", [5, 6, 15, 16, 25]),
        ("0:2, 20:29:4", [0, 1, 20, 24, 28]),
        ("7", [7]),
        ("7,3,3", [3, 7]),
        ("0:10,5:12", list(range(12))),
    ],
)
def test_a_schedule_is_ranges_as_in_slices_and_bursts(text, expected):
    plan = plan_of(steps=text)

    assert [step for step in range(30) if plan.samples(step)] == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "is no range") for text in ("", "a", "0-100", "-1:5", "1:2:3:4", "0:5,", "x3", "٣", "9" * 30)),
        *((text, "ends before it begins") for text in ("5:5", "9:2")),
        *((text, "there must be one") for text in ("::0", "::3x4", "::3x0", "0:9x2")),
        (100, "takes a text: '100' for that step alone, '::100' for each so many"),
    ],
)
@pytest.mark.parametrize("name", ["steps", "tensor_steps"])
def test_what_is_no_schedule_is_refused_with_what_one_is(name, text, said):
    with pytest.raises(AttachError, match=f"^{name} is ") as refused:
        plan_of(**{name: text})

    assert said in str(refused.value)


@pytest.mark.parametrize("more", [{"tensors": False}, {"flight": 5}])
def test_when_tensors_are_kept_is_not_said_where_none_are_or_flight_mode_chooses(more):
    with pytest.raises(AttachError, match="tensor_steps"):
        plan_of(tensor_steps="::10", **more)


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_statistics_come_each_recorded_step_and_tensors_at_their_own_rate(tmp_path, store):
    watched, twin = convolutional(), convolutional()

    with hookrec.attach(
        watched, tmp_path / "a", steps="2:12", every=2, tensor_steps="4,::6", store=store, keep_free=0
    ) as rec:
        losses = train(watched, SHAPE, 14, rec)

    assert losses == train(twin, SHAPE, 14)
    trace = replay.open(tmp_path / "a")
    assert trace.steps == [2, 4, 6, 8, 10]
    kept = {step: set() for step in trace.steps}
    for record in trace.records().to_pylist():
        kept[record["step"]].add(record["kept"])
    assert kept == {2: {False}, 4: {True}, 6: {True}, 8: {False}, 10: {False}}
    assert trace.tensor(step=6, layer="4").shape == (4, 3)
    with pytest.raises(replay.NotRecorded, match="statistics"):
        trace.tensor(step=8, layer="4")
    assert list(verify(tmp_path / "a")) == []


def test_between_recorded_steps_no_module_has_a_hook(tmp_path):
    model = convolutional()
    hooked = []

    with hookrec.attach(model, tmp_path / "a", steps="1:3,5:9:3x2", keep_free=0):
        for _ in range(10):
            hooked.append(any(module._forward_hooks for module in model.modules()))
            train(model, SHAPE, 1)

    assert [step for step, there in enumerate(hooked) if there] == [1, 2, 5, 6, 8]


@pytest.mark.parametrize("rules", [[], [{"layers": "0", "every": 1}]])
@pytest.mark.parametrize("exponents", [False, True])
def test_of_a_gradient_that_comes_after_its_step_the_tensor_is_kept_where_those_of_that_step_are(
    tmp_path, rules, exponents
):
    model = nn.Sequential(nn.Identity())
    options = {"exponents": exponents, "rules": rules, "tensor_steps": "::2", "clock": "manual"}
    late = None
    with hookrec.attach(model, tmp_path / "a", kinds="grad_output", keep_free=0, **options) as rec:
        for step in range(6):
            loss = (model(torch.ones(3).requires_grad_() * 1) * (step + 1.0)).sum()
            if late is not None:
                late.backward()
            late = loss
            rec.step()

    trace = replay.open(tmp_path / "a")
    rows = trace.records(kinds="grad_output").to_pylist()
    assert [(row["step"], row["max"], row["kept"]) for row in rows] == [
        (step, step + 1.0, step % 2 == 0) for step in range(5)
    ]
    assert [trace.tensor(step, "0", "grad_output").tolist() for step in (0, 2, 4)] == [[1.0] * 3, [3.0] * 3, [5.0] * 3]
    if exponents:
        assert trace.records(kinds="exponents")["kept"].to_pylist() == [True] * 5
    assert list(verify(tmp_path / "a")) == []


def test_tensors_at_no_step_that_came_leave_a_whole_trace_of_statistics(tmp_path):
    model = convolutional()

    with hookrec.attach(model, tmp_path / "a", tensor_steps="1000:", keep_free=0):
        train(model, SHAPE, 3)

    trace = replay.open(tmp_path / "a")
    assert trace.steps == [0, 1, 2]
    assert set(trace.records()["kept"].to_pylist()) == {False}
    assert list(verify(tmp_path / "a")) == []


def test_a_schedule_is_changed_while_recording_and_the_trace_says_so(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))

    with hookrec.attach(model, tmp_path / "a", tensor_steps="0", keep_free=0) as rec:
        train(model, (3, 2), 2)
        rec.at_boundary(lambda: rec.change(changes_of(("steps=4:", "tensor_steps=5"))))
        train(model, (3, 2), 4)

    trace = replay.open(tmp_path / "a")
    assert trace.steps == [0, 1, 2, 4, 5]
    kept = [r["step"] for r in trace.records(kinds="output").to_pylist() if r["kept"]]
    assert kept == [0, 5]
    notes = [json.loads(line) for line in (tmp_path / "a/rank-00000/notes.jsonl").read_text().splitlines()]
    assert notes[-1]["note"] == "the plan was changed: steps : -> 4:, tensor_steps 0 -> 5"
    assert notes[-1]["plan"]["steps"] == "4:"


@pytest.mark.parametrize("when", ["between two steps", "after the forward pass", "after the backward pass"])
@pytest.mark.parametrize("every", [1, 4])
def test_a_change_that_the_script_asks_for_costs_no_step_and_splits_none(tmp_path, when, every):
    """As a script does that sees its loss jump: the plan is another from the step on of which nothing has come."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    changes = {4: {"kinds": ["output", "update"], "every": 1}, 8: {"kinds": ["grad_output"], "every": 2}}
    said = []
    with hookrec.attach(model, tmp_path / "a", kinds=["output", "grad_output"], every=every, keep_free=0) as rec:
        for step in range(13):
            for moment in ("between two steps", "after the forward pass", "after the backward pass"):
                if moment == "after the forward pass":
                    loss = model(torch.ones(3, 2)).sum()
                elif moment == "after the backward pass":
                    loss.backward()
                if moment == when and step in changes:
                    said.append(rec.change(changes[step]))
                    with pytest.raises(hookrec.AttachError, match="matches none"):
                        rec.change({"layers": "none"})
            optimizer.step()
        assert rec.change({"every": 2}) == "that is the plan already"
    assert rec.change({"every": 1}) == "the recording has ended"

    later = when != "between two steps"
    expected = {step: {"output", "grad_output"} for step in range(0, 4 + later, every)}
    expected |= {step: {"output", "update"} for step in range(4 + later, 8 + later)}
    expected |= {step: {"grad_output"} for step in range(10 if later else 8, 13, 2)}
    trace = replay.open(tmp_path / "a")
    assert {step: set(trace.records(steps=step)["kind"].to_pylist()) for step in trace.steps} == expected
    assert {(row["step"], row["layer"]) for row in trace.records(kinds="output").to_pylist()} == {
        (step, layer) for step, kinds in expected.items() if "output" in kinds for layer in "01"
    }
    notes = [note for note in trace.notes if "plan" in note]
    assert [note["step"] for note in notes] == [4 + later, 8 + later]
    assert [words.split(":")[0] for words in said] == [f"from step {note['step']} on" for note in notes]


def test_changes_in_the_middle_of_a_step_add_up(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with hookrec.attach(model, tmp_path / "a", clock="manual", kinds="output", keep_free=0) as rec:
        for _ in range(3):
            model(torch.ones(1, 2))
            if rec.steps == 0:
                assert rec.change({"layers": "0"}) == "from step 1 on: layers * -> 0"
                assert rec.change({"tensors": False}) == "from step 1 on: tensors True -> False"
                assert rec.change({"layers": "1"}) == "from step 1 on: layers 0 -> 1"
            model(torch.ones(1, 2))
            rec.step()

    trace = replay.open(tmp_path / "a")
    rows = [(row["step"], row["layer"], row["call"], row["kept"]) for row in trace.records().to_pylist()]
    assert rows == [
        *((0, layer, call, True) for call in (0, 1) for layer in "01"),
        *((step, "1", call, False) for step in (1, 2) for call in (0, 1)),
    ]


def test_numbers_of_steps_that_are_not_recorded_are_filed_as_in_those_that_are(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before, after = (0, 2, 3, 6, 8, 11, 13), (0, 1, 5, 6, 8, 10, 13)
    with hookrec.attach(model, tmp_path / "a", every=4, keep_free=0) as rec:
        for step in range(14):
            model(torch.ones(3, 2)).sum().backward()
            if step in before:
                rec.log(before=step)
            optimizer.step()
            if step in after:
                rec.log(after=step)
            if step % 5 == 1:
                with rec.pause():
                    rec.log(evaluated=step)

    logged = {"before": [], "after": [], "evaluated": []}
    for row in replay.open(tmp_path / "a").scalars().to_pylist():
        if row["name"] in logged:
            assert row["step"] == row["value"]
            logged[row["name"]].append(row["step"])
    assert logged == {"before": list(before), "after": list(after), "evaluated": [1, 6, 11]}


def test_a_file_with_a_plan_has_schedules_and_the_trace_repeats_them(tmp_path):
    (tmp_path / "plan.toml").write_text('steps = "0:100,1000:2000:10"\ntensor_steps = "::100x3"\n')
    options = read_plan(tmp_path / "plan.toml")

    with hookrec.attach(nn.Linear(2, 2), tmp_path / "a", keep_free=0, **options):
        pass

    plan = json.loads((tmp_path / "a/trace.json").read_text())["plan"]
    assert (plan["steps"], plan["tensor_steps"]) == ("0:100,1000:2000:10", "::100x3")


def test_a_fault_in_a_step_that_is_passed_by_ends_the_recording_alone(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(3, 3))
    with hookrec.attach(model, tmp_path / "a", clock="manual", every=10, ring="1MiB", keep_free=0) as rec:
        model(torch.ones(1, 3))
        rec.step()
        rec.step()

        def broken(step):
            raise RuntimeError("planted")

        monkeypatch.setattr(rec._recording._capture, "begin_step", broken)
        with pytest.warns(hookrec.HookrecWarning, match="planted"):
            rec.step()

    assert not rec.active
    assert replay.open(tmp_path / "a").steps == [0]
