"""Ignite: a supervised trainer, an evaluator that runs after each epoch, and an early stop."""

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import MeanSquaredError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), 8, shuffle=True)
trainer = create_supervised_trainer(net, optimizer, nn.functional.mse_loss)
evaluator = create_supervised_evaluator(net, {"mse": MeanSquaredError()})


@trainer.on(Events.ITERATION_COMPLETED)
def say(engine):
    print(repr(engine.state.output))


@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    print(repr(evaluator.run(loader).metrics["mse"]))
    if engine.state.epoch == 2:
        engine.terminate()


trainer.run(loader, max_epochs=5)
