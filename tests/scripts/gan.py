"""Two models and two optimizers."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
discriminator = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 1))
of_generator = torch.optim.Adam(generator.parameters(), 0.01)
of_discriminator = torch.optim.Adam(discriminator.parameters(), 0.01)
loss = nn.BCEWithLogitsLoss()
for _ in range(3):
    fake = generator(torch.randn(8, 2))
    of_discriminator.zero_grad()
    real = loss(discriminator(torch.randn(8, 3)), torch.ones(8, 1))
    d = real + loss(discriminator(fake.detach()), torch.zeros(8, 1))
    d.backward()
    of_discriminator.step()
    of_generator.zero_grad()
    g = loss(discriminator(fake), torch.ones(8, 1))
    g.backward()
    of_generator.step()
    print(repr(d.item()), repr(g.item()))
