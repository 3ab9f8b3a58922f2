"""What a script of Accelerate's imports, over a run of ours: the switch is that line."""

from distributed.adapters.accelerate.accelerator import Accelerator as Accelerator
from distributed.adapters.accelerate.logging import get_logger as get_logger
from distributed.adapters.accelerate.seeds import set_seed as set_seed
