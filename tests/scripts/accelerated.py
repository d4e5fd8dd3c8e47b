"""Accelerate: prepared objects, accumulated and clipped gradients."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(net.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
loader = DataLoader(TensorDataset(torch.randn(32, 4)), 4, shuffle=True)
net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
for (x,) in loader:
    with accelerator.accumulate(net):
        loss = net(x).pow(2).mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    print(repr(loss.item()))
