"""ZeRO-3 with its state elsewhere: what each rank holds on its device, in host memory and in files.

    python zero_offload.py                              on the device, then in host memory
    python zero_offload.py --offload-dir /mnt/nvme      ... and in files there

DeepSpeed writes files of 1 MiB or more, and keeps what is smaller in memory: so this model is larger than those of the
other scripts. Files need DeepSpeed's op for asynchronous reads and writes, which is compiled when it is first used. It
takes a C++ compiler, libaio and some minutes; ahead of a run:

    python -m distributed.engines.deepspeed.ops
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from language import load_text, make_model, next_byte_loss

from distributed import Trainer

parser = argparse.ArgumentParser(description="Train with the state in different places, and count its bytes.")
parser.add_argument("--num-gpus", type=int, default=2, help="devices; CPU processes where there is no CUDA")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--width", type=int, default=512, help="of the model")
parser.add_argument("--batch-size", type=int, default=4, help="of a device")
parser.add_argument("--offload-dir", help="a folder on a fast local disk, for files")
arguments = parser.parse_args()


class Report:
    """The loss, and before the second step a line about what this rank holds while it computes."""

    def __init__(self, folder):
        self.folder, self.calls = folder, 0

    def make_optimizer(self, parameters):
        """An ordinary AdamW over the whole parameters. DeepSpeed gives it flat parts of them in fp32 to step."""
        self.parameters = list(parameters)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=2e-3)
        return self.optimizer

    def __call__(self, logits, target):
        self.calls += 1
        if self.calls == 2:
            shares = [p.ds_tensor for p in self.parameters]  # this rank's part of each
            masters = list(self.optimizer.state)  # what it steps: flat parts of many parameters
            states = [value for state in self.optimizer.state.values() for value in state.values()]
            files = sum(file.stat().st_size for file in Path(self.folder).rglob("*") if file.is_file())
            print(
                f"parameters: {held(shares)}; masters in fp32 and AdamW's moments: {held(masters + states)}"
                f"; files of all ranks: {files:,} bytes",
                flush=True,
            )
        return next_byte_loss(logits, target)


def held(tensors):
    """Bytes by the kind of memory, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t for t in tensors if isinstance(t, torch.Tensor)}
    places = Counter()
    for tensor in storages.values():
        places[tensor.device.type] += tensor.untyped_storage().nbytes()
    return " and ".join(f"{count:,} bytes on {place}" for place, count in sorted(places.items()))


def train(where, **offload):
    with tempfile.TemporaryDirectory(dir=arguments.offload_dir) as folder:
        if "nvme" in offload.values():
            offload["offload_dir"] = folder
        report = Report(folder)
        trainer = Trainer(
            make_model(width=arguments.width),
            backend="deepspeed",
            zero_stage=3,
            mixed_precision="bf16",
            deepspeed_config={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
            num_gpus=arguments.num_gpus,
            batch_size=arguments.batch_size,
            max_steps=arguments.steps,
            loss_fn=report,
            loss_weighting="samples",  # every sample has as many bytes; a loss that counts its calls is not tried out
            optimizer=report.make_optimizer,
            progress=False,
            **offload,
        )
        print(f"{where}:", flush=True)
        begun = time.monotonic()
        history = trainer.fit(train_set)
        took = time.monotonic() - begun
        print(
            f"  loss {history['loss'][-1]:.6f} after {history.steps} steps, {took:.1f} s with the start\n", flush=True
        )


train_set, _ = load_text(arguments.batch_size * arguments.num_gpus * arguments.steps)
train("on the device")
train("in host memory", offload_optimizer="cpu", offload_parameters="cpu")
if arguments.offload_dir:
    train("in files", offload_optimizer="nvme", offload_parameters="nvme")
