"""The bare loop of DeepSpeed: its engine as its own tutorial has it, ZeRO-2, and nothing else."""

from __future__ import annotations

from torch import nn

from distributed.bench.hand_written import own_loader
from distributed.bench.work import BATCH, Work, make_model, make_optimizer
from distributed.strategies.deepspeed_ops import import_deepspeed


def train(work: Work) -> None:
    deepspeed = import_deepspeed("cpu")
    model = make_model()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_optimizer(model.parameters()), config=config, dist_init_required=False
    )
    loss_fn = nn.CrossEntropyLoss()
    engine.train()
    for inputs, labels in own_loader(work):
        loss = loss_fn(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
    engine.destroy()
