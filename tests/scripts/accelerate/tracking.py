"""Accelerate's trackers: TensorBoard and a tracker of the user's own, and a metric gathered over the ranks."""

import json

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class JsonTracker(GeneralTracker):
    name = "json"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, path):
        super().__init__()
        self.file = open(path, "w")

    @property
    def tracker(self):
        return self.file

    @on_main_process
    def store_init_configuration(self, values):
        self.file.write(json.dumps(values) + "\n")

    @on_main_process
    def log(self, values, step):
        self.file.write(json.dumps(values | {"step": step}) + "\n")


def main():
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", JsonTracker("tracked.jsonl")], project_dir="logs")
    set_seed(5)
    x = torch.randn(84, 6)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    model = nn.Linear(6, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loaders = [DataLoader(data, batch_size=8, shuffle=shuffle) for shuffle in (True, False)]
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, *loaders)
    accelerator.init_trackers("tracking_example", config={"lr": 0.05, "batch_size": 8})
    for epoch in range(2):
        model.train()
        total = 0.0
        for inputs, targets in train_loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            total += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        predicted, expected = [], []
        for inputs, targets in eval_loader:
            with torch.no_grad():
                found = model(inputs).argmax(1)
            found, targets = accelerator.gather_for_metrics((found, targets))
            predicted.append(found)
            expected.append(targets)
        right = torch.cat(predicted) == torch.cat(expected)
        assert len(right) == len(data), "gather_for_metrics drops what was repeated"
        values = {"accuracy": right.float().mean().item(), "train_loss": total.item() / len(train_loader)}
        accelerator.log(values, step=epoch)
        accelerator.print(f"epoch {epoch} accuracy {values['accuracy']} loss {values['train_loss']!r}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
