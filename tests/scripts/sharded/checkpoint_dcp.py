"""Distributed checkpoints: state that knows its own dictionary, saved by all ranks and read by another run."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

CHECKPOINT_DIR = "checkpoint"


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = int(state["step"])


dist.init_process_group("gloo")
torch.manual_seed(4)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
fully_shard(model)
app = AppState(model, torch.optim.Adam(model.parameters(), lr=0.1))
if os.path.isdir(CHECKPOINT_DIR):
    dcp.load({"app": app}, checkpoint_id=CHECKPOINT_DIR)
    print(f"continues after step {app.step}")
for _ in range(3):
    x = torch.rand(8, 16, generator=torch.Generator().manual_seed(100 * app.step + dist.get_rank()))
    app.optimizer.zero_grad()
    loss = model(x).sum().square()
    loss.backward()
    app.optimizer.step()
    app.step += 1
    print(f"rank {dist.get_rank()} step {app.step} loss {loss.item()!r}", flush=True)
dcp.save({"app": app}, checkpoint_id=CHECKPOINT_DIR)
dist.destroy_process_group()
