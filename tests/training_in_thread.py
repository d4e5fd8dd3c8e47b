"""A training in a thread, for tests that reach it from another."""

import threading
import time

import torch
from torch import nn


class Training:
    """Steps in a thread, as slow as it must be for others to get a word in."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.steps = 0
        self.error: BaseException | None = None
        self._go = False

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        self.steps += 1

    def __enter__(self):
        self._go = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            while self._go:
                self.step()
                time.sleep(0.002)
        except BaseException as error:
            self.error = error

    def __exit__(self, *exception):
        self._go = False
        self._thread.join()
        assert self.error is None
