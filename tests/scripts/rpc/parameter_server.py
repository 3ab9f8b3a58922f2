"""A parameter server on rank 0: trainers call it by RPC, with autograd and an optimizer over the wire."""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer


class ParameterServer(nn.Module):
    _lock = threading.Lock()
    _server = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    @classmethod
    def get(cls):
        with cls._lock:
            if cls._server is None:
                cls._server = cls()
            return cls._server

    def forward(self, x):
        return self.model(x)

    def param_rrefs(self):
        return [rpc.RRef(p) for p in self.model.parameters()]

    def save(self, path):
        torch.save(self.model.state_dict(), path)


def get_parameter_server():
    return ParameterServer.get()


def run_trainer():
    server = rpc.remote("server", get_parameter_server)
    optimizer = DistributedOptimizer(torch.optim.SGD, server.rpc_sync().param_rrefs(), lr=0.3)
    random = torch.Generator().manual_seed(1)
    for step in range(6):
        x = torch.randn(12, 8, generator=random)
        target = x[:, :3].argmax(1)
        with dist_autograd.context() as context:
            loss = nn.functional.cross_entropy(server.rpc_sync().forward(x), target)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        print(f"step {step} loss {loss.item():.6f}", flush=True)
    server.rpc_sync().save("served.pt")


if __name__ == "__main__":
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = "server" if rank == 0 else f"trainer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world_size)
    if rank != 0:
        run_trainer()
    rpc.shutdown()
