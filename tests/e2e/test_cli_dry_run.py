"""`--dry-run=N`: rank 0 of N ranks plans, cuts and steps in one process that has neither devices nor memory for it."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from distributed import Trainer
from distributed.core.errors import ConfigError, PlanError
from distributed.data.source import read_source
from distributed.trainers.dry_run import DryRun, dry_run
from distributed.trainers.fitting import FitRequest
from tests.conftest import clean_environ, cli
from tests.meshes import LENGTH, make_data, make_model

LLAMA = """
import resource
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from distributed import Trainer

shape = LlamaConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    intermediate_size=14336, vocab_size=128256,
)
with torch.device("meta"):
    model = LlamaForCausalLM(shape)

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        ids = torch.zeros(64, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

trainer = Trainer(model, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4), batch_size=1, gradient_clipping=1.0)
try:
    trainer.fit(Tokens())
finally:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
raise AssertionError("the script went on")
"""
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
ELEMENTS = 8_030_261_248


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py", *arguments]
    return subprocess.run(command, cwd=folder, env=clean_environ(), capture_output=True, text=True, timeout=240)


def sizes(text: str, name: str) -> tuple[float, float]:
    """Bytes on this rank and of the whole model."""
    found = re.search(rf"^{name} +([\d.]+) (\w+) +([\d.]+) (\w+)$", text, re.MULTILINE)
    assert found, text
    return float(found[1]) * UNITS[found[2]], float(found[3]) * UNITS[found[4]]


def try_out(ranks: int, model: nn.Module | None = None, data: Any = None, **settings: Any) -> DryRun:
    trainer = Trainer(model or make_model(), **{"batch_size": 4, **settings})
    source = read_source(make_data(400) if data is None else data, "x")
    request = FitRequest(trainer.config, trainer._task, source, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of FSDP, that the model returns a view
        found = dry_run(request, ranks)
    assert not dist.is_initialized()
    return found


def test_dry_run_of_llama_8b_on_1024_ranks_shards_by_1024(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(LLAMA)
    done = train(tmp_path, "--dry-run=1024", "--backend", "fsdp")
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 1,024 ranks" in done.stdout
    assert "mesh dp_shard=1024" in done.stdout
    assert "one step in" in done.stdout
    assert "left out" not in done.stdout
    for name, width in (("parameters", 4), ("gradients", 4), ("optimizer state", 8)):
        here, whole = sizes(done.stdout, name)
        assert whole == pytest.approx(width * ELEMENTS, rel=0.01)
        assert here == pytest.approx(whole / 1024, rel=0.01)
    peak = re.search(r"peak (\d+)", done.stdout)
    assert peak
    assert int(peak[1]) < 3e9, "one copy of the model would be 32 GB"
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.py"], "nothing is written"


def test_dry_run_of_llama_with_tensor_parallel_shards_by_8(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(LLAMA.replace("num_hidden_layers=32", "num_hidden_layers=4"))
    done = train(tmp_path, "--dry-run=64", "--tensor-parallel", "8", "--gpus-per-node", "8")
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 64 ranks on 8 nodes" in done.stdout
    assert "mesh dp_replicate=8 × tp=8" in done.stdout
    here, whole = sizes(done.stdout, "parameters")
    assert here == pytest.approx(whole / 8, rel=0.02)


WHOLE = sum(p.numel() for p in make_model(meta=True).parameters()) * 4


@pytest.mark.parametrize(
    ("ranks", "settings", "share", "of_state"),  # parts of the model's parameters, and of its optimizer state, here
    [
        (4, {}, 1, 1),
        (4, {"zero_stage": 1}, 1, 1 / 4),
        (4, {"zero_stage": 2}, 1 / 4, 1 / 4),
        (4, {"backend": "fsdp", "gradient_clipping": 1.0}, 1 / 4, 1 / 4),
        (8, {"sharding": "hybrid", "shard_groups": 2}, 1 / 4, 1 / 4),
        (16, {"sharding": "hybrid", "num_nodes": 2, "gpus_per_node": 8}, 1 / 8, 1 / 8),
        (8, {"tensor_parallel": 2, "gradient_clipping": 1.0}, 1 / 2, 1 / 2),
        (8, {"tensor_parallel": 2, "sequence_parallel": True, "sharding": "full"}, 1 / 8, 1 / 8),
        (8, {"context_parallel": 2}, 1, 1),
        (16, {"context_parallel": 2, "tensor_parallel": 2, "sharding": "full"}, 1 / 8, 1 / 8),
        (4, {"backend": "fsdp", "activation_checkpointing": "selective"}, 1 / 4, 1 / 4),
        (4, {"backend": "fsdp", "cpu_offload": True, "gradient_accumulation_steps": 2}, 1 / 4, 1 / 4),
        (4, {"backend": "fsdp", "mixed_precision": "bf16"}, 1 / 4, 1 / 4),
        (4, {"mixed_precision": "fp16", "activation_checkpointing": True}, 1, 1),
    ],
)
def test_dry_run_step_on_mesh_holds_its_shard(ranks, settings, share, of_state):
    found = try_out(ranks, **settings)
    assert found.plan.world_size == ranks
    assert (found.whole.parameters, found.whole.gradients, found.whole.optimizer) == (WHOLE, WHOLE, 2 * WHOLE)
    assert found.here.parameters == found.here.gradients == pytest.approx(WHOLE * share, rel=0.06)
    assert found.here.optimizer == pytest.approx(2 * WHOLE * of_state, rel=0.06)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_dry_run_of_pipeline_splits_it_and_skips_the_step(schedule):
    found = try_out(4, make_model(blocks=4), pipeline_parallel=2, pipeline_schedule=schedule)
    assert any("pipeline" in what for what in found.left_out)
    assert "one step" not in str(found)
    whole = found.whole.parameters
    assert whole > WHOLE, "two blocks more"
    assert found.here.parameters == found.here.gradients == pytest.approx(whole / 2, rel=0.06)
    assert found.here.optimizer == pytest.approx(whole, rel=0.06)


def test_dry_run_reports_unknown_optimizer_state_as_unknown():
    found = try_out(8, pipeline_parallel=2, zero_stage=1)
    assert found.here.optimizer is None
    assert "not known" in str(found)


def test_dry_run_with_lora_has_gradients_of_adapters_only():
    pytest.importorskip("peft")
    found = try_out(4, backend="fsdp", lora=4)
    assert found.whole.parameters > WHOLE
    assert found.whole.gradients == found.whole.parameters - WHOLE
    assert found.here.gradients == pytest.approx(found.whole.gradients / 4)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_dry_run_takes_built_tied_model_and_its_optimizer(sharding):
    model = make_model(tied=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = try_out(4, model, optimizer=optimizer, sharding=sharding)
    assert found.here.optimizer == found.whole.optimizer == 0
    assert found.whole.parameters < WHOLE, "a tied weight is one"


class Recurrent(nn.Module):
    """Weak references, buffers, and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.lstm, self.head, self.scale = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2), torch.ones(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.norm(self.conv(x)).transpose(1, 2))
        return self.head(hidden[:, -1] * self.scale)


