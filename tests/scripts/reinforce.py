"""REINFORCE with a baseline: an agent that is no module, models called one observation at a time, then in a batch."""

import torch
from torch import nn


class Agent:
    def __init__(self):
        self.policy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.value = nn.Linear(3, 1)
        parameters = [*self.policy.parameters(), *self.value.parameters()]
        self.optimizer = torch.optim.RMSprop(parameters, 0.01)

    def act(self, observation):
        with torch.no_grad():
            return torch.distributions.Categorical(logits=self.policy(observation)).sample()

    def learn(self, observations, actions, returns):
        chosen = torch.distributions.Categorical(logits=self.policy(observations)).log_prob(actions)
        values = self.value(observations).squeeze(-1)
        loss = -(chosen * (returns - values.detach())).mean() + (returns - values).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


torch.manual_seed(0)
agent = Agent()
for _ in range(3):
    observations = torch.randn(5, 3)
    actions = torch.stack([agent.act(observation) for observation in observations])
    print(repr(agent.learn(observations, actions, observations.sum(1) * (actions * 2 - 1))))
