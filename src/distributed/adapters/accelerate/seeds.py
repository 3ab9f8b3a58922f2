"""The seed of a script: of Python's, numpy's and torch's generators, and with them of the run that it makes."""

from __future__ import annotations

import random

import numpy as np
import torch

_OF_TORCH = torch.Generator().initial_seed()  # of a generator that nobody has seeded


def set_seed(seed: int) -> None:
    """Seed all generators of this process, and the order of the data of the run to come."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_of_script() -> int | None:
    """What the script has given to torch; None: nothing."""
    found = torch.initial_seed()
    return None if found == _OF_TORCH else found % 2**63
