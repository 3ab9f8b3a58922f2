"""Pipeline, data and tensor parallelism combined: one model, one script, and meshes that are only settings.

    python hybrid_parallelism.py                                  three meshes, each with as many processes as it has
    python hybrid_parallelism.py --mesh pp2.dp2
    distributed train --script hybrid_parallelism.py --num-gpus 4 pipeline_parallel=2 tensor_parallel=2

Ranks that pipeline_parallel and tensor_parallel leave over are data-parallel. Every curve is compared, step by step,
with a plain loop in one process.
"""

import argparse
import os
import tempfile

import torch.distributed as dist
from curves import make_data, print_agreement, train, train_by_hand

BATCH_SIZE = 8  # of a data-parallel rank
MESHES = {
    "pp2.dp2": {"num_gpus": 4, "pipeline_parallel": 2},
    "dp2.tp2": {"num_gpus": 4, "tensor_parallel": 2},
    # three axes, and the parameters sharded over the data axis besides
    "pp2.dp2.tp2": {"num_gpus": 8, "pipeline_parallel": 2, "tensor_parallel": 2, "backend": "fsdp"},
}

parser = argparse.ArgumentParser(description="Train on meshes of several axes and compare the losses.")
parser.add_argument("--mesh", choices=MESHES, action="append", help="may be repeated; by default all")
parser.add_argument("--steps", type=int, default=20, help="of two data-parallel ranks; more take fewer")
arguments = parser.parse_args()
data = make_data(2 * BATCH_SIZE * arguments.steps)


def compare(name, found):
    print_agreement(name, found, train_by_hand(data, found.global_batch))


if "WORLD_SIZE" in os.environ:  # of a launcher; what is given on its command line wins over what stands here
    found = train(data, batch_size=BATCH_SIZE)
    if dist.get_rank() == 0:
        compare("the launcher's mesh", found)
else:
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.mesh or MESHES:
            compare(name, train(data, f"{scratch}/{name}", batch_size=BATCH_SIZE, **MESHES[name]))
