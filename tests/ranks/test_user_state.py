"""What the loss keeps, and buffers that are not persistent, on several ranks: resumed as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.checkpoint.restore.reading import load
from distributed.core.errors import RankFailedError, TaskError
from distributed.testing import run_ranks


class Anneal(nn.Module):
    """Counts its calls: what it keeps does not depend on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return (outputs - target).square().mean() * (1 + 1 / self.count)


class Normed(Anneal):
    """Keeps a mean of what it has seen, which is a rank's own share."""

    calls = 0

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = (outputs - target).square().mean()
        self.count.mul_(0.9).add_(0.1 * loss.detach())
        return loss / (1 + self.count)


class Warmed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64), persistent=False)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps.add_(1)
        hidden = inputs * (1 - 0.5**self.steps)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Warmed().double()


def problem() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    kind = {"generator": generator, "dtype": torch.float64}
    return TensorDataset(torch.randn(48, 4, **kind), torch.randn(48, 1, **kind))


MODES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero-1": {"zero_stage": 1},
    "fsdp": {"backend": "fsdp"},
    "pipeline": {"pipeline_parallel": 2, "pipeline_microbatches": 1, "batch_size": 8},
    "bitwise": {"reproducible": "bitwise", "virtual_ranks": 2},
}


def fit(name: str, steps: int, loss: nn.Module, ranks: int = 2, **more: Any) -> dict[str, Any]:
    """The trained weights by name, and what the loss keeps."""
    options = {"num_gpus": ranks, "batch_size": 8 // ranks, "progress": False, "device": "cpu", "epochs": 2}
    options |= {"run_dir": name, "checkpoint_dir": f"{name}/checkpoints", "max_steps": steps, "log_every_n_steps": 100}
    trainer = Trainer(make_model(), loss_fn=loss, optimizer=lambda p: torch.optim.Adam(p, lr=0.01), **options | more)
    trainer.fit(DataLoader(problem(), batch_size=4, shuffle=True), DataLoader(problem(), batch_size=5))
    assert trainer.history is not None
    saved = load(trainer.history.checkpoint, ranks=()).shared
    return saved["model"] | {"count": saved["loss_fn"]["count"], "steps": saved["nonpersistent"]["model"]["steps"]}


def worst(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def resume_all(folder: str) -> dict[str, tuple[float, dict[str, Any]]]:
    """By mode: how far a run that was cut is from one that was not, and that one's state."""
    found = {}
    for mode, options in MODES.items():
        whole = fit(f"{folder}/{mode}-whole", 9, Anneal(), **options)
        fit(f"{folder}/{mode}", 7, Anneal(), **options)
        again = fit(f"{folder}/{mode}", 9, Anneal(), resume_from_checkpoint=True, **options)
        found[mode] = worst(whole, again), whole
    return found


def test_loss_state_is_resumed_and_matches_one_process(tmp_path: Path) -> None:
    alone = fit(str(tmp_path / "alone"), 9, Anneal(), ranks=1)
    assert (alone["count"], alone["steps"]) == (9, 9), "an evaluation leaves no trace"
    for found in run_ranks(resume_all, 2, str(tmp_path)):
        assert {mode: difference for mode, (difference, _) in found.items()} == dict.fromkeys(MODES, 0.0)
        for mode, (_, whole) in found.items():
            assert worst(whole, alone) < 1e-12, mode


def keep_a_share(folder: str) -> tuple[str, int]:
    loss = Normed()
    with pytest.raises(TaskError) as refused:
        fit(f"{folder}/normed", 9, loss, sanity_val_steps=0)
    return str(refused.value), loss.calls


def test_pipeline_refuses_buffer_changed_by_each_micro_batch(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as refused:
        fit(str(tmp_path / "model"), 9, nn.MSELoss(), **MODES["pipeline"] | {"pipeline_microbatches": 2})
    assert "each call changes the buffer steps" in str(refused.value)
    assert "set pipeline_microbatches=1" in str(refused.value)


def test_loss_with_per_rank_state_is_refused(tmp_path: Path) -> None:
    for text, calls in run_ranks(keep_a_share, 2, str(tmp_path)):
        assert "is not the mean of the losses of its parts" in text
        assert calls == 1
    assert not list((tmp_path / "normed/checkpoints").glob("step-*")), "nothing of it was saved"
