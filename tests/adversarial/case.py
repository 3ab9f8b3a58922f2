"""A case: everything that is drawn of one seed. Its text is a program that makes the model, the data and the rest."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from tests.adversarial.helpers import HELPERS
from tests.adversarial.models import DrawnModel, draw_model
from tests.adversarial.optimizers import DrawnOptimizer, draw_optimizer
from tests.adversarial.strategies import Strategy, draw_strategy

_IMPORTS = """\
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import *  # samplers and datasets
"""


@dataclass(frozen=True)
class Case:
    """What is trained and how; of the same seed, the same."""

    seed: int
    text: str  # a module: make_model, make_data, make_loader, make_loss, make_optimizer, make_scheduler, …
    settings: dict[str, Any]  # of the trainer, whatever the strategy
    strategy: Strategy
    micro_batch: int  # samples over all ranks
    accumulation: int
    again: Strategy | None  # what goes on from a checkpoint in the middle
    resume_step: int
    is_called: bool  # the optimizer is passed as a function of the parameters
    evaluates: bool
    traits: frozenset[str]

    @property
    def is_double(self) -> bool:
        return "float32" not in self.traits

    def settings_for(self, strategy: Strategy) -> dict[str, Any]:
        """With the one global batch."""
        micro = {} if strategy == self.strategy else {"gradient_accumulation_steps": 1}
        whole = self.micro_batch * self.accumulation
        batch = self.micro_batch if not micro else whole
        settings = {"num_gpus": strategy.ranks, "batch_size": batch // strategy.data_ranks}
        return self.settings | micro | settings | strategy.settings

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in self.settings_for(self.strategy).items())
        return f"seed {self.seed}: {self.strategy.name} on {self.strategy.ranks} ranks, {told}"


_FAMILIES = {"vector": 8, "two": 1.5, "image": 3, "sequence": 2, "tokens": 3, "bag": 0.8, "stack": 2}
# Counters and BatchNorm see parts of a batch there, which is what these strategies say of themselves.
# DeepSpeed's ZeRO-3 gathers a module on all ranks when one of them calls it: ranks that use others wait for each other
# until the launcher's watch ends the run, and there is no launcher here.
_UNFIT = {
    "deepspeed": ("some_samples",),
    "bitwise": ("batchnorm", "count", "averaged", "stack", "some_steps", "spectral"),
    "pp": ("batchnorm", "count", "averaged", "some_steps", "spectral"),
}


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(f"adversarial/{seed}")
    strategy = draw_strategy(rng)
    family = "stack" if strategy.cuts_models else rng.choices(list(_FAMILIES), list(_FAMILIES.values()))[0]
    unfit = _UNFIT.get(strategy.name, ())
    model = draw_model(rng, family, lambda name: not any(word in name for word in unfit))
    if strategy.name == "bitwise" and "batchnorm" in model.traits:
        model = draw_model(rng, "vector", lambda name: not any(word in name for word in unfit))
    strategy = _fitted(rng, strategy, model)
    is_single = strategy.name == "deepspeed"
    optimizer = draw_optimizer(rng, model.traits)
    data_ranks = strategy.data_ranks
    per_device, accumulation = rng.choice([1, 2, 2, 3, 4]), rng.choice([1, 1, 1, 2, 2, 3])
    if strategy.name == "bitwise":
        per_device, accumulation = rng.choice([2, 3, 4]), 1
    if strategy.settings.get("pipeline_parallel"):
        per_device = rng.choice([2, 4])
    micro = per_device * data_ranks
    samples = _draw_samples(rng, micro, accumulation, "batchnorm" in model.traits)
    drops = rng.random() < 0.12
    order, loader, needs = _draw_loader(rng, per_device, drops)
    settings: dict[str, Any] = {
        "epochs": rng.choice([1, 2, 2]),
        "seed": rng.choice([0, 1, 7, 12345]),
        "gradient_accumulation_steps": accumulation,
    } | model.loss.settings
    if rng.random() < 0.35:
        settings["gradient_clipping"] = rng.choice([0.05, 0.3, 1.0])
    if rng.random() < 0.08 and not optimizer.schedule:
        settings |= {"lr_schedule": rng.choice(["cosine", "linear"]), "warmup_steps": rng.choice([0, 2])}
    if optimizer.schedule:
        settings["scheduler_interval"] = optimizer.interval
    if "blocks" in model.traits and rng.random() < 0.1 and strategy.name not in ("horovod", "deepspeed"):
        settings["activation_checkpointing"] = True
    steps = settings["epochs"] * _steps(samples, micro * accumulation, drops)
    resume_step, again = 0, None
    if rng.random() < 0.25 and steps > 2 and not optimizer.schedule.startswith("torch.optim.lr_scheduler.Reduce"):
        resume_step, again = rng.randrange(1, steps), _draw_again(rng, strategy, micro * accumulation, model)
    evaluates = rng.random() < 0.2
    text = _text(seed, model, optimizer, samples, loader, needs, is_single)
    traits = model.traits | optimizer.traits | {f"order_{order}", f"family_{family}", strategy.name}
    traits |= {name for name, there in (("resumed", again), ("clipped", "gradient_clipping" in settings)) if there}
    traits |= {"float32"} if is_single else set()
    return Case(
        seed, text, settings, strategy, micro, accumulation, again, resume_step, optimizer.is_called, evaluates,
        frozenset(traits),
    )  # fmt: skip


def _fitted(rng: random.Random, strategy: Strategy, model: DrawnModel) -> Strategy:
    """Mostly with the settings that a model's documentation would ask for."""
    leaves_out = model.traits & {"unused", "unused_sometimes", "unused_by_ranks"}
    settings = dict(strategy.settings)
    if strategy.name == "ddp" and leaves_out and rng.random() < 0.7:
        settings = {"find_unused_parameters": True}
    if strategy.settings.get("pipeline_schedule") in ("interleaved", "zero_bubble") and "blocks_4" not in model.traits:
        settings["pipeline_schedule"] = "1f1b"
    if "no_attention" in model.traits and strategy.settings.get("sequence_parallel"):
        settings.pop("sequence_parallel")
    return replace(strategy, settings=settings)


