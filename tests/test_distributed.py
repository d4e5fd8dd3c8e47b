"""What wrappers for several processes do to hooks, with two processes on one machine (gloo)."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import replay

CODE = """
import os, sys, torch, hookrec
import torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
how, path = sys.argv[1:]
recorded = model
if how == "ddp":
    trained = recorded = nn.parallel.DistributedDataParallel(model)
elif how == "ddp, attached before":
    trained = model
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = recorded = model
kinds = ("output", "grad_output", "input", "grad_input", "param", "param_grad", "param_grad_acc", "update")
with hookrec.attach(recorded, path, kinds=kinds, ring="1MiB", keep_free=0):
    if how == "ddp, attached before":
        trained = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        trained(x).pow(2).sum().backward()
        optimizer.step()
dist.destroy_process_group()
"""


def run(how: str, path: Path) -> replay.Trace:
    """Train in two processes, and return the trace of both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, how, str(path)],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    return replay.open(path)


def gradients() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs of the first layer on each rank, and the gradients of the parameters averaged over both."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    outputs, losses = [], []
    for rank in (0, 1):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
        outputs.append(model[0](x).detach())
        losses.append(model(x).pow(2).sum())
    return outputs, list(torch.autograd.grad(sum(losses) / 2, list(model.parameters())))


@pytest.mark.parametrize("how", ["ddp", pytest.param("ddp, attached before", marks=pytest.mark.slow)])
def test_gradients_of_parameters_are_those_averaged_over_the_ranks(tmp_path, how):
    trace = run(how, tmp_path / "a")

    outputs, averaged = gradients()
    assert trace.ranks == [0, 1]
    assert trace.layers[0] == "0"
    for rank in (0, 1):
        np.testing.assert_allclose(trace.tensor(0, "0", rank=rank), outputs[rank], rtol=1e-6)
        for kind in ("param_grad", "param_grad_acc"):
            got = trace.tensor(0, "0", kind, path="weight", rank=rank)
            np.testing.assert_allclose(got, averaged[0], rtol=1e-5, atol=1e-7)
        update = trace.tensor(0, "2", "update", path="bias", rank=rank)
        np.testing.assert_allclose(update, -0.1 * averaged[3], rtol=1e-4, atol=1e-7)
    assert trace.notes == []


@pytest.mark.slow
def test_shards_of_parameters_are_recorded_on_each_rank(tmp_path):
    trace = run("fsdp", tmp_path / "a")

    outputs, averaged = gradients()
    for rank in (0, 1):
        np.testing.assert_allclose(trace.tensor(0, "0", rank=rank), outputs[rank], rtol=1e-6)
        assert trace.tensor(0, "0", "grad_output", rank=rank).shape == (3, 4)
    for layer, path, whole in (("0", "weight", averaged[0]), ("2", "bias", averaged[3])):
        for kind, sign in (("param_grad", 1.0), ("param_grad_acc", 1.0), ("update", -0.1)):
            shards = [trace.tensor(0, layer, kind, path=path, rank=rank) for rank in (0, 1)]
            np.testing.assert_allclose(np.concatenate(shards), sign * whole.numpy(), rtol=1e-4, atol=1e-6)