def test_dry_run_takes_recurrent_layers_and_weighted_loss():
    data = TensorDataset(torch.randn(40, 1, 9), torch.randint(0, 2, (40,)))
    found = try_out(4, Recurrent(), data, loss_fn=nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])))
    assert found.here.parameters == found.whole.parameters > 0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from ((torch.zeros(LENGTH, dtype=torch.long),) * 2 for _ in range(100))


@pytest.mark.parametrize(
    "data", [DataLoader(Stream(), batch_size=4), DataLoader(make_data(), batch_size=4, num_workers=2), make_data(8)]
)
def test_dry_run_reads_first_batch_of_any_data(data):
    assert try_out(32, data=data, backend="fsdp").here.gradients


def test_dry_run_refuses_bitwise_and_wrong_node_counts():
    with pytest.raises(PlanError, match="bitwise"):
        try_out(4, reproducible="bitwise")
    with pytest.raises(ConfigError, match="num_nodes=2 × gpus_per_node=4 is 8"):
        try_out(16, num_nodes=2, gpus_per_node=4)


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        (["--dry-run=x"], ["--dry-run=x", "--dry-run=8"]),
        (["--dry-run=0"], ["--dry-run=0", "number of ranks"]),
        (["--dry-run=8", "--num-gpus", "4"], ["--dry-run=8", "num_gpus=4"]),
        (["--dry-run=12", "--num-nodes", "2", "--gpus-per-node", "8"], ["num_gpus=12", "16"]),
        (["--dry-run=12", "--tensor-parallel", "8"], ["12 ranks", "tensor_parallel=6 or tensor_parallel=12"]),
        (["--dry-run=12", "--tensor-parallel", "8", "sharding=ful"], ["sharding='ful'"]),
    ],
)
def test_bad_dry_run_arguments_are_refused(unstarted, arguments, hints):
    done = cli(unstarted, "train", "--script", "train.py", *arguments)
    assert done.returncode == 2
    for hint in hints:
        assert hint in done.stderr
    assert "Traceback" not in done.stderr
