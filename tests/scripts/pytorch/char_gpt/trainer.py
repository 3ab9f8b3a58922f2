"""Training and evaluation epochs, snapshots, and clipped gradients."""

import io
import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainerConfig:
    max_epochs: int
    batch_size: int
    data_loader_workers: int
    grad_norm_clip: float
    snapshot_path: str
    save_every: int


@dataclass
class Snapshot:
    model_state: dict[str, torch.Tensor]
    optimizer_state: dict[str, Any]
    finished_epoch: int


class Trainer:
    def __init__(self, config, model, optimizer, train_dataset, test_dataset):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.train_loader = self._loader(train_dataset)
        self.test_loader = self._loader(test_dataset)
        self.epochs_run = 0
        self.model, self.optimizer = model, optimizer
        self._load_snapshot()
        self.model = DDP(self.model)

    def _loader(self, dataset):
        config = self.config
        workers = config.data_loader_workers
        return DataLoader(dataset, config.batch_size, num_workers=workers, sampler=DistributedSampler(dataset))

    def _load_snapshot(self):
        try:
            with open(self.config.snapshot_path, "rb") as file:
                snapshot = Snapshot(**torch.load(io.BytesIO(file.read()), map_location="cpu"))
        except FileNotFoundError:
            print("Snapshot not found. Training model from scratch")
            return
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch
        print(f"Resuming training from snapshot at epoch {self.epochs_run}")

    def _save_snapshot(self, epoch):
        snapshot = Snapshot(self.model.module.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(snapshot), self.config.snapshot_path)

    def _run_batch(self, source, targets, train):
        with torch.set_grad_enabled(train):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch, loader, train):
        loader.sampler.set_epoch(epoch)
        kind = "Train" if train else "Eval"
        for step, (source, targets) in enumerate(loader):
            loss = self._run_batch(source, targets, train)
            if step % 5 == 0:
                print(f"[RANK{self.global_rank}] Epoch {epoch} | Iter {step} | {kind} loss {loss:.9f}", flush=True)

    def train(self):
        for epoch in range(self.epochs_run + 1, self.config.max_epochs + 1):
            self._run_epoch(epoch, self.train_loader, train=True)
            if self.local_rank == 0 and epoch % self.config.save_every == 0:
                self._save_snapshot(epoch)
            self._run_epoch(epoch, self.test_loader, train=False)
