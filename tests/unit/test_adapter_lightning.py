"""What a LightningModule's methods are mapped to, what is refused by name, and what a resumed one keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from lightning.pytorch.core import hooks as theirs
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, Trainer
from distributed.adapters import lightning_task
from distributed.adapters.lightning import hooks
from distributed.adapters.lightning.module_log import ModuleLog
from distributed.core.env import WorkerEnv
from distributed.core.errors import DistributedError, TaskError
from distributed.core.plan import BatchPlan, Plan
from distributed.data.source import read_source
from distributed.runtime.session import Session
from distributed.train.checks.given_objects import GivenObjects
from distributed.train.metrics import MetricNames
from distributed.train.whole_set.torch_metrics import MergedMetric

OWN = {"training_step", "configure_optimizers"}


def data(samples: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, x[:, :2].argmax(1))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def changed(**methods: Any) -> Any:
    return type("Changed", (Module,), methods)()


def fit(module: Any, run_dir: Path, *loaders: Any, **settings: Any) -> Any:
    loaders = loaders or (DataLoader(data(), 4),)
    options = {"epochs": 1, "num_gpus": 1, "progress": False, "run_dir": str(run_dir), **settings}
    return Trainer(lightning_task(module), **options).fit(*loaders)


def test_each_method_of_module_is_called_idle_or_refused() -> None:
    kinds = (lightning.LightningModule, theirs.ModelHooks, theirs.DataHooks, theirs.CheckpointHooks)
    found = {
        name
        for kind in kinds
        for name, value in vars(kind).items()
        if callable(value) and not isinstance(value, type) and not name.startswith("_")
    }
    groups = (hooks.STEPS, hooks.CALLED, hooks.REFUSED.keys(), hooks.IN_TESTS, hooks.IDLE)
    known = [name for group in groups for name in group]
    assert len(known) == len(set(known)), "in two groups"
    assert found - set(known) == set(), "say what happens to it"


@pytest.mark.parametrize("hook", hooks.REFUSED)
def test_override_that_is_never_called_is_refused(hook: str) -> None:
    with pytest.raises(TaskError, match=rf"Changed\.{hook} would never be called"):
        lightning_task(changed(**{hook: lambda self, *given: None}))


def test_other_objects_than_modules_are_refused() -> None:
    manual = Module()
    manual.automatic_optimization = False
    for given, message in (
        (nn.Linear(1, 1), "got a Linear"),
        (manual, "automatic_optimization=False"),
        (lightning.LightningModule(), "no training_step"),
    ):
        with pytest.raises(TaskError, match=message):
            lightning_task(given)
    with pytest.raises(TaskError, match="datamodule is a dict"):
        lightning_task(Module(), {})


def two(module: Any) -> Any:
    return [torch.optim.SGD(module.net.parameters(), lr=0.1), torch.optim.SGD(module.net.parameters(), lr=0.1)]


def plateau(module: Any, **options: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau_of(optimizer), **options}}


def plateau_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def in_step(code: Callable[[Any], Any]) -> dict[str, Any]:
    """A training step that runs some code first."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        found = code(self)
        return Module.training_step(self, batch, batch_idx) if found is None else found

    return {"training_step": training_step}


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "2 optimizers": ({"configure_optimizers": two}, {}, "returned 2 optimizers"),
    "no optimizer": ({"configure_optimizers": lambda self: None}, {}, "returned nothing"),
    "no monitor": ({"configure_optimizers": plateau}, {}, "without monitor"),
    "monitored": ({"configure_optimizers": lambda self: plateau(self, monitor="x")}, {}, "'x', which was not measured"),
    "plateau by step": (
        {"configure_optimizers": lambda self: plateau(self, monitor="x", interval="step")},
        {},
        "interval='step'",
    ),
    "loss": (in_step(lambda self: self.log("loss", 1.0)), {}, "'loss'"),
    "summed": (in_step(lambda self: self.log("n", 1.0, on_epoch=True, reduce_fx="sum")), {}, "reduce_fx='sum'"),
    "one rank's": (in_step(lambda self: self.log("n", 1.0, rank_zero_only=True)), {}, "rank_zero_only"),
    "logger": (in_step(lambda self: self.logger.experiment.add_scalar("n", 1.0)), {}, r"self\.logger"),
    "strategy": (in_step(lambda self: self.trainer.strategy.barrier()), {}, "self.trainer.strategy"),
    "gathered": (in_step(lambda self: self.all_gather(torch.ones(1))), {}, "self.all_gather"),
    "by hand": (in_step(lambda self: self.manual_backward(torch.ones(1))), {}, "self.manual_backward"),
    "no loss": (in_step(lambda self: {}), {}, "training_step returned dict"),
    "no step": ({"training_step": lambda *given: None}, {}, "Lightning then skips the batch"),
    "skipped": ({"on_train_batch_start": lambda self, *given: -1}, {}, "returned -1"),
    "clipped": ({"on_before_optimizer_step": lambda *given: None}, {"gradient_clipping": 1.0}, "gradient_clipping"),
    "accumulated": ({"on_after_backward": lambda *given: None}, {"gradient_accumulation_steps": 2}, "accumulation"),
    "accumulated later": (
        {"on_after_backward": lambda *given: None},
        {"gradient_accumulation_steps": {0: 1, 1: 2}},
        "accumulation",
    ),
    "bitwise": ({}, {"reproducible": "bitwise"}, "bitwise"),
    "scaled": ({}, {"lr_scaling": "linear", "base_batch_size": 2}, "lr_scaling"),
    "captured": ({}, {"capture": True}, "capture"),
}


