"""A plain loop; the first argument says how it ends."""

import os
import signal
import sys
import time

import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(4):
        optimizer.zero_grad()
        loss = net(torch.randn(16, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    print(sys.argv, __file__, sys.path[0], sys.orig_argv[1:], __spec__, __package__, sorted(globals()))
    end = sys.argv[1] if len(sys.argv) > 1 else ""
    if end == "raise":
        raise ValueError("on purpose")
    if end == "exit":
        sys.exit(3)
    if end == "words":
        sys.exit("last words")
    if end.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, end))
        time.sleep(10)
