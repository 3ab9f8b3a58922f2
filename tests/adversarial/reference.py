"""The reference: a plain torch loop in one process. Of the library it has only the order of the samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from distributed.data.generators import seeded
from distributed.data.order import derive_seed, shuffled_order


def epoch_order(loader: DataLoader[Any], seed: int, epoch: int) -> list[int]:
    """The samples of an epoch, one after the other."""
    sampler = loader.sampler
    if isinstance(loader.batch_sampler, BatchSampler):
        sampler = loader.batch_sampler.sampler
    length = len(loader.dataset)
    if isinstance(sampler, SequentialSampler | DistributedSampler):
        return list(range(length))
    if isinstance(sampler, RandomSampler) and not sampler.replacement:
        return shuffled_order(length, seed, epoch)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    with seeded(derive_seed(seed, "sampler", epoch)):
        return list(sampler)


def train_plainly(
    program: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    micro_batch: int,
    evaluates: bool,
    is_called: bool,
    noise: float = 0.0,
) -> dict[str, Any]:
    """Train in this process. `noise` moves the first weights by so much of themselves and takes each micro-batch from
    its end, to see what rounding comes to."""
    model, loss_fn = program["make_model"](), program["make_loss"]()
    if noise:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + noise * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))
    if is_called:
        optimizer = program["make_optimizer"]([p for p in model.parameters() if p.requires_grad])
    else:
        optimizer = program["make_optimizer"](model)
    scheduler = program["make_scheduler"](optimizer)
    loader = program["make_loader"](program["make_data"]())
    by_step = settings.get("scheduler_interval") == "step"
    whole = micro_batch * settings["gradient_accumulation_steps"]
    drops = loader.drop_last or getattr(loader.batch_sampler, "drop_last", False)
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses: list[float] = []
    validation: list[float] = []
    done, total = 0, 0
    for epoch in range(settings["epochs"]):
        steps = list(_steps(loader, settings["seed"], epoch, whole, drops))
        total = total or len(steps) * settings["epochs"]
        summed, count = 0.0, 0
        model.train()
        for samples in steps:
            _set_rates(optimizer, peaks, settings, done, total)
            optimizer.zero_grad(set_to_none=True)
            shares = [samples[at : at + micro_batch] for at in range(0, len(samples), micro_batch)]
            micros = [default_collate(share[::-1] if noise else share) for share in shares]
            weights = [program["weight_of"](loss_fn, batch) for batch in micros]
            divisor = None if weights[0] is None else float(sum(weights))
            if divisor == 0:
                raise FloatingPointError("a mean over nothing")
            value = 0.0
            for batch, weight in zip(micros, weights, strict=True):
                loss = program["plain_loss"](model, loss_fn, batch)
                if divisor is not None:  # of no weight, it is nothing, also where its mean is not a number
                    loss = loss * (float(weight) / divisor) if weight else loss.nan_to_num() * 0
                loss.backward()
                value += loss.item()
            if not math.isfinite(value):
                raise FloatingPointError(value)
            if settings.get("gradient_clipping"):
                nn.utils.clip_grad_norm_(stepped, settings["gradient_clipping"])
            optimizer.step()
            done += 1
            if scheduler is not None and by_step:
                scheduler.step()
            is_sum = divisor is None  # which a history has as a mean over the samples
            summed, count = summed + (value if is_sum else value * len(samples)), count + len(samples)
        losses.append(summed / count if count else math.nan)
        if evaluates:
            validation.append(_evaluate(program, model, loss_fn))
        if scheduler is not None and not by_step:
            known = validation[-1] if validation else losses[-1]
            is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(known) if is_plateau else scheduler.step()
    _set_rates(optimizer, peaks, settings, done, total)
    names = {id(p): name for name, p in model.named_parameters()}
    held = {names[id(p)]: state for p, state in optimizer.state.items()}
    return {
        "model": dict(model.state_dict()),
        "optimizer": {name: dict(state) for name, state in held.items()},
        "rates": [float(group["lr"]) for group in optimizer.param_groups],
        "loss": losses,
        "val_loss": validation,
        "steps": done,
    }


def _steps(loader: DataLoader[Any], seed: int, epoch: int, whole: int, drops: bool) -> Iterator[list[Any]]:
    if isinstance(loader.dataset, IterableDataset):
        samples = list(loader.dataset)
    else:
        samples = [loader.dataset[index] for index in epoch_order(loader, seed, epoch)]
    for start in range(0, len(samples), whole):
        step = samples[start : start + whole]
        if len(step) == whole or not drops:
            yield step


def _evaluate(program: Mapping[str, Any], model: nn.Module, loss_fn: Any) -> float:
    data = program["make_data"]()
    model.eval()
    with torch.no_grad():
        batch = default_collate([data[index] for index in range(len(data))])
        loss, weight = program["plain_loss"](model, loss_fn, batch), program["weight_of"](loss_fn, batch)
    model.train()
    return float(loss) / (len(data) if weight is None else 1)


def _set_rates(
    optimizer: torch.optim.Optimizer, peaks: list[float], settings: Mapping[str, Any], step: int, total: int
) -> None:
    """Warm-up and decay, where the settings ask for them."""
    kind = settings.get("lr_schedule")
    if kind is None:
        return
    warm = settings.get("warmup_steps", 0)
    if total <= warm <= step:
        factor = 1.0
    elif step < warm:
        factor = (step + 1) / warm
    else:
        done = min(1.0, (step - warm) / max(1, total - warm))
        factor = 0.5 * (1 + math.cos(math.pi * done)) if kind == "cosine" else 1 - done
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["lr"] = peak * factor
