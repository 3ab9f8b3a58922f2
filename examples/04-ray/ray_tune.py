"""Search with Ray Tune: each trial builds its model from the parameters and trains it with RayTrainer.

    python ray_tune.py
    python ray_tune.py --num-samples 20 --address auto

A trial's ranks take what the trial has booked (`resources_per_trial`), and Tune hears of every epoch, so its schedulers
can end a trial early. `lr` is the setting learning_rate; `hidden_size` is no setting, and the model's own.
"""

import argparse
import logging
from pathlib import Path

import ray
from digits import load_digits, make_model
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch.utils.data import DataLoader

from distributed import RayTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--num-samples", type=int, default=4, help="trials")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--address", default="local", help="of a Ray cluster; by default one of this machine, for this")


def train_fn(config):
    train_set, test_set = load_digits()
    trainer = RayTrainer(make_model(config["hidden_size"]), config, progress=False)
    trainer.fit(DataLoader(train_set, shuffle=True), DataLoader(test_set, batch_size=128))
    return {"val_accuracy": trainer.best_accuracy}


def rounded(config):
    return config | {"lr": float(f"{config['lr']:.2g}")}


def main():
    arguments = parser.parse_args()
    ray.init(address=arguments.address, log_to_driver=False, logging_level=logging.ERROR)
    analysis = tune.run(
        train_fn,
        config={
            "hidden_size": tune.choice([32, 64, 128]),
            "lr": tune.loguniform(1e-4, 1e-2),
            "batch_size": tune.choice([32, 64]),
            "epochs": arguments.epochs,
        },
        num_samples=arguments.num_samples,
        scheduler=ASHAScheduler(metric="val_accuracy", mode="max", grace_period=1, reduction_factor=2),
        resources_per_trial={"cpu": 1},  # {"gpu": 1} where there are some
        storage_path=str(Path("runs", "tune").absolute()),
        verbose=0,
    )
    for trial in analysis.trials:
        accuracy, epochs = trial.last_result["val_accuracy"], trial.last_result["training_iteration"]
        print(f"{trial.trial_id}  val_accuracy {accuracy:.3f}  reports {epochs}  {rounded(trial.config)}")
    print(f"best config: {rounded(analysis.get_best_config(metric='val_accuracy', mode='max'))}")


if __name__ == "__main__":
    main()
