"""What is given to `fit` comes back from the ranks that it starts, or is refused, or is named at the end."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, Trainer
from distributed.adapters import lightning_task
from distributed.core.errors import RankFailedError, TaskError
from distributed.data.drawn import SeededOrder

SEEN: list[float] = []  # of a step, in the ranks


def problem() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


class Counted(nn.Module):
    """Counts its calls in an attribute, and in a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.calls = nn.Linear(4, 2), 0
        self.register_buffer("loose", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.loose.add_(1)
        return self.layer(x)


class CountedLoss(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.kept.add_(1)
        return super().forward(outputs, target)


class Hits:
    def __init__(self) -> None:
        self.total = 0

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.total += 1
        return (outputs.argmax(1) == target).float()


class Rotated:
    """An order of its own each epoch; `keeps`: it can say where it stands."""

    def __init__(self, keeps: bool) -> None:
        self.drawn = 0
        if keeps:
            self.state_dict = lambda: {"drawn": self.drawn}
            self.load_state_dict = self._load

    def _load(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]

    def __iter__(self) -> Iterator[int]:
        self.drawn += 1
        return iter([(n + self.drawn) % 16 for n in range(16)])

    def __len__(self) -> int:
        return 16


class Keeping:
    """A sampler with a state."""

    def __init__(self) -> None:
        self.drawn = 0

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]

    def __iter__(self) -> Iterator[int]:
        self.drawn += 1
        return iter(range(16))

    def __len__(self) -> int:
        return 16


class Diary(Callback):
    """Keeps more than it says that it does."""

    def __init__(self) -> None:
        self.steps, self.lines = 0, list[int]()

    def on_step_end(self, run: Any) -> None:
        self.steps += 1
        self.lines.append(run.step)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def make_trainer(folder: Path, model: nn.Module, **parts: Any) -> Trainer:
    options: dict[str, Any] = {"num_gpus": 2, "batch_size": 4, "epochs": 2, "progress": False, "device": "cpu"}
    return Trainer(model, run_dir=str(folder / "run"), **options | parts)


def test_what_training_changes_in_ranks_alone_is_named(tmp_path: Path) -> None:
    model, loss, hits, sampler, diary = Counted(), CountedLoss(), Hits(), Rotated(keeps=False), Diary()
    model.layer.register_forward_hook(lambda layer, args, output: SEEN.append(float(output.sum())))
    trainer = make_trainer(tmp_path, model, loss_fn=loss, metrics={"hits": hits}, callbacks=[diary])
    with pytest.warns(UserWarning, match="processes of their own") as told:
        history = trainer.fit(DataLoader(problem(), sampler=sampler, batch_size=4))
    text = " ".join(history.left_in_ranks)
    for name in ("model.calls", "loss_fn.calls", "metrics['hits'].total", "train_loader.sampler.drawn", "Diary.lines"):
        assert name in text, name
    assert ".SEEN" in text
    assert not any(name in text for name in ("Diary.steps", "loose", "kept", "weight"))
    assert next(str(one.message) for one in told if "processes of their own" in str(one.message)).count(",") >= 3
    assert (diary.steps, diary.lines, model.calls, loss.calls, SEEN) == (history.steps, [], 0, 0, [])
    assert int(loss.kept) == history.steps, "what a state_dict has comes back"
    assert int(model.loose) == history.steps, "and buffers that it has not"


class Calls(Callback):
    """Its state has another form than what it keeps."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_epoch_start(self, run: Any) -> None:
        self.calls.append("start")

    def on_epoch_end(self, run: Any, metrics: Any) -> None:
        self.calls += ["end", "end"]

    def state(self) -> dict[str, Any]:
        return {"text": " ".join(self.calls)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.calls = state["text"].split()


class Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def f1_of_batch(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torchmetrics.functional.f1_score(outputs, target, "multiclass", num_classes=2)


def test_what_libraries_and_adapters_count_is_not_reported(tmp_path: Path) -> None:
    """States of torchmetrics, a callback's state in another form, an adapter's view of the run, an order's epoch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        metrics = {"f1": torchmetrics.F1Score("multiclass", num_classes=2), "of_batch": f1_of_batch}
        trainer = make_trainer(tmp_path / "a", nn.Linear(4, 2), metrics=metrics, callbacks=[calls := Calls()])
        assert trainer.fit(problem(), problem()).left_in_ranks == ()
        assert calls.calls == ["start", "end", "end"] * 2
        task: Any = lightning_task(Lit())
        loader = DataLoader(problem(), sampler=SeededOrder(16, 1), batch_size=4)
        assert make_trainer(tmp_path / "b", task).fit(loader).left_in_ranks == ()


def test_what_comes_back_is_not_reported(tmp_path: Path) -> None:
    """A sampler with a state, and a hook that only reads what it reaches."""
    model, sampler, mask = nn.Linear(4, 2), Keeping(), torch.ones(2, 4)
    model.weight.register_hook(lambda gradient: gradient * mask)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        history = make_trainer(tmp_path, model, optimizer=optimizer).fit(
            DataLoader(problem(), sampler=sampler, batch_size=4)
        )
    assert history.left_in_ranks == ()
    assert sampler.drawn == 2


def test_hook_of_the_model_is_called_in_its_steps_only(tmp_path: Path) -> None:
    """Not where DDP lays out its buckets."""
    model = nn.Linear(4, 2)
    model.register_buffer("calls", torch.zeros(()))

    def count(module: nn.Module, args: Any) -> None:
        module.calls.add_(1)

    model.register_forward_pre_hook(count)
    history = make_trainer(tmp_path, model, find_unused_parameters=False).fit(problem())
    assert int(model.calls) == history.steps


def by_averaged_model(model: nn.Module) -> dict[str, Any]:
    average, optimizer = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *given: average.update_parameters(model))
    return {"optimizer": optimizer}


