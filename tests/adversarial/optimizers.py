"""Drawn optimizers: every one of torch's, with its options, groups of parameters, and a schedule, as text."""

from __future__ import annotations

import random
from dataclasses import dataclass

# Options that change what is computed; the rate is far below where a few steps blow up.
_KINDS: dict[str, tuple[float, str, tuple[str, ...]]] = {
    "SGD": (4, "lr=0.05", ("", "momentum=0.9", "momentum=0.9, nesterov=True", "momentum=0.5, dampening=0.3",
                           "weight_decay=0.1", "maximize=True", "foreach=True", "fused=True, momentum=0.9")),
    "Adam": (3, "lr=0.01", ("", "amsgrad=True", "weight_decay=0.1", "foreach=True", "fused=True", "maximize=True",
                            "eps=1e-4, betas=(0.5, 0.9)", "decoupled_weight_decay=True, weight_decay=0.1")),
    "AdamW": (3, "lr=0.01", ("", "amsgrad=True", "fused=True", "foreach=True", "weight_decay=0.3")),
    "Adagrad": (1, "lr=0.02", ("", "lr_decay=0.1", "initial_accumulator_value=0.1", "fused=True")),
    "Adadelta": (1, "lr=0.5", ("", "rho=0.5", "weight_decay=0.1")),
    "Adamax": (1, "lr=0.01", ("", "weight_decay=0.1", "foreach=True")),
    "NAdam": (1, "lr=0.01", ("", "decoupled_weight_decay=True, weight_decay=0.1", "momentum_decay=0.1")),
    "RAdam": (1, "lr=0.01", ("", "weight_decay=0.1", "foreach=True")),
    "RMSprop": (1, "lr=0.005", ("", "momentum=0.9", "centered=True", "centered=True, momentum=0.5")),
    "Rprop": (0.4, "lr=0.005", ("", "etas=(0.4, 1.3)")),
    "ASGD": (0.7, "lr=0.02", ("", "t0=2, lambd=0.01", "weight_decay=0.1")),
    "Adafactor": (0.7, "lr=0.01", ("", "d=2.0", "weight_decay=0.1")),
    "Muon": (0.5, "lr=0.01", ("", "nesterov=False", "weight_decay=0.3")),
    "LBFGS": (0.15, "lr=0.1", ("",)),
}  # fmt: skip
_SPARSE: dict[str, tuple[float, str, tuple[str, ...]]] = {
    "SGD": (2, "lr=0.05", ("",)),
    "Adagrad": (1, "lr=0.02", ("",)),
}
_ON_COMPLEX = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "RMSprop")


@dataclass(frozen=True)
class DrawnOptimizer:
    """`make` is the expression of an optimizer over `model`; of `parameters`, where the trainer calls it."""

    name: str
    make: str
    is_called: bool  # passed as a function of the parameters
    schedule: str  # the expression of a scheduler over `optimizer`, or ""
    interval: str
    traits: frozenset[str]


def draw_optimizer(rng: random.Random, traits: frozenset[str]) -> DrawnOptimizer:
    kinds = dict(_SPARSE if "sparse" in traits else _KINDS)
    if "complex" in traits:
        kinds = {name: kind for name, kind in kinds.items() if name in _ON_COMPLEX}
    name = rng.choices(list(kinds), [weight for weight, _, _ in kinds.values()])[0]
    _, rate, options = kinds[name]
    option = rng.choice(options)
    if "complex" in traits:
        option = "" if "fused" in option else option
    if "single" in traits:
        option = option.replace("fused=True, ", "").replace("fused=True", "")
    told = ", ".join(filter(None, [rate, option]))
    groups = rng.choices(["all", "trainable", "called", "two", "three", "subset"], [3, 2, 3, 2.5, 1, 1.2])[0]
    found = {f"optimizer_{name}"} | ({"maximize"} if "maximize" in option else set())
    if name == "Muon":
        make = f"torch.optim.Muon([p for p in model.parameters() if p.dim() == 2 and p.requires_grad], {told})"
        return DrawnOptimizer(name, make, False, "", "epoch", frozenset({*found, "subset"}))
    if name == "LBFGS":
        make = f"torch.optim.LBFGS(model.parameters(), {told})"
        return DrawnOptimizer(name, make, False, "", "epoch", frozenset(found))
    schedule, interval = _draw_schedule(rng)
    if groups == "called":
        make = f"torch.optim.{name}(parameters, {told})"
        return DrawnOptimizer(name, make, True, schedule, interval, frozenset(found))
    first = "[p for p in model.parameters() if p.dim() > 1]"
    rest = "[p for p in model.parameters() if p.dim() <= 1]"
    match groups:
        case "all":
            over = "model.parameters()"
        case "trainable":
            over = "[p for p in model.parameters() if p.requires_grad]"
        case "two":
            extra = rng.choice(["'lr': 0.002", "'weight_decay': 0.0", "'lr': 0.001, 'weight_decay': 0.01"])
            if name in ("Rprop",):
                extra = "'lr': 0.002"
            over = f"[{{'params': {first}}}, {{'params': {rest}, {extra}}}]"
        case "three":
            every = "list(model.parameters())"
            thirds = [f"{{'params': {every}[{at}::3]{more}}}" for at, more in enumerate(["", ", 'lr': 0.002", ""])]
            over = f"[{', '.join(thirds)}]"
        case _:
            over = "list(model.parameters())[: -1]" if rng.random() < 0.5 else "list(model.parameters())[1:]"
            found.add("subset")
    if groups in ("two", "three"):
        over = f"[group for group in {over} if len(group['params'])]"
        found.add("groups")
    return DrawnOptimizer(name, f"torch.optim.{name}({over}, {told})", False, schedule, interval, frozenset(found))


def _draw_schedule(rng: random.Random) -> tuple[str, str]:
    made = "torch.optim.lr_scheduler"
    return rng.choices(
        [("", "epoch"),
         (f"{made}.StepLR(optimizer, 2, 0.5)", "step"),
         (f"{made}.ExponentialLR(optimizer, 0.7)", "epoch"),
         (f"{made}.CosineAnnealingLR(optimizer, 7)", "step"),
         (f"{made}.LambdaLR(optimizer, lambda step: 1 / (1 + step))", "step"),
         (f"{made}.SequentialLR(optimizer, [{made}.LinearLR(optimizer, 0.3, 1.0, 2), "
          f"{made}.ExponentialLR(optimizer, 0.8)], [2])", "step"),
         (f"{made}.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)", "epoch")],
        [7, 1, 1, 1, 0.7, 0.7, 0.7],
    )[0]  # fmt: skip
