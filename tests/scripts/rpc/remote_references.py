"""An agent and an observer: remote references, asynchronous calls that are gathered, functions that answer later."""

import os

import torch
import torch.distributed.rpc as rpc
from torch import nn


class Observer:
    """Walks in an environment of its own, and asks the agent where to."""

    def __init__(self):
        self.random = torch.Generator().manual_seed(3)

    def run_episode(self, agent, steps):
        state, total = torch.zeros(4), 0.0
        for _ in range(steps):
            action = agent.rpc_sync().select_action(state)
            state = 0.9 * state + torch.randn(4, generator=self.random) + (1 if action else -1)
            reward = float(-state.abs().mean())
            agent.rpc_sync().report(reward)
            total += reward
        return total


class Agent:
    def __init__(self):
        torch.manual_seed(0)
        self.policy = nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.05)
        self.log_probs, self.rewards = [], []

    def select_action(self, state):
        chosen = torch.distributions.Categorical(logits=self.policy(state))
        action = chosen.sample()
        self.log_probs.append(chosen.log_prob(action))
        return int(action)

    def report(self, reward):
        self.rewards.append(reward)

    def finish_episode(self):
        returns = torch.tensor(self.rewards).flip(0).cumsum(0).flip(0)
        loss = -(torch.stack(self.log_probs) * (returns - returns.mean())).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.log_probs, self.rewards = [], []
        return loss.item()


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=60)
    rpc.init_rpc(
        "agent" if rank == 0 else f"observer{rank}", rank=rank, world_size=world_size, rpc_backend_options=options
    )
    if rank == 0:
        agent = Agent()
        mine = rpc.RRef(agent)
        observers = [rpc.remote(f"observer{other}", Observer) for other in range(1, world_size)]
        for episode in range(3):
            walks = [observer.rpc_async().run_episode(mine, 10) for observer in observers]
            rewards = torch.futures.wait_all(walks)
            print(f"episode {episode} reward {sum(rewards):.6f} loss {agent.finish_episode():.6f}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
