"""The verdict on a case: agreed, refused by name, or failed, with the tensor that differs most."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.adversarial.case import Case

DOUBLE, SINGLE = 1e-9, 2e-4


@dataclass(frozen=True)
class Verdict:
    seed: int
    kind: str  # "agreed", "refused", "failed", "unstable" or "void" (torch itself refuses it in one process)
    why: str = ""
    detail: str = ""
    seconds: float = 0.0


def tolerance_of(case: Case) -> float:
    return DOUBLE if case.is_double and "single" not in case.traits else SINGLE


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any], *, compares_validation: bool) -> tuple[float, str]:
    """The largest difference of any number, relative to its tensor's largest, and where it is."""
    worst = (0.0, "")
    for part, like in (("model", "model"), ("saved", "model"), ("optimizer", "optimizer")):
        if part in found and like in wanted:
            worst = max(worst, _of_trees(part, found[part], wanted[like]))
    for name in ("rates", "loss", *(["val_loss"] if compares_validation else [])):
        if name in found and name in wanted:
            worst = max(worst, _of_values(name, found[name], wanted[name]))
    if found["steps"] != wanted["steps"]:
        worst = max(worst, (math.inf, f"steps: {found['steps']}, not {wanted['steps']}"))
    return worst


def _of_trees(path: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[float, str]:
    if found.keys() != wanted.keys():
        return math.inf, f"{path}: other names, {sorted(set(found) ^ set(wanted))[:4]}"
    worst = (0.0, "")
    for name, value in wanted.items():
        worst = max(worst, _of_values(f"{path}.{name}", found[name], value))
    return worst


def _of_values(path: str, found: Any, wanted: Any) -> tuple[float, str]:
    if isinstance(wanted, Mapping):
        return _of_trees(path, found, wanted) if isinstance(found, Mapping) else (math.inf, f"{path}: no mapping")
    if isinstance(wanted, list | tuple) and all(isinstance(value, int | float) for value in wanted):
        if len(found) != len(wanted):
            return math.inf, f"{path}: {list(found)}, not {list(wanted)}"
        found, wanted = torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    if isinstance(wanted, int | float) and isinstance(found, int | float | torch.Tensor):
        found, wanted = torch.as_tensor(found).double(), torch.tensor(float(wanted), dtype=torch.float64)
    if not isinstance(wanted, torch.Tensor):
        return (0.0, "") if found == wanted else (math.inf, f"{path}: {found!r}, not {wanted!r}")
    found = torch.as_tensor(found)
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return math.inf, f"{path}: {found.dtype} {tuple(found.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
    if not wanted.numel():
        return 0.0, ""
    if wanted.is_sparse or found.is_sparse:
        found, wanted = found.to_dense(), wanted.to_dense()
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    apart = (found.to(wide) - wanted.to(wide)).abs()
    same = (found == wanted) | (found.isnan() & wanted.isnan() if found.is_floating_point() else found == wanted)
    apart = torch.where(same, torch.zeros_like(apart), apart)
    largest = wanted.to(wide).abs().nan_to_num(posinf=0.0).max().item()
    value = apart.max().item() / max(1.0, largest)
    return (math.inf if math.isnan(value) else value), path
