"""A PEFT adapter of low rank on a model that stays as it is, trained by the transformers Trainer."""

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
    )
    adapter = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=4, lora_alpha=16, lora_dropout=0.1, target_modules=["query", "value"]
    )
    model = get_peft_model(BertForSequenceClassification(config), adapter)
    model.print_trainable_parameters()
    ids = torch.randint(2, 40, (64, 10))
    data = [{"input_ids": row, "labels": int(row.float().mean() > 20)} for row in ids]
    args = TrainingArguments(
        output_dir="lora-out",
        per_device_train_batch_size=8,
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']} loss {entry['loss']}")
        model.save_pretrained("lora-adapter")


if __name__ == "__main__":
    main()
