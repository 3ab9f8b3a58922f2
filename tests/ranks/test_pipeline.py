"""A pipeline's steps are those of one process: losses, gradients and weights, for each schedule and kind of model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from distributed.strategies.base import Outcome
from distributed.strategies.pipeline.schedule import Pipeline
from distributed.strategies.placement import Layout
from distributed.testing import run_ranks
from tests.meshes import joined

VOCAB, WIDTH, BLOCKS = 64, 32, 4


class Block(nn.Module):
    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.form = form

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        if self.training:
            self.calls += 1
        if self.form == "in place":
            x *= 0.9
        h = self.first(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        x = x + self.narrow(functional.gelu(self.wide(self.second(x))))
        return (x, mask) if self.form == "pair" else x


class Written(nn.Module):
    """A transformer in which what comes last is held first, with a parameter that belongs to no layer."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(WIDTH, VOCAB), nn.LayerNorm(WIDTH)
        self.positions = nn.Parameter(torch.randn(16, WIDTH))
        self.embedding, self.smooth = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block(form) for _ in range(BLOCKS))
        self.form = form

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)
        x = self.smooth(self.embedding(ids) * self.scale) + self.positions[:length]
        for block in self.blocks:
            x = block(x, mask)[0] if self.form == "pair" else block(x, mask)
        return self.head(self.norm(x))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(VOCAB, WIDTH), nn.TransformerEncoder(layer, BLOCKS), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": BLOCKS, "vocab_size": VOCAB}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": WIDTH, "n_layer": BLOCKS, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": BLOCKS, "vocab_size": VOCAB}
    return BertForMaskedLM(BertConfig(num_attention_heads=4, max_position_embeddings=16, **sizes, **off))


def recomputing() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable()
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "written": Written,
    "pairs": lambda: Written("pair"),
    "in place": lambda: Written("in place"),
    "encoder": encoder,
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "recomputing": recomputing,
}


def run(model: nn.Module, batch: dict[str, torch.Tensor]) -> Outcome:
    ids = batch["input_ids"]
    if hasattr(model, "config"):
        outputs = model(**batch, labels=ids)
        return Outcome(outputs.loss, outputs.logits, ids)
    logits = model(ids)
    return Outcome(functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), logits, ids)


