"""A sequence shared out over real ranks trains as on one, and a model that cannot be shared out is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distributed.core.errors import PlanError
from distributed.strategies.context.context_parallel import ContextParallel
from distributed.strategies.model.recompute import recompute
from distributed.testing import run_ranks
from tests.meshes import joined

LENGTH, WIDTH, HEADS, WORDS = 16, 32, 4, 64


class Block(nn.Module):
    """A pre-norm block; `kind` is what may be wrong with it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.positions = nn.Embedding(LENGTH, WIDTH) if kind == "positions in the block" else None

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        if self.kind == "one length" and length not in (LENGTH, LENGTH // dist.get_world_size()):
            raise ValueError("it takes no shorter sequences")
        h = self.norm1(x) * angles.to(x.dtype)
        if self.positions is not None:
            h = h + 0.1 * self.positions(torch.arange(length))
        q, k, v = self.qkv(h).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.kind == "own softmax":
            scores = (q @ k.transpose(-1, -2)).masked_fill(~torch.ones(length, length).tril().bool(), float("-inf"))
            attended = scores.softmax(-1) @ v
        elif self.kind == "own mask":
            mask = torch.ones(length, length).tril().bool()
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class Written(nn.Module):
    """As a user writes it: positions before the blocks, an output tied to the embedding after them."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Block(kind) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        at = torch.arange(tokens.shape[1])
        x = self.words(tokens) + self.positions(at)
        angles = 1 + torch.sin(at.float())[:, None].expand(-1, WIDTH) / 4
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """torch's own layers, with a mask; `padded` adds one of the keys, `batch_first` says where the sequence lies."""

    def __init__(self, batch_first: bool = True, padded: bool = False) -> None:
        super().__init__()
        self.batch_first, self.padded = batch_first, padded
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        padding = None
        if self.padded:
            padding = torch.zeros_like(mask[: len(tokens)]).masked_fill(torch.arange(len(mask)) > 12, float("-inf"))
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, mask=mask, src_key_padding_mask=padding)
        return self.head(x if self.batch_first else x.transpose(0, 1))


class HuggingFace(nn.Module):
    """A causal language model of transformers; `padded` gives it a mask of its own."""

    def __init__(self, kind: str, padded: bool = False) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

        self.padded = padded
        if kind == "llama":
            sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": WORDS}
            self.model = LlamaForCausalLM(LlamaConfig(num_attention_heads=HEADS, num_key_value_heads=2, **sizes))
        else:
            drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
            sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": WORDS, "n_positions": LENGTH}
            self.model = GPT2LMHeadModel(GPT2Config(**sizes, **drops))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(tokens.shape[1]) > 1).long().expand_as(tokens) if self.padded else None
        return self.model(tokens, attention_mask=mask).logits


def tokens(step: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, WORDS, (3, length + 1), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    batch = tokens(step)
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(model: nn.Module, parallel: ContextParallel | None) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """The losses of three steps, the gradients of the first and the weights of the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    losses, first = [], {}
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        if parallel is not None:
            parallel.finish_gradients(dict(model.named_parameters()))
        losses.append(loss.item())
        if step == 0:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, first, {n: p.detach().clone() for n, p in model.named_parameters()}


def compare(make: Callable[[], nn.Module], recomputed: str = "", positions: int = 256) -> dict[str, float]:
    """How far training on the group is from training on one process; `positions` a rank are verified."""
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    names = list(model.state_dict())
    if recomputed:
        recompute(model, recomputed)
    parallel = ContextParallel(model, dist.group.WORLD, joined())
    assert list(model.state_dict()) == names
    parallel.verify(lambda: model(tokens(9)[:, :-1]), positions=positions)
    assert model.training
    losses, gradients, weights = train(model, parallel)
    expected, expected_gradients, expected_weights = train(alone, None)
    assert gradients.keys() == expected_gradients.keys()
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "gradient": max((gradients[n] - g).abs().max().item() for n, g in expected_gradients.items()),
        "weight": max((weights[n] - w).abs().max().item() for n, w in expected_weights.items()),
    }


def compare_sharded(recomputed: str, kind: str = "", positions: int = 256) -> dict[str, float]:
    """The same, where the blocks are sharded over the group, too: the mean that FSDP takes is the one it needs."""
    torch.manual_seed(0)
    model = Written(kind)
    alone = copy.deepcopy(model)
    recompute(model, recomputed)
    parallel = ContextParallel(model, dist.group.WORLD, joined())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in [*model.layers, model]:
        fully_shard(block, mesh=mesh)
    parallel.verify(lambda: model(tokens(9)[:, :-1]), positions=positions)
    losses, gradients, _ = train(model, None)
    expected, expected_gradients, _ = train(alone, None)
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "gradient": max((gradients[n].full_tensor() - g).abs().max().item() for n, g in expected_gradients.items()),
    }


class Sorts(nn.Module):
    """Blocks with arguments of several kinds, whose other dimensions may be as long as the sequence."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor], gain: torch.Tensor | None = None) -> Any:
            batch, length, _ = x.shape
            h = x * more["angles"] + more["of all"]
            h = h if gain is None else h * gain
            q, k, v = self.qkv(h).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=more["bias"])
            return x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList([self.Block() for _ in range(2)])

    def forward(self, tokens: torch.Tensor, gains: bool = False) -> torch.Tensor:
        x, at = self.words(tokens), torch.arange(tokens.shape[1]).float()
        more = {"angles": torch.sin(at[:, None] + torch.arange(WIDTH)), "bias": -(at[:, None] - at).abs()}
        more["of all"] = torch.linspace(0, 1, 3 * WIDTH).view(3, 1, WIDTH)
        for layer in self.layers:
            x = layer(x, more, gain=1 + at[:, None] / 9 if gains else None)
        return x


