"""A small GPT learns to write like Python's help texts, fully sharded. Every option here is a setting of the library.

    python fsdp_transformer.py --num-gpus 2
    python fsdp_transformer.py --num-gpus 4 --sharding hybrid --mixed-precision bf16 --recompute selective
    distributed train --script fsdp_transformer.py --num-gpus 2 activation_checkpointing=true max_steps=100

On two CPU processes it takes less than a minute, and the loss falls from 5.8 to about 2.4.
"""

import argparse

import torch
import torch.distributed as dist
from gpt import GPT, load_text, next_byte_loss, sample_text
from torch.utils.data import DataLoader

from distributed import DistributedConfig, Trainer
from distributed.checkpoint.restore.reading import load


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-gpus", type=int, help="devices; CPU processes where there is no CUDA")
    parser.add_argument("--sharding", choices=["full", "grad_op", "hybrid"], default="full")
    parser.add_argument("--mixed-precision", choices=["off", "auto", "bf16", "fp16"], default="off")
    parser.add_argument("--recompute", choices=["off", "full", "selective"], default="off", help="blocks in backward")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="samples of 64 bytes a device and step")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--run-dir", help="where the run writes; by default runs/<time>")
    return parser.parse_args()


def make_config(arguments):
    return DistributedConfig(
        backend="fsdp",
        num_gpus=arguments.num_gpus,
        # full: parameters, gradients and optimizer state are sharded; grad_op: parameters only between steps;
        # hybrid: full within a group, with a copy of the model in each. See sharding_strategies.md.
        sharding=arguments.sharding,
        shard_groups=2 if arguments.sharding == "hybrid" else None,  # by default one a node, and this is one node
        # The blocks of a model are found; wrap_blocks=["Block"] would name them.
        activation_checkpointing=False if arguments.recompute == "off" else arguments.recompute,
        mixed_precision={"off": False, "auto": True}.get(arguments.mixed_precision, arguments.mixed_precision),
        batch_size=arguments.batch_size,
        max_steps=arguments.steps,
        learning_rate=4e-3,
        lr_schedule="cosine",
        warmup_steps=arguments.steps // 10,
        gradient_clipping=1.0,  # by the norm of the whole gradient, of which every rank has a part
        log_every_n_steps=20,
        run_dir=arguments.run_dir,
    )


def main():
    arguments = parse_arguments()
    size = {"width": arguments.width, "blocks": arguments.blocks}
    with torch.device("meta"):  # so that a model may be larger than the memory of any rank
        model = GPT(**size)
    train_set, test_set = load_text()
    trainer = Trainer(model, make_config(arguments), loss_fn=next_byte_loss)
    history = trainer.fit(DataLoader(train_set, shuffle=True), DataLoader(test_set, batch_size=64))

    if dist.is_initialized() and dist.get_rank() > 0:
        return  # in a launcher's world every rank comes here
    print(f"loss {history['val_loss'][-1]:.3f} on text that it has not seen, {history.throughput:,.0f} samples/s")
    if arguments.steps >= 100:
        print(sample_text(whole_model(history.checkpoint, size), "The ", 300))


def whole_model(checkpoint, size):
    """A checkpoint holds whole tensors, whatever the ranks held."""
    model = GPT(**size)
    model.load_state_dict(load(checkpoint, ranks=()).shared["model"])
    return model


main()
