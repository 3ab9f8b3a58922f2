"""Bytes that each way of sharding leaves on a rank, and the time of a step as a ratio to DDP's, all in one run.

    python measure.py --json sharding_strategies.json             what sharding_strategies.md shows
    python measure.py --width 256 --rounds 5

Bytes are counted from the tensors that rank 0 holds after a step and, for `in forward`, where the loss is computed.
Times are medians over rounds in which the ways take turns: on a CPU, where the ranks share cores and the network is
memory, they say what the bookkeeping costs and nothing of a cluster.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

parser = argparse.ArgumentParser(description="Measure the ways of sharding against DDP.")
parser.add_argument("--ranks", type=int, default=4, help="an even number")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--steps", type=int, default=10, help="of one measurement")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--batch-size", type=int, default=4, help="samples a rank and step")
parser.add_argument("--json", metavar="FILE", help="write the result there too")
arguments = parser.parse_args()

if "WORLD_SIZE" not in os.environ:  # all ways are to be measured in one world: let the launcher make one
    with tempfile.TemporaryDirectory() as scratch:
        launcher = [sys.executable, "-m", "distributed", "train", "--script", __file__]
        options = ["--num-gpus", str(arguments.ranks), "--run-dir", f"{scratch}/run", "progress=false"]
        done = subprocess.run([*launcher, *options, "--", *sys.argv[1:]], check=False)
    raise SystemExit(done.returncode)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gpt import GPT, load_text, next_byte_loss  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils.data import Subset  # noqa: E402

from distributed import Trainer  # noqa: E402

WAYS = {
    "none": {},
    "zero1": {"zero_stage": 1},
    "grad_op": {"sharding": "grad_op"},
    "full": {"sharding": "full"},
    "hybrid": {"sharding": "hybrid", "shard_groups": 2},
}


def bytes_here(tensors):
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def measure(way):
    """Bytes on this rank at two moments of a step, and seconds a step."""
    torch.manual_seed(0)
    model = GPT(width=arguments.width)
    held = {}

    def loss_fn(logits, target):
        held["parameters_after_forward"] = bytes_here(model.parameters())
        return next_byte_loss(logits, target)

    def make_optimizer(parameters):
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        optimizer.register_step_post_hook(count)
        return optimizer

    def count(optimizer, *_):
        held["parameters"] = bytes_here(model.parameters())
        held["gradients"] = bytes_here(p.grad for p in model.parameters())
        held["optimizer"] = bytes_here(value for state in optimizer.state.values() for value in state.values())

    samples = range(arguments.steps * arguments.batch_size * int(os.environ["WORLD_SIZE"]))
    trainer = Trainer(
        model,
        **WAYS[way],
        batch_size=arguments.batch_size,
        epochs=2,  # the first warms up
        loss_fn=loss_fn,
        loss_weighting="samples",  # every sample has as many bytes; a loss that looks at the model cannot be tried out
        optimizer=make_optimizer,
        certificate_steps=0,
        log_every_n_steps=arguments.steps,
        progress=False,
    )
    history = trainer.fit(Subset(load_text()[0], samples))
    return held, history.epochs[-1].seconds / history.epochs[-1].steps


found = {way: [] for way in WAYS}
for _ in range(arguments.rounds):
    for way, results in found.items():
        results.append(measure(way))
if dist.get_rank() == 0:
    columns = ("parameters", "gradients", "optimizer", "parameters_after_forward")
    rows = []
    print(" sharding  parameters   gradients   optimizer    all  in forward  time")
    for way, results in found.items():
        held = results[0][0]
        kept = sum(held[name] for name in columns[:3])
        part = kept / sum(found["none"][0][0][name] for name in columns[:3])
        ratio = median(mine[1] / ddp[1] for mine, ddp in zip(results, found["none"], strict=True))
        rows.append({"sharding": way, **held, "part_of_ddp": part, "time_ratio_to_ddp": ratio})
        *kept_figures, in_forward = (f"{held[name]:10,}" for name in columns)
        print(f"{way:>9}  {'  '.join(kept_figures)}  {part:5.0%}  {in_forward}  {ratio:4.2f}")
    if arguments.json:
        settings = {name: value for name, value in vars(arguments).items() if name != "json"}
        facts = {"torch": torch.__version__, "device": "cuda" if torch.cuda.is_available() else "cpu"}
        facts["cores"] = len(os.sched_getaffinity(0))
        Path(arguments.json).write_text(json.dumps(settings | facts | {"rows": rows}, indent=2) + "\n")
