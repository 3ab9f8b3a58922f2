"""How well training scales: the same work a process, on 1, 2, 4 … N of them, and what each gets done.

    python ddp_benchmark.py                           as many processes as there are GPUs, or CPU cores
    python ddp_benchmark.py --processes 1 2 3 4

Every process has the same batch (weak scaling), and on a CPU the same number of threads however many processes there
are, so that an efficiency below 1 is what synchronization and shared memory cost. `distributed bench scaling` does the
same for the library itself, with more care.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

parser = argparse.ArgumentParser(description="Measure the scaling efficiency of a training.")
parser.add_argument("--processes", type=int, nargs="+", help="numbers of processes; by default 1, 2, 4 … up to all")
parser.add_argument("--batch-size", type=int, default=256, help="samples a process and step")
parser.add_argument("--steps", type=int, default=20, help="optimizer steps of one measurement")
parser.add_argument("--repeats", type=int, default=3, help="measurements; the median counts")
parser.add_argument("--width", type=int, default=256, help="of the model's hidden layers")
parser.add_argument("--threads", type=int, default=1, help="CPU threads a process")
parser.add_argument("--json", metavar="FILE", help="write the result there too")
arguments = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # read by torch when it is imported, here and in the ranks

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from distributed import PyTorchDDPTrainer  # noqa: E402


def doubling(most: int) -> list[int]:
    """
    >>> doubling(6)
    [1, 2, 4, 6]
    """
    return sorted({most} | {2**power for power in range(most.bit_length()) if 2**power <= most})


def samples_per_second(processes: int, run_dir: str) -> float:
    """The median over the epochs after the first, which warms up. An epoch is one measurement of `--steps` steps."""
    width = arguments.width
    hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(nn.Linear(784, width), nn.ReLU(), *hidden, nn.Linear(width, 10))
    samples = arguments.steps * arguments.batch_size * processes
    data = TensorDataset(torch.randn(samples, 784), torch.randint(0, 10, (samples,)))
    trainer = PyTorchDDPTrainer(
        model,
        num_gpus=processes,
        epochs=arguments.repeats + 1,
        log_every_n_steps=arguments.steps,
        progress=False,
        run_dir=run_dir,
    )
    history = trainer.fit(DataLoader(data, arguments.batch_size, shuffle=True))
    rates = sorted(record.samples_per_second for record in history.epochs[1:])
    return rates[len(rates) // 2]


counts = arguments.processes or doubling(torch.cuda.device_count() or len(os.sched_getaffinity(0)))
rows = []
print(f"{'processes':>9}  {'samples/s':>10}  {'speedup':>7}  {'efficiency':>10}", flush=True)
with tempfile.TemporaryDirectory() as scratch:
    for count in counts:
        rate = samples_per_second(count, f"{scratch}/{count}")
        first = rows[0] if rows else {"processes": count, "samples_per_second": rate}
        speedup = rate / first["samples_per_second"]
        efficiency = speedup * first["processes"] / count
        rows.append({"processes": count, "samples_per_second": rate, "speedup": speedup, "efficiency": efficiency})
        print(f"{count:9}  {rate:10,.0f}  {speedup:7.2f}  {efficiency:10.2f}", flush=True)
if arguments.json:
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "processes")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    facts = {"torch": torch.__version__, "device": device, "cores": len(os.sched_getaffinity(0))}
    Path(arguments.json).write_text(json.dumps(settings | facts | {"rows": rows}, indent=2) + "\n")
