"""The engines that there are, by the names of `backend`; `core/engines/engine.py` imports this module by its name.

Of those that claim a run of backend='auto', the last one has it.
"""

from __future__ import annotations

from distributed.core.engines.engine import Engine
from distributed.engines.deepspeed.declaration import DEEPSPEED
from distributed.engines.horovod.declaration import HOROVOD
from distributed.engines.ray.declaration import RAY
from distributed.engines.tensorflow.declaration import TENSORFLOW
from distributed.strategies.declaration import FSDP, PYTORCH_DDP

DECLARED: dict[str, Engine] = {
    "pytorch-ddp": PYTORCH_DDP,
    "fsdp": FSDP,
    "deepspeed": DEEPSPEED,
    "horovod": HOROVOD,
    "ray": RAY,
    "tensorflow": TENSORFLOW,
}
