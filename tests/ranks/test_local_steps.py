"""Replicas that step alone, on real ranks: they take the steps of a loop written by hand that has all of them.

`Recorder` keeps what a rank's model has seen, so that the loop by hand trains each replica on the same samples.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Callback, Trainer
from distributed.checkpoint.restore.reading import load
from distributed.core.errors import MismatchError, ReplicasDifferError, TaskError
from distributed.testing import run_ranks

BATCH, WIDTH = 6, 8
SGD = {"optimizer": "sgd", "learning_rate": 0.05, "momentum": 0.0}
LOCAL: dict[str, Any] = {"synchronization": "local_sgd", "sync_every_n_steps": 5}
DILOCO: dict[str, Any] = {"synchronization": "diloco", "sync_every_n_steps": 4}
POST: dict[str, Any] = {"synchronization": "post_local_sgd", "sync_every_n_steps": 3, "local_sgd_start": 5}
ADAM = {"optimizer": "adamw", "learning_rate": 0.02, "weight_decay": 0.1}


class FrozenWithinRound(Callback):
    """A parameter is frozen after step 5 and unfrozen after step 7, of a round that ends with step 8."""

    NAME, STEPS = "layers.0.weight", (5, 7)

    def meets_after(self, step: int) -> bool:
        return step in self.STEPS

    def on_step_end(self, run: Any) -> None:
        if run.step in self.STEPS:
            run.freeze(self, [self.NAME] if run.step == self.STEPS[0] else [])


# What the loop by hand is compared with: each with steps of uneven shares, but where micro-batches are counted.
BY_HAND: dict[str, dict[str, Any]] = {
    "local": LOCAL | SGD | {"momentum": 0.9, "gradient_clipping": 0.5, "lr_schedule": "cosine", "warmup_steps": 3},
    "adam": LOCAL | ADAM,
    "normalized": LOCAL | SGD,
    "accumulated": LOCAL | ADAM | {"gradient_accumulation_steps": 2},
    "post": POST | SGD | {"momentum": 0.9},
    "diloco": DILOCO | ADAM,
    "diloco_frozen": DILOCO | ADAM | {"callbacks": [FrozenWithinRound()], "checkpoint_frequency": "6 steps"},
    "diloco_plain": DILOCO | ADAM | {"outer_learning_rate": 1.0, "outer_momentum": 0.0},
}
SAMPLES = {"accumulated": 96, "normalized": 100}


class Recorder(nn.Module):
    """A small model, and what it was trained on."""

    def __init__(self, *, normalizes: bool = False, leaves_out: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(16) if normalizes else nn.Tanh()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), middle, nn.ReLU(), nn.Linear(16, 4))
        self.seldom = nn.Linear(WIDTH, 4, bias=False) if leaves_out else None
        self.seen: list[torch.Tensor] = []
        self.evaluated: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.append(x.detach().clone())
        else:
            self.evaluated = {name: value.clone() for name, value in self.state_dict().items()}
        found: torch.Tensor = self.layers(x)
        is_used = self.seldom is not None and bool(x[:, 0].sum() > 0.5)
        return found + self.seldom(x) if is_used else found  # type: ignore[misc]


class Reshaping(Recorder):
    """Buffers of which forward makes new ones: of another shape on each rank, or only in an evaluation."""

    def __init__(self, *, unlike: bool) -> None:
        super().__init__()
        self.is_unlike = unlike
        for name in ("one", "other"):
            self.register_buffer(name, torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = dist.get_rank() if self.is_unlike else 5 * (not self.training)
        self.one, self.other = torch.ones(2 + size), torch.ones(2 - size if self.is_unlike else 2)
        return super().forward(x)


def targets_of(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[:, 0] * x[:, 1], x[:, 2], x[:, 3].abs(), x.sum(1)], 1)


def make_data(samples: int = 99) -> TensorDataset:
    x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, targets_of(x))


def weighted_step(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, targets = batch
    weights = 0.1 + x[:, 0].abs()
    return ((model(x) - targets).square().mean(1) * weights).sum() / weights.sum(), weights.sum()


class Watch(Callback):
    """The replica of this rank after each step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.replicas: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, run: Any) -> None:
        self.replicas.append({name: value.clone() for name, value in self.model.state_dict().items()})