def _draw_samples(rng: random.Random, micro: int, accumulation: int, normalizes: bool) -> int:
    """A few steps, most with a tail that does not divide; no micro-batch of one sample where there is BatchNorm."""
    whole = micro * accumulation
    samples = whole * rng.choice([1, 2, 2, 3]) + rng.choice([0, 1, 1, 2, 3, whole // 2, whole - 1])
    while normalizes and (samples % whole % micro == 1 or micro == 1):
        samples += 1
        if micro == 1:
            break
    return samples


def _steps(samples: int, whole: int, drops: bool) -> int:
    return samples // whole if drops else -(-samples // whole)


def _draw_loader(rng: random.Random, batch: int, drops: bool) -> tuple[str, str, tuple[str, ...]]:
    """The kind of the order, the expression of the loader over `data`, and the helpers that it needs."""
    kind = rng.choices(
        [
            "shuffle",
            "sequence",
            "weighted",
            "subset",
            "ring",
            "coin",
            "batches",
            "replacement",
            "stream",
            "distributed",
        ],
        [6, 3, 0.7, 0.5, 0.7, 0.5, 0.5, 0.4, 0.8, 0.3],
    )[0]
    g = "generator=torch.Generator().manual_seed(5)"
    more = f", batch_size={batch}" + (", drop_last=True" if drops else "")
    match kind:
        case "shuffle":
            return kind, f"DataLoader(data, shuffle=True{more})", ()
        case "sequence":
            return kind, f"DataLoader(data{more})", ()
        case "weighted":
            own = rng.choice(["", f", {g}"])
            sampler = f"WeightedRandomSampler([1.0 + index % 3 for index in range(len(data))], len(data){own})"
            return kind + ("_own_generator" if own else ""), f"DataLoader(data, sampler={sampler}{more})", ()
        case "subset":
            return kind, f"DataLoader(data, sampler=SubsetRandomSampler(range(len(data))){more})", ()
        case "ring":
            return kind, f"DataLoader(data, sampler=Ring(len(data), 1){more})", ("Ring",)
        case "coin":
            return kind, f"DataLoader(data, sampler=Coin(len(data)){more})", ("Coin",)
        case "batches":
            inner = rng.choice(
                ["SequentialSampler(data)", "RandomSampler(data)", "SubsetRandomSampler(range(len(data)))"]
            )
            return kind, f"DataLoader(data, batch_sampler=BatchSampler({inner}, {batch}, {drops}))", ()
        case "replacement":
            return kind, f"DataLoader(data, sampler=RandomSampler(data, replacement=True){more})", ()
        case "stream":
            return kind, f"DataLoader(Stream(data){more})", ("Stream",)
        case _:
            sampler = "torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)"
            return kind, f"DataLoader(data, sampler={sampler}{more})", ()


def _draw_again(rng: random.Random, strategy: Strategy, whole: int, model: DrawnModel) -> Strategy:
    """Mostly the same strategy; else another that can have the same global batch at once."""
    simple = [
        Strategy("one", 1),
        Strategy("ddp", 2),
        Strategy("ddp", 3),
        Strategy("zero1", 2, {"zero_stage": 1}),
        Strategy("fsdp", 2, {"backend": "fsdp"}),
        Strategy("fsdp", 4, {"zero_stage": 2}),
    ]
    simple = [other for other in simple if whole % other.ranks == 0]
    stays = strategy.name in ("bitwise", "deepspeed", "horovod") or model.traits & {"batchnorm", "counts"}
    return strategy if stays or not simple or rng.random() < 0.5 else rng.choice(simple)


def _text(
    seed: int,
    model: DrawnModel,
    optimizer: DrawnOptimizer,
    samples: int,
    loader: str,
    needs: tuple[str, ...],
    is_single: bool,
) -> str:
    """The program."""
    names = [name for name in model.columns if name != "y"]
    data = [f"    {name} = {expression}" for name, expression in model.columns.items()]
    holds = {"tuple": "TensorDataset({})", "dict": "Rows({})", "nested": "Nested(y, {})"}[model.form]
    pairs = ", ".join(f"{name}={name}" for name in names)
    columns = {"tuple": ", ".join([*names, "y"]), "dict": f"{pairs}, labels=y", "nested": pairs}[model.form]
    reads = {
        "tuple": "*inputs, y = batch",
        "dict": f"inputs, y = [batch[name] for name in {names}], batch['labels']",
        "nested": f"inputs, y = [batch[0][name] for name in {names}], batch[1]",
    }[model.form]
    used = [*needs, *model.loss.helpers, *{"dict": ["Rows"], "nested": ["Nested"]}.get(model.form, [])]
    lines = [
        _IMPORTS,
        *[HELPERS[name].strip("\n") + "\n" for name in used],
        model.text + "\n",
        "def make_model():",
        f"    torch.manual_seed({seed})",
        f"    model = Model().{'float' if is_single else 'double'}()",
        *[f"    {line}" for line in model.afters],
        "    return model\n",
        "def make_data():",
        f"    N, g = {samples}, torch.Generator().manual_seed({seed + 1})",
        *data,
        f"    return {holds.format(columns)}\n",
        "def make_loader(data):",
        f"    return {loader}\n",
        "def make_loss():",
        f"    return {model.loss.make}\n",
        f"def make_optimizer({'parameters' if optimizer.is_called else 'model'}):",
        f"    return {optimizer.make}\n",
        "def make_scheduler(optimizer):",
        f"    return {optimizer.schedule or None}\n",
        "def plain_loss(model, loss_fn, batch):",
        f"    {reads}",
        f"    return {model.loss.plain}\n",
        "def weight_of(loss_fn, batch):",
        f"    {reads}",
        f"    return {model.loss.weight}\n",
    ]
    text = "\n".join(lines)
    return text.replace("torch.float64", "torch.float32").replace(".double()", ".float()") if is_single else text
