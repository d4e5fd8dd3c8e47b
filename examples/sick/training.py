"""What the trainings of the gallery share: small nets, data that can be learned, a loop that is recorded."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import hookrec

STEPS = 80
KINDS = ("output", "grad_output", "input", "param", "param_grad", "update")

Batch = tuple[Tensor, Tensor]


def batches(seed: int, features: int = 16, classes: int = 4, size: int = 64) -> Iterator[Batch]:
    """Points and the classes that a random linear map gives them."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(features, classes, generator=generator)
    while True:
        x = torch.randn(size, features, generator=generator)
        yield x, (x @ teacher).argmax(1)


def perceptron(activation: Callable[[], nn.Module], depth: int, width: int = 32) -> nn.Sequential:
    """A linear layer and an activation in turn; a linear layer at the end. The weights have Xavier's scale."""
    hidden = [module for _ in range(depth) for module in (activation(), nn.Linear(width, width))]
    model = nn.Sequential(nn.Linear(16, width), *hidden[:-1], nn.Linear(width, 4))
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model


def fit(
    model: nn.Module,
    path: Path,
    data: Iterator[Batch],
    optimizer: torch.optim.Optimizer,
    *,
    loss_of: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy,
    before_step: Callable[[int], None] = lambda step: None,
    steps: int = STEPS,
) -> list[float]:
    """Train under the recorder, statistics only; return the losses.

    Args:
        model: the model.
        path: where the trace goes.
        data: batches.
        optimizer: the optimizer.
        loss_of: of what the model puts out and of the targets.
        before_step: called with the step's number before its forward pass.
        steps: how many.
    """
    losses = []
    with hookrec.attach(model, path, kinds=KINDS, tensors=False, keep_free=0, ring="16MB") as rec:
        for step in range(steps):
            before_step(step)
            x, y = next(data)
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            rec.log(loss=loss)
            losses.append(loss.item())
    return losses


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run small nets on one thread, which is fastest, and gives the same numbers everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
