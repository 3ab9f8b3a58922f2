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
from distributed.strategies.context_parallel import ContextParallel
from distributed.strategies.recompute import recompute
from distributed.testing import run_ranks

LENGTH, WIDTH, HEADS, WORDS = 16, 32, 4, 64


class Block(nn.Module):
    """A pre-norm block; `kind` is what may be wrong with it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x) * angles.to(x.dtype)
        if self.kind == "positions in the block":
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


def compare(make: Callable[[], nn.Module], recomputed: str = "") -> dict[str, float]:
    """How far training on the group is from training on one process."""
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    names = list(model.state_dict())
    if recomputed:
        recompute(model, recomputed)
    parallel = ContextParallel(model, dist.group.WORLD)
    assert list(model.state_dict()) == names
    parallel.verify(lambda: model(tokens(9)[:, :-1]))
    assert model.training
    losses, gradients, weights = train(model, parallel)
    expected, expected_gradients, expected_weights = train(alone, None)
    assert gradients.keys() == expected_gradients.keys()
    parallel.close()
    alone.load_state_dict(model.state_dict())
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "gradient": max((gradients[n] - g).abs().max().item() for n, g in expected_gradients.items()),
        "weight": max((weights[n] - w).abs().max().item() for n, w in expected_weights.items()),
        "given back": (loss_of(model, 5) - loss_of(alone, 5)).abs().item(),
    }


def compare_sharded(recomputed: str) -> dict[str, float]:
    """The same, where the blocks are sharded over the group, too: the mean that FSDP takes is the one it needs."""
    torch.manual_seed(0)
    model = Written()
    alone = copy.deepcopy(model)
    recompute(model, recomputed)
    parallel = ContextParallel(model, dist.group.WORLD)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in [*model.layers, model]:
        fully_shard(block, mesh=mesh)
    parallel.verify(lambda: model(tokens(9)[:, :-1]))
    losses, gradients, _ = train(model, None)
    expected, expected_gradients, _ = train(alone, None)
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "gradient": max((gradients[n].full_tensor() - g).abs().max().item() for n, g in expected_gradients.items()),
    }


def refuse(make: Callable[[], nn.Module], length: int = LENGTH) -> str:
    torch.manual_seed(0)
    model = make()
    parallel = ContextParallel(model, dist.group.WORLD)
    try:
        parallel.verify(lambda: model(tokens(9, length)[:, :-1]).mean())
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
        "encoder": compare(Encoder),
        "encoder, sequence first": compare(lambda: Encoder(batch_first=False)),
        "encoder, padded": compare(lambda: Encoder(padded=True)),
        "llama": compare(lambda: HuggingFace("llama")),
        "llama, recomputed": compare(lambda: HuggingFace("llama"), "full"),
        "llama, padded": compare(lambda: HuggingFace("llama", padded=True)),
        "gpt2": compare(lambda: HuggingFace("gpt2")),
    }
    wrong = {
        "positions in the block": refuse(lambda: Written("positions in the block")),
        "positions in the block, in half precision": refuse(lambda: Written("positions in the block").bfloat16()),
        "own softmax": refuse(lambda: Written("own softmax")),
        "own mask": refuse(lambda: Written("own mask")),
        "15 positions": refuse(Written, length=15),
        "no stack": "",
    }
    try:
        ContextParallel(nn.Linear(2, 2), dist.group.WORLD)
    except PlanError as error:
        wrong["no stack"] = str(error)
    return same, wrong


def close_enough(differences: dict[str, float]) -> bool:
    return all(value < 1e-5 for value in differences.values())


def test_two_ranks_train_as_one_or_refuse() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for same, wrong in run_ranks(on_two_ranks, 2):
        assert all(map(close_enough, same.values())), same
        assert all(wrong.values()), f"these were not refused: {[name for name, text in wrong.items() if not text]}"
        assert "15 positions" in wrong["15 positions"]


def test_four_ranks_train_as_one() -> None:
    for same in run_ranks(lambda: {"written": compare(Written), "encoder": compare(Encoder)}, 4):
        assert all(map(close_enough, same.values())), same
