"""The trainings of the gallery: each function trains a small net, sick or healthy, and records it."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import hookrec
from examples.sick.training import KINDS, STEPS, Batch, batches, fit, perceptron

ACCIDENT = 50
"""The step at which something happens, where it does not happen from the beginning."""


def vanishing(path: Path, *, sick: bool = True, seed: int = 0) -> list[float]:
    """Ten tanh layers whose weights are too small: each lets a tenth of the gradient through."""
    return _deep_tanh(path, 0.17 if sick else 1.0, seed)


def exploding(path: Path, *, sick: bool = True, seed: int = 0) -> list[float]:
    """Ten ReLU layers whose weights are too large: each multiplies the gradient."""
    torch.manual_seed(seed)
    model = perceptron(nn.ReLU, 10)
    for module in model:
        if isinstance(module, nn.Linear):
            module.weight.data *= 4 if sick else 1.4
    # The learning rate is small, so that the sick one lives long enough to be looked at.
    return fit(model, path, batches(seed), torch.optim.SGD(model.parameters(), 1e-12 if sick else 0.05))


def saturated_tanh(path: Path, *, sick: bool = True, seed: int = 0) -> list[float]:
    """Ten tanh layers whose weights are far too large: units are at the ends of their range."""
    return _deep_tanh(path, 30.0 if sick else 1.0, seed)


def _deep_tanh(path: Path, gain: float, seed: int) -> list[float]:
    torch.manual_seed(seed)
    model = perceptron(nn.Tanh, 10)
    for module in model:
        if isinstance(module, nn.Linear):
            module.weight.data *= gain
    return fit(model, path, batches(seed), torch.optim.SGD(model.parameters(), 0.02))


def dead_relus(path: Path, *, sick: bool = True, seed: int = 0) -> list[float]:
    """A layer whose biases are so low that the ReLU behind it, layer 3, never fires."""
    model = _relu_net(seed)
    if sick:
        nn.init.constant_(model[2].bias, -20.0)
    return fit(model, path, batches(seed), torch.optim.SGD(model.parameters(), 0.1))


def lr_spike(path: Path, *, sick: bool = True, seed: int = 0) -> list[float]:
    """A learning rate that is two hundred times too high in one step."""
    model = _relu_net(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def before_step(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 20.0 if sick and step == ACCIDENT else 0.1

    return fit(model, path, batches(seed), optimizer, before_step=before_step)


def bad_batch(path: Path, *, sick: bool = True, seed: int = 0) -> list[float]:
    """One batch that was not scaled."""
    model = _relu_net(seed)
    good = batches(seed)
    data = ((x * 50 if sick and step == ACCIDENT else x, y) for step, (x, y) in enumerate(good))
    return fit(model, path, data, torch.optim.SGD(model.parameters(), 0.1))


def left_out(path: Path, *, sick: bool = True, seed: int = 0) -> list[float]:
    """A layer, 2, that the optimizer was not given."""
    model = _relu_net(seed)
    parameters = [p for name, p in model.named_parameters() if not (sick and name.startswith("2."))]
    return fit(model, path, batches(seed), torch.optim.SGD(parameters, 0.1))


class Detached(nn.Module):
    """Two layers, of which the first is cut off where `sick`."""

    def __init__(self, sick: bool) -> None:
        super().__init__()
        self.sick = sick
        self.encoder, self.act, self.head = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        hidden = self.act(self.encoder(x))
        return self.head(hidden.detach() if self.sick else hidden)


def detached(path: Path, *, sick: bool = True, seed: int = 0) -> list[float]:
    """A layer, `encoder`, whose output is detached."""
    torch.manual_seed(seed)
    model = Detached(sick)
    return fit(model, path, batches(seed), torch.optim.SGD(model.parameters(), 0.1))


def _relu_net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return perceptron(nn.ReLU, 3)


class Log(nn.Module):
    """The logarithm, of 0 too where `floor` is 0."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor = floor

    def forward(self, x: Tensor) -> Tensor:
        """Return the logarithm of each element."""
        return torch.log(x + self.floor)


def log_of_zero(path: Path, *, sick: bool = True, seed: int = 0) -> list[float]:
    """A net that predicts rates of counts, `log`, its layer 4, of a rate that becomes 0 sooner or later."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1), nn.ReLU(), Log(0.0 if sick else 0.1))
    nn.init.constant_(model[2].bias, 1.5)

    def poisson(log_rate: Tensor, y: Tensor) -> Tensor:
        return functional.poisson_nll_loss(log_rate.squeeze(1), y.float())

    return fit(model, path, batches(seed), torch.optim.SGD(model.parameters(), 0.2), loss_of=poisson)


def half_underflow(path: Path, *, sick: bool = True, seed: int = 0) -> list[float]:
    """A loss of small weight under float16 autocast: its gradients are smaller than the dtype's smallest number."""
    torch.manual_seed(seed)
    model = perceptron(nn.Tanh, 3)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, eps=1e-16)
    scaler = torch.amp.GradScaler("cpu", 2.0**16, enabled=not sick)
    data, losses = batches(seed), []
    with hookrec.attach(model, path, kinds=KINDS, tensors=False, keep_free=0, ring="16MB") as rec:
        for _ in range(STEPS):
            x, y = next(data)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                logits = model(x)
            loss = functional.cross_entropy(logits.float(), y)
            scaler.scale(1e-5 * loss).backward()
            scaler.step(optimizer)
            scaler.update()
            rec.log(loss=loss)
            losses.append(loss.item())
    return losses


