"""The promised interface, used as its documents use it; only the data and the sizes of the world are ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Run

CONFIG = """
from distributed import DistributedConfig

config = DistributedConfig(
    num_gpus=8, num_nodes=2, gpus_per_node=4,
    backend="pytorch-ddp",
    batch_size=32, epochs=100, learning_rate=0.001,
    mixed_precision=True, gradient_accumulation_steps=4, gradient_clipping=1.0,
    communication_backend="nccl", find_unused_parameters=False,
    checkpoint_frequency=10, checkpoint_dir="./checkpoints",
    mlflow_tracking=True, tensorboard=True, log_every_n_steps=100,
)
print("config", config.num_gpus, config.source("batch_size"), config.source("seed"))
"""

QUICK_START = """
from distributed import PyTorchDDPTrainer

trainer = PyTorchDDPTrainer(model=MyModel(), num_gpus=2, batch_size=32, epochs=2)
trainer.fit(train_loader, val_loader)
print("done", trainer.best_accuracy > 0)
"""

FULL = """
from distributed import PyTorchDDPTrainer

trainer = PyTorchDDPTrainer(
    model=MyModel(), num_gpus=2, batch_size=32, epochs=2, learning_rate=0.001,
    mixed_precision=True, gradient_accumulation_steps=2, gradient_clipping=1.0,
    scaler_init_scale=2**16, scaler_growth_interval=2000, find_unused_parameters=True,
    communication_backend="gloo", bucket_cap_mb=10, checkpoint_frequency=1, resume_from_checkpoint=True,
    tensorboard_dir="./tb", log_every_n_steps=2,
)
history = trainer.fit(
    train_loader, val_loader, checkpoint_dir="./checkpoints", mlflow_experiment="distributed-training", max_steps=6,
)
print(f"Training time: {history.total_time:.2f}s")
print(f"Final accuracy: {history.best_accuracy:.4f}")
print("steps", history.steps)
again = PyTorchDDPTrainer(
    model=MyModel(), num_gpus=2, batch_size=32, epochs=2, checkpoint_dir="./checkpoints",
    gradient_accumulation_steps=2, resume_from_checkpoint=True, mixed_precision=True,
).fit(train_loader, val_loader)
print("resumed to", again.steps, len(again["val_accuracy"]))
"""

MLFLOW = """
import mlflow
from distributed import PyTorchDDPTrainer

mlflow.set_tracking_uri("sqlite:///tracking.db")
with mlflow.start_run(run_name="distributed-training") as run:
    trainer = PyTorchDDPTrainer(MyModel(), num_gpus=2, mlflow_tracking=True, epochs=2, log_every_n_steps=2)
    trainer.fit(train_loader, val_loader)
    mlflow.log_param("mine", 8)
found = mlflow.MlflowClient().get_run(run.info.run_id)
print("status", found.info.status, found.data.params["mine"], found.data.params["epochs"])
print("metrics", sorted(found.data.metrics))
"""

PROFILE = """
from torch.profiler import ProfilerActivity, profile
from distributed import PyTorchDDPTrainer

trainer = PyTorchDDPTrainer(MyModel(), num_gpus=1)
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
    trainer.fit(train_loader, val_loader, max_steps=3)
print("seen", "aten::addmm" in prof.key_averages().table(sort_by="cpu_time_total"))
"""

WARMUP = """
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from distributed import PyTorchDDPTrainer

model = MyModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
warmup = LinearLR(optimizer, start_factor=0.1, total_iters=2)
main = CosineAnnealingLR(optimizer, T_max=3)
scheduler = SequentialLR(optimizer, schedulers=[warmup, main], milestones=[2])
trainer = PyTorchDDPTrainer(
    model, num_gpus=2, epochs=5, optimizer=optimizer, scheduler=scheduler, log_every_n_steps=1000
)
trainer.fit(train_loader, val_loader)
print("scheduler", scheduler.last_epoch, len(optimizer.state) > 0)
"""

SAMPLER = """
from torch.utils.data import DistributedSampler
from distributed import PyTorchDDPTrainer

num_gpus, rank = 2, 0
sampler = DistributedSampler(train_loader.dataset, num_replicas=num_gpus, rank=rank)
loader = DataLoader(train_loader.dataset, batch_size=16, sampler=sampler, num_workers=2, pin_memory=True)
history = PyTorchDDPTrainer(MyModel(), num_gpus=num_gpus, epochs=1).fit(loader)
print("samples", history.samples)
"""


@pytest.mark.parametrize(
    ("snippet", "words"),
    [
        (CONFIG, ["config 8 argument default"]),
        (QUICK_START, ["done True"]),
        (FULL, ["Training time: ", "Final accuracy: 0.", "steps 4", "resumed to 4 2"]),
        (PROFILE, ["seen True"]),
        (WARMUP, ["scheduler 5 True"]),
        (SAMPLER, ["samples 210", "DistributedSampler is replaced"]),
    ],
    ids=["config", "quick start", "full", "profile", "warmup", "sampler"],
)
def test_snippet(snippet: str, words: list[str], run_script: Run) -> None:
    result = run_script(snippet)
    assert result.returncode == 0, result.stdout + result.stderr
    for word in words:
        assert word in result.stdout, result.stdout + result.stderr


def test_mlflow_logs_into_the_run_that_is_open(run_script: Run) -> None:
    result = run_script(MLFLOW)
    assert "status FINISHED 8 2" in result.stdout, result.stdout + result.stderr
    metrics = result.stdout[result.stdout.index("metrics [") :]
    for name in ("loss", "val_accuracy", "learning_rate", "samples_per_second"):
        assert f"'{name}'" in metrics


def test_a_user_scheduler_sets_the_rates(run_script: Run, tmp_path: Path) -> None:
    """The rates that were used are those of the same scheduler in a plain loop."""
    result = run_script(WARMUP.replace("num_gpus=2", 'num_gpus=2, run_dir="run"'))
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    rates = [event["learning_rate"] for event in events if event["event"] == "StepEnded"]
    assert rates == pytest.approx([0.001, 0.0055, 0.01, 0.0075, 0.0025])
