"""The bare loop of DeepSpeed: its engine as its own tutorial has it, ZeRO-2, and nothing else."""

from __future__ import annotations

from torch import nn

from benchmarks.suite.overhead.workload import BATCH
from distributed.bench.workloads.job import BenchJob
from distributed.engines.deepspeed.ops import import_deepspeed


def train(job: BenchJob) -> nn.Module:
    deepspeed = import_deepspeed("cpu")
    model = job.make_model()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=job.make_optimizer(model.parameters()), config=config, dist_init_required=False
    )
    engine.train()
    for row in job.own_loader():
        loss = job.loss(engine, row)
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return model
