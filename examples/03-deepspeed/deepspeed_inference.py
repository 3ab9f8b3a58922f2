"""Use what was trained: a checkpoint's model under DeepSpeed, compared with the same model in plain torch.

    python deepspeed_train.py --num-gpus 2 --run-dir runs/small
    python deepspeed_inference.py runs/small/checkpoints
    torchrun --nproc-per-node 2 deepspeed_inference.py runs/small/checkpoints
    distributed train --script deepspeed_inference.py --num-gpus 2 -- runs/small/checkpoints

One process uses deepspeed.init_inference; several use ZeRO-Inference, where each rank holds a part of the model in host
memory, and layers are gathered as they are needed.

A checkpoint holds whole tensors by name, so it does not matter with which stage or engine it was written.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from language import LENGTH, load_text, make_model

from distributed.checkpoint.restore.reading import load
from distributed.core.env import worker_env
from distributed.engines.deepspeed.ops import import_deepspeed

parser = argparse.ArgumentParser(description="Compute with a checkpoint's model under DeepSpeed.")
parser.add_argument("checkpoint", type=Path, help="of a run, or the folder of them: then its newest")
parser.add_argument("--prompt", default="The value of the expression is ")
parser.add_argument("--count", type=int, default=40, help="bytes to write")
parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
arguments = parser.parse_args()


def trained_model():
    newest = sorted(arguments.checkpoint.glob("step-*")) or [arguments.checkpoint]
    model = make_model()
    model.load_state_dict(load(str(newest[-1]), ranks=()).shared["model"])
    return model.eval()


def zero_inference(deepspeed, model):
    """Parameters are sharded over the ranks, kept in host memory, and gathered layer by layer."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {"device": "cpu", "pin_memory": torch.cuda.is_available()},
        },
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
    parts = sum(p.ds_tensor.nbytes for p in engine.module.parameters())
    whole = sum(p.ds_numel * p.element_size() for p in engine.module.parameters())
    print(f"rank {dist.get_rank()} holds {parts:,} of {whole:,} bytes", flush=True)
    engine.eval()
    return engine


@torch.no_grad()
def write(model, text, count, device):
    """The likeliest bytes after a text. All ranks take as many steps: each gathers parameters from the others."""
    ids = torch.tensor([list(text.encode())], device=device)
    for _ in range(count):
        ids = torch.cat([ids, model(ids[:, -LENGTH:])[:, -1:].argmax(-1)], 1)
    return bytes(ids[0].tolist()).decode(errors="replace")


def main():
    world = worker_env()
    device = torch.device("cpu")
    deepspeed = import_deepspeed("cuda" if torch.cuda.is_available() else "cpu")  # quiet, and compiling nothing
    if torch.cuda.is_available():
        device = torch.device("cuda", world.local_rank if world else 0)
        torch.cuda.set_device(device)
    samples = load_text(1)[1].tensors[0].to(device)
    with torch.no_grad():
        expected = trained_model().to(device)(samples)

    if world is None:
        engine = deepspeed.init_inference(trained_model().to(device), dtype=torch.float32)
    else:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        engine = zero_inference(deepspeed, trained_model().to(device))
    with torch.no_grad():
        difference = (engine(samples) - expected).abs().max().item()
    written = write(engine, arguments.prompt, arguments.count, device)
    if world is None or world.is_main:
        print(f"{type(engine).__name__} on {f'{world.world_size} ranks' if world else 'one rank'}")
        print(f"largest difference to plain torch over {len(samples)} texts: {difference:.1e}")
        print(written, flush=True)
    if world is not None:
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # torch's threads abort about one in fifty such processes while Python is torn down


main()
