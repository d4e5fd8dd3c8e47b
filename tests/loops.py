"""A net, its data and a check of its trace, for the training loops of other libraries: they are given the same."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import replay

ROWS = 16
SMALL = {"keep_free": 0, "ring": "4MB"}


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
