"""A LightningModule under Lightning's own Trainer, which finds the ranks that a launcher has started."""

import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class BoringModel(LightningModule):
    def __init__(self, width=16):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("train_loss", loss)
        print(f"rank {self.global_rank} batch {batch_idx} loss {loss.item()!r}", flush=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main():
    seed_everything(2, verbose=False)
    x = torch.randn(96, 8)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        strategy="ddp",
        max_epochs=2,
        logger=CSVLogger("lightning_logs", name="run", version=0),
        callbacks=[ModelCheckpoint(dirpath="kept", monitor="val_loss", filename="{epoch}", save_last=True)],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel(), DataLoader(data, 8, shuffle=True), DataLoader(data, 16))
    if trainer.is_global_zero:
        print(f"val loss {trainer.callback_metrics['val_loss'].item()!r}")


if __name__ == "__main__":
    main()
