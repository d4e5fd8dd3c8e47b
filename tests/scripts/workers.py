"""argparse, DataLoader workers that are forked and spawned, and a class of __main__ that is pickled."""

import argparse
import copy
import pickle

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((4,), float(index)), torch.tensor([float(index % 3)])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--context", default="fork")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), arguments.lr)
    average = copy.deepcopy(net)
    loader = DataLoader(Numbers(), 8, shuffle=True, num_workers=2, multiprocessing_context=arguments.context)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    again = pickle.loads(pickle.dumps(net))
    print(type(again), repr(average(torch.ones(1, 4)).item()))


if __name__ == "__main__":
    main()
