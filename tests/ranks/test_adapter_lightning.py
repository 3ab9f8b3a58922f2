"""A LightningModule trains to the numbers of Lightning's own Trainer, and on two ranks to those of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.adapters import lightning_task
from distributed.testing import run_ranks

BATCH, EPOCHS = 8, 3
SAMPLES = {"Classifier": 49, "Autoencoder": 41, "Normalized": 48}  # with one sample in the last step, or all
Numbers = dict[str, Any]


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1))


class Classifier(lightning.LightningModule):
    """With two schedulers, torchmetrics, and what steps commonly read."""

    def __init__(self, width: int = 12, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.seen: list[tuple[int, int, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> dict[str, torch.Tensor]:
        return {"x": batch[0], "y": batch[1]}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch["x"], batch["y"]
        out = self(x)
        loss = F.cross_entropy(out, y)
        self.accuracy(out.detach(), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("train_accuracy", self.accuracy, on_step=True, on_epoch=True)
        assert x.device == self.device
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert set(outputs) == {"loss"}
        self.seen.append((self.current_epoch, batch_idx, self.global_step))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch["x"], batch["y"]
        out = self(x)
        self.val_accuracy(out, y)
        self.log_dict({"val_loss": F.cross_entropy(out, y), "val/margin": out.std()}, sync_dist=True)
        self.log("val_accuracy", self.val_accuracy)

    def on_train_epoch_end(self) -> None:
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, int(self.trainer.estimated_stepping_batches))
        step = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        slow = {"scheduler": step, "monitor": "val_loss", "frequency": 2}
        return [optimizer], [{"scheduler": cycle, "interval": "step"}, slow]


class Autoencoder(lightning.LightningModule):
    """With numbers of its own, parts that are called by themselves, hooks, and the learning rate of each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.decoder = nn.Linear(6, 3).double(), nn.Linear(3, 6).double()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.norms: list[float] = []
        self.calls: list[str] = []

    def training_step(self, batch: Any) -> dict[str, Any]:
        x = batch[0]
        self.steps += 1
        restored = self.decoder(torch.tanh(self.encoder(x)))
        loss = F.mse_loss(restored, x)
        self.log("largest", (restored - x).abs().mean(), on_step=False, on_epoch=True)
        return {"loss": loss, "restored": restored}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        weight = self.encoder.weight.grad
        assert weight is not None
        self.log("gradient", weight.norm(), on_step=False, on_epoch=True)
        self.norms.append(weight.norm().item())

    def on_train_start(self) -> None:
        self.calls.append("on_train_start")

    def on_train_epoch_start(self) -> None:
        self.calls.append(f"on_train_epoch_start {self.current_epoch}")

    def on_train_end(self) -> None:
        self.calls.append("on_train_end")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 2}}


class Normalized(lightning.LightningModule):
    """With BatchNorm, trained with accumulated and clipped gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7), "frequency": 2}]


CASES: Mapping[str, tuple[type[lightning.LightningModule], Numbers, Numbers]] = {  # settings of each trainer
    "classifier": (Classifier, {}, {}),
    "autoencoder": (Autoencoder, {}, {}),
    "normalized": (
        Normalized,
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2},
        {"gradient_accumulation_steps": 2, "gradient_clipping": 0.2},
    ),
}
# In Lightning also by these names: that of the last step, and what it is of the two.
FORKED = ("train_loss", "train_loss_step", "train_accuracy", "train_accuracy_step")


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([value.double().flatten() for value in module.state_dict().values()])


def by_lightning(kind: type[lightning.LightningModule], settings: Numbers, folder: Path) -> tuple[Any, Numbers]:
    module = kind()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **settings,
    )
    loaders = [DataLoader(data(SAMPLES[kind.__name__]), BATCH)]
    trainer.fit(module, *loaders, *([DataLoader(data(20), 20)] if hasattr(module, "val_accuracy") else []))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module, metrics


def by_us(kind: type[lightning.LightningModule], run_dir: str, ranks: int = 1, **settings: Any) -> tuple[Any, Numbers]:
    module = kind()
    alone = {"num_gpus": 1} if ranks == 1 else {}
    trainer = Trainer(lightning_task(module), epochs=EPOCHS, progress=False, run_dir=run_dir, **alone, **settings)
    validation = DataLoader(data(20), 20 // ranks) if hasattr(module, "val_accuracy") else None
    history = trainer.fit(DataLoader(data(SAMPLES[kind.__name__]), BATCH // ranks), validation)
    return module, dict(history.epochs[-1].metrics)


@pytest.mark.parametrize("name", CASES)
def test_module_trains_to_numbers_of_lightning(name: str, tmp_path: Path) -> None:
    kind, theirs, ours = CASES[name]
    expected, metrics = by_lightning(kind, theirs, tmp_path)
    found, measured = by_us(kind, str(tmp_path / "run"), **ours)
    assert torch.allclose(weights(found), weights(expected), rtol=0, atol=1e-9)
    for metric in metrics.keys() - FORKED:
        assert measured[metric] == pytest.approx(metrics[metric], abs=1e-6), metric
    if isinstance(found, Autoencoder):
        assert (found.calls, found.norms) == (expected.calls, pytest.approx(expected.norms))
    if isinstance(found, Classifier):
        assert found.seen == expected.seen
        assert found.hparams == expected.hparams
    assert vars(found).keys() == vars(expected).keys()


def on_ranks(folder: str, shardings: list[str | None], **shared: Any) -> dict[str, Any]:
    found = {}
    for name, (kind, _, settings) in CASES.items():
        for sharding in shardings:
            more = {} if sharding is None else {"sharding": sharding, "whole_model_on": "all"}
            if sharding and kind is Autoencoder:
                continue  # its hook would see shards of gradients: refused
            module, metrics = by_us(kind, f"{folder}/{name}-{sharding}", 2, **settings, **more, **shared)
            found[f"{name}-{sharding}"] = weights(module), metrics
    return found


def test_module_on_two_ranks_trains_to_numbers_of_one(tmp_path: Path) -> None:
    alone = {name: by_us(kind, str(tmp_path / name), **ours) for name, (kind, _, ours) in CASES.items()}
    for found in run_ranks(on_ranks, 2, str(tmp_path), [None, "full"]):
        for case, (trained, metrics) in found.items():
            module, expected = alone[case.partition("-")[0]]
            assert torch.allclose(trained, weights(module), rtol=0, atol=1e-9), case
            for name in expected.keys() - {"val/margin"}:  # which is no mean over samples
                assert metrics[name] == pytest.approx(expected[name], abs=1e-6), (case, name)
