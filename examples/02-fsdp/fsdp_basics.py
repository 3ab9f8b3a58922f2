"""Fully sharded data parallelism at its smallest: a model that no rank ever holds whole, and what each of them holds.

    python fsdp_basics.py --num-gpus 2                            the script starts the ranks itself
    distributed train --script fsdp_basics.py --num-gpus 2        every rank runs this script, and `fit` joins them

The model is made on the meta device: it has shapes and no memory. Each rank makes the rows that it keeps, with the
values that the whole model would have had.
"""

import argparse

import torch
import torch.distributed as dist
from gpt import GPT, load_text, next_byte_loss
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from distributed import Trainer

parser = argparse.ArgumentParser(description="Train a model in shards, and print what each rank holds.")
parser.add_argument("--num-gpus", type=int, help="devices; CPU processes where there is no CUDA")
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()


def bytes_here(tensors):
    """Of a sharded tensor, its part on this rank."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def make_optimizer(parameters):
    """An ordinary AdamW. It gets the whole parameters, and steps on the shards that are put in their place."""
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)

    def report(optimizer, *_):
        here = [p for group in optimizer.param_groups for p in group["params"]]
        state = [value for held in optimizer.state.values() for value in held.values()]
        whole = sum(p.numel() * p.element_size() for p in here)
        gradients = bytes_here(p.grad for p in here)
        print(
            f"of {whole:,} bytes of parameters this rank holds {bytes_here(here):,}, with {gradients:,} bytes of"
            f" gradients and {bytes_here(state):,} of optimizer state",
            flush=True,
        )
        once.remove()

    once = optimizer.register_step_post_hook(report)
    return optimizer


with torch.device("meta"):
    model = GPT()
trainer = Trainer(
    model,
    backend="fsdp",
    num_gpus=arguments.num_gpus,
    max_steps=arguments.steps,
    loss_fn=next_byte_loss,
    optimizer=make_optimizer,
    log_every_n_steps=10,
)
train_set, _ = load_text()
history = trainer.fit(DataLoader(train_set, batch_size=16, shuffle=True))

if not dist.is_initialized() or dist.get_rank() == 0:  # a launcher's ranks all come here; one of them is enough
    print(f"loss {history['loss'][-1]:.3f} after {history.steps} steps; the whole model is in {history.checkpoint}")
