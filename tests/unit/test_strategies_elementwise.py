"""Optimizers whose step cannot be taken in parts are found by trying them, whatever class they are of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.core.errors import TaskError
from distributed.strategies.checks.elementwise import moves_on_zeros, why_not_cut

CUTS = ("parameters", "rows", "columns", "flat")


class OwnAdam(torch.optim.AdamW):
    pass


class Scaled(torch.optim.Optimizer):
    """Steps by a gradient that is divided by something; made of a model, as nobody would expect."""

    def __init__(self, model: nn.Module, divisor: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.divisors = [divisor]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad / self.divisors[0](self, parameter)


def all_norm(optimizer: Any, _: torch.Tensor) -> torch.Tensor:
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return torch.stack([grad.norm() for grad in grads]).norm()


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


@pytest.mark.parametrize(
    ("optimizer", "unfit"),
    [
        (torch.optim.AdamW(make().parameters()), ()),
        (OwnAdam(make().parameters(), weight_decay=0.1), ()),
        (torch.optim.Adafactor(make().parameters()), ("rows", "columns", "flat")),
        (torch.optim.Muon([p for p in make().parameters() if p.ndim == 2]), ("rows", "columns", "flat")),
        (Scaled(make(), lambda o, p: 2.0), ()),
        (Scaled(make(), lambda o, p: p.grad.norm()), ("rows", "columns", "flat")),
        (Scaled(make(), lambda o, p: 1.0 if p.ndim > 1 else 2.0), ("flat",)),
        (Scaled(make(), all_norm), CUTS),
    ],
    ids=["adamw", "subclass", "adafactor", "muon", "constant", "own_norm", "by_dimensions", "norm_of_all"],
)
def test_trial_finds_optimizers_that_are_not_elementwise(
    optimizer: torch.optim.Optimizer, unfit: tuple[str, ...]
) -> None:
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which puts itself around the step
    assert tuple(cut for cut in CUTS if why_not_cut(optimizer, [cut])) == unfit
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(map(torch.equal, before, after))
    assert not optimizer.state


def test_optimizer_with_steps_elementwise_skips_the_trial() -> None:
    optimizer = torch.optim.Adafactor(make().parameters())
    optimizer.steps_elementwise = True  # type: ignore[attr-defined]
    assert not why_not_cut(optimizer, ["rows"])


def test_zero_gradients_move_parameters_only_with_weight_decay() -> None:
    model = make()
    assert moves_on_zeros(torch.optim.AdamW(model.parameters()))
    assert not moves_on_zeros(torch.optim.Adam(model.parameters()))
    assert not moves_on_zeros(torch.optim.SGD(model.parameters(), momentum=0.9))


def hooked(parameters: Any) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(parameters)
    made.register_step_post_hook(lambda optimizer, *_: None)
    return made


@pytest.mark.parametrize(
    ("settings", "optimizer", "told"),
    [
        ({"num_gpus": 2, "backend": "fsdp"}, torch.optim.Adafactor, "Adafactor cannot be trained with sharded"),
        ({"num_gpus": 2, "tensor_parallel": 2}, torch.optim.Adafactor, "Adafactor cannot be trained with tensor"),
        ({"num_gpus": 2, "tensor_parallel": 2}, hooked, "AdamW has step hooks, with tensor_parallel=2"),
        ({"num_gpus": 2, "backend": "deepspeed"}, hooked, "AdamW has step hooks, with backend='deepspeed'"),
        ({"num_gpus": 2, "zero_stage": 3}, torch.optim.LBFGS, "LBFGS, which calls the model by a closure, with shar"),
        ({"num_gpus": 1, "gradient_clipping": 1.0}, torch.optim.LBFGS, "by a closure, with gradient_clipping=1"),
    ],
    ids=["fsdp", "tensor", "hooks", "hooks_deepspeed", "closure", "closure_clipped"],
)
def test_optimizer_that_cannot_be_sharded_is_refused_at_start(
    settings: dict[str, Any], optimizer: Any, told: str, tmp_path: Path
) -> None:
    model = make()
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
    trainer = Trainer(
        model, optimizer=optimizer(model.parameters()), run_dir=str(tmp_path), device="cpu", progress=False, **settings
    )
    with pytest.raises(TaskError, match=told):
        trainer.fit(DataLoader(data, batch_size=2))
    assert not list(tmp_path.rglob("*attempt*"))


def test_sparse_gradients_are_refused_under_sharding_or_bitwise(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2))
    data = TensorDataset(torch.randint(0, 6, (8,)), torch.randn(8, 2))
    for settings in ({"backend": "fsdp"}, {"zero_stage": 1}, {"reproducible": "bitwise", "virtual_ranks": 2}):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(
            model, optimizer=optimizer, num_gpus=2, run_dir=str(tmp_path), device="cpu", progress=False, **settings
        )
        with pytest.raises(TaskError, match="0 has sparse gradients"):
            trainer.fit(DataLoader(data, batch_size=2))


def test_sparse_gradients_train_and_clip_on_one_rank(tmp_path: Path) -> None:
    expected = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2)).double()
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2)).double()
    model.load_state_dict(expected.state_dict())
    data = TensorDataset(torch.randint(0, 6, (16,)), torch.randn(16, 2).double())
    by_hand = torch.optim.SGD(expected.parameters(), lr=0.1)
    for x, y in DataLoader(data, batch_size=8):
        by_hand.zero_grad()
        nn.functional.mse_loss(expected(x), y).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        by_hand.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(
        model,
        optimizer=optimizer,
        loss_fn=nn.MSELoss(),
        num_gpus=1,
        gradient_clipping=0.1,
        run_dir=str(tmp_path),
        device="cpu",
        progress=False,
    )
    trainer.fit(DataLoader(data, batch_size=8))
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