@pytest.mark.parametrize(
    "settings",
    [{"limit_train_batches": 1}, {"gradient_accumulation_steps": {0: 1, 1: 2}}, {"gradient_accumulation_steps": 2}],
)
def test_module_is_told_how_long_its_run_is(settings: dict[str, Any], tmp_path: Path) -> None:
    taken: list[int] = []
    told: list[tuple[Any, ...]] = []

    def end(self: Any) -> None:
        trainer = self.trainer
        told.append((trainer.num_training_batches, trainer.accumulate_grad_batches, trainer.estimated_stepping_batches))

    def begin(self: Any, *batch: Any) -> None:
        taken.append(self.trainer.current_epoch)

    module = changed(on_train_batch_start=begin, on_train_epoch_end=end)
    history = fit(module, tmp_path / "run", DataLoader(data(26), 4), epochs=2, **settings)
    asked = settings.get("gradient_accumulation_steps", 1)
    for epoch, (batches, accumulated, steps) in enumerate(told):
        assert batches == taken.count(epoch)
        assert accumulated == (asked if isinstance(asked, int) else asked[epoch])
        assert steps == history.steps


class Measured(Module):
    """Averages and a torchmetrics metric over each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("mean", batch[0].mean(), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class StopsAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step:
            run.stop("for this test")


def test_metric_of_an_epoch_that_is_resumed_is_of_all_of_it(tmp_path: Path) -> None:
    def metrics(name: str, *callbacks: Any, **settings: Any) -> dict[str, float]:
        trainer = Trainer(
            lightning_task(Measured()),
            callbacks=callbacks,
            **{"epochs": 2, "num_gpus": 1, "progress": False, "run_dir": str(tmp_path / name), **settings},
        )
        return dict(trainer.fit(DataLoader(data(), 4)).epochs[-1].metrics)

    whole = metrics("whole")
    metrics("cut", StopsAt(8))
    assert metrics("cut", resume_from_checkpoint=True) == pytest.approx(whole)


def test_states_of_ranks_go_on_as_one() -> None:
    kinds = [
        torchmetrics.classification.BinaryAccuracy,
        torchmetrics.classification.BinaryAUROC,
        torchmetrics.MaxMetric,
    ]
    batches = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 1] * 4)
    for kind in kinds:
        own = [kind() for _ in range(4)]
        given = [(batch,) if kind is torchmetrics.MaxMetric else (batch, target) for batch in batches]
        for metric, batch in zip(own, given[:2], strict=False):  # each on its rank
            metric.update(*batch)
        one = MergedMetric(own[2])
        states = [MergedMetric(metric).state() for metric in own[:2]]
        one.go_on(one.as_one([state for state in states if state is not None]))
        own[2].update(*given[2])
        for batch in given:
            own[3].update(*batch)
        assert torch.equal(own[2].compute(), own[3].compute()), kind
    assert MergedMetric(torchmetrics.PearsonCorrCoef()).as_one([{}, {}]) is None


def test_view_of_the_run_is_no_object_of_the_user() -> None:
    task = lightning_task(Module())
    objects = GivenObjects(task, read_source(data(), "train_loader"), task.callbacks)
    objects.begin()
    task._trainer.begin_run(Plan("run", BatchPlan(4)), 24)
    assert objects.left() == []


@pytest.mark.parametrize("case", WRONG)
def test_what_a_run_cannot_do_is_refused_by_name(case: str, tmp_path: Path) -> None:
    methods, settings, message = WRONG[case]
    with pytest.raises(DistributedError, match=message):
        fit(changed(**methods), tmp_path / "run", **settings)


class Counted(Module):
    """Keeps a count in checkpoints, logs means of epochs, and fails once if it is told to."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.count, self.fails_at = 0, fails_at
        self.numbers: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        self.numbers.append(batch_idx)
        if self.global_step == self.fails_at:
            raise RuntimeError("as it was told to")
        self.log("mean", batch[0].mean(), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.count = checkpoint["count"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": rate, "interval": "step"}]


def test_module_resumed_in_an_epoch_ends_as_undisturbed(tmp_path: Path) -> None:
    settings = {"epochs": 2, "checkpoint_frequency": "2 steps", "checkpoint_dir": str(tmp_path / "saved")}
    whole = Counted()
    history = fit(whole, tmp_path / "whole", epochs=2)
    with pytest.raises(RuntimeError, match="as it was told to"):
        fit(Counted(fails_at=9), tmp_path / "first", **settings)
    again = Counted()
    resumed = fit(again, tmp_path / "again", **settings, resume_from_checkpoint=True)
    assert torch.equal(again.net.weight, whole.net.weight)
    assert (again.count, again.numbers) == (whole.count, [2, 3, 4, 5])
    assert resumed.epochs[-1].metrics["mean"] == pytest.approx(history.epochs[-1].metrics["mean"])


class Data(lightning.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage} of {self.trainer.world_size if stage else 0}")
        self.train, self.val = data(), data(8)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 4)

    def val_dataloader(self) -> Any:
        return [DataLoader(self.val, 4)]

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")


class Validated(Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.hits = torchmetrics.MeanMetric()

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append(f"validation_step {batch_idx}")
        self.hits(self.net(batch[0]).argmax(1) == batch[1])
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(f"on_validation_batch_end {batch_idx}")

    def on_validation_epoch_end(self) -> None:
        self.log("val_hits", self.hits.compute())
        self.hits.reset()


def test_data_module_is_set_up_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Data, "setup", lambda self, stage: vars(self).update(train=data(), val=data(8)))
    module, source = Validated(), Data()
    task = lightning_task(module, source)
    history = Trainer(task, epochs=1, num_gpus=1, progress=False, run_dir=tmp_path / "run").fit(*task.loaders())
    assert source.calls == ["prepare_data", "teardown fit"]
    names = [f"{name} {at}" for at in range(2) for name in ("validation_step", "on_validation_batch_end")]
    assert module.calls == ["setup fit", *names]
    out, target = module.net(source.val.tensors[0]), source.val.tensors[1]
    assert history["val_loss"] == [pytest.approx(F.cross_entropy(out, target).item(), abs=1e-6)]
    assert history["val_hits"] == [pytest.approx((out.argmax(1) == target).float().mean().item())]


def test_several_loaders_are_refused() -> None:
    loaders = {"train_dataloader": lambda self: [DataLoader(data()), DataLoader(data())]}
    with pytest.raises(TaskError, match=r"train_dataloader returned a list of 2"):
        lightning_task(changed(**loaders)).loaders()
    with pytest.raises(TaskError, match="no train_dataloader"):
        lightning_task(Module()).loaders()


def test_mean_over_no_sample_leaves_no_trace_in_the_epoch() -> None:
    """As of a class that a batch has no sample of: it is NaN, and batch_size=0."""
    log, session = ModuleLog(), Session(WorkerEnv(), torch.device("cpu"), None)
    for value, count in ((0.5, 3), (math.nan, 0)):
        given: dict[str, Any] = {"module": nn.Identity(), "samples": 4, "on_epoch": True, "on_step": False}
        given["batch_size"] = count
        log.log("training_step", "of_class", torch.tensor(value), stage="training", **given)
    assert log.means(MetricNames([], session), session) == {"of_class": 0.5}
