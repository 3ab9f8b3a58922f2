"""Own steps, several optimizers, manual steps and closures on 1, 2 and 3 ranks: what a plain loop in one process does.

In double precision, with BatchNorm over all ranks, shares of different sizes (the last step of an epoch is short), and
losses whose weights differ from rank to rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from distributed import OptimizerSetup, Task, Trainer
from distributed.core.errors import TaskError
from distributed.testing import run_ranks
from tests.own_steps import Run, assert_same, run_of

MICRO_BATCH, SAMPLES, EPOCHS = 12, 29, 2  # two micro-batches and one of five: three ranks have 2, 2 and 1 of it
BCE = F.binary_cross_entropy_with_logits


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_data(samples: int = SAMPLES) -> TensorDataset:
    """Of a sample: what is real, noise for a generator, and a class, which may be one to be ignored."""
    real, noise = numbers(samples, 3, seed=1), numbers(samples, 4, seed=2)
    classes = (real[:, 0] > 0).long() + (real[:, 1] > 0).long()
    classes[2::5] = -100
    return TensorDataset(real, noise, classes)


def classifier() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def networks() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return {
        "generator": generator.double(),
        "critic": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
    }


class Branches(nn.Module):
    """A model with a part that only some batches use, so that a step leaves it out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body, self.rare = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()


# ---- the steps


def plain(model: nn.Module, batch: Any) -> torch.Tensor:
    """Means over the samples, of two calls of the model."""
    real, noise, _ = batch
    return F.mse_loss(model(real), real) + 0.5 * F.mse_loss(model(noise[:, :3]), real)


def ignoring(model: nn.Module, batch: Any) -> dict[str, Any]:
    """A mean over the targets that count, given with the loss, and logged values of both kinds of weights."""
    real, _, classes = batch
    counted = classes != -100
    losses = F.cross_entropy(model(real), classes, ignore_index=-100, reduction="none")
    loss = losses.sum() / counted.sum().clamp(min=1)
    return {"loss": loss, "weight": counted.sum(), "outputs": None, "spread": real.abs().mean()}


def left_out(model: Branches, batch: Any) -> tuple[torch.Tensor, int]:
    """The rare part computes with marked samples, which a share may not have."""
    real, _, classes = batch
    outputs, is_marked = model.body(real), classes == -100
    if is_marked.any():
        outputs = outputs + is_marked[:, None] * model.rare(real)
    return F.mse_loss(outputs, real), len(real)


def adversarial(model: Any, batch: Any, optimizer: str) -> Any:
    real, noise, _ = batch
    judged = model["critic"](model["generator"](noise))
    if optimizer == "generator":
        return BCE(judged, torch.ones_like(judged))
    true = model["critic"](real)
    return {"loss": BCE(true, torch.ones_like(true)) + BCE(judged, torch.zeros_like(judged)), "score": true.mean()}


def adversaries(model: Any) -> dict[str, Any]:
    critic = torch.optim.SGD(model["critic"].parameters(), lr=0.1, momentum=0.9)
    generator = torch.optim.Adam(model["generator"].parameters(), lr=0.01)
    return {
        "critic": OptimizerSetup(critic, gradient_clipping=0.2),
        "generator": OptimizerSetup(generator, every=2, scheduler=halving, scheduler_interval="step"),
    }


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def of_two(model: nn.Module) -> dict[str, Any]:
    """Two optimizers of one loss."""
    first, *rest = model
    return {
        "first": torch.optim.SGD(first.parameters(), lr=0.1),
        "rest": OptimizerSetup(torch.optim.Adam(nn.ModuleList(rest).parameters(), lr=0.01), scheduler=halving),
    }


class Rare(Task):
    """Logs the value of one sample, so in one step of an epoch, and on one rank of it."""

    def training_step(self, model: nn.Module, batch: Any) -> torch.Tensor:
        real, noise, _ = batch
        is_largest = noise[:, 0] == make_data().tensors[1][:, 0].max()
        if is_largest.any():
            self.log("largest", real[is_largest][0, 0], weight=1)
        return plain(model, batch)


