"""A rank of the overhead benchmark: it joins its world once, and then runs what each turn asks for."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile

import torch.distributed as dist

from benchmarks.suite.overhead.contenders import contenders_of
from benchmarks.suite.overhead.workload import Reading, StepWorkload
from distributed.bench.interleave import answer, answering


def main() -> None:
    """`python -m benchmarks.suite.overhead.rank STEPS ENGINE PORT`, by the overhead benchmark."""
    steps, engine, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as scratch, answering(port, dist.get_rank()) as channel:
        for line in channel:
            answer(channel, [_run(name, engine, steps, os.path.join(scratch, name)) for name in json.loads(line)])
    if dist.is_initialized():
        dist.destroy_process_group()


def _run(name: str, engine: str, steps: int, scratch: str) -> Reading:
    train = contenders_of(engine).load(name)
    workload = StepWorkload(dist.get_rank(), dist.get_world_size(), steps, scratch, engine)
    gc.collect()  # of whoever ran before
    dist.barrier()
    train(workload)
    return workload.clock.reading


if __name__ == "__main__":
    main()
