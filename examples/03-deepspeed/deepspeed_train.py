"""Train with DeepSpeed's ZeRO, from a DeepSpeed configuration, under any launcher.

    python deepspeed_train.py --num-gpus 2                                         the script starts the ranks itself
    python deepspeed_train.py --num-gpus 2 --deepspeed_config configs/zero3_config.json
    distributed train --script deepspeed_train.py --num-gpus 2 --deepspeed-config configs/zero1_config.json
    torchrun --nproc-per-node 2 deepspeed_train.py
    deepspeed --num_gpus=2 deepspeed_train.py --deepspeed_config configs/zero2_config.json

What stands in the configuration counts as set here: batch, precision, clipping, optimizer, stage. Anything else is a
setting of this library, by name; one that says otherwise than the configuration is an error.
"""

import argparse
from pathlib import Path

import torch.distributed as dist
from language import load_text, make_model, next_byte_loss

from distributed import DistributedConfig, PyTorchDDPTrainer

CONFIGS = Path(__file__).parent / "configs"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--deepspeed_config", "--deepspeed-config", metavar="FILE", default=str(CONFIGS / "zero2_config.json")
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    parser.add_argument("--num-gpus", type=int, help="devices; CPU processes where there is no CUDA")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=3200)
    parser.add_argument("--run-dir", help="where the run writes; by default runs/<time>")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint in --run-dir")
    arguments = parser.parse_args()
    if arguments.resume and not arguments.run_dir:
        parser.error("--resume needs the --run-dir of the run to resume")
    return arguments


def main():
    arguments = parse_arguments()
    config = DistributedConfig(
        deepspeed_config=arguments.deepspeed_config,  # a path, a dict, or a deepspeed.DeepSpeedConfig
        num_gpus=arguments.num_gpus,
        epochs=arguments.epochs,
        run_dir=arguments.run_dir,
        checkpoint_frequency=1,
        resume_from_checkpoint=arguments.resume,
        log_every_n_steps=25,
    )
    train_set, test_set = load_text(arguments.samples)
    trainer = PyTorchDDPTrainer(make_model(), config, loss_fn=next_byte_loss)
    history = trainer.fit(train_set, test_set)

    if dist.is_initialized() and dist.get_rank() > 0:
        return  # in a launcher's world every rank comes here
    losses = " to ".join(f"{loss:.3f}" for loss in (history["val_loss"][0], history["val_loss"][-1]))
    print(f"loss on other text {losses} in {history.steps} steps; the whole model is in {history.checkpoint}")
    print(f"python {Path(__file__).with_name('deepspeed_inference.py').name} {history.checkpoint}")


main()
