"""How much of the communication hides behind the computation: DDP's buckets and FSDP's groups, as ratios in one run.

    python communication_overlap.py
    distributed train --script communication_overlap.py --num-gpus 2 progress=false

DDP reduces a bucket of gradients as soon as the backward pass has filled it, while earlier layers are still computed:
one bucket for all can begin only when everything is computed, and a bucket for each tensor pays for a message each.
FSDP gathers the parameters of one group of layers while the group before it computes; if all blocks are one group,
there is nothing to compute meanwhile. Every way computes the same losses.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from statistics import median

parser = argparse.ArgumentParser(description="Measure ways to overlap communication with computation.")
parser.add_argument("--ranks", type=int, default=2, help="where the script makes the world itself")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--steps", type=int, default=8, help="of one measurement")
parser.add_argument("--width", type=int, default=192)
arguments = parser.parse_args()

if "WORLD_SIZE" not in os.environ:  # all ways are to be measured in one world: let the launcher make one
    with tempfile.TemporaryDirectory() as scratch:
        launcher = [sys.executable, "-m", "distributed", "train", "--script", __file__]
        options = ["--num-gpus", str(arguments.ranks), "--run-dir", f"{scratch}/run", "progress=false"]
        done = subprocess.run([*launcher, *options, "--", *sys.argv[1:]], check=False)
    raise SystemExit(done.returncode)

import torch.distributed as dist  # noqa: E402
from curves import make_data, make_model, token_loss  # noqa: E402

from distributed import Trainer  # noqa: E402

WAYS = {
    "ddp, all gradients in one bucket": {"bucket_cap_mb": 1000},
    "ddp, buckets of 1 MB": {"bucket_cap_mb": 1},
    "ddp, a bucket for each tensor": {"bucket_cap_mb": 0.001},
    "fsdp, all blocks one group": {"backend": "fsdp", "wrap_blocks": ["TransformerEncoder"]},
    "fsdp, each block a group": {"backend": "fsdp"},
    "fsdp, nothing gathered for backward": {"backend": "fsdp", "sharding": "grad_op"},
}


def seconds_a_step(settings):
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        make_model(width=arguments.width),
        loss_fn=token_loss,
        batch_size=8,
        epochs=2,  # the first warms up
        certificate_steps=0,
        log_every_n_steps=arguments.steps,
        progress=False,
        **settings,
    )
    record = trainer.fit(make_data(8 * ranks * arguments.steps)).epochs[-1]
    return record.seconds / record.steps


found = {name: [] for name in WAYS}
for _ in range(arguments.rounds):
    for name, settings in WAYS.items():
        found[name].append(seconds_a_step(settings))
if dist.get_rank() == 0:
    first, *_ = found.values()
    print(f"{'':36}  time a step, to the first (median of {arguments.rounds}, least … most)")
    for name, seconds in found.items():
        ratios = sorted(mine / theirs for mine, theirs in zip(seconds, first, strict=True))
        print(f"{name:36}  {median(ratios):5.2f}   {ratios[0]:.2f} … {ratios[-1]:.2f}")
