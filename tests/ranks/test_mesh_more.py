"""What else users train on a mesh: steps that are cut short, masked targets, BatchNorm, groups of parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from distributed import PyTorchDDPTrainer, Trainer
from distributed.testing import run_ranks
from tests.meshes import LENGTH, MESHES, WIDTH, Transformer, make_data, make_model
from tests.meshes import train as plain_train

SAMPLES, EPOCHS = 37, 2  # the last step of an epoch is short: 5 samples


class Masked(Dataset[dict[str, torch.Tensor]]):
    """Batches by name, with inputs beside the tokens, in which every sample has another number of targets."""

    def __init__(self, samples: int) -> None:
        self._data = make_data(samples)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, target = self._data[index]
        target = target.clone()
        target[: index * 5 % LENGTH] = -100
        return {"ids": ids, "bias": torch.full((LENGTH, WIDTH), index / 100), "labels": target}


class Biased(Transformer):
    def forward(self, ids: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device)) + bias
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


class Normed(nn.Module):
    """With a buffer of its own, which nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([NormedBlock() for _ in range(2)])
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def numbers(samples: int) -> TensorDataset:
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(samples))
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


class Work(NamedTuple):
    model: nn.Module
    train: Dataset[Any]
    validation: Dataset[Any]
    settings: dict[str, Any]


def masked() -> Work:
    torch.manual_seed(5)
    return Work(Biased(), Masked(SAMPLES), Masked(5), {})


def normed() -> Work:
    torch.manual_seed(5)
    return Work(Normed(), numbers(SAMPLES), numbers(6), {})


def grouped() -> Work:
    """An optimizer that was made over the whole model, with a schedule, over a model of which a part is frozen."""
    model = make_model()
    model.tokens.requires_grad_(False)  # type: ignore[union-attr]
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0, "lr": 0.003},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    more = {"optimizer": optimizer, "scheduler": scheduler, "gradient_clipping": 0.5}
    return Work(model, make_data(SAMPLES), make_data(5), more)


def few() -> Work:
    """Fewer samples than ranks, also to evaluate."""
    return Work(make_model(), make_data(3), make_data(1), {})


class Trained(NamedTuple):
    steps: list[dict[str, Any]]  # loss, accuracy and gradient norm of each
    validation: list[float]
    buffers: dict[str, torch.Tensor]


def train(mesh: str, work: Work, run_dir: Path) -> Trained:
    options = MESHES[mesh].all_settings() | work.settings
    if "optimizer" not in options:
        options["learning_rate"] = 0.01
    quiet = {"epochs": EPOCHS, "log_every_n_steps": 1, "progress": False, "run_dir": str(run_dir)}
    trainer = Trainer(work.model, loss_fn=nn.CrossEntropyLoss(), **quiet, **options)
    history = trainer.fit(work.train, work.validation)
    events = [json.loads(line) for line in (Path(history.run_dir) / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "StepEnded"]
    numbers = [
        {"loss": step["loss"], "norm": step["gradient_norm"], "rate": step["learning_rate"]} | step["metrics"]
        for step in steps
    ]
    return Trained(numbers, history["val_loss"], dict(trainer.model.named_buffers()))


CASES = {
    masked: ("3d", "pp_dp", "cp"),
    normed: ("dp_tp", "fsdp"),
    grouped: ("fsdp", "pp", "zero1"),
    few: ("pp_dp", "fsdp_cp"),
}


def train_all(cases: list[tuple[Any, str]], folder: Path) -> dict[str, Trained]:
    return {f"{make.__name__}/{mesh}": train(mesh, make(), folder / f"{make.__name__}-{mesh}") for make, mesh in cases}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """All cases of one number of ranks are trained in one world, which costs its start."""
    folder = tmp_path_factory.mktemp("more")
    cases = [(make, mesh) for make, meshes in CASES.items() for mesh in meshes]
    found = train_all([(make, "one") for make in CASES], folder)
    for ranks in sorted({MESHES[mesh].ranks for _, mesh in cases}):
        mates = [(make, mesh) for make, mesh in cases if MESHES[mesh].ranks == ranks]
        found |= run_ranks(train_all, ranks, mates, folder)[0]
    return found


@pytest.mark.parametrize(("make", "mesh"), [(make.__name__, mesh) for make, meshes in CASES.items() for mesh in meshes])
def test_mesh_matches_one_process_on_unusual_models(make: str, mesh: str, trained: dict[str, Trained]) -> None:
    wanted, found = trained[f"{make}/one"], trained[f"{make}/{mesh}"]
    assert len(found.steps) == len(wanted.steps)
    for at, (one, other) in enumerate(zip(found.steps, wanted.steps, strict=True)):
        assert one == pytest.approx(other, rel=1e-4), f"step {at + 1}"
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert found.validation == pytest.approx(wanted.validation, rel=1e-5)
    for name, buffer in wanted.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-4, atol=1e-5, msg=name)


class Spare(Transformer):
    """With a layer that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)


@pytest.mark.parametrize("mesh", ["cp", "pp_dp"])
def test_unused_parameter_stays_unchanged_on_a_mesh(mesh: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = Spare()
    before = model.spare.weight.detach().clone()
    plain_train(mesh, tmp_path / "run", model, epochs=1, weight_decay=0.5)
    assert torch.equal(model.spare.weight, before)
    assert not torch.equal(model.head.weight, Spare().head.weight)


def test_zero_stage_3_of_ddp_trainer_shards_the_model(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    trainer = PyTorchDDPTrainer(make_model(), loss_fn=nn.CrossEntropyLoss(), zero_stage=3, num_gpus=2, batch_size=4)
    history = trainer.fit(make_data(), max_steps=3, progress=False, run_dir=run_dir)
    plan = json.loads((run_dir / "plan.json").read_text())
    assert (plan["shard"]["kind"], plan["mesh"]["dp_shard"], history.steps) == ("full", 2, 3)
