"""A character model of several files beside the script, configured by a file of YAML and the command line."""

import sys

import torch
import yaml
from char_dataset import CharDataset, DataConfig
from model import GPT, GPTConfig, create_optimizer
from torch.distributed import destroy_process_group, init_process_group
from torch.utils.data import random_split
from trainer import Trainer, TrainerConfig


def configuration():
    with open("config.yaml") as file:
        config = yaml.safe_load(file)
    for word in sys.argv[1:]:  # trainer.max_epochs=2
        place, _, value = word.partition("=")
        section, key = place.split(".")
        config[section][key] = yaml.safe_load(value)
    return config


def main():
    config = configuration()
    init_process_group(backend="gloo")
    torch.manual_seed(1)
    dataset = CharDataset(DataConfig(**config["data"]))
    train_len = int(len(dataset) * config["data"]["train_split"])
    train_set, test_set = random_split(dataset, [train_len, len(dataset) - train_len])
    shape = GPTConfig(**config["model"], vocab_size=dataset.vocab_size, block_size=dataset.block_size)
    model = GPT(shape)
    optimizer = create_optimizer(model, **config["optimizer"])
    Trainer(TrainerConfig(**config["trainer"]), model, optimizer, train_set, test_set).train()
    destroy_process_group()


if __name__ == "__main__":
    main()
