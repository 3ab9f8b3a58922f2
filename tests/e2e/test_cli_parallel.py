"""Meshes on the command line: its options are the settings, and what cannot be is refused before anything starts."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import clean_environ, cli

SHOWS_CONFIG = """
import torch
from torch.utils.data import TensorDataset
from distributed import Trainer
from distributed.trainers import trainer

class Seen(Exception):
    pass

def look(request):
    raise Seen(" ".join(f"{name}={value!r}" for name, value in request.config.given_values().items()))

trainer.fit_alone = look
Trainer(torch.nn.Linear(2, 2), batch_size=2).fit(TensorDataset(torch.zeros(4, 2), torch.zeros(4, 2)))
"""


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        (
            ["--num-gpus", "6", "--tensor-parallel", "4"],
            ["6 ranks", "tensor_parallel=4", "num_gpus=4 or num_gpus=8", "tensor_parallel=3 or tensor_parallel=6"],
        ),
        (["--num-gpus", "8", "--sharding", "hybrid", "shard_groups=3"], ["3 groups of 8", "one of 2, 4"]),
        (["--num-gpus", "8", "--sharding", "hybrid"], ["1 group of 8", "sharding='full'", "one of 2, 4"]),
        (["--num-gpus", "8", "--sharding", "grad_op", "--zero-stage", "3"], ["'grad_op'", "zero_stage=3", "keep one"]),
        (["--num-gpus", "4", "sequence_parallel=true"], ["sequence_parallel", "no effect", "tensor_parallel=2"]),
        (["--num-gpus", "4", "--cpu-offload"], ["cpu_offload", "no effect", "backend='fsdp'"]),
        (
            ["--num-gpus", "4", "--tensor-parallel", "2", "--zero-stage", "1", "--lora", "8", "reproducible=bitwise"],
            ["reproducible='bitwise' with lora, tensor_parallel, sharding (optimizer)", "reproducible='off'"],
        ),
        (["--sharding", "ful"], ["sharding='ful' (command line)", "'hybrid'"]),
        (["--zero-stage", "4"], ["zero_stage=4 (command line)"]),
        (["--context-parallel", "0"], ["context_parallel=0 (command line)"]),
        (["--activation-checkpointing", "often"], ["activation_checkpointing='often'", "selective"]),
        (["--tensor-parallel", "2", "tensor_parallel=2"], ["tensor_parallel", "twice"]),
    ],
)
def test_impossible_mesh_settings_are_refused_before_start(unstarted, arguments, hints):
    done = cli(unstarted, "train", "--script", "train.py", *arguments)
    assert done.returncode == 2
    for hint in hints:
        assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(entry.name for entry in unstarted.iterdir()) == ["train.py"]


def test_all_mesh_problems_are_reported_at_once(unstarted):
    wrong = ["--num-gpus", "6", "--tensor-parallel", "4", "--zero-stage", "1", "--sharding", "full"]
    done = cli(unstarted, "train", "--script", "tran.py", *wrong, "pipeline_schedule=gpipe", "lora={rnk: 2}")
    assert done.returncode == 2
    for hint in ("tran.py", "6 ranks", "zero_stage=1", "pipeline_schedule", "'rnk'"):
        assert hint in done.stderr


def test_parallel_options_set_settings_of_the_same_names(unstarted):
    (unstarted / "train.py").write_text(SHOWS_CONFIG)
    options = {
        "backend": "fsdp",
        "sharding": "full",
        "zero-stage": "3",
        "tensor-parallel": "1",
        "pipeline-parallel": "1",
        "context-parallel": "1",
        "activation-checkpointing": "2",
        "lora": "4",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    shown = cli(unstarted, "train", "--script", "train.py", "--dry-run", "--cpu-offload", *words)
    assert shown.returncode == 0, shown.stderr
    overrides = re.search(r"DISTRIBUTED_OVERRIDES='([^']*)'", shown.stdout)
    assert overrides
    script = subprocess.run(
        [sys.executable, "train.py"],
        cwd=unstarted,
        env=clean_environ(DISTRIBUTED_OVERRIDES=overrides.group(1)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    for given in ("backend='fsdp'", "sharding='full'", "zero_stage=3", "activation_checkpointing=2", "lora=4"):
        assert given in script.stderr
    assert "cpu_offload=True" in script.stderr


def test_dry_run_shows_mesh_with_its_reason(unstarted):
    done = cli(unstarted, "train", "--script", "train.py", "--dry-run", "--num-gpus", "8", "--tensor-parallel", "2")
    assert done.returncode == 0, done.stderr
    assert "mesh dp_replicate=4 × tp=2: 4 replicas of the model, 2 ranks for each layer" in done.stdout


def test_train_help_lists_the_engines(unstarted):
    text = " ".join(cli(unstarted, "train", "--help", COLUMNS="200").stdout.split())
    assert "auto, pytorch-ddp, fsdp" in text
    assert "KEY=VALUE" in text
    assert "--dry-run [=N]" in text
