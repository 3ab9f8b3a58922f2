"""What an engine is measured beside: its own minimal loop, and what starts the same training without us."""

from __future__ import annotations

# Engine → module:function that trains with it alone. The peers stand on the first one.
BARE_LOOPS = {
    "pytorch-ddp": "distributed.bench.workloads.hand_written:train",
    "deepspeed": "benchmarks.suite.hand_written.deepspeed:train",
    "horovod": "benchmarks.suite.hand_written.horovod:train",
    "ray": "benchmarks.suite.hand_written.ray:train",
}

_STARTERS = {"ray": "ray", "tensorflow": "tensorflow"}


def starter(engine: str) -> str:
    """Who starts an engine's training by hand: a script beside the start benchmark.

    >>> starter("fsdp"), starter("ray")
    ('torchrun', 'ray')
    """
    return _STARTERS.get(engine, "torchrun")
