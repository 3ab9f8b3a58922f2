"""First values of a model on the meta device: the same however it is cut, and those that its own code would give."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distributed.core.errors import PlanError, TaskError
from distributed.strategies.data_parallel.zero1 import rebind
from distributed.strategies.model.materialize import materialize
from distributed.strategies.placement import Cut, Layout

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)
        self.norm, self.mlp = nn.RMSNorm(16), nn.Linear(16, 16)


class Model(nn.Module):
    """Initialises its modules itself, as many do; in part through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16, padding_idx=3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.tokens.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
        if isinstance(module, Block):
            nn.init.constant_(module.mlp.bias, 0.5)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def made(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    model = on_meta(make)
    materialize(model, Layout(model), CPU, seed)
    return model


def test_materialized_values_follow_the_models_own_init() -> None:
    model: Any = made(Model)
    assert model.blocks[1].mlp.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert (model.blocks[1].mlp.bias == 0.5).all(), "a parent that sets its child's"
    assert (model.blocks[0].attention.in_proj_bias == 0).all()
    assert (model.blocks[0].attention.out_proj.bias == 0).all()
    bound = math.sqrt(6 / (16 + 48))
    assert bound * 0.9 < model.blocks[0].attention.in_proj_weight.abs().max() <= bound
    assert (model.norm.running_var == 1).all()
    assert model.norm.num_batches_tracked == 0
    assert (model.blocks[0].norm.weight == 1).all()
    assert (model.tokens.weight[3] == 0).all()
    assert model.head.weight is model.tokens.weight
    assert not torch.equal(model.blocks[0].mlp.weight, model.blocks[1].mlp.weight)


def test_materialize_depends_on_seed_and_leaves_the_rng_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, same, other = made(Model, 7).state_dict(), made(Model, 7).state_dict(), made(Model, 8).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert not torch.equal(one["blocks.0.mlp.weight"], other["blocks.0.mlp.weight"])


def test_materialized_shard_equals_that_of_the_whole() -> None:
    whole = made(Model).state_dict()
    model: Any = on_meta(Model)
    layout = Layout(model)
    cuts = {"blocks.0.mlp.weight": Cut(0, ((4, 8), (12, 16))), "blocks.0.mlp.bias": Cut(0, ((4, 8), (12, 16)))}
    cuts |= {"blocks.0.attention.out_proj.weight": Cut(1, ((8, 16),))}
    cuts |= {name: Cut(0, ((16, 32),)) for name in ("tokens.weight", "head.weight")}
    for name, cut in cuts.items():
        layout.cut(name, cut)
        owner, _, attribute = name.rpartition(".")
        small = nn.Parameter(cut.take(model.get_parameter(name)))
        setattr(model.get_submodule(owner), attribute, small)
    model.head.weight = model.tokens.weight
    for name in [name for name in whole if name.startswith("blocks.1.")]:
        layout.leave_out(name)
    materialize(model, layout, CPU, 0)
    for name, value in model.state_dict().items():
        if layout.is_here(name):
            assert torch.equal(value, layout.take(name, whole[name])), name
        else:
            assert value.is_meta, name
    assert model.head.weight is model.tokens.weight
    assert model.blocks[0].mlp.weight.shape == (8, 16)


def test_materialize_keeps_existing_values_and_parameter_objects() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"), nn.LSTM(4, 4, device="meta"))
    built, parameters = model[0].weight.detach().clone(), list(model.parameters())
    parameters[2].requires_grad_(False)
    materialize(model, Layout(model), CPU, 0)
    assert torch.equal(model[0].weight, built)
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, *[True] * 5]
    assert model[2](model[1](torch.ones(1, 4)))[0].isfinite().all()


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(3, 3).tril(), persistent=False)
        self.angles = torch.arange(3)
        self.inner = nn.Linear(2, 2)


def test_modules_without_an_initialiser_are_all_named() -> None:
    with pytest.raises(PlanError) as error:
        made(lambda: nn.Sequential(nn.Linear(2, 2), Unknown(), nn.ModuleDict({"last": Unknown()})))
    text = str(error.value)
    assert "1 (Unknown): scale, mask, angles" in text
    assert "2.last (Unknown): scale, mask, angles" in text
    assert "inner" not in text
    assert "reset_parameters" in text


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "mixtral"])
def test_materialized_hugging_face_models_match_their_init(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    config = transformers.AutoConfig.for_model(kind, **sizes, **({} if kind == "gpt2" else {"intermediate_size": 64}))
    kinds = {"bert": transformers.BertForMaskedLM}
    make = kinds.get(kind) or (lambda config: transformers.AutoModelForCausalLM.from_config(config))
    ours, theirs = made(lambda: make(config)), make(config)
    buffers = dict(theirs.named_buffers())
    for name, buffer in ours.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        spread = expected[name].std().item()
        assert parameter.std().item() == pytest.approx(spread, rel=0.25, abs=1e-6), name
        if not spread:
            assert torch.equal(parameter, expected[name]), name
    assert ours.get_output_embeddings().weight.shape == theirs.get_output_embeddings().weight.shape


def test_users_optimizer_is_rebound_to_new_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": [model[0].weight, model[1].weight], "lr": 0.5}, {"params": [model[0].bias, model[1].bias]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    before, layout = {id(p): name for name, p in model.named_parameters()}, Layout(model)
    model[0].weight = nn.Parameter(torch.ones(2, 4))
    layout.leave_out("1.bias")
    rebind(optimizer, before, model, layout)
    new = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    assert new == [[id(model[0].weight), id(model[1].weight)], [id(model[0].bias)]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    model[0].weight.grad = torch.ones(2, 4)
    optimizer.step()
    with pytest.raises(TaskError, match="earlier training"):
        rebind(optimizer, {id(p): name for name, p in model.named_parameters()}, model, layout)
