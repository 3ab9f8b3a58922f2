"""Tiny transformers models, their data and arguments, for tests of the adapter."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch.utils.data import Dataset

VOCABULARY, LENGTH = 64, 10


class Rows(Dataset[Any]):
    """Sequences with a class each, or with their own tokens as labels, some of which do not count."""

    def __init__(self, count: int, *, tokens: bool = False, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, VOCABULARY, (count, LENGTH), generator=generator)
        self.labels = self.ids.sum(1) % 3
        if tokens:
            self.labels = self.ids.clone()
            self.labels[torch.arange(LENGTH) >= 4 + self.ids[:, :1] % 6] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.labels[index], "text": "of no use"}


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


def gpt() -> Any:
    """`loss_type` is what transformers counts the targets of a batch by: without it, one too many a sequence."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def arguments(folder: Any, **given: Any) -> transformers.TrainingArguments:
    defaults = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return transformers.TrainingArguments(str(folder), **(defaults | given))


def measure(found: transformers.EvalPrediction) -> dict[str, float]:
    hits = found.predictions.argmax(-1) == found.label_ids
    return {
        "hits": float(hits.mean()),
        "first": float(found.predictions[0, 0]),
        "last": float(found.predictions[-1, 0]),
    }
