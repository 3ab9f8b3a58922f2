"""A causal language model under the transformers Trainer, its settings in dataclasses or a file of JSON."""

import os
import sys
from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    n_embd: int = field(default=32, metadata={"help": "width of the model"})
    n_layer: int = field(default=2, metadata={"help": "number of blocks"})


@dataclass
class DataTrainingArguments:
    block_size: int = field(default=16, metadata={"help": "tokens of one sample"})
    max_train_samples: int | None = field(default=None, metadata={"help": "use only so many samples"})


class Blocks(Dataset):
    def __init__(self, count, block_size, seed):
        random = torch.Generator().manual_seed(seed)
        starts = torch.randint(30, (count, 1), generator=random)
        self.ids = (starts + torch.arange(block_size) * (1 + starts % 3)) % 32

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']}", flush=True)


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    shape = {"n_embd": model_args.n_embd, "n_layer": model_args.n_layer, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=32, bos_token_id=0, eos_token_id=0, **shape))
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=Blocks(data_args.max_train_samples or 96, data_args.block_size, 1),
        eval_dataset=Blocks(30, data_args.block_size, 2),
        data_collator=default_data_collator,
        callbacks=[PrintLoss()],
    )
    if training_args.do_train:
        trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        if trainer.is_world_process_zero():
            print(f"eval loss {metrics['eval_loss']!r}", flush=True)


if __name__ == "__main__":
    main()
