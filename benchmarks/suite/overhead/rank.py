"""A rank of the overhead benchmark: it joins its world once, and then runs what it is told, turn by turn."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile

import torch.distributed as dist

from distributed.bench.contenders import contenders_of
from distributed.bench.turns import Reading, answer, answering
from distributed.bench.work import Work


def main() -> None:
    """`python -m distributed.bench.rank STEPS ENGINE PORT`, started by `distributed bench overhead`."""
    steps, engine, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as scratch, answering(port, dist.get_rank()) as channel:
        for line in channel:
            answer(channel, [_run(name, engine, steps, os.path.join(scratch, name)) for name in json.loads(line)])
    if dist.is_initialized():
        dist.destroy_process_group()


def _run(name: str, engine: str, steps: int, scratch: str) -> Reading:
    train = contenders_of(engine).load(name)
    work = Work(dist.get_rank(), dist.get_world_size(), steps, scratch, engine)
    gc.collect()  # of whoever ran before
    dist.barrier()
    train(work)
    return work.clock.reading


if __name__ == "__main__":
    main()
