"""Recomputed and compiled blocks: the same numbers, less kept for the backward pass, and the model as it was."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from distributed.core.errors import PlanError
from distributed.strategies.model.compilation import compile_blocks, undo_compile
from distributed.strategies.model.recompute import recompute, undo_recompute

WIDTH = 16


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([Block(dropout) for _ in range(depth)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight.T


def model(dropout: float = 0.0, depth: int = 4) -> Model:
    torch.manual_seed(0)
    return Model(dropout, depth)


def gradients(model: nn.Module, autocast: bool = False) -> tuple[dict[str, torch.Tensor], int]:
    """Of one step with a fixed seed, and how many numbers the forward pass keeps."""
    kept = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    torch.manual_seed(3)
    tokens = torch.randint(0, 32, (2, 8))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", enabled=autocast):
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, kept


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputed_gradients_are_bitwise_equal_and_save_memory(kind: str, dropout: float, autocast: bool) -> None:
    expected, all_kept = gradients(model(dropout), autocast)
    recomputed = model(dropout)
    assert recompute(recomputed, kind) == [f"layers.{index}" for index in range(4)]
    found, kept = gradients(recomputed, autocast)
    assert same(found, expected)
    assert kept < all_kept / 3


class Counting(nn.Module):
    """A block whose buffers change in forward, and change what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.norm(self.layer(x)) / self.calls


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recompute_updates_buffers_once(kind: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[Counting() for _ in range(2)])
    recomputed = copy.deepcopy(plain)
    recompute(recomputed, kind)
    for _ in range(2):
        x = torch.randn(6, WIDTH)
        for made in (plain, recomputed):
            made(x).square().sum().backward()
    assert same(dict(plain.named_buffers()), dict(recomputed.named_buffers()))
    assert same(*({name: p.grad for name, p in made.named_parameters()} for made in (plain, recomputed)))


def test_selective_recompute_costs_less_than_full() -> None:
    def operations(kind: str) -> int:
        made = model()
        if kind:
            recompute(made, kind)
        with FlopCounterMode(display=False) as counter:
            gradients(made)
        return counter.get_total_flops()

    assert operations("") < operations("selective") < operations("full")


def test_recompute_every_2_keeps_activations_of_other_blocks() -> None:
    made, halved, full = model(), model(), model()
    assert recompute(halved, "full", every=2) == ["layers.0", "layers.2"]
    recompute(full, "full")
    (_, most), (_, some), (_, least) = gradients(made), gradients(halved), gradients(full)
    assert least < some < most


def test_recompute_keeps_module_names_and_undo_restores_blocks() -> None:
    made = model()
    names, parts = list(made.state_dict()), [name for name, _ in made.named_modules()]
    recompute(made, "selective")
    paths = compile_blocks(made, backend="eager")
    assert (list(made.state_dict()), [name for name, _ in made.named_modules()]) == (names, parts)
    undo_compile(made, paths)
    undo_recompute(made)
    assert [block.__dict__.keys() for block in made.layers] == [block.__dict__.keys() for block in model().layers]


def test_copy_of_a_recomputed_model_uses_its_own_weights() -> None:
    made = model()
    recompute(made, "full")
    other = copy.deepcopy(made)
    with torch.no_grad():
        other.layers[0].out.weight.zero_()
    plain = model()
    with torch.no_grad():
        plain.layers[0].out.weight.zero_()
    assert same(gradients(other)[0], gradients(plain)[0])


def test_nothing_is_recomputed_in_eval() -> None:
    made = model().eval()
    expected = gradients(made)[1]
    recompute(made, "full")
    assert gradients(made)[1] == expected


def test_recompute_does_not_fill_a_kv_cache_twice() -> None:
    """Models of transformers make one in training, too, unless told otherwise."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
    config = transformers.LlamaConfig(num_attention_heads=2, use_cache=True, **sizes)

    def made() -> nn.Module:
        torch.manual_seed(0)
        whole = transformers.LlamaForCausalLM(config).train()
        recompute(whole, "full", blocks=["LlamaDecoderLayer"])
        return whole

    def step(whole: nn.Module) -> dict[str, torch.Tensor]:
        tokens = torch.arange(8).view(1, 8)
        whole(tokens, labels=tokens).loss.backward()
        return {name: p.grad for name, p in whole.named_parameters()}

    plain = made()
    undo_recompute(plain)
    assert same(step(made()), step(plain))


def test_recompute_without_blocks_or_of_unknown_kind_is_refused() -> None:
    for call in (recompute, lambda m, _: compile_blocks(m)):
        with pytest.raises(PlanError, match="no blocks"):
            call(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "full")
    with pytest.raises(PlanError, match="some"):
        recompute(model(), "some")


@pytest.mark.parametrize("kind", ["", "full", "selective"])
def test_equal_blocks_are_compiled_once(kind: str) -> None:
    """More blocks than dynamo would compile one by one; "aot_eager" is all of it but the C++ compiler."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    made = model(depth=10)
    expected = gradients(copy.deepcopy(made))[0]
    if kind:
        recompute(made, kind)
    assert compile_blocks(made, backend="aot_eager") == [f"layers.{index}" for index in range(10)]
    found = gradients(made)[0]
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    assert counters["stats"]["unique_graphs"] == 1