def by_copy(model: nn.Module) -> dict[str, Any]:
    average, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)

    def update(*given: Any) -> None:
        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
            mean.data.lerp_(value.data, 0.1)

    optimizer.register_step_post_hook(update)
    return {"optimizer": optimizer}


def by_forward_hook(model: nn.Module) -> dict[str, Any]:
    average = AveragedModel(model)
    model.register_forward_hook(lambda *given: average.update_parameters(model))
    return {}


def by_factory(model: nn.Module) -> dict[str, Any]:
    average = AveragedModel(model)

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(lambda *given: average.update_parameters(model))
        return optimizer

    return {"optimizer": make}


class Averages(Callback):
    def __init__(self, model: nn.Module) -> None:
        self.average = AveragedModel(model)

    def on_step_end(self, run: Any) -> None:
        self.average.update_parameters(run.model)


def by_callback(model: nn.Module) -> dict[str, Any]:
    return {"callbacks": [Averages(model)]}


@pytest.mark.parametrize("averages", [by_averaged_model, by_copy, by_forward_hook, by_factory, by_callback])
def test_average_that_would_be_lost_is_refused_before_the_start(averages: Any, tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    trainer = make_trainer(tmp_path, model, **averages(model))
    with pytest.raises(TaskError, match="reaches a module outside of the model"):
        trainer.fit(problem())
    assert not (tmp_path / "run").exists()


def test_own_average_works_where_the_script_is_the_rank(tmp_path: Path) -> None:
    """Nothing has to come back, and the hook averages as it always does."""
    model = nn.Linear(4, 2)
    average, optimizer = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *given: average.update_parameters(model))
    history = make_trainer(tmp_path, model, optimizer=optimizer, num_gpus=1).fit(problem())
    assert int(average.n_averaged) == history.steps


def test_tensor_changed_by_a_hook_is_refused_in_the_first_steps(tmp_path: Path) -> None:
    model, mean = nn.Linear(4, 2), torch.zeros(2)

    def keep(layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        mean.add_(output.detach().mean(0))

    model.register_forward_hook(keep)
    with pytest.raises(RankFailedError, match=r"training changes a hook of the module Linear\.mean"):
        make_trainer(tmp_path, model, max_restarts=0).fit(problem())
