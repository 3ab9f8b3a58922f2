"""Blocks of characters of a text."""

from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

TEXT = "how many ships that left the harbour at dawn came home again before the rain began? " * 6


@dataclass
class DataConfig:
    block_size: int
    train_split: float


class CharDataset(Dataset):
    def __init__(self, config):
        chars = sorted(set(TEXT))
        self.number = {char: i for i, char in enumerate(chars)}
        self.block_size = config.block_size
        self.vocab_size = len(chars)

    def __len__(self):
        return len(TEXT) - self.block_size

    def __getitem__(self, index):
        ids = torch.tensor([self.number[char] for char in TEXT[index : index + self.block_size + 1]])
        return ids[:-1], ids[1:]