def steps(microbatches: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Full steps, one with another number of micro-batches, one whose last is short, one of short ones."""
    generator = torch.Generator().manual_seed(5)

    def batch(samples: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCAB, (samples, 8), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        return {"input_ids": ids, "attention_mask": mask}

    yield [batch(2) for _ in range(microbatches)]
    yield [batch(2) for _ in range(microbatches)]
    yield [batch(2) for _ in range(microbatches - 1)] + [batch(1)]
    yield [batch(1)]


def weigh(index: int, outcome: Outcome) -> torch.Tensor:
    return outcome.loss * (index + 1) / 4


def train(name: str, schedule: str, microbatches: int, group: Any = None, wrap: Any = None) -> dict[str, Any]:
    """How far losses, gradients and weights are from those of one process, at worst."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    alone = copy.deepcopy(model)
    layout = Layout(model)
    pipeline = Pipeline(
        model, layout, group=group or dist.group.WORLD, schedule=schedule, microbatches=microbatches, session=joined()
    )
    if wrap is not None:
        wrap(pipeline, model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-4) for m in (model, alone)]
    worst = 0.0
    whole = dict(alone.named_parameters(remove_duplicate=False))

    def compare(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> None:
        nonlocal worst
        if ours is None or theirs is None:
            assert ours is theirs or (ours is not None and not ours.any()), "a gradient is missing"
            return
        ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
        worst = max(worst, (ours - theirs).abs().max().item())

    for batches in steps(microbatches):
        seen: list[tuple[int, torch.Tensor]] = []
        kept: list[weakref.ref[torch.Tensor]] = []

        def see(index: int, outcome: Outcome, seen: Any = seen, kept: Any = kept) -> torch.Tensor:
            seen.append((index, outcome.loss.detach()))
            kept.append(weakref.ref(outcome.outputs))
            return weigh(index, outcome)

        pipeline.forward_backward(batches, run, see)
        assert not any(outputs() is not None for outputs in kept), "what a model gives out is not kept"
        pipeline.finish_gradients()
        expected = [run(alone, batch) for batch in batches]
        sum(weigh(at, outcome) for at, outcome in enumerate(expected)).backward()
        assert [index for index, _ in seen] == [*range(len(batches))] * pipeline.is_last
        for index, loss in seen:
            compare(loss, expected[index].loss)
        for key, parameter in model.named_parameters(remove_duplicate=False):
            compare(parameter.grad, whole[key].grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for key, parameter in model.named_parameters(remove_duplicate=False):
        compare(parameter.detach(), whole[key])
    buffers = dict(alone.named_buffers())
    for key, buffer in model.named_buffers():
        assert not layout.is_here(key) or torch.equal(buffer, buffers[key]), key
    model.eval(), alone.eval()
    outcomes = [pipeline.forward(batch, run) for batch in next(steps(2))]
    with torch.no_grad():
        for found, batch in zip(outcomes, next(steps(2)), strict=True):
            if found is not None:
                compare(found.loss, run(alone, batch).loss)
    here = [key for key, _ in alone.named_parameters(remove_duplicate=False) if layout.is_here(key)]
    assert sorted(here) == sorted(key for key, _ in model.named_parameters(remove_duplicate=False))
    stored = [key for key in here if layout.shard(key, whole[key]).stores]
    return {"worst": worst, "stored": stored, "all": list(whole), "shared": pipeline.shared}


def check(results: list[dict[Any, dict[str, Any]]]) -> None:
    for case in results[0]:
        assert all(result[case]["worst"] < 1e-5 for result in results), (case, [r[case]["worst"] for r in results])
        stored = sorted(name for result in results for name in result[case]["stored"])
        assert stored == sorted(results[0][case]["all"]), f"{case}: every parameter is stored by one stage"


def half_precision_distance(name: str, schedule: str) -> float:
    """Of the gradients, relative to the largest."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    alone = copy.deepcopy(model)
    pipeline = Pipeline(
        model, Layout(model), group=dist.group.WORLD, schedule=schedule, microbatches=2, session=joined()
    )
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            pipeline.forward_backward(next(steps(2)), run, weigh)
            outcomes = [run(alone, batch) for batch in next(steps(2))]
            sum(weigh(at, outcome) for at, outcome in enumerate(outcomes)).backward()
    pipeline.finish_gradients()
    whole = {key: parameter.grad for key, parameter in alone.named_parameters()}
    worst = max((p.grad - whole[key]).abs().max().item() for key, p in model.named_parameters())
    return worst / max(gradient.abs().max().item() for gradient in whole.values())


@pytest.fixture(scope="module")
def two_ranks() -> list[Any]:
    def cases() -> tuple[dict[Any, dict[str, Any]], dict[Any, float]]:
        trained, halves = {}, {}
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
            for microbatches in (1, 2):
                trained["written", schedule, microbatches] = train("written", schedule, microbatches)
            for name in ("written", "pairs", "in place", "encoder", "llama", "gpt2", "bert", "recomputing"):
                trained[name, schedule, 4] = train(name, schedule, 4)
            for name in ("written", "llama", "bert") if schedule != "gpipe" else ():
                halves[name, schedule] = half_precision_distance(name, schedule)
        return trained, halves

    return run_ranks(cases, 2)


def test_two_pipeline_ranks_match_one_process(two_ranks: list[Any]) -> None:
    results = [trained for trained, _ in two_ranks]
    check(results)
    assert results[0]["gpt2", "1f1b", 4]["shared"] == [("transformer.wte.weight", "lm_head.weight")]
    assert results[0]["llama", "1f1b", 4]["shared"] == []


def test_half_precision_pipeline_matches_one_process(two_ranks: list[Any]) -> None:
    for _, halves in two_ranks:
        assert all(distance < 0.02 for distance in halves.values()), halves


def test_four_ranks_and_sharded_stages_match_one_process() -> None:
    def shard(pipeline: Pipeline, model: nn.Module, group: Any) -> None:
        mesh = DeviceMesh.from_group(group, "cpu")
        for stage, blocks in zip(pipeline.stages, pipeline.blocks, strict=True):
            for path in blocks:
                fully_shard(model.get_submodule(path), mesh=mesh)
            fully_shard(stage, mesh=mesh)

    def cases() -> tuple[dict[Any, dict[str, Any]], dict[Any, dict[str, Any]]]:
        of_four = [("written", "1f1b", 4), ("written", "1f1b", 2), ("gpt2", "gpipe", 4), ("llama", "1f1b", 4)]
        trained = {case: train(*case) for case in of_four}
        pipelines, shards = [
            [dist.new_group(ranks) for ranks in pairs] for pairs in (((0, 2), (1, 3)), ((0, 1), (2, 3)))
        ]
        group, mates = pipelines[dist.get_rank() % 2], shards[dist.get_rank() // 2]
        of_two = [("written", "1f1b"), ("written", "interleaved"), ("gpt2", "1f1b"), ("gpt2", "zero_bubble")]
        return trained, {case: train(*case, 2, group, lambda p, m: shard(p, m, mates)) for case in of_two}

    results = run_ranks(cases, 4)
    check([trained for trained, _ in results])
    check([sharded for _, sharded in results[::2]])
    check([sharded for _, sharded in results[1::2]])
