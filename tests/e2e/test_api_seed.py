"""The promised interface, used as its documents use it; only the data and the sizes of the world are ours."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import DATA, Run, clean_environ
from tests.warm_python import SCRIPTS

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
    model, num_gpus=2, epochs=5, optimizer=optimizer, scheduler=scheduler, log_every_n_steps=1000, run_dir="warmup"
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


# Of the whole of the documents, in one script: each snippet after the line that names it.
SNIPPETS = {
    "config": (CONFIG, ["config 8 argument default"]),
    "quick start": (QUICK_START, ["done True"]),
    "full": (FULL, ["Training time: ", "Final accuracy: 0.", "steps 4", "resumed to 4 2"]),
    "profile": (PROFILE, ["seen True"]),
    "warmup": (WARMUP, ["scheduler 5 True"]),
    "sampler": (SAMPLER, ["samples 210", "DistributedSampler is replaced"]),
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of the script, and what it says in each of its snippets."""
    folder = tmp_path_factory.mktemp("snippets")
    parts = [f"print('=== {name}', flush=True)\n{text}" for name, (text, _) in SNIPPETS.items()]
    (folder / "script.py").write_text(DATA + "\n".join(parts))
    command = [*SCRIPTS.command, "script.py"]
    done = subprocess.run(command, cwd=folder, env=clean_environ(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [part.partition("\n") for part in done.stdout.split("=== ")[1:]]
    return folder, {name: text for name, _, text in said}


@pytest.mark.parametrize("name", SNIPPETS)
def test_documented_snippet_runs_as_written(name: str, shown: tuple[Path, dict[str, str]]) -> None:
    for word in SNIPPETS[name][1]:
        assert word in shown[1][name]


def test_mlflow_metrics_go_into_the_users_open_run(run_script: Run) -> None:
    result = run_script(MLFLOW)
    assert "status FINISHED 8 2" in result.stdout, result.stdout + result.stderr
    metrics = result.stdout[result.stdout.index("metrics [") :]
    for name in ("loss", "val_accuracy", "learning_rate", "samples_per_second"):
        assert f"'{name}'" in metrics


def test_user_scheduler_gives_rates_of_a_plain_loop(shown: tuple[Path, dict[str, str]]) -> None:
    """The rates that were used are those of the same scheduler in a plain loop."""
    events = [json.loads(line) for line in (shown[0] / "warmup" / "events.jsonl").read_text().splitlines()]
    rates = [event["learning_rate"] for event in events if event["event"] == "StepEnded"]
    assert rates == pytest.approx([0.001, 0.0055, 0.01, 0.0075, 0.0025])