def fit(folder: str, *, ranks: int = 2, samples: int = 99, **options: Any) -> dict[str, Any]:
    """A run, and all that a test looks at."""
    kept = {name: options.pop(name, False) for name in ("normalizes", "leaves_out")}
    model = Reshaping(unlike=options.pop("unlike")) if "unlike" in options else Recorder(**kept)
    first, watch = copy.deepcopy(model), Watch(model)
    if "training_step" not in options:
        options["loss_fn"] = nn.MSELoss()
    callbacks = [watch, *options.pop("callbacks", [])]
    settings = {"epochs": 2, "progress": False, "checkpoint_frequency": "4 steps", "checkpoint_dir": folder}
    trainer = Trainer(model, batch_size=BATCH * 2 // ranks, callbacks=callbacks, **settings | options)
    history = trainer.fit(make_data(samples), make_data(20))
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    events = Path(history.run_dir, "events.jsonl").read_text().splitlines() if is_main else []
    told = [event for event in map(json.loads, events) if event["event"] == "ResumeCompared"]
    return {
        "first": first,
        "seen": model.seen,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "val_loss": history["val_loss"],
        "replicas": watch.replicas,
        "evaluated": model.evaluated,
        "checkpoint": history.checkpoint,
        "certificates": [event["text"] for event in told],
        "steps": history.steps,
    }


def saved_at(found: dict[str, Any], step: int) -> str:
    return str(Path(found["checkpoint"]).with_name(f"step-{step:06d}"))


def run_cases(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, settings in BY_HAND.items():
        samples = SAMPLES.get(name, 99)
        found[name] = fit(f"{folder}/{name}", samples=samples, normalizes=name == "normalized", **settings)
    for name, settings in {"dense": {}, "each": LOCAL | {"sync_every_n_steps": 1}}.items():
        found[name] = fit(f"{folder}/{name}", samples=97, **SGD, **settings)
    found["same_as_plain"] = fit(f"{folder}/same", **ADAM | LOCAL | {"sync_every_n_steps": 4})
    found["weighted"] = fit(f"{folder}/weighted", training_step=weighted_step, **LOCAL | ADAM)
    scaled = {"mixed_precision": "fp16", "scaler_init_scale": 2.0**14, "scaler_growth_interval": 3}
    found["scaled"] = fit(f"{folder}/scaled", **LOCAL | ADAM | scaled)
    found["unused"] = fit(f"{folder}/unused", leaves_out=True, **LOCAL | ADAM)
    for name, path, options in (
        ("local", 8, BY_HAND["local"]),
        ("adam", 12, BY_HAND["adam"]),
        ("normalized", 8, BY_HAND["normalized"] | {"normalizes": True, "samples": 100}),
        ("post", 4, BY_HAND["post"]),
        ("post", 12, BY_HAND["post"]),
        ("diloco", 8, BY_HAND["diloco"]),
        ("diloco", 10, BY_HAND["diloco"]),
        ("diloco_frozen", 6, BY_HAND["diloco_frozen"]),
        ("scaled", 8, LOCAL | ADAM | scaled),
        ("unused", 8, LOCAL | ADAM | {"leaves_out": True}),
        ("weighted", 8, LOCAL | ADAM | {"training_step": weighted_step}),
    ):
        whole = found[name]
        if path == 10:  # a run that ended there, within a round, and is trained on
            whole = fit(f"{folder}/{name}-short", max_steps=10, **options)
        given = {"resume_from_checkpoint": saved_at(whole, path)} | options
        found[f"{name} from {path}"] = fit(f"{folder}/{name}-{path}", **given)
    found["reshaped"] = fit(f"{folder}/reshaped", unlike=False, val_check_interval=3, **LOCAL | ADAM)
    with pytest.raises(MismatchError) as failed:
        fit(f"{folder}/unlike", unlike=True, checkpoint_frequency="1000 steps", sanity_val_steps=0, **LOCAL | ADAM)
    found["unlike"] = str(failed.value)
    return found


RESUMED = (
    "local from 8", "adam from 12", "normalized from 8", "post from 4", "post from 12", "diloco from 8",
    "diloco from 10", "diloco_frozen from 6", "scaled from 8", "unused from 8", "weighted from 8",
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_cases, 2, str(tmp_path_factory.mktemp("cases")))


def optimizer_for(model: nn.Module, settings: dict[str, Any]) -> torch.optim.Optimizer:
    rate = settings["learning_rate"]
    if settings["optimizer"] == "sgd":
        return torch.optim.SGD(model.parameters(), rate, momentum=settings["momentum"])
    return torch.optim.AdamW(model.parameters(), rate, weight_decay=settings["weight_decay"])


def rate_at(step: int, total: int, settings: dict[str, Any]) -> float:
    """Of a warm-up and a cosine."""
    if "lr_schedule" not in settings:
        return 1.0
    warm = settings["warmup_steps"]
    if step < warm:
        return (step + 1) / warm
    return float(0.5 * (1 + torch.cos(torch.tensor(torch.pi * (step - warm) / (total - warm)))))


def by_hand(settings: dict[str, Any], first: nn.Module, seen: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The replicas of all ranks in one process; the mean of them at the end."""
    replicas = [copy.deepcopy(first).train() for _ in seen]
    optimizers = [optimizer_for(replica, settings) for replica in replicas]
    anchor = [p.detach().clone().requires_grad_() for p in first.parameters()]
    is_diloco = settings["synchronization"] == "diloco"
    outer = torch.optim.SGD(
        anchor,
        settings.get("outer_learning_rate", 0.7),
        momentum=settings.get("outer_momentum", 0.9),
        nesterov=settings.get("outer_momentum", 0.9) > 0,
    )
    parts = settings.get("gradient_accumulation_steps", 1)
    total, start = len(seen[0]) // parts, settings.get("local_sgd_start", 0)
    for step in range(total):
        micros = [own[step * parts : (step + 1) * parts] for own in seen]
        samples = sum(len(x) for own in micros for x in own)
        for replica, optimizer, own in zip(replicas, optimizers, micros, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = settings["learning_rate"] * rate_at(step, total, settings)
            optimizer.zero_grad()
            for x in own:
                loss = nn.functional.mse_loss(replica(x), targets_of(x))
                (loss * len(x) * len(seen) / samples).backward()
        if step < start:  # dense
            for of_all in zip(*(replica.parameters() for replica in replicas), strict=True):
                mean = torch.stack([p.grad for p in of_all]).mean(0)
                for p in of_all:
                    p.grad = mean.clone()
        if "callbacks" in settings and FrozenWithinRound.STEPS[0] <= step < FrozenWithinRound.STEPS[1]:
            for replica in replicas:
                replica.get_parameter(FrozenWithinRound.NAME).grad = None
        for replica, optimizer in zip(replicas, optimizers, strict=True):
            if "gradient_clipping" in settings:
                nn.utils.clip_grad_norm_(replica.parameters(), settings["gradient_clipping"])
            optimizer.step()
        if step >= start and (step + 1 - start) % settings["sync_every_n_steps"] == 0:
            means = mean_of(replicas)
            if is_diloco:
                for p, mean in zip(anchor, (means[name] for name, _ in first.named_parameters()), strict=True):
                    p.grad = p.detach() - mean
                outer.step()
                means |= {name: p.detach() for (name, _), p in zip(first.named_parameters(), anchor, strict=True)}
            for replica in replicas:
                replica.load_state_dict(means)
    return mean_of(replicas)


def mean_of(replicas: list[nn.Module]) -> dict[str, torch.Tensor]:
    states = [replica.state_dict() for replica in replicas]
    return {
        name: torch.stack([state[name] for state in states]).mean(0) if value.is_floating_point() else value.clone()
        for name, value in states[0].items()
    }


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("case", BY_HAND)
def test_replicas_take_the_steps_of_a_loop_by_hand(case: str, ranks: list[dict[str, Any]]) -> None:
    one, other = (found[case] for found in ranks)
    assert_same(one["weights"], other["weights"])
    assert_close(one["weights"], by_hand(BY_HAND[case], one["first"], [one["seen"], other["seen"]]))


def test_buffers_of_unlike_shapes_are_not_averaged(ranks: list[dict[str, Any]]) -> None:
    """Lain end to end they have as many numbers on both ranks."""
    for found in ranks:
        assert (
            "rank 0 holds one torch.float32 [2], other torch.float32 [2]; rank 1 one torch.float32 [3]"
            in found["unlike"]
        )
        assert_same(found["reshaped"]["weights"], found["adam"]["weights"])  # what an evaluation made changes nothing


def test_average_after_each_step_of_sgd_is_dense(ranks: list[dict[str, Any]]) -> None:
    """Also where a rank has no sample of a step."""
    assert_close(ranks[0]["each"]["weights"], ranks[0]["dense"]["weights"])


def test_plain_outer_step_is_the_average(ranks: list[dict[str, Any]]) -> None:
    assert_close(ranks[0]["diloco_plain"]["weights"], ranks[0]["same_as_plain"]["weights"])


def test_replicas_differ_within_a_round_and_meet(ranks: list[dict[str, Any]]) -> None:
    one, other = (found["adam"]["replicas"] for found in ranks)
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(one, other, strict=True)]
    assert same == [(step + 1) % 5 == 0 for step in range(len(one))]


@pytest.mark.parametrize("case", ["adam", "normalized", "diloco", "scaled", "unused", "weighted"])
def test_mean_of_replicas_is_what_leaves_the_training(case: str, ranks: list[dict[str, Any]]) -> None:
    one, other = (found[case] for found in ranks)
    last = mean_of_states(one["replicas"][-1], other["replicas"][-1])
    assert_same(one["weights"], last)
    assert_same(other["weights"], last)
    assert_same(load(one["checkpoint"], ranks=()).shared["model"], last)
    assert_same(one["evaluated"], last)
    assert_same(other["evaluated"], last)


def mean_of_states(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: (value + other[name]) / 2 if value.is_floating_point() else value for name, value in one.items()}


@pytest.mark.parametrize("case", RESUMED)
def test_run_resumed_within_a_round_has_the_same_bytes(case: str, ranks: list[dict[str, Any]]) -> None:
    whole = case.partition(" ")[0]
    for found in ranks:
        assert_same(found[case]["weights"], found[whole]["weights"])
        assert_same(found[case]["replicas"][-1], found[whole]["replicas"][-1])
    (certificate,) = ranks[0][case]["certificates"]
    assert ("NOTHING COMPARED" if case == "diloco from 10" else "PASS") in certificate, certificate  # it ended there


def test_scales_of_replicas_go_apart(ranks: list[dict[str, Any]]) -> None:
    """Each replica skips its own steps, and the model that leaves is finite."""
    assert all(value.isfinite().all() for value in ranks[0]["scaled"]["weights"].values())


def go_on_elsewhere(folder: str, path: str, settings: dict[str, Any]) -> dict[str, Any]:
    size = dist.get_world_size()
    at_once = fit(f"{folder}/stays", ranks=size, resume_from_checkpoint=path, max_steps=8, **settings)
    further = fit(f"{folder}/goes", ranks=size, resume_from_checkpoint=path, **settings)
    dense = {"synchronization": "every_step"} | ADAM
    return {
        "stays": at_once,
        "goes": further,
        "dense": fit(f"{folder}/d", ranks=size, resume_from_checkpoint=path, **dense),
    }


@pytest.mark.parametrize("case", ["adam", "diloco"])
def test_other_number_of_ranks_begins_with_the_mean(case: str, ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    path = saved_at(ranks[0][case], 8)
    saved = load(path, ranks=()).shared["model"]
    three = run_ranks(go_on_elsewhere, 3, str(tmp_path), path, BY_HAND[case])
    for found in three:
        assert_same(found["stays"]["weights"], saved)
        for name in ("goes", "dense"):
            assert found[name]["steps"] == ranks[0][case]["steps"]
            assert_same(found[name]["weights"], three[0][name]["weights"])
            assert all(value.isfinite().all() for value in found[name]["weights"].values())


class OtherRate(Callback):
    """A rate that one rank alone has."""

    def on_step_end(self, run: Any) -> None:
        if dist.get_rank() == 1:
            run.optimizer.param_groups[0]["lr"] *= 2


def refused(folder: str) -> list[str]:
    found = []
    try:
        fit(f"{folder}/rate", callbacks=[OtherRate()], **LOCAL | ADAM)
    except ReplicasDifferError as error:
        found.append(str(error))
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.SyncBatchNorm(4))
    try:
        Trainer(model, loss_fn=nn.MSELoss(), batch_size=4, progress=False, **LOCAL).fit(make_data())
    except TaskError as error:
        found.append(str(error))
    return found


def test_what_must_be_alike_is_still_compared(tmp_path: Path) -> None:
    differ, synced = run_ranks(refused, 2, str(tmp_path))[0]
    assert "optimizer option lr of group 0" in differ
    assert "SyncBatchNorm" in synced


def test_single_rank_takes_outer_steps_alone(tmp_path: Path) -> None:
    found = fit(str(tmp_path / "one"), num_gpus=1, **DILOCO | ADAM)
    expected = by_hand(DILOCO | ADAM, found["first"], [found["seen"]])
    assert_close(found["weights"], expected)
    dense = fit(str(tmp_path / "dense"), num_gpus=1, **ADAM)
    local = fit(str(tmp_path / "local"), num_gpus=1, **LOCAL | ADAM)
    assert_same(local["weights"], dense["weights"])
