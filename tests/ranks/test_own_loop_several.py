"""A loop of the user's own with several models and optimizers: a GAN, as a hand-written loop trains it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import distributed
from distributed.core.errors import PlanError, TaskError
from distributed.data.order import shuffled_order
from distributed.testing import run_ranks

SAMPLES, GLOBAL_BATCH, EPOCHS = 53, 12, 2
CLIP = {"plain": {}, "clipped": {"gradient_clipping": 0.05}, "bounded": {"gradient_clip_value": 0.02}}
Parts = tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]


def problem() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    real, noise = (torch.randn(SAMPLES, size, generator=generator, dtype=torch.float64) for size in (2, 3))
    return TensorDataset(real, noise)


def make() -> Parts:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
    return generator, critic, of_generator, torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9)


def loss_as(logits: torch.Tensor, target: float) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def losses(parts: Parts, real: torch.Tensor, noise: torch.Tensor) -> Iterator[tuple[torch.Tensor, Any]]:
    """The loss of each step of a batch, with its optimizer; every other batch trains the critic alone."""
    generator, critic, of_generator, of_critic = parts
    of_critic.zero_grad()
    yield loss_as(critic(real), 1.0) + loss_as(critic(generator(noise).detach()), 0.0), of_critic
    of_generator.zero_grad()
    yield loss_as(critic(generator(noise)), 1.0), of_generator


def by_hand(*, gradient_clipping: float | None = None, gradient_clip_value: float | None = None) -> torch.Tensor:
    parts, data = make(), problem()
    for epoch in range(EPOCHS):
        order = list(shuffled_order(SAMPLES, 0, epoch))
        for start in range(0, SAMPLES, GLOBAL_BATCH):
            for loss, optimizer in losses(parts, *data[order[start : start + GLOBAL_BATCH]]):
                loss.backward()
                held = optimizer.param_groups[0]["params"]
                if gradient_clipping is not None:
                    nn.utils.clip_grad_norm_(held, gradient_clipping)
                if gradient_clip_value is not None:
                    nn.utils.clip_grad_value_(held, gradient_clip_value)
                optimizer.step()
    return flat(parts)


def flat(parts: Parts) -> torch.Tensor:
    return torch.cat([value.flatten() for part in parts[:2] for value in part.state_dict().values()])  # type: ignore[union-attr]


def train(
    folder: str, settings: dict[str, Any], stop_at: int | None = None, *, freezes: bool = False
) -> tuple[torch.Tensor, dict[str, float]]:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    size = GLOBAL_BATCH // ranks
    run = distributed.start(
        num_gpus=ranks, batch_size=size, epochs=EPOCHS, progress=False, run_dir=folder, log_every_n_steps=1, **settings
    )
    parts = make()
    *prepared, loader = run.prepare(*parts, DataLoader(problem(), batch_size=size, shuffle=True))
    assert [id(one) for one in prepared] == [id(one) for one in parts]
    with run:
        for _ in run.epochs():
            for real, noise in loader:
                if freezes:
                    parts[1].requires_grad_(True)
                for loss, optimizer in losses(parts, real, noise):
                    run.backward(loss)
                    assert run.step(optimizer)
                    run.log(own=loss)
                    if freezes:  # the critic, while the generator steps, and until the next batch
                        parts[1].requires_grad_(False)
                if run.history is None and stop_at is not None:
                    run.stop("enough for now")
    assert run.history is not None
    return flat(parts), dict(run.history.epochs[-1].metrics)


def train_all(folder: str) -> dict[str, torch.Tensor]:
    found = {name: train(f"{folder}/{name}", settings)[0] for name, settings in CLIP.items()}
    found["freezing"] = train(f"{folder}/freezing", {}, freezes=True)[0]
    saves = {"checkpoint_frequency": "1 steps"}
    train(f"{folder}/resumed", saves, stop_at=1)
    found["resumed"] = train(f"{folder}/resumed", saves | {"resume_from_checkpoint": True})[0]
    return found


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak), 3])
def test_loop_with_two_optimizers_equals_hand_written_one(ranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    found = train_all(folder) if ranks == 1 else run_ranks(train_all, ranks, folder)[ranks - 1]
    for name, settings in CLIP.items():
        assert torch.allclose(found[name], by_hand(**settings), rtol=0, atol=1e-12), name
    assert torch.equal(found["resumed"], found["plain"])
    assert torch.equal(found["freezing"], found["plain"])


def prepare(folder: Path, **settings: Any) -> tuple[Any, Parts, Any]:
    run = distributed.start(num_gpus=1, batch_size=6, progress=False, run_dir=str(folder), **settings)
    parts = make()
    return run, parts, run.prepare(*parts, DataLoader(problem(), batch_size=6))[-1]


def test_steps_before_a_break_are_counted(tmp_path: Path) -> None:
    run, parts, loader = prepare(tmp_path / "run", epochs=2)
    for _ in run.epochs():
        for real, noise in loader:
            for loss, optimizer in losses(parts, real, noise):
                run.backward(loss)
                run.step(optimizer)
            break
    assert [record.steps for record in run.history.epochs] == [1, 1]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (("backward critic", "backward critic", "step other"), "not prepared"),
        (("step none",), "got no optimizer"),
        (("step critic",), "none of its parameters has a gradient"),
        (("backward generator", "step generator", "backward critic"), "still has gradients"),
        (("backward generator", "step generator", "end", "backward critic"), "still has gradients"),
    ],
)
def test_misused_loop_with_two_optimizers_names_the_call(steps: tuple[str, ...], message: str, tmp_path: Path) -> None:
    run, (generator, critic, of_generator, of_critic), loader = prepare(tmp_path / "run")
    optimizers = {"generator": of_generator, "critic": of_critic, "other": make()[2], "none": None}
    todo = list(steps)

    def loop() -> None:
        for _ in run.epochs():
            for real, noise in loader:
                while todo and (word := todo.pop(0).split()) != ["end"]:
                    if word[0] == "step":
                        run.step(optimizers[word[1]])
                    else:
                        run.backward(loss_as(critic(real if word[1] == "critic" else generator(noise)), 1.0))

    with pytest.raises(TaskError, match=message), run:
        loop()


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        {"sharding": "full", "backend": "fsdp"},
        {"static_graph": True},
        {"compression": "bf16"},
    ],
)
def test_settings_against_two_optimizers_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"several optimizers under distributed\.start"):
        prepare(tmp_path / "run", **settings)


def test_optimizer_with_a_closure_is_refused(tmp_path: Path) -> None:
    run = distributed.start(num_gpus=1, batch_size=6, progress=False, run_dir=str(tmp_path / "run"))
    model = nn.Linear(2, 1)
    with pytest.raises(TaskError, match="closure"):
        run.prepare(model, torch.optim.LBFGS(model.parameters()), DataLoader(problem(), batch_size=6))
