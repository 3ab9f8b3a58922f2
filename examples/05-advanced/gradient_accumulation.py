"""The same global batch from more ranks or from more micro-batches: the same loss curve, step by step.

    python gradient_accumulation.py
    distributed train --script gradient_accumulation.py --num-gpus 2         the rows with two ranks only

A step takes batch_size × ranks × gradient_accumulation_steps samples. Gradients are reduced once a step, after the
last micro-batch, and are those of the mean over the whole global batch. That also holds for the last step of an epoch,
which takes the samples that are left: here 8 instead of 48, so that some micro-batches are short or empty.
"""

import argparse
import os
import tempfile

import torch.distributed as dist
from curves import make_data, print_agreement, train, train_by_hand

GLOBAL_BATCH, LEFT = 48, 8
WAYS = [(1, 48, 1), (1, 12, 4), (2, 24, 1), (2, 4, 6), (3, 4, 4), (4, 12, 1)]  # ranks, batch_size, accumulation

parser = argparse.ArgumentParser(description="Make one global batch in several ways and compare the losses.")
parser.add_argument("--steps", type=int, default=15)
parser.add_argument("--ranks", type=int, nargs="+", help="only the rows with these numbers of ranks; by default all")
arguments = parser.parse_args()
data = make_data(GLOBAL_BATCH * (arguments.steps - 1) + LEFT)
expected = train_by_hand(data, GLOBAL_BATCH)
is_launched = "WORLD_SIZE" in os.environ  # then the world has the size that it has
wanted = [int(os.environ["WORLD_SIZE"])] if is_launched else arguments.ranks or [1, 2, 3, 4]
ways = [way for way in WAYS if way[0] in wanted]
if not ways:
    raise SystemExit(f"no row has {wanted} ranks; there are some with 1, 2, 3 and 4")

with tempfile.TemporaryDirectory() as scratch:
    for ranks, batch_size, accumulation in ways:
        folder = None if is_launched else f"{scratch}/{ranks}-{batch_size}"
        found = train(data, folder, num_gpus=ranks, batch_size=batch_size, gradient_accumulation_steps=accumulation)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print_agreement(f"{ranks} ranks × batch {batch_size} × accumulation {accumulation}", found, expected)
