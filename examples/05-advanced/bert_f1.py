"""Fine-tuning a BERT of `transformers`, and its F1 score over all ranks: exact, though it is no mean over samples.

    python bert_f1.py
    distributed train --script bert_f1.py --num-gpus 2 mixed_precision=bf16

A logged value is averaged by its weight. F1 is 2·TP / (2·TP + FP + FN), so it is the mean of the batches' scores,
weighted by their denominators. The model is a tiny one without pretrained weights, and the sentences are made up.
"""

import torch
from alongside import train_alongside
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from distributed import Task

WORDS, LENGTH = 40, 12


def make_model():
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # dropout differs from rank to rank
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **size, **quiet))


class FineTuning(Task):
    def training_step(self, model, batch):
        ids, mask, labels = batch
        found = model(input_ids=ids, attention_mask=mask, labels=labels)
        return {"loss": found.loss, "outputs": found.logits, "target": labels}

    def validation_step(self, model, batch):
        found = self.training_step(model, batch)
        said, is_so = found["outputs"].argmax(1) == 1, found["target"] == 1
        right, denominator = 2 * (said & is_so).sum(), said.sum() + is_so.sum()
        self.log("f1", right / denominator.clamp(min=1), weight=denominator)
        return found


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=5e-3)


def by_hand(batches):
    model = make_model().train()
    optimizer = make_optimizer(model.parameters())
    for ids, mask, labels in batches:
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def make_data(samples, seed):
    """Sentences of several lengths; to be found are those that have the word 7 before the word 9."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, WORDS, (samples, LENGTH), generator=generator)
    first, second = torch.rand(samples, LENGTH, generator=generator).topk(2).indices.unbind(1)
    rows = torch.arange(samples)
    ids[rows, first], ids[rows, second] = 7, 9
    mask = (torch.arange(LENGTH) <= torch.maximum(first, second)[:, None]).long()
    return TensorDataset(ids * mask, mask, (first < second).long())


train_alongside(
    "BERT",
    lambda: {"model": FineTuning(make_model(), optimizer=make_optimizer)},
    make_data(130, seed=1),
    by_hand,
    validation=make_data(50, seed=2),
    epochs=3,
)