class Counting(Task):
    """Weighs its loss by the number of its steps, and keeps that."""

    steps = 0

    def training_step(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.steps += 1
        return plain(model, batch) * (1 + 1 / self.steps)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Sequences(nn.Module):
    """Returns logits and its loss, which leaves targets of -1 out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.tokens, self.head = nn.Embedding(7, 5).double(), nn.Linear(5, 7).double()

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.tokens(idx).cumsum(1).tanh())
        return logits, F.cross_entropy(logits.view(-1, 7), targets.view(-1), ignore_index=-1)


def as_sequences(samples: list[Any]) -> dict[str, torch.Tensor]:
    real = torch.stack([torch.cat(sample[:2]) for sample in samples])
    targets = (real.abs() * 5).long() % 7
    targets[:, 3:][real[:, 3:] > 0.5] = -1
    return {"idx": (real.abs() * 3).long() % 7, "targets": targets}


def weighted(outputs: torch.Tensor, target: torch.Tensor, *, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean weighted by an input that the outputs do not show."""
    real, noise = inputs
    weights = noise[:, 0].abs()
    losses = (outputs - real).square().mean(1) * (target != -100)
    return (losses * weights).sum() / weights.sum(), weights.sum()


class Manual(Task):
    """Two steps of the generator after one of the critic, whose gradient comes of two backward passes."""

    manual_optimization = True

    def configure_optimizers(self, model: Any) -> dict[str, Any]:
        return {
            name: OptimizerSetup(one.optimizer, gradient_clipping=one.gradient_clipping)
            for name, one in adversaries(model).items()
        }

    def training_step(self, model: Any, batch: Any) -> None:
        real, noise, classes = batch
        true, judged = model["critic"](real), model["critic"](model["generator"](noise).detach())
        self.zero_grad("critic")
        self.backward(BCE(true, torch.ones_like(true)))
        counted = (classes != -100).double()[:, None]
        self.backward(
            BCE(judged, torch.zeros_like(judged), weight=counted, reduction="sum") / counted.sum().clamp(min=1),
            weight=counted.sum(),
        )
        self.step("critic")
        for _ in range(2):
            self.zero_grad("generator")
            judged = model["critic"](model["generator"](noise))
            self.backward(BCE(judged, torch.ones_like(judged)))
            self.step("generator")
        self.log("score", true.mean())


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


# ---- the same by hand


@dataclass(frozen=True)
class Case:
    """A task, and the plain loop that it is compared with: a generator of each step's loss and logged values."""

    make: Callable[[], Any]
    by_hand: Callable[[Any, Iterator[list[Any]]], Iterator[dict[str, float]]]
    given: dict[str, Any] = field(default_factory=dict)  # to the trainer, or the class of a task
    task: type[Task] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None
    validate: Callable[[nn.Module], dict[str, float]] | None = None

    @property
    def accumulation(self) -> int:
        return int(self.settings.get("gradient_accumulation_steps", 1))


def batches(accumulation: int) -> Iterator[list[Any]]:
    """Each step's micro-batches."""
    tensors = make_data().tensors
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, MICRO_BATCH * accumulation):
            starts = range(start, min(start + MICRO_BATCH * accumulation, SAMPLES), MICRO_BATCH)
            yield [tuple(tensor[first : first + MICRO_BATCH] for tensor in tensors) for first in starts]


def gradient(step: Any, model: nn.Module, micros: list[Any], *more: Any) -> dict[str, float]:
    """Forward and backward over a step's micro-batches: of means over the samples, or over given weights."""
    model.zero_grad()
    found = [_read(step(model, micro, *more), len(micro[0])) for micro in micros]
    whole = sum(weight for _, weight, _ in found)
    for loss, weight, _ in found:
        (loss * (weight / whole)).backward()
    values = {"loss": sum(loss.item() * weight / whole for loss, weight, _ in found)}
    sizes = [len(micro[0]) for micro in micros]
    for name in found[0][2]:
        values[name] = sum(
            float(more[name].detach()) * size for (_, _, more), size in zip(found, sizes, strict=True)
        ) / sum(sizes)
    return values


def _read(result: Any, size: int) -> tuple[torch.Tensor, float, dict[str, Any]]:
    if isinstance(result, dict):
        logged = {name: value for name, value in result.items() if name not in ("loss", "weight", "outputs")}
        return result["loss"], float(result.get("weight", size)), logged
    loss, weight = result if isinstance(result, tuple) else (result, size)
    return loss, float(weight), {}


def simple(step: Any, clip: float | None = None) -> Callable[..., Iterator[dict[str, float]]]:
    def loop(model: nn.Module, steps: Iterator[list[Any]]) -> Iterator[dict[str, float]]:
        optimizer = sgd(model.parameters())
        for micros in steps:
            values = gradient(step, model, micros)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            yield values

    return loop


