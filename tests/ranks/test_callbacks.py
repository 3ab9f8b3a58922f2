"""Callbacks on real ranks: their order, what they ask for on one rank alone, their state, and how they fail."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, Trainer
from distributed.checkpoint.restore.reading import load
from distributed.core.errors import CallbackError, RankFailedError, ReplicasDifferError, TaskError
from distributed.core.history import History
from distributed.testing import run_ranks

STEPS = 4  # of an epoch


def problem(samples: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 5, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def fit(folder: str, *callbacks: Callback, ranks: int = 2, validates: bool = True, **more: Any) -> Trainer:
    """Checkpoints lie in the folder; where a launcher has made the world, the run directory is its own."""
    options: dict[str, Any] = {"num_gpus": ranks, "batch_size": 4 // ranks, "epochs": 3, "optimizer": "sgd"}
    options |= {"learning_rate": 0.1, "progress": False, "run_dir": folder, "checkpoint_dir": f"{folder}/checkpoints"}
    options |= {"device": "cpu", "checkpoint_frequency": 100}
    trainer = Trainer(model(), callbacks=callbacks, **options | more)
    trainer.fit(DataLoader(problem(), shuffle=True), DataLoader(problem(6), batch_size=2) if validates else None)
    return trainer


def trained(folder: str, *callbacks: Callback, **more: Any) -> History:
    history = fit(folder, *callbacks, **more).history
    assert history is not None
    return history


def events(history: History | None, kind: str) -> list[dict[str, Any]]:
    assert history is not None
    lines = (Path(history.run_dir) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def flat(trained: nn.Module) -> torch.Tensor:
    return torch.cat([value.flatten() for value in trained.state_dict().values()])


class Diary(Callback):
    """Writes down each call, with the step."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("on_"):
            return found
        return lambda run, *given: self.calls.append(f"{name} {run.step}")


def every_hook(kind: type[Callback]) -> type[Callback]:
    """Each hook is the class's own, so that it is called."""
    for name in [name for name in vars(Callback) if name.startswith("on_")]:
        setattr(kind, name, lambda self, run, *given: None)
    return kind


every_hook(Diary)


class Asks(Callback):
    """Asks on one rank alone, at one step."""

    def __init__(self, rank: int, step: int, hook: str, what: str) -> None:
        self.rank, self.step, self.what = rank, step, what
        setattr(self, hook, self.ask)

    def ask(self, run: Any, *given: Any) -> None:
        if (run.rank, run.step) == (self.rank, self.step):
            if self.what == "stop":
                run.stop(f"enough for rank {run.rank}")
            elif self.what == "save":
                run.save()
            else:
                raise ValueError(self.what)


class Logs(Callback):
    def __init__(self, name: str = "gap") -> None:
        self.name = name

    def on_epoch_end(self, run: Any, metrics: Mapping[str, float]) -> None:
        run.log(self.name, 0.1 + run.epoch + run.rank)
        run.log("alike", 0.1)
        if run.is_main:
            run.log("rank 0's", metrics["val_loss"])


def test_hooks_are_called_in_order_on_every_rank(tmp_path: Path) -> None:
    def calls() -> list[str]:
        diary = Diary()
        fit(str(tmp_path / "run"), diary, epochs=1, checkpoint_frequency="3 steps")
        return diary.calls

    expected = ["on_fit_start 0", "on_epoch_start 0", *(f"on_step_end {step}" for step in (1, 2, 3))]
    expected += ["on_save 3", "on_step_end 4", "on_validation_start 4", "on_validation_end 4", "on_epoch_end 4"]
    assert run_ranks(calls, 2) == [[*expected, "on_fit_end 4", "on_save 4"]] * 2


def ask_on_one_rank(folder: str) -> dict[str, Any]:
    """What comes of a request of one rank at each place; every rank returns its own."""
    found: dict[str, Any] = {}
    for hook, step in (("on_step_end", 2), ("on_epoch_end", STEPS), ("on_validation_end", STEPS), ("on_fit_start", 0)):
        run = f"{folder}/stop-{hook}"
        history = trained(run, Asks(1, step, hook, "stop"), log_every_n_steps=3)
        found[hook] = history.steps, history.stopped, [event["by"] for event in events(history, "RunStopped")]
    history = trained(f"{folder}/end", Asks(1, STEPS, "on_epoch_end", "stop"), val_check_interval="2 epochs")
    found["evaluated"] = [one.step for one in history.evaluations], "val_loss" in history.epochs[-1].metrics
    within: dict[str, Any] = {"val_check_interval": 2, "checkpoint_frequency": "1 validation"}
    history = trained(f"{folder}/stop-within", Asks(1, 2, "on_validation_end", "stop"), log_every_n_steps=3, **within)
    found["within"] = history.steps, history.stopped, history.checkpoint[-4:]
    run = f"{folder}/both"
    history = trained(run, Asks(1, 2, "on_step_end", "stop"), Asks(0, 3, "on_step_end", "stop"), log_every_n_steps=3)
    found["both"] = history.steps, history.stopped, [event["rank"] for event in events(history, "RunStopped")]
    for hook, step in (("on_step_end", 2), ("on_epoch_end", STEPS), ("on_epoch_start", STEPS)):
        run = f"{folder}/save-{hook}"
        history = trained(run, Asks(1, step, hook, "save"), log_every_n_steps=2, max_steps=9)
        found[f"save {hook}"] = sorted(event["step"] for event in events(history, "CheckpointSaved"))
    return found


