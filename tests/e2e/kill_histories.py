"""Seeded histories of kills: a run of two ranks is killed at random steps and compared with one that was not.

Run as a script. It imports torch once and forks the ranks, so that an attempt takes about a second. Prints a JSON line
for each history, and exits with 1 if one of them differs from the undisturbed run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # which DDP imports: once here, and not in every rank
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distributed.checkpoint.restore.reading import load
from distributed.core.env import ATTEMPT, RUN_DIR
from distributed.core.run_dir import RunDir
from distributed.data.checks.ledger import check_ledgers, read_ledger
from distributed.trainers.trainer import Trainer

SAMPLES, EPOCHS, STEPS = 75, 3, 15  # five steps an epoch, the last one short


class Augmented(Dataset):
    """Samples with noise that a data loader worker draws."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator)
        return x + 0.1 * torch.randn(6), int(x[0] > 0)


def train(folder: Path, kill_at: int | None, workers: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    calls = 0

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(outputs, target)

    Trainer(
        model,
        loss_fn=loss,
        batch_size=4,
        epochs=EPOCHS,
        learning_rate=0.01,
        lr_schedule="cosine",
        warmup_steps=3,
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
        gradient_clipping=1.0,
        checkpoint_frequency="2 steps",
        checkpoint_dir=str(folder / "checkpoints"),
        keep_last=2,
        resume_from_checkpoint=True,
        sample_ledger=True,
        log_every_n_steps=3,
        progress=False,
    ).fit(DataLoader(Augmented(), shuffle=True, num_workers=workers))


def attempt(folder: Path, number: int, kills: dict[int, int], workers: int) -> bool:
    """Two forked ranks; `kills` says at which micro-batch which of them dies. True when both ended well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = {}
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()})
            os.environ.update({"MASTER_ADDR": "127.0.0.1", RUN_DIR: str(folder), ATTEMPT: str(number)})
            log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = 1
            try:
                train(folder, kills.get(rank), workers)
                code = 0
            except BaseException:  # noqa: BLE001 - the boundary of a forked process
                traceback.print_exc()
            finally:
                os._exit(code)
        children[pid] = rank
    good = True
    while children:
        pid, status = os.wait()
        children.pop(pid, None)
        if status and good:
            good = False
            time.sleep(0.05)  # the survivor may still be in its save
            for other in children:
                os.kill(other, signal.SIGKILL)
    return good


def outcome(folder: Path) -> dict[str, str]:
    """What the run came to: the bytes of its weights and optimizer, and who used which samples when."""
    shared = load(str(folder / "checkpoints" / f"step-{STEPS:06d}"), ranks=()).shared
    hashes = {}
    for part in ("model", "optimizer"):
        digest = hashlib.sha256()
        for value in _tensors(shared[part]):
            digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        hashes[part] = digest.hexdigest()
    entries = [
        [e.step, e.epoch, e.indices.tolist()] for r in range(2) for e in read_ledger(RunDir(folder).ledger.file(r))
    ]
    hashes["ledger"] = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    hashes["exactly once"] = str(check_ledgers(folder / "ledger", SAMPLES).is_exact)
    return hashes


def _tensors(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(child)


def history(folder: Path, seed: int) -> dict[str, object]:
    rng = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kills = 0
    for number in range(40):
        deaths = {rank: rng.randint(1, 2 * STEPS) for rank in rng.sample(range(2), rng.choice([1, 1, 2]))}
        if number >= 2:  # two micro-batches a step: two deaths fall anywhere in the run, the third attempt may live
            deaths = {}
        if attempt(folder, number, deaths, workers=seed % 2):
            return {"seed": seed, "kills": kills} | outcome(folder)
        kills += 1
    return {"seed": seed, "kills": kills, "failed": (folder / "rank-0.log").read_text()[-2000:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--histories", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    undisturbed = {}
    for workers in range(2):
        clean = arguments.folder / f"undisturbed-{workers}"
        clean.mkdir(parents=True)
        assert attempt(clean, 0, {}, workers), (clean / "rank-0.log").read_text()
        undisturbed[workers] = outcome(clean)
    bad = 0
    for seed in range(arguments.seed, arguments.seed + arguments.histories):
        result = history(arguments.folder / f"history-{seed}", seed)
        result["same"] = all(result.get(name) == value for name, value in undisturbed[seed % 2].items())
        bad += not result["same"]
        print(json.dumps(result), flush=True)
        if result["same"]:
            shutil.rmtree(arguments.folder / f"history-{seed}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