def alternating(model: Any, steps: Iterator[list[Any]]) -> Iterator[dict[str, float]]:
    setups = adversaries(model)
    scheduler = halving(setups["generator"].optimizer)
    for number, micros in enumerate(steps, 1):
        values = {"loss": 0.0}
        for name, setup in setups.items():
            if number % setup.every:
                continue
            for other, part in model.items():
                part.requires_grad_(other == name)
            found = gradient(adversarial, model, micros, name)
            if setup.gradient_clipping is not None:
                nn.utils.clip_grad_norm_(model[name].parameters(), setup.gradient_clipping)
            setup.optimizer.step()
            values |= {f"loss_{name}": found["loss"], "loss": values["loss"] + found.pop("loss"), **found}
        if number % 2 == 0:
            scheduler.step()
        yield values
    model.requires_grad_(True)


def joint(model: Any, steps: Iterator[list[Any]]) -> Iterator[dict[str, float]]:
    setups = of_two(model)
    optimizers = [setups["first"], setups["rest"].optimizer]
    scheduler, per_epoch = halving(optimizers[1]), -(-SAMPLES // MICRO_BATCH)
    for number, micros in enumerate(steps, 1):
        yield gradient(plain, model, micros)
        for optimizer in optimizers:
            optimizer.step()
        if number % per_epoch == 0:
            scheduler.step()


def manual(model: Any, steps: Iterator[list[Any]]) -> Iterator[dict[str, float]]:
    optimizers = {name: setup.optimizer for name, setup in adversaries(model).items()}
    for ((real, noise, classes),) in steps:
        true, judged = model["critic"](real), model["critic"](model["generator"](noise).detach())
        losses = [
            BCE(true, torch.ones_like(true)),
            BCE(judged[classes != -100], torch.zeros_like(judged)[classes != -100]),
        ]
        optimizers["critic"].zero_grad()
        sum(losses).backward()
        nn.utils.clip_grad_norm_(model["critic"].parameters(), 0.2)
        optimizers["critic"].step()
        for _ in range(2):
            optimizers["generator"].zero_grad()
            judged = model["critic"](model["generator"](noise))
            losses.append(BCE(judged, torch.ones_like(judged)))
            losses[-1].backward()
            optimizers["generator"].step()
        yield {"loss": sum(loss.item() for loss in losses), "score": true.mean().item()}


def by_closure(model: nn.Module, steps: Iterator[list[Any]]) -> Iterator[dict[str, float]]:
    optimizer = lbfgs(model.parameters())
    for micros in steps:
        yield {"loss": float(optimizer.step(lambda micros=micros: gradient(plain, model, micros)["loss"]))}


def counted(model: nn.Module, steps: Iterator[list[Any]]) -> Iterator[dict[str, float]]:
    optimizer = sgd(model.parameters())
    for number, micros in enumerate(steps, 1):
        yield gradient(lambda model, batch, n=number: plain(model, batch) * (1 + 1 / n), model, micros)
        optimizer.step()


def of_sequences(model: nn.Module, steps: Iterator[list[Any]]) -> Iterator[dict[str, float]]:
    def step(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = as_sequences(list(zip(*batch, strict=True)))
        return model(**given)[1], (given["targets"] != -1).sum()

    yield from simple(step)(model, steps)


def validate_sequences(model: nn.Module) -> dict[str, float]:
    given = as_sequences(list(make_data(7)))
    counted = given["targets"] != -1
    with torch.no_grad():
        logits, loss = model(**given)
    return {
        "val_loss": loss.item(),
        "val_accuracy": (logits.argmax(-1) == given["targets"])[counted].double().mean().item(),
    }


def of_inputs(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *inputs, target = batch
    return weighted(model(inputs[0], inputs[1]), target, inputs=inputs)


class OfBoth(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(8)
        super().__init__(7, 3, dtype=torch.float64)

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([real, noise], 1))


class Validated(Task):
    """Validates by a loss that leaves targets out, which its logits show."""

    def training_step(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return plain(model, batch)

    def validation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        real, _, classes = batch
        logits = model(real)
        self.log("largest", logits.max(1).values.mean())
        return {"loss": F.cross_entropy(logits, classes), "outputs": logits, "target": classes}


def validate_classes(model: nn.Module) -> dict[str, float]:
    real, _, classes = make_data(7).tensors
    with torch.no_grad():
        logits = model(real)
    accuracy = (logits.argmax(1) == classes)[classes != -100].double().mean()
    found = {"val_loss": F.cross_entropy(logits, classes), "val_largest": logits.max(1).values.mean()}
    return {"val_accuracy": accuracy.item(), **{name: value.item() for name, value in found.items()}}


def validate_inputs(model: nn.Module) -> dict[str, float]:
    with torch.no_grad():
        return {"val_loss": of_inputs(model, make_data(7).tensors)[0].item()}


def rarely(model: nn.Module, steps: Iterator[list[Any]]) -> Iterator[dict[str, float]]:
    seen: list[list[Any]] = []
    largest = make_data().tensors[1][:, 0].max()
    for values, micros in zip(simple(plain)(model, _kept(steps, seen)), seen, strict=False):
        found = torch.cat([micro[0][micro[1][:, 0] == largest][:, 0] for micro in micros])
        yield values | ({"largest": found.item()} if len(found) else {})


def _kept(steps: Iterator[list[Any]], seen: list[list[Any]]) -> Iterator[list[Any]]:
    for micros in steps:
        seen.append(micros)
        yield micros


ACCUMULATED = {"gradient_accumulation_steps": 2}
GAN = {"training_step": adversarial, "configure_optimizers": adversaries}
CASES = {
    "plain": Case(classifier, simple(plain), {"training_step": plain, "optimizer": sgd}),
    "clipped": Case(
        classifier,
        simple(plain, clip=0.1),
        {"training_step": plain, "optimizer": sgd},
        settings={"gradient_clipping": 0.1, **ACCUMULATED},
    ),
    "ignoring": Case(classifier, simple(ignoring), {"training_step": ignoring, "optimizer": sgd}, settings=ACCUMULATED),
    "left_out": Case(
        Branches,
        simple(left_out),
        {"training_step": left_out, "optimizer": sgd},
        settings={"find_unused_parameters": True},
    ),
    "counting": Case(classifier, counted, {"optimizer": sgd}, task=Counting),
    "rare": Case(classifier, rarely, {"optimizer": sgd}, task=Rare),
    "rare_accumulated": Case(classifier, rarely, {"optimizer": sgd}, task=Rare, settings=ACCUMULATED),
    "sequences": Case(Sequences, of_sequences, {"optimizer": sgd}, collate=as_sequences, validate=validate_sequences),
    "validated": Case(classifier, simple(plain), {"optimizer": sgd}, task=Validated, validate=validate_classes),
    "inputs": Case(OfBoth, simple(of_inputs), {"loss_fn": weighted, "optimizer": sgd}, validate=validate_inputs),
    "gan": Case(networks, alternating, GAN),
    "gan_accumulated": Case(networks, alternating, GAN, settings=ACCUMULATED),
    "gan_static": Case(networks, alternating, GAN, settings={"static_graph": True}),
    "gan_fsdp": Case(networks, alternating, GAN, settings={"backend": "fsdp"}),
    "gan_grad_op": Case(networks, alternating, GAN, settings={"sharding": "grad_op", **ACCUMULATED}),
    "joint": Case(classifier, joint, {"training_step": plain, "configure_optimizers": of_two}),
    "joint_fsdp": Case(
        classifier, joint, {"training_step": plain, "configure_optimizers": of_two}, settings={"backend": "fsdp"}
    ),
    "manual": Case(networks, manual, task=Manual),
    "closure": Case(classifier, by_closure, {"training_step": plain, "optimizer": lbfgs}),
    "closure_accumulated": Case(
        classifier, by_closure, {"training_step": plain, "optimizer": lbfgs}, settings=ACCUMULATED
    ),
}


def as_module(made: Any) -> nn.Module:
    return nn.ModuleDict(made) if isinstance(made, dict) else made


def by_hand(case: Case) -> Run:
    model = as_module(case.make())
    values = list(case.by_hand(model, batches(case.accumulation)))
    validation = {} if case.validate is None else case.validate(model.eval())
    return Run([each.pop("loss") for each in values], values, validation, model.state_dict())


def train(case: Case, ranks: int, folder: str, **more: Any) -> Run:
    made = case.make()
    trainer = Trainer(
        made if case.task is None else case.task(made, **case.given),
        **(case.given if case.task is None else {}),
        num_gpus=ranks,
        batch_size=MICRO_BATCH // ranks,
        epochs=EPOCHS,
        progress=False,
        log_every_n_steps=1,
        whole_model_on="all",
        run_dir=folder,
        **case.settings | more,
    )
    train = DataLoader(make_data(), batch_size=1, collate_fn=case.collate)
    evaluation = None if case.validate is None else DataLoader(make_data(7), batch_size=2, collate_fn=case.collate)
    return run_of(trainer.fit(train, evaluation), as_module(made))


def train_all(ranks: int, folder: str, names: list[str]) -> dict[str, Run]:
    return {name: train(CASES[name], ranks, f"{folder}/{name}") for name in names}


# Two ranks train every case; others train one of each kind, and the rest in `make soak`.
FEW = ["rare_accumulated", "sequences", "validated", "gan_accumulated", "joint", "manual", "closure"]
REST = [name for name in CASES if name not in FEW and "fsdp" not in name]
WORLDS = {"1ranks": (1, FEW), "2ranks": (2, list(CASES)), "3ranks": (3, FEW)}
SOAKED = {"1ranks-rest": (1, REST), "3ranks-rest": (3, REST)}


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(world, id=name) for name, world in WORLDS.items()),
        *(pytest.param(world, id=name, marks=pytest.mark.soak) for name, world in SOAKED.items()),
    ],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All of these cases in one world; of one rank, in this process."""
    folder = str(tmp_path_factory.mktemp("runs"))
    ranks, names = request.param
    if ranks == 1:
        return train_all(1, folder, names)
    first, *others = run_ranks(train_all, ranks, ranks, folder, names)
    for other in others:  # every rank has the same bytes at the end
        for name, run in first.items():
            assert all(torch.equal(run.weights[key], value) for key, value in other[name].weights.items()), name
    return first


def test_ranks_match_a_plain_loop_in_one_process(trained: dict[str, Run]) -> None:
    for name, run in trained.items():
        try:
            assert_same(run, by_hand(CASES[name]), 1e-9)
        except AssertionError as differs:
            raise AssertionError(f"{name}: {differs}") from differs


RESUMED = ["counting", "gan_fsdp", "joint", "manual", "closure"]
SAVED = 2  # the step, after which two more are compared with those of the first run


def resume_all(folder: str) -> dict[str, tuple[bool, str]]:
    """Of each case: whether a resumed run has the bytes of the first one, and its certificate."""
    found = {}
    for name in RESUMED:
        saves = {"checkpoint_dir": f"{folder}/{name}", "checkpoint_frequency": f"{SAVED} steps"}
        whole = train(CASES[name], 2, f"{folder}/whole-{name}", **saves)
        source = f"{folder}/{name}/step-{SAVED:06d}"
        again = train(CASES[name], 2, f"{folder}/again-{name}", **saves, resume_from_checkpoint=source)
        is_same = all(torch.equal(again.weights[key], value) for key, value in whole.weights.items())
        found[name] = (is_same and again.losses == whole.losses[SAVED:], again.certificate)
    return found


def test_resumed_run_has_the_bytes_and_a_certificate(tmp_path: Path) -> None:
    """And one rank continues what two have saved."""
    for found in run_ranks(resume_all, 2, str(tmp_path)):
        for name, (is_same, certificate) in found.items():
            assert is_same, name
            assert certificate.startswith("resume certificate: PASS, 2 steps"), name
    for name in RESUMED:
        source = str(tmp_path / name / f"step-{SAVED:06d}")
        alone = {"backend": "pytorch-ddp", "resume_from_checkpoint": source}
        run = train(CASES[name], 1, str(tmp_path / f"alone-{name}"), **alone)
        wanted = by_hand(CASES[name])
        rest = Run(wanted.losses[SAVED:], wanted.logged[SAVED:], {}, wanted.weights)
        assert_same(run, rest, 1e-9)


class Unlike(Manual):
    """Its ranks do not call the same: the second one calls something else, nothing more, or once more."""

    def __init__(self, model: Any, how: str) -> None:
        super().__init__(model)
        self.how = how if dist.get_rank() == 1 else ""

    def training_step(self, model: Any, batch: Any) -> None:
        real, noise, _ = batch
        judged = model["critic"](model["generator"](noise))
        self.zero_grad()
        self.backward(BCE(judged, torch.ones_like(judged)), retain_graph=True)
        self.step("critic" if self.how != "other" else "generator")
        if self.how == "fewer":
            return
        if self.how == "more":
            self.step("critic")
        self.backward(BCE(judged.detach() + model["critic"](real), torch.ones_like(judged)), weight=len(real))


UNLIKE = {
    "other": r"rank 0: step\('critic'\); rank 1: step\('generator'\)",
    "fewer": "rank 0: backward with a weight; rank 1: the end of its training_step",
    "more": r"rank 0: backward with a weight; rank 1: step\('critic'\)",
}


def told_of_unlike_calls(folder: str) -> dict[str, str]:
    told = {}
    for how in UNLIKE:
        try:
            Trainer(Unlike(networks(), how), batch_size=6, run_dir=f"{folder}/{how}", progress=False).fit(make_data())
        except TaskError as refused:
            told[how] = str(refused)
    return told


def test_ranks_that_call_differently_in_a_manual_step_are_named(tmp_path: Path) -> None:
    for told in run_ranks(told_of_unlike_calls, 2, str(tmp_path)):
        assert told.keys() == UNLIKE.keys()
        for how, wanted in UNLIKE.items():
            assert re.search(f"ranks make different calls in a manual step: {wanted}", told[how]), told[how]