def test_request_of_one_rank_is_agreed_on_by_all(tmp_path: Path) -> None:
    for found in run_ranks(ask_on_one_rank, 2, str(tmp_path)):
        assert found["on_step_end"] == (3, "stopped after step 3: enough for rank 1 [Asks]", ["Asks"])
        assert found["on_epoch_end"] == (STEPS, "stopped after epoch 1: enough for rank 1 [Asks]", ["Asks"])
        assert found["on_validation_end"] == found["on_epoch_end"]
        assert found["on_fit_start"] == (0, "stopped after step 0: enough for rank 1 [Asks]", ["Asks"])
        assert found["evaluated"] == ([STEPS], True), "the end of a run, whatever the interval"
        assert found["within"] == (2, "stopped after step 2: enough for rank 1 [Asks]", "0002"), "with what is saved"
        assert found["both"] == (3, "stopped after step 3: enough for rank 0 [Asks]", [0]), "the first rank's reason"
        assert found["save on_step_end"] == [2, 9]
        assert found["save on_epoch_end"] == [4, 9]
        assert found["save on_epoch_start"] == [6, 9], "not before a step: it would be called again"


def test_logged_number_is_the_mean_over_ranks(tmp_path: Path) -> None:
    for history in run_ranks(trained, 2, str(tmp_path / "run"), Logs()):
        assert history["gap"] == pytest.approx([0.6, 1.6, 2.6])
        assert history["alike"] == [0.1] * 3
        assert history["rank 0's"] == history["val_loss"]


def test_logged_name_of_a_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match="'val_loss', which is a metric"):
        fit(str(tmp_path / "run"), Logs("val_loss"), ranks=1)


def test_callback_failing_on_one_rank_is_named(tmp_path: Path) -> None:
    """The other rank, which waits for it, is freed by the launcher; no other attempt is made."""
    with pytest.raises(RankFailedError) as failed:
        fit(str(tmp_path / "run"), Asks(1, 2, "on_step_end", "fail"))
    assert failed.value.rank == 1
    assert "a callback failed in on_step_end of Asks on rank 1, after step 2: ValueError: fail" in str(failed.value)


class Counts(Callback):
    """Counts epochs and steps; `unlike`: on each rank otherwise."""

    def __init__(self, unlike: int = 0) -> None:
        self.unlike, self.steps, self.epochs = unlike, 0, 0
        self.seen = torch.zeros(2)

    def on_epoch_start(self, run: Any) -> None:
        self.epochs += 1

    def on_step_end(self, run: Any) -> None:
        self.steps += 1 + self.unlike * run.rank
        self.seen += 1

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "epochs": self.epochs, "seen": self.seen} if self.steps else {}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps, self.epochs, self.seen = state["steps"], state["epochs"], state["seen"]


def state_that_differs(folder: str) -> tuple[str, Any]:
    with pytest.raises(ReplicasDifferError) as differs:
        fit(f"{folder}/compared", Counts(unlike=1))
    unchecked = Counts(unlike=1)
    checkpoint = trained(f"{folder}/unchecked", unchecked, check_replicas=False).checkpoint
    return str(differs.value), load(checkpoint, ranks=()).shared["callbacks"]["state"]["Counts"]["steps"]


def test_state_that_differs_between_ranks_is_found(tmp_path: Path) -> None:
    for text, saved in run_ranks(state_that_differs, 2, str(tmp_path)):
        assert "callback Counts: its state()" in text
        assert saved == 12, "without the check it is rank 0's"


class FreezesAlone(Callback):
    """Freezes the first layer on rank 1, and nothing elsewhere."""

    def on_epoch_start(self, run: Any) -> None:
        if run.rank == 1:
            run.model[0].requires_grad_(False)


def frozen_on_one_rank(folder: str) -> str:
    with pytest.raises(CallbackError) as refused:
        fit(f"{folder}/frozen", FreezesAlone())
    return str(refused.value)


def test_freezing_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    for text in run_ranks(frozen_on_one_rank, 2, str(tmp_path)):
        assert "whether 0.bias, 0.weight requires a gradient, on some ranks only" in text


def test_state_is_back_in_the_callback_after_fit(tmp_path: Path) -> None:
    """Of ranks that `fit` has started; one that had none of it yet keeps what it has."""
    counts, second = Counts(), Counts()
    fit(str(tmp_path / "run"), counts, second)
    assert (counts.steps, counts.epochs, counts.seen.tolist()) == (12, 3, [12.0, 12.0])
    assert second.steps == 12


