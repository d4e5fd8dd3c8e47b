"""The three trainings that overhead is measured on: many small layers, a transformer, a convolutional net.

mlp     41 leaves,  82 records a step of 16 KB, 1.3 MB a step
gpt     46 leaves,  92 records a step,          197 MB a step
resnet  65 leaves, 130 records a step,          253 MB a step, with in-place ReLU
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Workload = tuple[nn.Module, Callable[[], Tensor]]


def mlp() -> Workload:
    """Return a stack of small layers, and its loss on fixed data."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(20) for m in (nn.Linear(64, 64), nn.Tanh())), nn.Linear(64, 10))
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
    return model, lambda: functional.cross_entropy(model(x), y)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(self.act(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A transformer that predicts the next token."""

    def __init__(self, vocabulary: int = 512, width: int = 256, depth: int = 6, context: int = 128) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, 8) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each place."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt() -> Workload:
    """Return a small transformer, and its loss on fixed data."""
    torch.manual_seed(0)
    model, tokens = GPT(), torch.randint(0, 512, (8, 128))
    return model, lambda: functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.relu1, self.relu2 = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
        shorter = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.skip = nn.Identity() if stride == 1 and before == after else shorter

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(y + self.skip(x))


def resnet() -> Workload:
    """Return a residual net, and its loss on fixed data."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    width = 64
    for after, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(_Residual(width, after, stride))
        width = after
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    return model, lambda: functional.cross_entropy(model(x), y)


WORKLOADS = {"mlp": mlp, "gpt": gpt, "resnet": resnet}
RECORDS = {"mlp": 82, "gpt": 92, "resnet": 130}
STEPS = {"mlp": 100, "gpt": 4, "resnet": 4}


def train_step(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
    """Do one step; return its loss."""
    optimizer.zero_grad()
    value = loss()
    value.backward()
    optimizer.step()
    return value
