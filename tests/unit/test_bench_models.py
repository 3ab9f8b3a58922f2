"""The models that are measured: their sizes are those of the families they stand for, and they learn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from distributed.bench.workloads.gpt import SIZES, flops_per_token
from distributed.bench.workloads.models import TINY, WORKLOADS, Workload
from distributed.train.task import Task

MILLIONS = {"resnet50": 25.557032, "bert-large": 335.2, "gpt2-124m": 124.5, "gpt-1.3b": 1315.8, "dlrm": 715.2}


def on_meta(workload: Workload) -> nn.Module:
    with torch.device("meta"):
        return workload.make_model()


@pytest.mark.parametrize("name", MILLIONS)
def test_model_has_the_parameter_count_of_its_family(name: str) -> None:
    count = sum(parameter.numel() for parameter in on_meta(WORKLOADS[name]).parameters())
    assert count / 1e6 == pytest.approx(MILLIONS[name], abs=1e-9 if name == "resnet50" else 0.05)


def test_dlrm_tables_and_gradients_fit_into_40_gb() -> None:
    model = on_meta(WORKLOADS["dlrm"])
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    assert len(tables) == 26
    assert not any(table.sparse for table in tables)
    assert 2 * 4 * sum(parameter.numel() for parameter in model.parameters()) < 40e9


@pytest.mark.parametrize("name", ["mlp", "resnet50", "bert-large", "dlrm"])
def test_flops_are_three_times_torchs_forward_count(name: str) -> None:
    """Backward has two products for each of forward's, but for the first layer's inputs, which need no gradient."""
    workload, model = WORKLOADS[name], on_meta(WORKLOADS[name])
    rows = [torch.empty((2, *t.shape[1:]), dtype=t.dtype, device="meta") for t in workload.make_rows(1)]
    with FlopCounterMode(display=False) as counter:
        workload.loss(model, rows)
    units = 2 * workload.units_per_sample
    assert workload.flops_per_unit == pytest.approx(3 * counter.get_total_flops() / units, rel=0.01)


@pytest.mark.parametrize(("name", "size"), [("gpt2-124m", "124m"), ("gpt-1.3b", "1.3b")])
def test_gpt_flops_match_flops_per_token(name: str, size: str) -> None:
    read = replace(SIZES[size], length=WORKLOADS[name].units_per_sample)
    assert WORKLOADS[name].flops_per_unit == flops_per_token(on_meta(WORKLOADS[name]), read)


@pytest.mark.parametrize("name", TINY)
def test_model_learns_and_its_rows_are_reproducible(name: str) -> None:
    workload = TINY[name]
    model, rows = workload.make_model(), workload.make_rows(workload.batch)
    optimizer = workload.optimizer(model.parameters())
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = workload.loss(model, rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    again = workload.loss(workload.make_model(), workload.make_rows(workload.batch))
    assert again.item() == losses[0]


@pytest.mark.parametrize("name", TINY)
def test_task_loss_equals_that_of_a_hand_written_loop(name: str) -> None:
    workload = TINY[name]
    model, rows = workload.make_model(), workload.make_rows(workload.batch)
    outcome = Task(model, workload.loss_fn).run(model, rows)
    assert outcome.loss.item() == workload.loss(workload.make_model(), rows).item()
    assert rows[0].shape[0] == rows[-1].shape[0] == workload.batch
