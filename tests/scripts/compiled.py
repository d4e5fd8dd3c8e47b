"""torch.compile, after the optimizer was made."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
compiled = torch.compile(net, backend="eager")
for _ in range(4):
    optimizer.zero_grad()
    loss = compiled(torch.randn(16, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    print(repr(loss.item()))
