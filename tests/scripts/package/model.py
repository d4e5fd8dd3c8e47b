"""A model that the module beside it imports."""

from torch import nn


def net():
    return nn.Linear(3, 1)
