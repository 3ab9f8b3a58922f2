"""FSDP2: a model made on no device, sharded block by block, its whole state gathered for a file."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Net(nn.Module):
    def __init__(self, width=32, blocks=3):
        super().__init__()
        layers = [nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True) for _ in range(blocks)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(width, width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(args):
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    full = Net().state_dict()
    with torch.device("meta"):
        model = Net()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.mixed_precision else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if os.path.exists("fsdp2.pt"):
        full = torch.load("fsdp2.pt", mmap=True, weights_only=True)
    set_model_state_dict(model, full, options=options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())
    for step in range(args.steps):
        x = torch.randn(4, 6, 32)
        loss = (model(x).float() - x.flip(1)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()} step {step} loss {loss.item()!r}", flush=True)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(state, "fsdp2.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--mixed-precision", action="store_true")
    main(parser.parse_args())
