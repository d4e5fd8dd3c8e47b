"""Two small nets that have the commonest hazards, and how they are trained."""

import torch
from torch import nn

import hookrec


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 3), nn.Identity()
    )


def with_views() -> nn.Module:
    """A Linear on 3-D input returns a view, which the in-place ReLU then changes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3), nn.Dropout(0.5), nn.Flatten())


SAMPLES = {convolutional: (4, 1, 8, 8), with_views: (4, 5, 6)}


def train(model: nn.Module, shape: tuple[int, ...], steps: int, watching=None) -> list[float]:
    """Train on noise; `watching` is told of each step: a recorder gets the loss, an oracle the end of it."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(shape)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if isinstance(watching, hookrec.Recorder):
            watching.log(loss=loss)
        elif watching is not None:
            watching.step()
    return losses
