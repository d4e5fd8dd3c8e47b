"""Trainings of other libraries are recorded step by step, and are what they are without a recorder."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hookrec
import replay
from hookrec import recorder
from hookrec.cli import main
from hookrec.errors import HookrecError
from tests.writer_in_process import WriterInProcess

ROWS = 16
SMALL = {"keep_free": 0, "ring": "4MB"}


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    monkeypatch.setattr(recorder, "WriterProcess", WriterInProcess)


class Net(nn.Module):
    """Keeps what it computed in training, and can be told to fail."""

    def __init__(self, fail_at: int | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)
        self.seen: list[torch.Tensor] = []
        self.fail_at = fail_at

    def forward(self, x):
        y = self.head(torch.relu(self.body(x)))
        if self.training:
            if len(self.seen) == self.fail_at:
                raise ValueError("on purpose")
            self.seen.append(y.detach().clone())
        return y


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(ROWS, 3, generator=generator), torch.randn(ROWS, 1, generator=generator))


def batches() -> DataLoader:
    return DataLoader(rows(), 4)


def check(path: Path, net: Net, bare: Net, micros: int = 1, *, steps: int | None = None) -> replay.Trace:
    """See that each training batch, and nothing else, is in the trace, where it belongs, and nothing was changed."""
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), bare.parameters(), strict=True))
    trace = replay.open(path)
    steps = len(net.seen) // micros if steps is None else steps
    assert trace.steps == list(range(steps))
    assert trace.layers == ["body", "head"]
    assert len(trace.records(steps=slice(0, steps))) == steps * micros * 4
    assert set(trace.records()["mode"].to_pylist()) == {"train"}
    for number, output in enumerate(net.seen[: steps * micros]):
        step, micro = divmod(number, micros)
        assert trace.tensor(step, "head", call=micro).tobytes() == output.numpy().tobytes()
    micro_batches = trace.records("head", "grad_output")["micro"].to_pylist()
    assert micro_batches == [*range(micros)] * steps
    assert not net.body._forward_hooks
    return trace


def scalars(trace: replay.Trace) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in trace.scalars().to_pylist():
        if not row["name"].startswith("hookrec/"):
            found.setdefault(row["name"], {})[row["step"]] = row["value"]
    return found


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
    def test_a_training_that_goes_on_from_a_checkpoint_says_from_which_step(self, tmp_path):
        self.train(Net(), tmp_path / "out", save_strategy="steps", save_steps=5)
        net = Net()

        self.train(net, tmp_path / "out", [self.callback(tmp_path / "a")], str(tmp_path / "out/checkpoint-5"))

        trace = replay.open(tmp_path / "a")
        assert trace.steps == [0, 1, 2]
        assert scalars(trace)["global_step"] == {0: 5.0}

    def test_where_there_is_a_trace_already_nothing_is_trained(self, tmp_path):
        hookrec.attach(Net(), tmp_path / "a", **SMALL).detach()
        net = Net()

        with pytest.raises(hookrec.AttachError, match="holds a trace already"):
            self.train(net, tmp_path / "out", [self.callback(tmp_path / "a")])

        assert net.seen == []


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
    def test_a_module_with_parameters_of_its_own_is_recorded_as_a_whole(self, tmp_path):
        lightning = pytest.importorskip("lightning.pytorch")
        from hookrec.integrations.lightning import _models_of

        module = lightning.LightningModule()
        module.scale = nn.Parameter(torch.ones(1))
        module.net = nn.Linear(1, 1)

        assert _models_of(module) is module


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


class TestTensorBoard:
    def recorded(self, path, every=1):
        net, optimizer = Net(), None
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with hookrec.attach(net, path, tensors=False, every=every, **SMALL) as recording:
            for x, y in batches():
                loss = functional.mse_loss(net(x), y)
                loss.backward()
                optimizer.step()
                recording.log(loss=loss)
        return replay.open(path)

    def events(self, folder):
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(folder)).Reload()
        return {tag: found.Scalars(tag) for tag in found.Tags()["scalars"]}

    @pytest.mark.parametrize("follow", [False, True])
    def test_statistics_and_scalars_are_charts_of_their_own(self, tmp_path, follow):
        pytest.importorskip("tensorboard")
        trace = self.recorded(tmp_path / "a")
        options = ["--kinds", "grad_output", "--stat", "l2", *(["--follow"] if follow else [])]

        result = CliRunner().invoke(main, ["tensorboard", str(tmp_path / "a"), str(tmp_path / "logs"), *options])

        assert result.exit_code == 0, result.output
        found = self.events(tmp_path / "logs")
        assert {tag for tag in found if not tag.startswith("hookrec/")} == {
            *("grad_output l2/body", "grad_output l2/head", "loss")
        }
        rows = trace.records("head", "grad_output").to_pylist()
        chart = found["grad_output l2/head"]
        assert [event.step for event in chart] == [0, 1, 2, 3]
        assert [event.value for event in chart] == pytest.approx([row["l2"] for row in rows], rel=1e-6)
        times = {row["step"]: row["time"] for row in trace.scalars().to_pylist()}
        assert [event.wall_time for event in chart] == pytest.approx(list(times.values()), abs=1e-3)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["{trace}", "{full}"], "holds something already"),
            (["{trace}", "{tmp}/logs", "--stat", "norm"], "There is no statistic 'norm'"),
            (["{trace}", "{tmp}/logs", "--where", "norm > 1"], "cannot be understood"),
            (["{tmp}/nowhere", "{tmp}/logs"], "does not exist"),
        ],
    )
    def test_what_cannot_be_is_one_message_and_makes_no_folder(self, tmp_path, arguments, words):
        pytest.importorskip("tensorboard")
        (tmp_path / "full").mkdir()
        (tmp_path / "full/file").touch()
        self.recorded(tmp_path / "a", every=10)
        places = {"trace": tmp_path / "a", "full": tmp_path / "full", "tmp": tmp_path}

        result = CliRunner().invoke(main, ["tensorboard", *(argument.format(**places) for argument in arguments)])

        assert (result.exit_code, words in result.output) == (2, True), result.output
        assert not (tmp_path / "logs").exists()

    def test_without_tensorboard_one_message_says_what_to_install(self, tmp_path, monkeypatch):
        from hookrec.integrations.tensorboard import export

        trace = self.recorded(tmp_path / "a", every=10)
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

        with pytest.raises(HookrecError, match="pip install tensorboard"):
            export(trace, tmp_path / "logs")


def test_a_pause_leaves_calls_out_and_the_step_goes_on(tmp_path):
    net = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with hookrec.attach(net, tmp_path / "a", **SMALL, kinds=("input", "output", "grad_output", "param")) as recording:
        for _ in range(2):
            net(torch.ones(3, 2)).sum().backward()
            with recording.pause():
                net(torch.ones(7, 2))
                assert not net[0]._forward_hooks
            net(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            recording.pause()
            net(torch.ones(9, 2))
            recording.log(evaluated=1.0)
            recording.resume()
            recording.resume()
    with pytest.raises(hookrec.DetachedError):
        recording.pause()

    trace = replay.open(tmp_path / "a")
    rows = trace.records(kinds="output").to_pylist()
    assert [(row["step"], row["call"], row["micro"], row["shape"][0]) for row in rows] == [
        (step, call, call, 3) for step in (0, 1) for call in (0, 1)
    ]
    assert len(trace.records(kinds="param")) == 2 * 2
    assert scalars(trace)["evaluated"] == {0: 1.0, 1: 1.0}


def test_a_pause_outlasts_steps_and_keeps_those_that_are_not_sampled_free_of_hooks(tmp_path):
    net = nn.Linear(2, 2)
    with hookrec.attach(net, tmp_path / "a", **SMALL, clock="manual", every=2) as recording:
        net(torch.ones(1, 2))
        recording.pause()
        recording.step()
        recording.step()
        net(torch.ones(5, 2))
        recording.step()
        recording.resume()
        assert not net._forward_hooks  # of step 3, which is not sampled
        recording.step()
        net(torch.ones(1, 2))
        recording.step()

    assert replay.open(tmp_path / "a").records(kinds="output")["step"].to_pylist() == [0, 4]


def test_a_pause_of_a_clock_that_counts_forward_passes_ends_no_step(tmp_path):
    net = nn.Linear(2, 2)
    with hookrec.attach(net, tmp_path / "a", **SMALL, clock="forward") as recording:
        net(torch.ones(1, 2))
        with recording.pause():
            net(torch.ones(5, 2))
            net(torch.ones(5, 2))
        net(torch.ones(1, 2))
        assert recording.steps == 1
