"""Runs by -m only, since it imports its neighbour."""

import sys

import torch

from .model import net

model = net()
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
print(sys.argv, __name__, __package__, __spec__.name, sys.path[0])
