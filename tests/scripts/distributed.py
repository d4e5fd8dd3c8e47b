"""DistributedDataParallel on gloo, under torchrun."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
net = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = net(torch.randn(16, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
Path(os.environ["LOSSES"] + str(dist.get_rank())).write_text(repr(losses))
dist.destroy_process_group()
