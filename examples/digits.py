"""Train two nets on scikit-learn's digits under the recorder, and ask replay what happened.

One is a small convolutional net that learns; the other a deep sigmoid net, badly initialised, whose gradients vanish.
"""

import copy
import statistics
import sys
import time
from pathlib import Path

import pandas
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import hookrec
import replay

STEPS = 200


def train(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, rec: "hookrec.Recorder | None" = None
) -> float:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seconds = []
    for step in range(steps):
        begin = time.perf_counter()
        batch = slice(step % 14 * 128, step % 14 * 128 + 128)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        if rec is not None:
            rec.log(loss=loss)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    torch.manual_seed(0)
    convolutional = nn.Sequential(
        *(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(inplace=True),
        ),
        *(nn.Flatten(), nn.Linear(4096, 10)),
    )
    sigmoid = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        *(m for _ in range(8) for m in (nn.Sigmoid(), nn.Linear(64, 64))),
        nn.Linear(64, 10),
    )
    for name, model in (("convolutional", convolutional), ("sigmoid", sigmoid)):
        twin = copy.deepcopy(model)
        bare = train(twin, x, y, STEPS)
        with hookrec.attach(model, out / name) as rec:
            recorded = train(model, x, y, STEPS, rec)
        same = all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
        report(name, model, out)
        print(f"  median step {bare * 1e3:.1f} ms bare, {recorded * 1e3:.1f} ms recorded")
        print(f"  the parameters are {'' if same else 'NOT '}those of the bare run, bit for bit")


def report(name: str, model: nn.Module, out: Path) -> None:
    """Print what replay says of a training."""
    trace = replay.open(out / name)
    loss = [row["value"] for row in trace.scalars().to_pylist() if row["name"] == "loss"]
    print(f"\n{name}: {len(trace.steps)} steps, {trace.count:,} records, loss {loss[0]:.3f} to {loss[-1]:.3f}")
    parquet = out / f"{name}.parquet"
    trace.select().to_parquet(parquet)
    records = pandas.read_parquet(parquet)
    gradients = records[records.kind == "grad_output"].groupby("layer", sort=False).l2.median()
    print(f"  median l2 of the gradient, from the last layer to the first (pandas, from {parquet}):")
    for layer, l2 in gradients.items():
        print(f"    {layer:>3} {type(model[int(layer)]).__name__:8} {l2:.2e}")
    vanished = trace.records(kinds="grad_output", where=f"l2 < {1e-4 * gradients.max()}").to_pylist()
    if vanished:
        layers = sorted({row["layer"] for row in vanished}, key=int)
        print(f"  vanishing gradients from step {vanished[0]['step']} in layers {', '.join(layers)}")


if __name__ == "__main__":
    main()