def later_batches() -> dict[str, Any]:
    """How far outputs are off for other lengths than the one that was verified, and what is refused."""
    found: dict[str, Any] = {}
    for first in (WIDTH, LENGTH):
        torch.manual_seed(0)
        model = Sorts()
        alone, parallel = copy.deepcopy(model), ContextParallel(model, dist.group.WORLD, joined())
        lengths: list[int] = []
        model.layers[1].qkv.register_forward_pre_hook(lambda _, given, to=lengths: to.append(given[0].shape[1]))
        parallel.verify(lambda model=model, first=first: model(tokens(9, first)[:, :-1]), positions=4)
        found[f"most verified of {first}"] = max(lengths)
        for length in (2, LENGTH, WIDTH, 3 * WIDTH):
            batch = tokens(1, length)[:, :-1]
            found[f"{first}, {length}"] = (model(batch) - alone(batch)).abs().max().item()
    try:
        model(tokens(1)[:, :-1], gains=True)
    except PlanError as error:
        found["another argument"] = str(error)
    return found


def refuse(make: Callable[[], nn.Module], length: int = LENGTH, positions: int = 256) -> str:
    torch.manual_seed(0)
    model = make()
    parallel = ContextParallel(model, dist.group.WORLD, joined())
    try:
        parallel.verify(lambda: model(tokens(9, length)[:, :-1]).mean(), positions=positions)
    except PlanError as error:
        return str(error)
    return ""


def on_two_ranks() -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    same = {
        "written": compare(Written),
        "recomputed": compare(Written, "full"),
        "partly recomputed": compare(Written, "selective"),
        "sharded": compare_sharded("full"),
        "sharded, partly recomputed": compare_sharded("selective"),
        "sharded, verified as a whole": compare_sharded("full", "one length", positions=2),
        "encoder": compare(Encoder),
        "encoder, sequence first": compare(lambda: Encoder(batch_first=False)),
        "encoder, padded": compare(lambda: Encoder(padded=True)),
        "llama": compare(lambda: HuggingFace("llama")),
        "llama, recomputed": compare(lambda: HuggingFace("llama"), "full"),
        "llama, padded": compare(lambda: HuggingFace("llama", padded=True)),
        "gpt2": compare(lambda: HuggingFace("gpt2")),
        "verified in part": compare(Written, "full", positions=2),
        "encoder, padded, verified in part": compare(lambda: Encoder(batch_first=False, padded=True), positions=2),
        "llama, padded, verified in part": compare(lambda: HuggingFace("llama", padded=True), positions=2),
        "verified as a whole": compare(lambda: Written("one length"), positions=2),
        "gpt2, verified in part": compare(lambda: HuggingFace("gpt2"), positions=2),
    }
    wrong = {
        "positions in the block": refuse(lambda: Written("positions in the block")),
        "positions in the block, in half precision": refuse(lambda: Written("positions in the block").bfloat16()),
        "positions in the block, verified in part": refuse(lambda: Written("positions in the block"), positions=2),
        "own softmax": refuse(lambda: Written("own softmax")),
        "own mask": refuse(lambda: Written("own mask")),
        "15 positions": refuse(Written, length=15),
        "no stack": "",
    }
    try:
        ContextParallel(nn.Linear(2, 2), dist.group.WORLD, joined())
    except PlanError as error:
        wrong["no stack"] = str(error)
    return same, wrong


def close_enough(differences: dict[str, float]) -> bool:
    return all(value < 1e-5 for value in differences.values())


def test_two_context_ranks_match_one_process_or_refuse() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for same, wrong in run_ranks(on_two_ranks, 2):
        assert all(map(close_enough, same.values())), same
        assert all(wrong.values()), f"these were not refused: {[name for name, text in wrong.items() if not text]}"
        assert "15 positions" in wrong["15 positions"]


def test_later_batches_are_sharded_like_the_verified_one() -> None:
    for found in run_ranks(later_batches, 2):
        refused = found.pop("another argument")
        assert "'gain'" in refused
        assert [found.pop(f"most verified of {first}") for first in (WIDTH, LENGTH)] == [8, 8], "four positions a rank"
        assert close_enough(found), found


def test_four_context_ranks_match_one_process() -> None:
    for same in run_ranks(lambda: {"written": compare(Written), "encoder": compare(Encoder)}, 4):
        assert all(map(close_enough, same.values())), same
