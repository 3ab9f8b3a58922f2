"""A classifier of handwritten digits, trained, measured and predicted: what the servers beside this file serve.

python train.py --out served
distributed train --script train.py --num-gpus 2 -- --out served
"""

from __future__ import annotations

import argparse

import torch
from sklearn import datasets
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer, whole_set


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set of the 1,797 images in scikit-learn; every fifth is for the test."""
    bunch = datasets.load_digits()
    images, labels = torch.from_numpy((bunch.data.astype("float32") - 8) / 8), torch.from_numpy(bunch.target).long()
    is_test = torch.arange(len(labels)) % 5 == 4
    return TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(images[is_test], labels[is_test])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))


@whole_set
def auc(outputs: torch.Tensor, target: torch.Tensor) -> float:
    return float(roc_auc_score(target, outputs.softmax(1), multi_class="ovr"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="served", help="a folder for the program and the predictions")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    train, test = load_digits()
    trainer = Trainer(
        make_model(),
        loss_fn=nn.CrossEntropyLoss(),
        metrics={"auc": auc},
        batch_size=32,
        epochs=args.epochs,
        val_check_interval=0.5,  # twice an epoch
        checkpoint_frequency="1 validation",
        keep_best="val_loss",
    )
    trainer.fit(DataLoader(train, shuffle=True), test)
    trainer.load_checkpoint("best")
    metrics = trainer.test(test)
    predictions = trainer.predict(test, to=f"{args.out}/predictions")
    trainer.export(f"{args.out}/digits.pt2", next(iter(DataLoader(test, batch_size=2))))
    if trainer.is_main:
        print(f"test accuracy {metrics['test_accuracy']:.4f}, AUC {metrics['test_auc']:.4f}, {len(predictions)} rows")


if __name__ == "__main__":
    main()