class Halves(Callback):
    """Sets rates of its own, which no schedule knows."""

    def on_step_end(self, run: Any) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + run.step // 3)

    def on_epoch_start(self, run: Any) -> None:
        for group in run.optimizer.param_groups:
            group["momentum"] = 0.5 * run.epoch / 3


class Thaws(Callback):
    """Trains the first layer from the second epoch on, and then by what it has seen last."""

    def on_epoch_start(self, run: Any) -> None:
        run.model[0].requires_grad_(run.epoch > 0)
        run.freeze(self, ["2.bias"] if run.epoch == 1 else [])
        run.model[0].requires_grad_(run.epoch > 0)  # which freeze has as it came
        for group in run.optimizer.param_groups:
            group["lr"] = 0.1 * (1 + run.metrics.get("val_loss", 0.0) + (run.loss or 0.0))


def resume_what_is_trained(folder: str) -> dict[str, Any]:
    whole = fit(f"{folder}/thawed", Thaws(), Counts(), checkpoint_frequency="2 steps")
    found: dict[str, Any] = {"flags": [p.requires_grad for p in whole.model.parameters()]}
    for step in (2, STEPS, STEPS + 2):  # in the first epoch, at its end, and in the second
        path = f"{folder}/thawed/checkpoints/step-{step:06d}"
        more: dict[str, Any] = {"checkpoint_frequency": "2 steps", "resume_from_checkpoint": path}
        again = fit(f"{folder}/thawed-{step}", Thaws(), Counts(), **more)
        found[f"same from step {step}"] = torch.equal(flat(whole.model), flat(again.model))
        found[f"certificate from step {step}"] = events(again.history, "ResumeCompared")[0]["passed"]
    gone = fit(f"{folder}/gone", resume_from_checkpoint=f"{folder}/thawed/checkpoints/step-000002")
    found["warned"] = [event["message"] for event in events(gone.history, "Warned")]
    return found


def test_what_a_callback_trains_and_has_seen_is_resumed(tmp_path: Path) -> None:
    for found in run_ranks(resume_what_is_trained, 2, str(tmp_path)):
        assert any("callbacks had left it: Counts, Thaws" in text for text in found.pop("warned"))
        assert found.pop("flags") == [True] * 4, "as the model came"
        assert all(found.values()), found


def resume_own_rates(folder: str) -> dict[str, bool]:
    same = {}
    for name, more in {"constant": {}, "cosine": {"lr_schedule": "cosine", "warmup_steps": 2}}.items():
        every: dict[str, Any] = {"momentum": 0.1, **more}
        whole = fit(f"{folder}/{name}-whole", Halves(), checkpoint_frequency="5 steps", **every)
        assert whole.history is not None
        path = f"{folder}/{name}-whole/checkpoints/step-000005"
        again = fit(f"{folder}/{name}-again", Halves(), resume_from_checkpoint=path, **every)
        same[name] = torch.equal(flat(whole.model), flat(again.model))
        verdict = events(again.history, "ResumeCompared")[0]
        same[f"{name}: certificate"] = verdict["passed"]
    return same


def test_rates_set_by_a_callback_are_resumed_exactly(tmp_path: Path) -> None:
    for same in run_ranks(resume_own_rates, 2, str(tmp_path)):
        assert all(same.values()), same


@dataclass(eq=False)
class Options(Callback):
    strength: float = 1.0
    seen: int = field(default=0, init=False)

    def state(self) -> dict[str, Any]:
        return {"seen": 1}


def resume_with_others(folder: str) -> list[str]:
    fit(f"{folder}/a", Options(1.0), Counts(), checkpoint_dir=f"{folder}/kept", max_steps=6)
    resumed: dict[str, Any] = {"checkpoint_dir": f"{folder}/kept", "resume_from_checkpoint": True}
    history = trained(f"{folder}/b", Options(2.0), **resumed)
    return [event["message"] for event in events(history, "Warned")]


def test_callbacks_that_changed_are_reported_on_resume(tmp_path: Path) -> None:
    for messages in run_ranks(resume_with_others, 2, str(tmp_path)):
        assert any("the callback Options strength=1.0 → strength=2.0" in message for message in messages), messages
        assert any("the state of the callback Counts, which this run does not have" in text for text in messages)


class Misspelt(Callback):
    def on_epoch_ended(self, run: Any) -> None: ...


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        ([Misspelt()], "Misspelt.on_epoch_ended would never be called"),
        ([Counts], "Counts is a class, not a callback"),
        ([print], "is no callback"),
        (Counts(), "callbacks is a Counts"),
        ([(same := Counts()), same], "the same Counts is passed twice"),
    ],
)
def test_wrong_callbacks_are_refused_by_the_trainer(callbacks: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        Trainer(model(), callbacks=callbacks)
