"""Loops with Accelerate are recorded step by step, and are what they are without a recorder."""

import warnings

import pytest
import torch
from torch.nn import functional

import replay
from tests.loops import SMALL, Net, batches, check, scalars

pytestmark = pytest.mark.usefixtures("no_process")


class TestAccelerate:
    def train(self, net, path=None, *, micros=1, fail=False):
        accelerate = pytest.importorskip("accelerate")
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=micros)
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, optimizer, loader = accelerator.prepare(net, optimizer, batches())
        if path is None:
            self.loop(accelerator, model, optimizer, loader, None)
            return
        from hookrec.integrations.accelerate import recorded

        with recorded(accelerator, model, path, **SMALL) as recording:
            self.loop(accelerator, model, optimizer, loader, recording)
        assert accelerator.trackers == []

    def loop(self, accelerator, model, optimizer, loader, recording):
        for _ in range(2):
            model.train()
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = functional.mse_loss(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    accelerator.log({"loss": loss.item(), "what": "text"})
            model.eval()
            if recording is not None:
                with recording.pause():
                    model(torch.ones(1, 3))

    @pytest.mark.parametrize("micros", [1, 2])
    def test_each_step_of_training_is_recorded(self, tmp_path, micros):
        net, bare = Net(), Net()

        self.train(bare, micros=micros)
        self.train(net, tmp_path / "a", micros=micros)

        trace = check(tmp_path / "a", net, bare, micros)
        assert trace.endings[0]["how"] == "detached"
        assert list(scalars(trace)["loss"]) == trace.steps
        assert list(scalars(trace)) == ["loss"]

    def test_a_training_that_fails_is_said_to_have_failed(self, tmp_path):
        with pytest.raises(ValueError, match="on purpose"):
            self.train(Net(fail_at=3), tmp_path / "a")

        assert replay.open(tmp_path / "a").endings[0]["how"] == "exception"