class Language(nn.Module):
    """A language model of two layers whose head is meant to be the embedding."""

    def __init__(self, sick: bool) -> None:
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(24, 16), nn.Linear(16, 16), nn.Linear(16, 24, bias=False)
        self.head.weight = nn.Parameter(self.embedding.weight.detach().clone()) if sick else self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next tokens."""
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


def wrong_tying(path: Path, *, sick: bool = True, seed: int = 0) -> list[float]:
    """A head with a copy of the embedding, where the embedding itself was meant."""
    torch.manual_seed(seed)
    model = Language(sick)
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randperm(24, generator=generator)

    def sentences() -> Iterator[Batch]:
        while True:
            tokens = torch.randint(0, 24, (64,), generator=generator)
            yield tokens, follows[tokens]

    return fit(model, path, sentences(), torch.optim.SGD(model.parameters(), 0.1))


class Gated(nn.Module):
    """A net whose hidden layer is weighted by a softmax, over a dimension of one element where `sick`."""

    def __init__(self, sick: bool) -> None:
        super().__init__()
        self.encoder, self.score, self.head = nn.Linear(16, 32), nn.Linear(32, 1 if sick else 32), nn.Linear(32, 4)
        self.act, self.gate = nn.Tanh(), nn.Softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        hidden = self.act(self.encoder(x))
        return self.head(hidden * self.gate(self.score(hidden)) * hidden.shape[1])


def softmax_of_one(path: Path, *, sick: bool = True, seed: int = 0) -> list[float]:
    """An attention, `gate`, over a dimension of one element, which is 1 whatever comes in."""
    torch.manual_seed(seed)
    model = Gated(sick)
    return fit(model, path, batches(seed), torch.optim.SGD(model.parameters(), 0.02))


def random_labels(path: Path, *, sick: bool = True, seed: int = 0) -> list[float]:
    """Labels that have nothing to do with their inputs."""
    model = _relu_net(seed)
    nn.init.zeros_(model[6].weight)  # so that the loss begins with that of a guess
    data = ((x, torch.randint(0, 4, y.shape) if sick else y) for x, y in batches(seed))
    return fit(model, path, data, torch.optim.SGD(model.parameters(), 0.02), steps=240)


def diverging_rank(path: Path, *, sick: bool = True, seed: int = 0) -> list[float]:
    """Two ranks that average their gradients, until the one, 1, keeps its own.

    Both run in this process in turn; each is recorded as the rank that the environment says it is.
    """
    models, recorders, losses = [], [], []
    known = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    for rank in range(2):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        models.append(_relu_net(seed))
        recorders.append(hookrec.attach(models[-1], path, kinds=KINDS, tensors=False, keep_free=0, ring="16MB"))
    for name, value in known.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    data = [batches(seed), batches(seed)]
    next(data[1])  # each rank has batches of its own
    for step in range(STEPS):
        for model, optimizer, recorder, mine in zip(models, optimizers, recorders, data, strict=True):
            x, y = next(mine)
            next(mine)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            recorder.log(loss=loss)
            losses.append(loss.item())
        for one, two in zip(*(model.parameters() for model in models), strict=True):
            mean = (one.grad + two.grad) / 2
            one.grad.copy_(mean)
            if not (sick and step >= ACCIDENT):
                two.grad.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
    for recorder in recorders:
        recorder.detach()
    return losses


@dataclass(frozen=True)
class Ailment:
    """A training that can be had sick or healthy, and what is wrong with the sick one.

    Attributes:
        train: takes the path of the trace, `sick` and `seed`; returns the losses.
        rule: the rule that should find it first.
        layer: the layer that should be named; None if none.
        step: the step at which it begins; None where that depends on the numbers.
    """

    train: Callable[..., list[float]]
    rule: str
    layer: str | None
    step: int | None


AILMENTS = {
    "vanishing": Ailment(vanishing, "vanishing-gradients", "0", 0),
    "exploding": Ailment(exploding, "exploding-gradients", "1", 0),
    "saturated_tanh": Ailment(saturated_tanh, "saturated", "1", 0),
    "dead_relus": Ailment(dead_relus, "dead-relu", "3", 0),
    "softmax_of_one": Ailment(softmax_of_one, "constant-output", "gate", 0),
    "lr_spike": Ailment(lr_spike, "large-updates", "0", ACCIDENT),
    "bad_batch": Ailment(bad_batch, "input-outlier", "0", ACCIDENT),
    "left_out": Ailment(left_out, "not-learning", "2", 0),
    "detached": Ailment(detached, "not-learning", "encoder", 0),
    "log_of_zero": Ailment(log_of_zero, "non-finite", "4", None),
    "half_underflow": Ailment(half_underflow, "half-underflow", "5", 0),
    "wrong_tying": Ailment(wrong_tying, "untied-weights", "head", 1),
    "random_labels": Ailment(random_labels, "loss-not-falling", None, None),
    "diverging_rank": Ailment(diverging_rank, "ranks-disagree", "0", ACCIDENT),
}
