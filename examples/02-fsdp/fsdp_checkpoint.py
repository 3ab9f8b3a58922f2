"""One checkpoint, any mesh: trained in shards on four ranks, then continued in four other ways, and exported.

    python fsdp_checkpoint.py
    python fsdp_checkpoint.py --folder runs/portable --steps 20 --more 20

A checkpoint holds whole tensors by name, in whatever pieces the ranks wrote them. So the run resumes with other shards,
with none, with cut layers or in one process, and the losses agree to the last digits of fp32. The script starts worlds
of several sizes one after the other, so it is not for `distributed train`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from gpt import GPT, load_text, next_byte_loss
from safetensors.torch import load_file

from distributed import Trainer

GLOBAL_BATCH = 16
WAYS = {
    "fsdp on 4": {"num_gpus": 4, "backend": "fsdp"},
    "ddp on 2": {"num_gpus": 2},
    "tensor on 2": {"num_gpus": 2, "tensor_parallel": 2},
    "one process": {"num_gpus": 1},
}

parser = argparse.ArgumentParser(description="Train on one mesh and resume on others.")
parser.add_argument("--folder", help="where the runs are kept; by default nowhere")
parser.add_argument("--steps", type=int, default=10, help="before the checkpoint")
parser.add_argument("--more", type=int, default=10, help="after it")
arguments = parser.parse_args()


def train(way, folder, steps, **settings):
    """The history, and the loss of each step."""
    mesh = WAYS[way]
    data_ranks = mesh["num_gpus"] // mesh.get("tensor_parallel", 1)
    torch.manual_seed(0)  # for the weights, which are drawn here
    trainer = Trainer(
        GPT(),
        **mesh,
        batch_size=GLOBAL_BATCH // data_ranks,  # of a device: the global batch is the same in every way
        max_steps=steps,
        loss_fn=next_byte_loss,
        run_dir=folder / way.replace(" ", "-"),
        log_every_n_steps=1,
        progress=False,
        **settings,
    )
    history = trainer.fit(train_set, test_set)
    events = map(json.loads, Path(history.run_dir, "events.jsonl").read_text().splitlines())
    return history, [event["loss"] for event in events if event["event"] == "StepEnded"]


def go_on(folder):
    first, losses = train("fsdp on 4", folder / "first", arguments.steps)
    print(f"fsdp on 4 ranks: loss {losses[0]:.4f} to {losses[-1]:.4f} in {arguments.steps} steps, then a checkpoint\n")
    total = arguments.steps + arguments.more
    curves = {
        way: train(way, folder / "then", total, resume_from_checkpoint=first.checkpoint)[1][-arguments.more :]
        for way in WAYS
    }
    print("  step  " + "  ".join(f"{way:>12}" for way in curves))
    for step, row in enumerate(zip(*curves.values(), strict=True), arguments.steps + 1):
        print(f"{step:6}  " + "  ".join(f"{loss:12.7f}" for loss in row))
    spread = max(max(row) - min(row) for row in zip(*curves.values(), strict=True))
    print(f"\nlargest difference between them: {spread:.1e}")
    return first


def export(first, folder):
    """Other programs read safetensors. `distributed checkpoint export` makes one without ever holding the model."""
    file = folder / "gpt.safetensors"
    command = [sys.executable, "-m", "distributed", "checkpoint", "export", first.checkpoint, "--to", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    model = GPT()
    model.load_state_dict(load_file(file))
    ids, target = test_set.tensors
    with torch.no_grad():
        loss = next_byte_loss(model(ids), target)
    print(f"validation loss of the sharded run {first['val_loss'][-1]:.7f}, of its export in plain torch {loss:.7f}")


train_set, test_set = load_text()
with tempfile.TemporaryDirectory() as scratch:
    folder = Path(arguments.folder or scratch)
    export(go_on(folder), folder)
