"""The random generators of one rank as a state tree."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

StateTree = dict[str, Any]


def rng_state(device: torch.device) -> StateTree:
    """Python's, numpy's, torch's CPU generator and this rank's device's."""
    version, words, gauss = random.getstate()
    algorithm, keys, position, has_gauss, cached = np.random.get_state()
    state: StateTree = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "algorithm": str(algorithm),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: StateTree, device: torch.device) -> None:
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["algorithm"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
