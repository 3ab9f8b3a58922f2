"""What an Accelerator's arguments and calls are over a run, and what is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from distributed.adapters.accelerate import Accelerator, get_logger, set_seed
from distributed.adapters.accelerate.saved_state import next_folder
from distributed.core.errors import DistributedError
from tests.accelerate_scripts import dataset, make_model


def make(tmp_path: Path, **given: Any) -> Accelerator:
    return Accelerator(num_gpus=1, progress=False, run_dir=str(tmp_path / "run"), **given)


def prepare(accelerator: Accelerator, shuffle: bool = False) -> Any:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator.prepare(model, optimizer, DataLoader(dataset(12, 1), batch_size=4, shuffle=shuffle))


Call = Callable[[Accelerator, nn.Module, Any, torch.Tensor], object]


def train(accelerator: Accelerator, call: Call, *, batches: int = 10**9) -> None:
    """Batches in which `call` does all but the forward pass."""
    model, optimizer, loader = prepare(accelerator)
    for number, (inputs, labels) in enumerate(loader):
        if number < batches:
            call(accelerator, model, optimizer, F.cross_entropy(model(inputs), labels))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"deepspeed_plugin": object()}, "deepspeed_plugin"),
        ({"fsdp_plugin": object()}, "fsdp_plugin"),
        ({"megatron_lm_plugin": object()}, "megatron_lm_plugin"),
        ({"parallelism_config": object()}, "parallelism_config"),
        ({"rng_types": ["torch"]}, "rng_types"),
        ({"log_with": "wandb"}, "log_with='wandb'"),
        ({"dynamo_backend": "aot_eager"}, "dynamo_backend='aot_eager'"),
        ({"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}, "dispatch_batches=True"),
        ({"gradient_accumulation_plugin": GradientAccumulationPlugin(2, sync_with_dataloader=False)}, "sync_with"),
        ({"kwargs_handlers": [AutocastKwargs(enabled=False)]}, "AutocastKwargs"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs(broadcast_buffers=False)]}, "broadcast_buffers"),
        ({"device_placement": False}, "device_placement"),
        ({"lr_schedule": "cosine"}, "lr_schedule"),
        ({"no_such_thing": 1}, "no_such_thing"),
    ],
)
def test_argument_that_a_run_cannot_follow_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DistributedError, match=message):
        make(tmp_path, **given)


def test_arguments_become_settings(tmp_path: Path) -> None:
    handlers = [
        DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=7),
        GradScalerKwargs(init_scale=4.0),
        InitProcessGroupKwargs(timeout=timedelta(seconds=70)),
    ]
    plugin = GradientAccumulationPlugin(num_steps=3)
    made = make(tmp_path, kwargs_handlers=handlers, gradient_accumulation_plugin=plugin, mixed_precision="fp16")
    config = made.run.config
    assert (config.find_unused_parameters, config.bucket_cap_mb, config.scaler_init_scale) == (True, 7, 4.0)
    assert (config.collective_timeout_s, config.gradient_accumulation_steps) == (70, 3)
    assert (made.mixed_precision, made.num_processes, made.is_main_process) == ("fp16", 1, True)
    assert made.distributed_type == DistributedType.NO


def clip(accelerator: Accelerator, model: nn.Module) -> torch.Tensor:
    return accelerator.clip_grad_norm_(model.parameters(), 1.0)


MISUSED: dict[str, tuple[Call, str]] = {
    "no backward": (lambda acc, model, opt, loss: None, "did not call run.backward"),
    "by hand": (lambda acc, model, opt, loss: acc.backward(loss), "did not call run.step"),
    "closure": (lambda acc, model, opt, loss: [acc.backward(loss), opt.step(lambda: 0)], "closure"),
    "zeroed": (lambda acc, model, opt, loss: [acc.backward(loss), opt.zero_grad()], "zero_grad"),
    "clipped early": (
        lambda acc, model, opt, loss: acc.clip_grad_norm_(model.parameters(), 1.0),
        "before the gradients",
    ),
    "clipped late": (
        lambda acc, model, opt, loss: [acc.backward(loss), opt.step(), acc.clip_grad_norm_(model.parameters(), 1.0)],
        "after they are dropped",
    ),
    "clipped partly": (lambda acc, model, opt, loss: acc.clip_grad_norm_(model[0].parameters(), 1.0), "some of the"),
    "clipped by 1": (lambda acc, model, opt, loss: acc.clip_grad_norm_(model.parameters(), 1.0, 1), "norm_type=1"),
    "saved early": (lambda acc, model, opt, loss: [acc.backward(loss), acc.save_state("x")], r"before optimizer\.step"),
    "loaded": (lambda acc, model, opt, loss: acc.load_state("x"), "after the training has begun"),
    "skipped": (lambda acc, model, opt, loss: acc.skip_first_batches(None, 2), "skip_first_batches"),
    "prepared": (lambda acc, model, opt, loss: acc.prepare(model), "prepare after"),
    "registered": (lambda acc, model, opt, loss: acc.register_for_checkpointing(opt), "register_for_checkpointing"),
    "logged": (lambda acc, model, opt, loss: acc.log({"loss": 1.0}), "'loss'"),
    "text": (lambda acc, model, opt, loss: acc.log({"name": "text"}), "got a str"),
    "retained": (lambda acc, model, opt, loss: acc.backward(loss, retain_graph=True), "retain_graph"),
    "unknown": (lambda acc, model, opt, loss: acc.no_sync(model), r"accelerator\.no_sync"),
    "groups": (lambda acc, model, opt, loss: opt.add_param_group({"params": []}), "add_param_group"),
}


@pytest.mark.parametrize("case", MISUSED)
def test_call_that_a_run_cannot_follow_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, message = MISUSED[case]
    accelerator = make(tmp_path)
    with pytest.raises(DistributedError, match=message):
        train(accelerator, call)
    accelerator.run._abandon()


def test_accumulation_without_its_scope_is_refused(tmp_path: Path) -> None:
    accelerator = make(tmp_path, gradient_accumulation_steps=2)
    with pytest.raises(DistributedError, match=r"outside of accelerator\.accumulate"):
        train(accelerator, lambda acc, model, opt, loss: [acc.backward(loss), opt.step()])
    accelerator.run._abandon()


def test_what_cannot_be_prepared_is_refused(tmp_path: Path) -> None:
    for objects, message in (
        ((make_model(), make_model()), "several models"),
        ((object(),), "got a object"),
    ):
        with pytest.raises(DistributedError, match=message):
            make(tmp_path).prepare(*objects)
    _, loader = (accelerator := make(tmp_path)).prepare(make_model(), DataLoader(dataset(4, 1)))
    with pytest.raises(DistributedError, match="no optimizer was prepared"):
        next(iter(loader))
    assert not accelerator.run.is_open


def test_clipping_twice_is_refused(tmp_path: Path) -> None:
    accelerator = make(tmp_path, gradient_clipping=1.0)
    with pytest.raises(DistributedError, match="gradient_clipping"):
        train(
            accelerator,
            lambda acc, model, opt, loss: [acc.backward(loss), acc.clip_grad_norm_(model.parameters(), 1.0)],
        )
    accelerator.run._abandon()


def test_logged_numbers_are_in_the_history(tmp_path: Path) -> None:
    accelerator = make(tmp_path, log_with="tensorboard", project_dir=tmp_path / "logs")
    accelerator.init_trackers("one", config={"lr": 0.1})
    model, optimizer, loader = prepare(accelerator)
    for epoch in range(2):
        for number, (inputs, labels) in enumerate(loader):
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            accelerator.log({"number": number}, step=number)
        accelerator.log({"epoch_number": epoch})
    accelerator.end_training()
    first, second = (record.metrics for record in accelerator.run.history.epochs)
    assert (first["number"], first["epoch_number"], second["epoch_number"]) == (1.0, 0.0, 1.0)
    assert list((tmp_path / "logs").rglob("events.out.*"))
    assert any("lr=0.1" in str(decision) for decision in accelerator.run.plan.decisions)


def test_states_are_named_and_limited(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = make(tmp_path, project_config=project)
    model, optimizer, loader = prepare(accelerator)
    for inputs, labels in loader:
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
        accelerator.save_state()
    accelerator.end_training()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    again = Accelerator(num_gpus=1, progress=False, run_dir=str(tmp_path / "again"), project_config=project)
    model, *_ = prepare(again)
    again.load_state()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    again.run._abandon()


def test_limit_above_the_number_of_states_keeps_all(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=6)
    for number in range(8):
        Path(next_folder(project, None, removes=True)).mkdir()
        project.iteration += 1
        kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert kept == [f"checkpoint_{at}" for at in range(max(0, number - 5), number + 1)]


def test_state_after_a_break_has_the_step_before_it(tmp_path: Path) -> None:
    accelerator = make(tmp_path)
    model, optimizer, loader = prepare(accelerator)
    for taken, (inputs, labels) in enumerate(loader, 1):
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
        if taken == 2:
            break
    folder = accelerator.save_state(str(tmp_path / "state"))
    accelerator.end_training()
    again = Accelerator(num_gpus=1, progress=False, run_dir=str(tmp_path / "again"))
    prepare(again)
    again.load_state(folder)
    assert (accelerator.run.history.steps, again.run.batches_done) == (2, 2)
    again.run._abandon()


def test_split_batches_and_seeded_order_follow_the_configuration(tmp_path: Path) -> None:
    options = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=5)
    accelerator = make(tmp_path, dataloader_config=options)
    _, _, loader = prepare(accelerator, shuffle=True)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(5))
    inputs, _ = next(iter(loader))
    assert torch.equal(inputs, dataset(12, 1).tensors[0][order[:4]])
    accelerator.run._abandon()


@pytest.mark.parametrize("drop_last", [False, True])
def test_length_is_that_of_the_pass(drop_last: bool, tmp_path: Path) -> None:
    accelerator = make(tmp_path, gradient_accumulation_steps=2)
    model = make_model()
    loaders = [DataLoader(dataset(size, 1), batch_size=4, drop_last=drop_last) for size in (18, 10)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    before, taken = [len(loader) for loader in loaders], 0
    for inputs, labels in loaders[0]:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
        taken += 1
    assert before == [len(loader) for loader in loaders] == [taken, sum(1 for _ in loaders[1])]
    accelerator.end_training()


def test_seed_of_script_is_that_of_the_run(tmp_path: Path) -> None:
    set_seed(7)
    accelerator, model = make(tmp_path), nn.Linear(6, 3)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(dataset(4, 1)))
    accelerator.loaders_of_run()
    assert accelerator.run.plan.seed == 7
    accelerator.run._abandon()


def test_logger_is_that_of_the_main_process(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("script", "INFO")
    with caplog.at_level(logging.INFO):
        logger.info("told %s", "once", main_process_only=True)
    assert [record.getMessage() for record in caplog.records] == ["told once"]


def test_script_that_ends_without_end_training_is_warned(tmp_path: Path) -> None:
    accelerator = make(tmp_path)
    train(accelerator, lambda acc, model, opt, loss: [acc.backward(loss), opt.step()])
    with pytest.warns(UserWarning, match="end_training"):
        accelerator.run._end_with_the_process()
