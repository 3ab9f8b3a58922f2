"""Bad input to the API: a clear error before any process starts, and nothing left behind."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from distributed import DistributedConfig, PyTorchDDPTrainer, Trainer
from distributed.core.errors import ConfigError, DataError, DistributedError, LaunchError, PlanError, TaskError
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan


def loader(samples: int = 8, **options: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(samples, 4), torch.randint(0, 2, (samples,)))
    return DataLoader(data, batch_size=options.pop("batch_size", 2), **options)


def fit(model: nn.Module | None = None, run_dir: Path | str = "", train: Any = None, **options: Any) -> None:
    Trainer(model or nn.Linear(4, 2), progress=False, run_dir=run_dir, **{"num_gpus": 2} | options).fit(
        loader() if train is None else train
    )


@pytest.fixture
def run_dir(tmp_path: Path):
    path = tmp_path / "run"
    yield path
    assert not (path / "attempts").exists(), "a process was started"


def test_config_reports_all_errors_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        DistributedConfig(num_gpus=8, num_nodes=2, gpus_per_node=3, batchsize=3, backend="pytorch_ddp", epochs=0)
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    for words in ("num_gpus=8, but num_nodes=2 × gpus_per_node=3 is 6", "batch_size", "pytorch-ddp", "epochs=0"):
        assert words in text


def test_a_setting_without_effect_is_an_error() -> None:
    for settings in (
        {"mixed_precision": "bf16", "scaler_init_scale": 8.0},
        {"base_batch_size": 8},
        {"momentum": 0.9},
        {"min_lr_ratio": 0.1},
        {"warmup_steps": 3, "warmup_epochs": 1},
    ):
        with pytest.raises(ConfigError):
            DistributedConfig(**settings)


def test_plan_refuses_more_gpus_than_the_node_has() -> None:
    hardware = Hardware(gpus=(Gpu("A", 1, 8.0), Gpu("A", 1, 8.0)), cpu_cores=8)
    with pytest.raises(PlanError, match="4 GPUs asked for on this node, but it has 2"):
        make_plan(DistributedConfig(num_gpus=4, batch_size=1), JobProfile(), hardware, run_dir="x")


def test_device_cuda_without_gpu_is_refused(run_dir: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(PlanError, match="but it has 0"):
        fit(run_dir=run_dir, device="cuda")


def test_batch_that_cannot_be_split_is_refused(run_dir: Path) -> None:
    with pytest.raises(PlanError, match="8 samples cannot be split into batches of 16"):
        fit(run_dir=run_dir, train=loader(8, batch_size=8), drop_last=True)
    with pytest.raises(PlanError, match="empty"):
        fit(run_dir=run_dir, train=loader(0))
    with pytest.raises(DataError, match="cannot be split over the ranks"):
        fit(run_dir=run_dir, train=loader(batch_size=None))


class HoldsLock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 2))
        self.inner[0].guard = threading.Lock()  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_unpicklable_model_error_names_the_attribute(run_dir: Path) -> None:
    with pytest.raises(TaskError, match=r"model\.inner\.0\.guard cannot be sent to the ranks: it is a lock"):
        fit(HoldsLock(), run_dir=run_dir)
    assert not list(run_dir.glob("payload*"))


def test_unpicklable_loss_error_names_the_variable(run_dir: Path) -> None:
    guard = threading.Lock()

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with guard:
            return nn.functional.cross_entropy(outputs, target)

    with pytest.raises(TaskError, match=r"loss_fn \(its variable guard\) cannot be sent"):
        fit(run_dir=run_dir, loss_fn=loss)


def test_optimizer_of_another_model_is_refused(run_dir: Path) -> None:
    with pytest.raises(TaskError, match="not over this model's parameters: 2 of its 2"):
        fit(run_dir=run_dir, optimizer=torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1))
    other = nn.Linear(4, 2)
    with pytest.raises(TaskError, match="not over this model's parameters"):
        fit(run_dir=run_dir, num_gpus=1, optimizer=lambda parameters: torch.optim.SGD(other.parameters(), lr=0.1))


class Uncounted(Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(4)


LINEAR = nn.Linear(4, 2)
COLUMNS = (torch.ones(8, 4), torch.ones(8))


@pytest.mark.parametrize(
    ("kind", "call", "words"),
    [
        (TaskError, lambda: Trainer(nn.Linear), ["model is the class Linear", "Trainer(Linear(…))"]),
        (TaskError, lambda: Trainer(LINEAR, loss_fn=nn.MSELoss), ["loss_fn is the class MSELoss", "MSELoss(…)"]),
        (TaskError, lambda: Trainer(LINEAR, metrics={"a": nn.L1Loss}), ["metrics['a'] is the class L1Loss"]),
        (ConfigError, lambda: Trainer(LINEAR, loader()), ["config is a DataLoader", ".fit(train_loader"]),
        (TaskError, lambda: Trainer(loader()).fit(loader()), ["model is a DataLoader", "Trainer(model, …).fit("]),
        (DataError, lambda: fit(train=LINEAR), ["train_loader is a Linear", "given to the trainer before"]),
        (DataError, lambda: fit(train=torch.optim.SGD([torch.ones(1)])), ["train_loader is a SGD", "optimizer=…"]),
        (DataError, lambda: fit(train=COLUMNS), ["a tuple of 2 arrays with 8 rows", "TensorDataset"]),
        (DataError, lambda: fit(train=[loader(), loader()]), ["a list of 2 data loaders", "ConcatDataset"]),
        (DataError, lambda: fit(train=[loader().dataset]), ["a list of 1 data loaders or datasets", "ConcatDataset"]),
        (DataError, lambda: fit(train=Uncounted(), batch_size=2), ["a Uncounted, which has no __len__", "define"]),
        (TaskError, lambda: fit(nn.DataParallel(LINEAR)), ["the model is a DataParallel", "pass model.module"]),
    ],
)
def test_swapped_or_unmade_argument_is_named(kind, call, words) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


def test_learning_rate_beside_user_optimizer_is_refused(run_dir: Path) -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(PlanError, match="learning_rate is set"):
        fit(model, run_dir=run_dir, learning_rate=0.1, optimizer=torch.optim.SGD(model.parameters(), lr=0.2))


def test_scheduler_of_another_optimizer_is_refused(run_dir: Path) -> None:
    model = nn.Linear(4, 2)
    mine, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(TaskError, match="belongs to another optimizer"):
        fit(model, run_dir=run_dir, optimizer=mine, scheduler=scheduler)
    with pytest.raises(PlanError, match="both a scheduler and lr_schedule"):
        fit(model, run_dir=run_dir, optimizer=other, scheduler=scheduler, lr_schedule="cosine")


def test_master_port_in_use_is_refused(run_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LaunchError, match="in use"):
            fit(run_dir=run_dir, master_port=taken.getsockname()[1])


def test_run_directory_of_another_run_is_refused_unchanged(tmp_path: Path) -> None:
    fit(run_dir=tmp_path / "run", num_gpus=1)
    events = (tmp_path / "run" / "events.jsonl").read_bytes()
    with pytest.raises(LaunchError, match="holds another run"):
        fit(run_dir=tmp_path / "run")
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == events


def test_unknown_setting_error_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="learning_rate"):
        PyTorchDDPTrainer(nn.Linear(1, 1), learn_rate=0.1)
    with pytest.raises(ConfigError, match="max_steps"):
        PyTorchDDPTrainer(nn.Linear(1, 1)).fit(loader(), max_step=3)


def test_fit_in_plain_script_refuses_several_nodes(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="started alone"):
        fit(run_dir=run_dir, num_gpus=None, num_nodes=2, gpus_per_node=1, master_addr="n1")


def test_model_without_parameters_or_not_a_module_is_refused(run_dir: Path) -> None:
    with pytest.raises(TaskError, match="no parameter that requires a gradient"):
        fit(nn.ReLU(), run_dir=run_dir)
    with pytest.raises(TaskError, match=r"nn\.Module"):
        fit(lambda x: x, run_dir=run_dir)  # type: ignore[arg-type]


def test_metric_that_is_not_callable_is_refused(run_dir: Path) -> None:
    with pytest.raises(TaskError, match="cannot be called"):
        fit(run_dir=run_dir, metrics={"f1": 3})


def test_task_without_inferable_loss_is_refused(tmp_path: Path) -> None:
    data = DataLoader([(torch.randn(4), "text")] * 4, batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="no loss"):
        fit(run_dir=tmp_path / "run", num_gpus=1, train=data)


def test_errors_survive_pickling() -> None:
    import pickle

    for error in (ConfigError("a", why="b", do="c"), DistributedError("x")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_ignored_targets_with_accumulation_need_target_weights(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(8, 4), torch.tensor([0, 1, -100, 1, 0, 1, 0, 1]))
    options: dict[str, Any] = {"num_gpus": 1, "train": data, "loss_fn": nn.CrossEntropyLoss()}
    with pytest.raises(TaskError, match="loss_weighting='targets'"):
        fit(run_dir=tmp_path / "parts", batch_size=4, gradient_accumulation_steps=2, **options)
    assert not list((tmp_path / "parts").rglob("manifest.json"))  # no step of it was taken, and nothing saved
    fit(run_dir=tmp_path / "whole", batch_size=8, **options)  # in one part the mean is that of one process
