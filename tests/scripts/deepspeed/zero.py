"""DeepSpeed's own engine: `initialize` with a configuration, ZeRO, and its checkpoints."""

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stage", type=int, default=1)
parser.add_argument("--resume", action="store_true")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled first
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
x = torch.randn(64, 8)
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": args.stage},
}
engine, _, loader, _ = deepspeed.initialize(
    args, model, config=config, model_parameters=model.parameters(), training_data=TensorDataset(x, x[:, :4].argmax(1))
)
if args.resume:
    engine.load_checkpoint("zero")
for step, (inputs, targets) in enumerate(loader):
    loss = nn.functional.cross_entropy(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    print(f"step {step} rank {engine.global_rank} loss {loss.item()!r}", flush=True)
engine.save_checkpoint("zero", tag=f"after-{engine.global_steps}")
