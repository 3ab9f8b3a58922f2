"""A template for real runs: copy it, and put your own data and model where it says so.

It shows, each in one place: settings in one object, warm-up and cosine decay, mixed precision, gradient clipping and
accumulation, checkpoints and resuming, TensorBoard, MLflow, a metric of one's own, and seeds.

    python ddp_training.py --num-gpus 2 --run-dir runs/first
    python ddp_training.py --num-gpus 2 --run-dir runs/first --epochs 12 --resume        continues where that one ended
    distributed train --script ddp_training.py --num-gpus 2 epochs=3 -- --batch-size 16  settings of one run, by name
"""

import argparse

import torch
import torch.distributed as dist
from digits import load_digits
from torch import nn
from torch.utils.data import DataLoader

from distributed import DistributedConfig, PyTorchDDPTrainer


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-gpus", type=int, help="devices; CPU processes where there is no CUDA")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="samples a device and micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches an optimizer step")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--mixed-precision", choices=["off", "auto", "bf16", "fp16"], default="off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="data loader processes a rank")
    parser.add_argument("--data-dir", help="folder with MNIST's files; by default scikit-learn's small digits")
    parser.add_argument("--run-dir", help="where the run writes; by default runs/<time>")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint in --run-dir")
    parser.add_argument("--mlflow", metavar="EXPERIMENT", help="log to this MLflow experiment")
    arguments = parser.parse_args()
    if arguments.resume and not arguments.run_dir:
        parser.error("--resume needs the --run-dir of the run to resume")
    return arguments


def make_config(arguments):
    """All settings in one object: wrong ones are reported together, before anything starts."""
    return DistributedConfig(
        num_gpus=arguments.num_gpus,
        seed=arguments.seed,
        epochs=arguments.epochs,
        gradient_accumulation_steps=arguments.accumulate,
        gradient_clipping=1.0,
        mixed_precision={"off": False, "auto": True}.get(arguments.mixed_precision, arguments.mixed_precision),
        optimizer="adamw",
        weight_decay=0.01,
        # The rate at the peak. It is for the global batch that is used here: nothing scales it silently. To keep a rate
        # that was tuned for another batch, set lr_scaling="linear" (or "sqrt") and base_batch_size.
        learning_rate=arguments.learning_rate,
        lr_schedule="cosine",
        warmup_epochs=1,
        min_lr_ratio=0.01,
        run_dir=arguments.run_dir,
        checkpoint_frequency=2,
        resume_from_checkpoint=arguments.resume,
        tensorboard=True,
        mlflow_experiment=arguments.mlflow,
        log_every_n_steps=5,
    )


class Classifier(nn.Module):
    """Your model. BatchNorm is used as in any model: over several ranks its statistics are those of the whole batch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, images):
        return self.layers(images)


def top3_accuracy(outputs, target):
    """A metric of one's own: a value for each sample, so that it is exact over ranks and batches of any size."""
    return (outputs.topk(3).indices == target.unsqueeze(1)).any(1).float()


def main():
    arguments = parse_arguments()
    config = make_config(arguments)
    torch.manual_seed(arguments.seed)  # the weights are drawn here, before the trainer seeds the ranks
    train_set, test_set = load_digits(arguments.data_dir)  # your data

    # An ordinary DataLoader. Its dataset, collate function and workers are used; each rank takes its share.
    loader = DataLoader(train_set, arguments.batch_size, shuffle=True, num_workers=arguments.workers, pin_memory=True)
    trainer = PyTorchDDPTrainer(
        Classifier(),
        config,
        loss_fn=nn.CrossEntropyLoss(label_smoothing=0.05),
        metrics={"top3": top3_accuracy},
    )
    history = trainer.fit(loader, DataLoader(test_set, batch_size=256))

    if dist.is_initialized() and dist.get_rank() > 0:
        return  # in a launcher's world every rank comes here
    for record in history.epochs:
        values = "  ".join(f"{name} {value:.4f}" for name, value in sorted(record.metrics.items()))
        print(f"epoch {record.epoch + 1}: {record.steps} steps  {values}")
    print(f"best accuracy {history.best_accuracy:.4f}; {history.throughput:,.0f} samples/s; {history.run_dir}")
    torch.save(trainer.model.state_dict(), f"{history.run_dir}/classifier.pt")  # an ordinary state_dict


main()
