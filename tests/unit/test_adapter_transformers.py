"""What each field of TrainingArguments is here, what is refused by name, and what a trainer saves and takes back."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import distributed
from distributed.adapters import hf_trainer
from distributed.adapters.transformers.fields import IDLE, MAPPED, REFUSED, settings_of
from distributed.adapters.transformers.history import log_history, mean_loss
from distributed.core.errors import DistributedError, MissingExtraError
from distributed.core.events import RunStarted, StepEnded
from distributed.core.history import History
from distributed.core.run_dir import RunDir
from distributed.observe.event_log import EventLog
from tests.hf_models import Rows, arguments, bert, measure

OTHER: dict[str, Any] = {  # of fields whose other values must be of a kind
    "accelerator_config": {"split_batches": True},
    "debug": "underflow_overflow",
    "include_for_metrics": ["inputs"],
    "include_num_input_tokens_seen": True,
    "torch_empty_cache_steps": 2,
    "neftune_noise_alpha": 1.0,
    "parallelism_config": object(),
    "ddp_backend": "gloo",
    "ddp_broadcast_buffers": True,
    "eval_delay": 2,
    "fsdp": "full_shard",
    "fsdp_config": {"min_num_params": 1},
    "deepspeed": {"train_batch_size": 1},
}


def test_each_training_argument_is_mapped_idle_or_refused() -> None:
    found = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    known = [*MAPPED, *IDLE, *REFUSED]
    assert len(known) == len(set(known)), "in two groups"
    assert found - set(known) == set(), "say what happens to it"


def test_arguments_by_default_are_not_refused(tmp_path: Path) -> None:
    found = settings_of(transformers.TrainingArguments(str(tmp_path), use_cpu=True))
    assert (found["batch_size"], found["epochs"], found["gradient_clipping"]) == (8, 3, 1.0)
    assert (found["checkpoint_frequency"], found["checkpoint_dir"]) == ("500 steps", str(tmp_path / "checkpoints"))
    distributed.DistributedConfig(**found)


@pytest.mark.parametrize("name", REFUSED)
def test_field_that_is_set_in_vain_is_refused(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    default = getattr(args, name)
    setattr(args, name, OTHER.get(name, not default))
    with pytest.raises(DistributedError, match=name):
        settings_of(args)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eval_strategy": "steps", "eval_steps": 0.5}, r"eval_steps=0\.5"),
        ({"save_strategy": "steps", "save_steps": 0.5}, r"save_steps=0\.5"),
        ({"logging_steps": 0.5}, r"logging_steps=0\.5"),
        ({"report_to": "wandb"}, "report_to='wandb'"),
        ({"torch_compile": True, "torch_compile_backend": "eager"}, "torch_compile_backend='eager'"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["x"]}, "galore_adamw_layerwise"),
        ({"train_sampling_strategy": "group_by_length"}, "'group_by_length'"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "'reduce_lr_on_plateau'"),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "load_best_model_at_end"),
    ],
)
def test_value_that_is_not_mapped_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DistributedError, match=message):
        settings_of(arguments(tmp_path, **given))


def test_settings_follow_the_arguments(tmp_path: Path) -> None:
    given = {"max_grad_norm": 0.0, "bf16": True, "save_strategy": "epoch", "save_total_limit": 2, "logging_steps": 7}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_hits", "eval_strategy": "epoch"}
    found = settings_of(arguments(tmp_path, **given, **best, report_to=["tensorboard", "mlflow"], run_name="one"))
    expected = {"mixed_precision": "bf16", "log_every_n_steps": 7, "keep_last": 2, "checkpoint_frequency": 1}
    expected |= {"keep_best": "max:val_hits", "tensorboard": True, "mlflow_tracking": True, "mlflow_experiment": "one"}
    assert expected.items() <= found.items()
    assert "gradient_clipping" not in found


def best_of(folder: Path, more: dict[str, Any] | None = None, **settings: Any) -> Any:
    args = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True, "learning_rate": 0.3}
    return hf_trainer(
        bert(),
        arguments(folder, **args | (more or {}), num_train_epochs=3),
        train_dataset=Rows(24),
        eval_dataset=Rows(16, seed=1),
        compute_metrics=measure,
        num_gpus=1,
        **settings,
    )


def test_best_model_is_loaded_and_saved_for_from_pretrained(tmp_path: Path) -> None:
    trainer = best_of(tmp_path / "out", run_dir=tmp_path / "run")
    trainer.train()
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert trainer.state.best_metric == pytest.approx(min(losses))
    assert min(losses) < losses[-1] - 1e-3, "the last is the best, so the test shows nothing"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), abs=1e-6)
    trainer.save_model(tmp_path / "model")
    trainer.save_metrics("eval", {"eval_loss": min(losses)})
    trainer.save_state()
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "model")
    for mine, theirs in zip(trainer.model.state_dict().values(), loaded.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert json.loads((tmp_path / "out/trainer_state.json").read_text())["global_step"] == 9
    assert json.loads((tmp_path / "out/eval_results.json").read_text()) == {"eval_loss": min(losses)}


@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_best_evaluation_within_an_epoch_is_loaded(strategy: str, tmp_path: Path) -> None:
    """By a metric of compute_metrics, which each evaluation has at its own step."""
    more = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": strategy, "save_steps": 2}
    more |= {"metric_for_best_model": "eval_first", "greater_is_better": True, "save_total_limit": 1}
    trainer = best_of(tmp_path / "out", more, run_dir=tmp_path / "run")
    trainer.train()
    rows = {row["step"]: row["eval_first"] for row in trainer.state.log_history if "eval_first" in row}
    assert [*rows] == [2, 4, 6, 8, 9]  # and the end
    best = max(rows, key=rows.__getitem__)
    assert best not in (3, 6, 9), "it is at the end of an epoch, so the test shows nothing"
    assert trainer.state.best_metric == pytest.approx(rows[best])
    assert trainer.state.best_model_checkpoint.endswith(f"step-{best:06}")
    assert trainer.evaluate()["eval_first"] == pytest.approx(rows[best], abs=1e-6)


def test_predictions_come_in_the_order_of_the_data(tmp_path: Path) -> None:
    trainer = best_of(tmp_path / "out", run_dir=tmp_path / "run")
    trainer.train()
    rows = Rows(13, seed=2)
    found = trainer.predict(rows)
    assert found.predictions.shape == (13, 3)
    assert found.label_ids.tolist() == rows.labels.tolist()
    assert found.metrics["test_hits"] == float((found.predictions.argmax(-1) == found.label_ids).mean())


class StopsAt(distributed.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step:
            run.stop("for this test")


def test_resumed_arguments_end_as_undisturbed(tmp_path: Path) -> None:
    def train(name: str, *callbacks: Any, **given: Any) -> Any:
        args = arguments(tmp_path / "out" / name, save_strategy="steps", save_steps=2, weight_decay=0.1)
        options = {"callbacks": callbacks, "num_gpus": 1, "run_dir": tmp_path / f"{name}-{len(callbacks)}"}
        trainer = hf_trainer(bert(), args, train_dataset=Rows(40), **options)
        return trainer, trainer.train(**given).global_step

    whole, steps = train("whole")
    assert train("cut", StopsAt(3))[1] == 3
    again, resumed = train("cut", resume_from_checkpoint=True)
    assert (steps, resumed) == (10, 10)
    for mine, theirs in zip(again.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_steps_that_are_taken_again_count_once(tmp_path: Path) -> None:
    """Of a run that broke after its fourth step, and went on behind the second."""
    started = partial(
        RunStarted, time=0.0, run_dir=str(tmp_path), world_size=1, device="cpu", backend="pytorch-ddp", epochs=1
    )
    log = EventLog(RunDir(tmp_path).events)
    for first_step, losses in ((0, [4.0, 3.0, 9.0, 9.0]), (2, [2.0, 1.0])):
        log.on(started(steps_per_epoch=4, total_steps=4, first_step=first_step, global_batch=8))
        for step, loss in enumerate(losses, first_step + 1):
            log.on(StepEnded(time=0.0, step=step, epoch=0, loss=loss, learning_rate=0.1, samples_per_second=1.0))
    log.close()
    rows = log_history(History((), total_time=1.0, steps=4, world_size=1, run_dir=str(tmp_path)))
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]
    assert mean_loss(rows) == 2.5


def test_half_an_epoch_ends_in_its_middle(tmp_path: Path) -> None:
    trainer = hf_trainer(
        bert(), arguments(tmp_path, num_train_epochs=1.5), train_dataset=Rows(40), num_gpus=1, run_dir=tmp_path / "run"
    )
    assert trainer.train().global_step == 8


def test_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"distributed-training\[transformers\]"):
        hf_trainer(nn.Linear(1, 1))


def test_adapters_import_no_library_before_their_use() -> None:
    code = "import sys; from distributed.adapters import lightning_task, hf_trainer; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"lightning", "transformers", "accelerate", "torchmetrics"} & set(found)


def test_what_is_no_model_or_callback_is_refused(tmp_path: Path) -> None:
    for given, message in (
        ({}, "either a model or a model_init"),
        ({"model": bert(), "callbacks": [transformers.EarlyStoppingCallback()]}, "EarlyStoppingCallback"),
        ({"model": bert(), "eval_dataset": {"one": Rows(4)}}, "several"),
    ):
        with pytest.raises(DistributedError, match=message):
            hf_trainer(args=arguments(tmp_path), **given)
    with pytest.raises(DistributedError, match="gradient_checkpointing of a Linear"):
        hf_trainer(nn.Linear(1, 1), arguments(tmp_path, gradient_checkpointing=True))
    with pytest.raises(DistributedError, match="without a train_dataset"):
        hf_trainer(bert(), arguments(tmp_path)).train()
