"""Statistics and scalars of a trace are charts of TensorBoard."""

import sys

import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional

import hookrec
import replay
from hookrec.cli import main
from hookrec.errors import HookrecError
from tests.loops import SMALL, Net, batches

pytestmark = pytest.mark.usefixtures("no_process")


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
