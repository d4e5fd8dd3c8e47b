"""Trainings of the `Trainer` of transformers are recorded step by step, and are what they are without a recorder."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import hookrec
import replay
from hookrec import recorder
from hookrec.writer_process import WriterProcess
from tests.loops import SMALL, Net, rows, scalars

pytestmark = pytest.mark.usefixtures("no_process")


class TestTransformers:
    def train(self, net, out, callbacks=(), resume=None, **more):
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("accelerate")

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = net

            def forward(self, x, labels):
                y = self.net(x)
                return {"loss": functional.mse_loss(y, labels), "logits": y}

        data = [{"x": x, "labels": y} for x, y in rows()]
        arguments = transformers.TrainingArguments(
            str(out),
            **{
                "per_device_train_batch_size": 4,
                "num_train_epochs": 2,
                "logging_steps": 1,
                "save_strategy": "no",
                "report_to": [],
                "use_cpu": True,
                "disable_tqdm": True,
                "dataloader_pin_memory": False,
                **more,
            },
        )
        trainer = transformers.Trainer(
            Model(), arguments, train_dataset=data, eval_dataset=data[:8], callbacks=list(callbacks)
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    def callback(self, path, **options):
        pytest.importorskip("transformers")
        from hookrec.integrations.transformers import HookrecCallback

        return HookrecCallback(path, layers="net.*", **SMALL, **options)

    @pytest.mark.parametrize(
        ("micros", "more"),
        [
            (1, {"eval_strategy": "epoch", "eval_on_start": True}),
            pytest.param(1, {"eval_strategy": "steps", "eval_steps": 1}, marks=pytest.mark.slow),
            pytest.param(2, {"eval_strategy": "steps", "eval_steps": 2}, marks=pytest.mark.slow),
        ],
    )
    def test_each_step_of_training_is_recorded_and_no_evaluation(self, tmp_path, micros, more):
        more |= {"gradient_accumulation_steps": micros}
        net, bare = Net(), Net()

        plain = self.train(bare, tmp_path / "out", **more)
        recorded = self.train(net, tmp_path / "out2", [self.callback(tmp_path / "a")], **more)

        trace = replay.open(tmp_path / "a")
        assert trace.layers == ["net.body", "net.head"]
        assert trace.endings[0]["how"] == "detached"
        assert [row["loss"] for row in plain.state.log_history if "loss" in row] == list(
            scalars(trace)["loss"].values()
        )
        assert recorded.state.global_step == len(trace.steps)
        found = scalars(trace)
        assert list(found["loss"]) == trace.steps
        evaluated = {row["step"] - 1: row["eval_loss"] for row in plain.state.log_history if "eval_loss" in row}
        evaluated.pop(-1, None)  # that of the start is logged before the first step
        assert {step: value for step, value in found["eval_loss"].items() if step in evaluated} == evaluated
        del recorded
        self.check_records(trace, net, bare, micros)

    def check_records(self, trace, net, bare, micros):
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), bare.parameters(), strict=True))
        assert set(trace.records()["mode"].to_pylist()) == {"train"}
        assert len(trace.records()) == len(net.seen) * 4
        for number, output in enumerate(net.seen):
            step, micro = divmod(number, micros)
            assert trace.tensor(step, "net.head", call=micro).tobytes() == output.numpy().tobytes()

    def test_a_training_that_fails_inside_of_the_block_is_said_to_have_failed(self, tmp_path):
        with pytest.raises(ValueError, match="on purpose"), self.callback(tmp_path / "a") as callback:
            self.train(Net(fail_at=3), tmp_path / "out", [callback])

        trace = replay.open(tmp_path / "a")
        assert (trace.endings[0]["how"], trace.endings[0]["detail"]) == ("exception", "ValueError: on purpose")
        assert trace.steps[:3] == [0, 1, 2]

    @pytest.mark.slow
    def test_a_failure_that_was_caught_leaves_no_recorder_with_an_old_model(self, tmp_path):
        callback = self.callback(tmp_path / "a")
        failing, net = Net(fail_at=1), Net()
        with pytest.raises(ValueError, match="on purpose"):
            self.train(failing, tmp_path / "out", [callback])

        with pytest.raises(hookrec.AttachError, match="holds a trace already"):
            self.train(net, tmp_path / "out", [callback])

        assert (failing.body._forward_hooks, net.seen) == ({}, [])
        assert replay.open(tmp_path / "a").endings[0]["how"] == "detached"

    @pytest.mark.slow
    def test_a_training_that_goes_on_from_a_checkpoint_says_from_which_step(self, tmp_path):
        self.train(Net(), tmp_path / "out", save_strategy="steps", save_steps=5)
        net = Net()

        self.train(net, tmp_path / "out", [self.callback(tmp_path / "a")], str(tmp_path / "out/checkpoint-5"))

        trace = replay.open(tmp_path / "a")
        assert trace.steps == [0, 1, 2]
        assert scalars(trace)["global_step"] == {0: 5.0}

    @pytest.mark.slow
    def test_a_training_that_is_resumed_goes_on_in_its_trace_at_the_step_of_the_checkpoint(self, tmp_path, monkeypatch):
        monkeypatch.setattr(recorder, "WriterProcess", WriterProcess)
        bare = Net()
        self.train(bare, tmp_path / "bare")
        saving = {"save_strategy": "steps", "save_steps": 3}
        path = tmp_path / "a"
        with pytest.raises(ValueError, match="on purpose"), self.callback(path, resume=True) as callback:
            self.train(Net(fail_at=5), tmp_path / "out", [callback], **saving)

        checkpoint = str(tmp_path / "out/checkpoint-3")
        self.train(Net(), tmp_path / "out", [self.callback(path, resume=True)], checkpoint, **saving)

        trace = replay.open(path)
        assert trace.steps == list(range(8))
        for step, output in enumerate(bare.seen):
            assert trace.tensor(step, "net.head").tobytes() == output.numpy().tobytes()
        assert "global_step" not in scalars(trace)

    def test_a_training_goes_on_when_its_recorder_is_detached_meanwhile(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        callback, net = self.callback(tmp_path / "a"), Net()

        class Detaching(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **more):
                if state.global_step == 2:
                    callback.recorder.detach()

        self.train(net, tmp_path / "out", [callback, Detaching()], eval_strategy="steps", eval_steps=1)

        assert len(net.seen) == 8
        assert replay.open(tmp_path / "a").steps == [0, 1]

    def test_where_there_is_a_trace_already_nothing_is_trained(self, tmp_path):
        hookrec.attach(Net(), tmp_path / "a", **SMALL).detach()
        net = Net()

        with pytest.raises(hookrec.AttachError, match="holds a trace already"):
            self.train(net, tmp_path / "out", [self.callback(tmp_path / "a")])

        assert net.seen == []
