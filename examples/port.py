"""Record a model and a port of it that has one fault, and ask which layer differs first.

The port names its layers otherwise and keeps its linear weights transposed, as ports do. Its second normalisation has
another `eps`: both losses fall, and nothing but a comparison layer by layer shows which of the two is wrong, and where.
"""

import shutil
import sys
from pathlib import Path

import torch
from torch import nn

import hookrec
import replay

WIDTH = 32


class Linear(nn.Module):
    """A linear layer as other frameworks have it: its weight is `(inputs, outputs)`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return x @ self.kernel + self.bias


def original() -> nn.Sequential:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())

    return nn.Sequential(block(), block(), nn.Linear(WIDTH, 10))


def port(of: nn.Sequential) -> nn.Sequential:
    def block(eps: float) -> nn.ModuleDict:
        return nn.ModuleDict({"dense": Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH, eps), "act": nn.GELU()})

    class Port(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([block(1e-5), block(1e-3)])
            self.head = Linear(WIDTH, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer["act"](layer["norm"](layer["dense"](x)))
            return self.head(x)

    ported = Port()
    for parameter, source in zip(ported.parameters(), of.parameters(), strict=True):
        parameter.data.copy_(source.data.T if source.dim() == 2 else source.data)
    return ported


def train(model: nn.Module, path: Path) -> float:
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hookrec.attach(model, path, kinds=("input", "output", "grad_output", "param", "param_grad")) as rec:
        for _ in range(20):
            x = torch.randn(64, WIDTH, generator=draw)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
            loss.backward()
            rec.log(loss=loss)
            optimizer.step()
    return loss.item()


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/port")
    shutil.rmtree(out, ignore_errors=True)
    torch.manual_seed(0)
    model = original()
    ported = port(model)
    print(f"loss of the original {train(model, out / 'original'):.4f}, of the port {train(ported, out / 'port'):.4f}")
    names = {"2": "head", "0.*": "layers.0.*", "1.*": "layers.1.*", "*.0": "*.dense", "*.1": "*.norm", "*.2": "*.act"}
    (out / "names.toml").write_text("".join(f'"{a}" = "{b}"\n' for a, b in names.items()))
    print(replay.diff(out / "original", out / "port", map=out / "names.toml").first)


if __name__ == "__main__":
    main()
