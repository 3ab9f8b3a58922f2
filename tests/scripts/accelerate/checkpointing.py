"""Accelerate's `save_state` after every epoch or some steps, `--resume_from_checkpoint`, skipped first batches."""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpointing_steps", default="epoch", help="a number of steps, or 'epoch'")
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--output_dir", default="saved")
    parser.add_argument("--num_epochs", type=int, default=1)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(project_dir=args.output_dir))
    set_seed(7)
    x = torch.randn(96, 6)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.1), nn.ReLU(), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    step, first_epoch, skipped = 0, 0, 0
    if args.resume_from_checkpoint:
        accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)
        kind, number = os.path.basename(args.resume_from_checkpoint).split("_")
        step = int(number) if kind == "step" else (int(number) + 1) * len(loader)
        first_epoch, skipped = divmod(step, len(loader))
    for epoch in range(first_epoch, args.num_epochs):
        batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        skipped = 0
        for inputs, targets in batches:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            print(f"step {step} rank {accelerator.process_index} loss {loss.item()!r}", flush=True)
            if args.checkpointing_steps.isdigit() and step % int(args.checkpointing_steps) == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{step}"))
        if args.checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
