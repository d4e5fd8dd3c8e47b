"""Recording takes no more memory, handles or hooks after thousands of steps than after some, and gives all back."""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import hookrec
from hookrec.plan import KINDS
from tests.hookcases.case import count_hooks


class Net(nn.Module):
    """Views, in-place changes, a shared layer, a functional residual, evaluation and recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

    def block(self, x):
        return self.two(self.act(self.one(x))) + x

    def forward(self, x):
        x = checkpoint(self.block, self.two(x), use_reentrant=False)
        x[..., :2] *= 0.5
        return x


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def left() -> tuple[int, int, str]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir())), children


def measure(path: str, steps: int) -> None:
    """Train with each kind recorded; check that memory stays, and that nothing is left at the end."""
    torch.set_num_threads(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def train(count: int) -> None:
        for step in range(count):
            optimizer.zero_grad()
            model(torch.ones(2, 3, 4)).pow(2).sum().backward()
            optimizer.step()
            if step % 10 == 0:
                with torch.no_grad():
                    model(torch.ones(2, 3, 4))

    train(3)
    hookrec.attach(model, f"{path}/first", kinds=KINDS, ops="add", tensors=False, keep_free=0).detach()
    before = left()
    with hookrec.attach(model, f"{path}/a", kinds=KINDS, ops="add", tensors=False, ring="1MiB", keep_free=0):
        train(steps // 5)
        gc.collect()
        objects, memory = len(gc.get_objects()), resident_bytes()
        train(steps - steps // 5)
        gc.collect()
        more_objects, more_memory = len(gc.get_objects()) - objects, resident_bytes() - memory
    assert more_objects < 200, f"{more_objects} more objects"
    assert more_memory < 4 << 20, f"{more_memory} more bytes"
    assert left() == before
    assert count_hooks(model) == 0
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("steps", [1000, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_memory_is_flat_and_nothing_is_left(tmp_path, steps):
    """In a process of its own, where nothing else takes memory."""
    code = "import sys; from tests.test_memory import measure; measure(sys.argv[1], int(sys.argv[2]))"
    command = [sys.executable, "-c", code, str(tmp_path), str(steps)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])

    assert result.returncode == 0, result.stderr
