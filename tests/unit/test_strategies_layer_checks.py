"""Layers that several ranks cannot train as one process would are named before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distributed.core.errors import PlanError, TaskError
from distributed.core.mesh import MeshSpec
from distributed.core.plan import BatchPlan, LoraPlan, Plan, ReplicatePlan, ShardPlan, SpeedPlan
from distributed.strategies.checks.layers import check_layers
from distributed.strategies.checks.plain_modules import is_plain
from distributed.strategies.model.lora import add_lora
from distributed.strategies.tensor.plans import find_styles


def plan(**more: Any) -> Plan:
    batch = more.pop("batch", None) or BatchPlan(2, more.pop("ranks", 2), more.pop("accumulation", 1))
    return Plan("", batch, **({"mesh": DDP} | more))


DDP = MeshSpec(dp_replicate=2)
FSDP = {"mesh": MeshSpec(dp_shard=2), "shard": ShardPlan("full")}


class OwnStatistics(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) / (x.var(0) + self.eps).sqrt()


class AboveOwn(OwnStatistics):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


class ByMethod(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalized(x).relu()

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.training)


class ByClass(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.BatchNorm1d.forward(self, x).relu()


class Without(ByMethod):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def scripted() -> nn.Module:
    return torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.randn(3, 2))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, ByMethod, ByClass, Without, nn.SyncBatchNorm])
def test_norms_that_call_torchs_batch_norm_are_accepted(kind: type[nn.Module]) -> None:
    check_layers(nn.Sequential(kind(2)), plan())


@pytest.mark.parametrize("make", [lambda: OwnStatistics(2), lambda: AboveOwn(2), scripted])
def test_norms_with_own_statistics_are_refused(make: Callable[[], nn.Module]) -> None:
    model = nn.ModuleDict({"inner": make()})
    with pytest.raises(TaskError, match="inner"):
        check_layers(model, plan())
    check_layers(model, plan(mesh=MeshSpec()))
    check_layers(model, plan(replicate=ReplicatePlan(sync_batchnorm=False)))


@pytest.mark.parametrize(
    "where",
    [
        FSDP,
        {"strategy": "deepspeed"},
        {"mesh": MeshSpec(pp=2)},
        {"speed": SpeedPlan(parameters="compensated"), "mesh": MeshSpec()},
    ],
    ids=["fsdp", "deepspeed", "pipeline", "bf16 parameters"],
)
def test_embedding_max_norm_is_refused_when_its_update_is_lost(where: dict[str, Any]) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(3, 2, max_norm=1.0)})
    with pytest.raises(TaskError, match="table has max_norm=1"):
        check_layers(model, plan(**where))
    check_layers(model, plan())


def test_scale_grad_by_freq_over_part_of_a_batch_is_refused() -> None:
    model = nn.ModuleDict({"table": nn.EmbeddingBag(3, 2, scale_grad_by_freq=True)})
    virtual_ranks = {"batch": BatchPlan(2, leaves=4), "mesh": MeshSpec()}
    pipeline = {"batch": BatchPlan(2, parts=2), "mesh": MeshSpec(pp=2)}
    for where in ({}, virtual_ranks, pipeline):
        with pytest.raises(TaskError, match="table has scale_grad_by_freq"):
            check_layers(model, plan(**where))
    check_layers(model, plan(mesh=MeshSpec()))


@pytest.mark.parametrize("where", [FSDP, {"mesh": MeshSpec(tp=2)}, {"strategy": "deepspeed"}, {"accumulation": 2}])
def test_hooks_on_sharded_or_partial_gradients_are_refused(where: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    check_layers(model, plan(**where))
    model.bias.register_hook(torch.sign)
    with pytest.raises(TaskError, match="bias has a hook"):
        check_layers(model, plan(**where))
    check_layers(model, plan())


class OwnLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


class OwnAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_only_an_unmodified_module_counts_as_plain() -> None:
    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert is_plain(nn.Linear(2, 2), nn.Linear, "weight")
    assert not any(is_plain(m, nn.Linear, "weight") for m in (patched, normed, OwnLinear(2, 2), nn.ReLU()))


def test_subclass_of_attention_is_refused_by_tensor_parallel() -> None:
    layers = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)]
    layers[1].self_attn = OwnAttention(8, 2)
    with pytest.raises(PlanError, match=r"1\.self_attn"):
        find_styles(nn.Sequential(*layers), 2)


def test_lora_on_a_shared_layer_is_refused() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(PlanError, match="0 and 2 are one layer"):
        add_lora(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 4)), LoraPlan(rank=1, targets=("0",)), 0)
