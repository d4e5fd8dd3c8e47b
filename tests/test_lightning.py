"""Trainings of Lightning are recorded step by step, and are what they are without a recorder."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import replay
from hookrec import recorder
from hookrec.writer_process import WriterProcess
from tests.loops import SMALL, Net, batches, check, scalars

pytestmark = pytest.mark.usefixtures("no_process")


class TestLightning:
    def train(self, net, root, callbacks=(), *, called=False, resume=None, **more):
        lightning = pytest.importorskip("lightning.pytorch")

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                for name, child in net.named_children():
                    setattr(self, name, child)

            def forward(self, x):
                return self.head(torch.relu(self.body(x)))

            def training_step(self, batch, index):
                x, y = batch
                out = self(x) if called else self.forward(x)
                if len(net.seen) == net.fail_at:
                    raise ValueError("on purpose")
                net.seen.append(out.detach().clone())
                loss = functional.mse_loss(out, y)
                self.log("train/loss", loss, on_step=True, on_epoch=True)
                return loss

            def validation_step(self, batch, index):
                self.log("val_loss", functional.mse_loss(self(batch[0]), batch[1]))

            def configure_optimizers(self):
                return torch.optim.Adam(self.parameters(), 0.1)

        arguments = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **more}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few workers, and of what they import
            trainer = lightning.Trainer(
                default_root_dir=root,
                accelerator="cpu",
                log_every_n_steps=1,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=list(callbacks),
                **arguments,
            )
            trainer.fit(Module(), batches(), batches(), ckpt_path=resume)
        return trainer

    def callback(self, path, **options):
        pytest.importorskip("lightning.pytorch")
        from hookrec.integrations.lightning import HookrecCallback

        return HookrecCallback(path, **SMALL, **options)

    @pytest.mark.parametrize(
        ("micros", "more"),
        [
            (2, {"val_check_interval": 2}),
            pytest.param(1, {}, marks=pytest.mark.slow),
            pytest.param(1, {"called": True}, marks=pytest.mark.slow),
        ],
    )
    def test_each_step_of_training_is_recorded_and_no_validation(self, tmp_path, micros, more):
        more |= {"accumulate_grad_batches": micros}
        net, bare = Net(), Net()

        self.train(bare, tmp_path / "bare", **more)
        trainer = self.train(net, tmp_path / "out", [self.callback(tmp_path / "a")], **more)

        trace = check(tmp_path / "a", net, bare, micros)
        assert trace.endings[0]["how"] == "detached"
        assert trainer.global_step == len(trace.steps)
        found = scalars(trace)
        last = [y for number, y in enumerate(net.seen) if number % micros == micros - 1]
        targets = [y for _, y in batches()] * 2
        losses = [
            functional.mse_loss(out, targets[number * micros + micros - 1]).item() for number, out in enumerate(last)
        ]
        assert found["train/loss_step"] == dict(enumerate(losses))
        per_epoch = len(trace.steps) // 2
        assert set(found["train/loss_epoch"]) == {per_epoch - 1, 2 * per_epoch - 1}
        assert max(found["val_loss"]) == len(trace.steps) - 1
        assert found["val_loss"][len(trace.steps) - 1] == trainer.callback_metrics["val_loss"].item()

    def test_a_training_that_fails_is_said_to_have_failed(self, tmp_path):
        with pytest.raises(ValueError, match="on purpose"):
            self.train(Net(fail_at=3), tmp_path / "out", [self.callback(tmp_path / "a")])

        trace = replay.open(tmp_path / "a")
        assert (trace.endings[0]["how"], trace.endings[0]["detail"]) == ("exception", "ValueError: on purpose")
        assert trace.steps[:3] == [0, 1, 2]

    @pytest.mark.slow
    def test_a_training_that_goes_on_from_a_checkpoint_says_from_which_step(self, tmp_path):
        trainer = self.train(Net(), tmp_path / "out", max_epochs=1, enable_checkpointing=True)
        saved = trainer.checkpoint_callback.best_model_path
        net = Net()

        self.train(net, tmp_path / "out2", [self.callback(tmp_path / "a")], resume=saved, max_epochs=2)

        trace = replay.open(tmp_path / "a")
        assert trace.steps == [0, 1, 2, 3]
        assert scalars(trace)["global_step"] == {0: 4.0}

    @pytest.mark.slow
    def test_a_training_that_is_resumed_goes_on_in_its_trace_at_the_step_of_the_checkpoint(self, tmp_path, monkeypatch):
        monkeypatch.setattr(recorder, "WriterProcess", WriterProcess)
        bare = Net()
        self.train(bare, tmp_path / "bare")
        path = tmp_path / "a"
        trainer = self.train(
            Net(), tmp_path / "out", [self.callback(path, resume=True)], max_epochs=1, enable_checkpointing=True
        )
        saved = trainer.checkpoint_callback.best_model_path

        self.train(Net(), tmp_path / "out2", [self.callback(path, resume=True)], resume=saved, max_epochs=2)

        trace = replay.open(path)
        assert trace.steps == list(range(8))
        for step, output in enumerate(bare.seen):
            assert trace.tensor(step, "head").tobytes() == output.numpy().tobytes()
        assert list(scalars(trace)["train/loss_step"]) == trace.steps
        assert "global_step" not in scalars(trace)

    @pytest.mark.slow
    def test_a_module_with_parameters_of_its_own_is_recorded_as_a_whole(self, tmp_path):
        lightning = pytest.importorskip("lightning.pytorch")
        from hookrec.integrations.lightning import _models_of

        module = lightning.LightningModule()
        module.scale = nn.Parameter(torch.ones(1))
        module.net = nn.Linear(1, 1)

        assert _models_of(module) is module
