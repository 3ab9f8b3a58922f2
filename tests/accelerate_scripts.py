"""Scripts in the shape of Accelerate's own examples, as functions of the Accelerator that they use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, EVALUATED = 48, 21  # of two ranks, one has a batch more of the latter


def dataset(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def get_dataloaders(accelerator: Any, batch_size: int) -> tuple[Any, Any]:
    with accelerator.main_process_first():
        train, evaluated = dataset(SAMPLES, 1), dataset(EVALUATED, 2)
    return DataLoader(train, batch_size=batch_size), DataLoader(evaluated, batch_size=batch_size)


def evaluate(accelerator: Any, model: nn.Module, loader: Any) -> tuple[int, int]:
    """Hits, and samples that they were counted over."""
    model.eval()
    hits, count = 0, 0
    for inputs, labels in loader:
        with torch.no_grad():
            outputs = model(inputs)
        predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), labels))
        hits, count = hits + int((predictions == references).sum()), count + len(references)
    return hits, count


def accumulate(make: Any, folder: str, batch_size: int) -> dict[str, Any]:
    """gradient_accumulation.py and multi_process_metrics.py, with a scheduler and clipped gradients."""
    accelerator = make(gradient_accumulation_steps=2)
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model = make_model().to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.05)
    lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3 * len(train_dataloader) // 2)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    metrics, norms = [], []
    for _ in range(3):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch[0]), batch[1])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        metrics.append(evaluate(accelerator, model, eval_dataloader))
    accelerator.end_training()
    lengths = len(train_dataloader), accelerator.num_processes
    rates = [float(lr_scheduler.get_last_lr()[0]), optimizer.param_groups[0]["lr"]]
    return {"weights": weights(model), "metrics": metrics, "norms": norms, "rates": rates, "lengths": lengths}


def stop_early(make: Any, folder: str, batch_size: int) -> dict[str, Any]:
    """early_stopping.py and tracking of numbers: two calls of prepare, a trigger of one rank, gathered losses."""
    accelerator = make()
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model = accelerator.prepare(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    optimizer, train_dataloader, eval_dataloader = accelerator.prepare(optimizer, train_dataloader, eval_dataloader)
    lr_scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step))
    accelerator.wait_for_everyone()
    total, steps, metrics = 0.0, 0, []
    for _ in range(5):
        model.train()
        for inputs, labels in train_dataloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            total += float(accelerator.reduce(loss.detach(), reduction="mean"))
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            steps += 1
            if steps == 2:
                metrics.append(evaluate(accelerator, model, eval_dataloader))
                model.train()
            if accelerator.is_last_process and float(accelerator.device.type == "cpu") and steps == 16:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
        metrics.append(evaluate(accelerator, model, eval_dataloader))
        if steps >= 16:
            break
    row = torch.full((1, 2 + accelerator.process_index), 1.0 + accelerator.process_index, device=accelerator.device)
    padded = accelerator.gather(accelerator.pad_across_processes(row, dim=1))
    state = accelerator.unwrap_model(model).state_dict()
    accelerator.save(state, Path(folder, "weights.pt"))
    accelerator.wait_for_everyone()
    accelerator.end_training()
    saved = torch.load(Path(folder, "weights.pt"))
    assert all(torch.equal(state[name], saved[name]) for name in state)
    found = {"weights": weights(model), "metrics": metrics, "total": total, "steps": steps}
    return found | {"padded": padded.sum().item(), "objects": accelerator.is_main_process or None}


class Seen:
    """An object of the script's own that is saved with its state."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def checkpoint(make: Any, folder: str, batch_size: int, resume: str | None = None) -> dict[str, Any]:
    """checkpointing.py: saves with each 4th batch and each epoch, and resumes in an epoch, or after one."""
    accelerator = make(gradient_accumulation_steps=2)
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model, seen = make_model(), Seen()
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.05)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    steps = len(train_dataloader)
    lr_scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 9 / steps))
    accelerator.register_for_checkpointing(seen)
    starting_epoch, overall_step, resume_step = 0, 0, None
    if resume is not None:
        accelerator.load_state(str(Path(folder, resume)))
        kind, _, number = resume.partition("_")
        if kind == "epoch":
            starting_epoch = int(number) + 1
        else:
            resume_step = int(number)
            starting_epoch = resume_step // len(train_dataloader)
            resume_step -= starting_epoch * len(train_dataloader)
    metrics: list[tuple[int, int]] = []
    for epoch in range(starting_epoch, 3):
        model.train()
        active = train_dataloader
        if epoch == starting_epoch and resume_step is not None:
            active = accelerator.skip_first_batches(train_dataloader, resume_step)
            overall_step += starting_epoch * len(train_dataloader) + resume_step
        for batch in active:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(batch[0]), batch[1]))
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            overall_step += 1
            seen.batches += 1
            if overall_step % 4 == 0:
                accelerator.save_state(str(Path(folder, f"step_{overall_step}")))
        metrics.append(evaluate(accelerator, model, eval_dataloader))
        accelerator.save_state(str(Path(folder, f"epoch_{epoch}")))
    accelerator.end_training()
    return {"weights": weights(model), "metrics": metrics[-1:], "seen": seen.batches}


SCRIPTS = {"accumulate": accumulate, "stop_early": stop_early, "checkpoint": checkpoint}
