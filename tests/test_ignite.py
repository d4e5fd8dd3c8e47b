"""Trainings of Ignite's engines are recorded step by step, and are what they are without a recorder."""

import pytest
import torch
from torch.nn import functional

import replay
from tests.loops import SMALL, Net, batches, check, scalars

pytestmark = pytest.mark.usefixtures("no_process")


class TestIgnite:
    def train(self, net, path=None, *, micros=1, evaluate=True):
        engine = pytest.importorskip("ignite.engine")
        metrics = pytest.importorskip("ignite.metrics")
        optimizer = torch.optim.Adam(net.parameters(), 0.1)

        def update(_, batch):
            net.train()
            loss = functional.mse_loss(net(batch[0]), batch[1])
            (loss / micros).backward()
            if trainer.state.iteration % micros == 0:
                optimizer.step()
                optimizer.zero_grad()
            return {"loss": loss.item(), "name": "text"}

        def predict(_, batch):
            net.eval()
            with torch.no_grad():
                return net(batch[0]), batch[1]

        trainer, evaluator = engine.Engine(update), engine.Engine(predict)
        metrics.MeanSquaredError().attach(evaluator, "mse")
        if evaluate:
            trainer.add_event_handler(
                engine.Events.ITERATION_COMPLETED(every=2 * micros), lambda: evaluator.run(batches())
            )
        handler = None
        if path is not None:
            from hookrec.integrations.ignite import HookrecHandler

            handler = HookrecHandler(net, path, **SMALL).attach(trainer, evaluator)
        trainer.run(batches(), max_epochs=2)
        return evaluator, handler

    @pytest.mark.parametrize("micros", [1, 2])
    def test_each_step_of_training_is_recorded_and_no_evaluation(self, tmp_path, micros):
        net, bare = Net(), Net()

        self.train(bare, micros=micros)
        evaluator, _ = self.train(net, tmp_path / "a", micros=micros)

        trace = check(tmp_path / "a", net, bare, micros)
        assert trace.endings[0]["how"] == "detached"
        found = scalars(trace)
        assert list(found["loss"]) == trace.steps
        assert sorted(found["mse"]) == trace.steps[1::2]
        assert found["mse"][trace.steps[-1]] == evaluator.state.metrics["mse"]
        assert "name" not in found

    def test_a_training_that_fails_is_said_to_have_failed_and_fails(self, tmp_path):
        with pytest.raises(ValueError, match="on purpose"):
            self.train(Net(fail_at=3), tmp_path / "a")

        trace = replay.open(tmp_path / "a")
        assert (trace.endings[0]["how"], trace.endings[0]["detail"]) == ("exception", "ValueError: on purpose")
        assert trace.steps[:3] == [0, 1, 2]

    def test_who_else_listens_to_exceptions_decides_what_becomes_of_them(self, tmp_path):
        engine = pytest.importorskip("ignite.engine")
        from hookrec.integrations.ignite import HookrecHandler

        def update(*_):
            raise ValueError("on purpose")

        trainer = engine.Engine(update)
        HookrecHandler(Net(), tmp_path / "a", **SMALL).attach(trainer)
        caught = []
        trainer.add_event_handler(engine.Events.EXCEPTION_RAISED, lambda error: caught.append(str(error)))
        trainer.run([1], max_epochs=1)

        assert caught == ["on purpose"]
        assert replay.open(tmp_path / "a").endings[0]["how"] == "exception"
