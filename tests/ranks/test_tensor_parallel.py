"""A model cut by tensor parallelism computes what the whole one does: loss, gradients, training and evaluation.

In double precision, since some gradients are zero but for rounding (of the bias of keys, say), and Adam sees those.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from distributed.core.errors import PlanError
from distributed.strategies.model.blocks import find_blocks
from distributed.strategies.placement import Layout
from distributed.strategies.tensor.plans import find_styles, styles_from
from distributed.strategies.tensor.tensor_parallel import TensorParallel
from distributed.testing import run_ranks
from tests.meshes import joined

WIDTH, HEADS, VOCABULARY, LENGTH, BATCH, STEPS = 32, 4, 64, 12, 2, 5


class SeparateAttention(nn.Module):
    """Takes its sizes from attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2) for f in self.inputs())
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(y.transpose(1, 2).reshape(b, t, -1))

    def inputs(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q_proj, self.k_proj, self.v_proj


class NanoAttention(nn.Module):
    """Takes its sizes from its input's shape, as nanoGPT does, and begins with an output of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = HEADS, WIDTH
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.c_proj.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        y = scores.softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class FusedAttention(nn.Module):
    """Its heads see no position, so it is told of one in a mask; and it has a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], mask).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 48, bias=False)
        self.w2 = nn.Linear(48, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module, masked: bool) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp, self.masked = attention, mlp, masked

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + (self.attn(self.ln1(x), mask) if self.masked else self.attn(self.ln1(x)))
        return x + self.mlp(self.ln2(x))


class OneBlock(nn.Module):
    """All in one module, with a residual within it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        h = self.ln1(x)
        q, k, v = (f(h).view(b, t, self.num_heads, -1).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(b, t, -1))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class Language(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], tied: bool = False, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        mask = torch.full((length, length), -math.inf).triu(1)
        x = self.embed(ids) + self.position.weight[:length]
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """torch's own layers, with a mask of padding."""

    def __init__(self, batch_first: bool, norm_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first and batch_first)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        padding = torch.zeros(ids.shape, dtype=torch.bool)
        padding[1, -3:] = True
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.head((x if self.batch_first else x.transpose(0, 1)).masked_fill(padding[..., None], 0))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 64, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.transformer(x.flip(1), x, tgt_mask=mask, tgt_is_causal=True))


class Weighing(nn.Module):
    """Calls torch's attention as tutorials do, which asks it for its weights, and uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y, weights = self.attn(x, x, x, attn_mask=mask)
        return x + y + weights @ self.mlp(x)


class Listed(SeparateAttention):
    """Has its output in a sequence, and its feed-forward network in a dictionary, which has no forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.out_proj = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))  # type: ignore[assignment]


class ListedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Listed()
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 64), "c_proj": nn.Linear(64, WIDTH)})

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x.add_(self.mlp["c_proj"](F.relu(self.mlp["c_fc"](x.clone()))))


class OuterBlock(OneBlock):
    """Its attention is in the block itself, its feed-forward network is not."""

    def __init__(self) -> None:
        super().__init__()
        del self.fc1
        self.fc2 = Halved()  # type: ignore[assignment]

    def fc1(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Halved(nn.Module):
    """One layer with the gate and what it gates, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(WIDTH, 96), nn.Linear(48, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


def plain(
    attention: Callable[[], nn.Module], mlp: Callable[[], nn.Module], masked: bool = False, **more: Any
) -> nn.Module:
    return Language(lambda: Block(attention(), mlp(), masked), **more)


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Dropout(0.0))


OURS: dict[str, Callable[[], nn.Module]] = {
    "separate": lambda: plain(SeparateAttention, sequential),
    "nano": lambda: plain(NanoAttention, Gated, tied=True),
    "fused": lambda: plain(FusedAttention, Gated, masked=True, vocabulary=65),
    "listed": lambda: Language(ListedBlock),
    "halved": lambda: plain(SeparateAttention, Halved),
    "encoder": lambda: Encoder(batch_first=True, norm_first=False),
    "encoder_first": lambda: Encoder(batch_first=False, norm_first=True),
    "encoder_decoder": EncoderDecoder,
}
ONLY_WHOLE_SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "one_block": lambda: Language(OneBlock),
    "outer_block": lambda: Language(OuterBlock),
    "weighing": lambda: Language(Weighing),
}


def hugging(name: str) -> nn.Module:
    import transformers as hf

    hf.logging.set_verbosity_error()
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
    }
    grouped = {**sizes, "num_key_value_heads": 2}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": VOCABULARY, "n_positions": 32}
    gpt2 |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    models: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**grouped)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**grouped)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**grouped, head_dim=8)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**sizes, **still)),
    }
    if not name.endswith("_lora"):
        return models[name]()
    import peft

    targets = ["c_attn", "c_proj", "c_fc"] if name == "gpt2_lora" else ["q_proj", "o_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, fan_in_fan_out=name == "gpt2_lora")
    return peft.get_peft_model(models[name.removesuffix("_lora")](), config)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    logits = getattr(logits, "logits", logits)
    targets = ids.roll(-1, 1) % logits.shape[-1]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def assemble(locals_: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor]:
    """The whole tensors of all ranks' parts, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: (layout.cut_of(name), local) for name, local in locals_.items()})
    found = {}
    for name, local in locals_.items():
        whole = torch.full(layout.shape(name), math.nan)
        for cut, part in (others[name] for others in everyone):
            if cut is None:  # every rank has the same of it
                torch.testing.assert_close(part, local, rtol=1e-9, atol=1e-12)
                whole = part
            else:
                pieces = part.split([stop - start for start, stop in cut.ranges], cut.dim)
                for (start, stop), piece in zip(cut.ranges, pieces, strict=True):
                    whole.narrow(cut.dim, start, stop - start).copy_(piece)
        found[name] = whole
    return found


def compare_gradients(whole: nn.Module, parameters: Mapping[str, nn.Parameter], layout: Layout) -> None:
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    found = assemble({name: p.grad for name, p in parameters.items() if p.grad is not None}, layout)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        scale = max(grad.abs().max().item(), 1e-4)
        error = (found[name] - grad).abs().max().item()
        assert error < 1e-5 * scale, f"{name}: off by {error} of {scale}"


def parallelize(
    model: nn.Module, layout: Layout, sequence: bool = False, plan: Mapping[str, str] | None = None
) -> TensorParallel:
    degree, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    styles = find_styles(model, degree) if plan is None else styles_from(plan, model, degree)
    return TensorParallel(model, layout, group, styles, joined(), sequence=sequence)


def check(make: Callable[[], nn.Module], sequence: bool = False, plan: Mapping[str, str] | None = None) -> list[str]:
    """Compares a cut model with the whole one; returns the names of parameters that were cut."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    whole = make().double()
    cut = copy.deepcopy(whole)
    names = [name for name, _ in cut.named_parameters()]
    layout = Layout(cut)
    parallel = parallelize(cut, layout, sequence, plan)
    parameters = dict(cut.named_parameters())
    assert list(parameters) == names
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (whole, cut)]
    for step in range(STEPS):
        losses = [loss_of(model, batch(step)) for model in (whole, cut)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
        for loss in losses:
            loss.backward()
        parallel.finish_gradients(parameters)
        if step == 0:
            compare_gradients(whole, parameters, layout)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(cut.eval(), batch(9)), loss_of(whole.eval(), batch(9)), rtol=1e-4, atol=1e-6)
    return [name for name in parameters if layout.cut_of(name) is not None]


def check_all(cases: list[tuple[str, Callable[[], nn.Module], bool]]) -> dict[str, int]:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    cut = {}
    for name, make, sequence in cases:
        try:
            cut[f"{name} sequence={sequence}"] = len(check(make, sequence))
        except Exception as error:
            raise AssertionError(f"{name}, sequence={sequence}: {error}") from error
    return cut


def test_tensor_parallel_matches_one_process_on_own_blocks() -> None:
    cases = [(name, make, sequence) for name, make in OURS.items() for sequence in (False, True)]
    cases += [(name, make, False) for name, make in ONLY_WHOLE_SEQUENCES.items()]
    cut = run_ranks(check_all, 2, cases)[0]
    assert cut["separate sequence=False"] == 2 * (7 + 3) + 3
    assert cut["nano sequence=True"] == 2 * (3 + 3) + 1
    assert cut["fused sequence=False"] == 2 * (2 + 3)  # a vocabulary of 65 stays whole


def test_tensor_parallel_matches_one_process_on_hugging_face() -> None:
    names = ("llama", "qwen2", "qwen3", "gpt2", "bert", "llama_lora", "gpt2_lora")
    cases = [(name, lambda name=name: hugging(name), sequence) for name in names for sequence in (False, True)]
    cut = run_ranks(check_all, 2, cases)[0]
    assert cut["llama sequence=False"] == 2 * 7 + 2
    assert cut["gpt2 sequence=True"] == 2 * (2 + 1 + 2 + 1) + 1


class Interleaved(FusedAttention):
    """One layer with the query, key and value of each head next to each other."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class Named(nn.Module):
    """Has names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.ask, self.find, self.tell, self.answer = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.ask, self.find, self.tell))
        return self.answer(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Fixed(FusedAttention):
    """Has its sizes in its code."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


def check_plans() -> list[int]:
    fed = {"layers.*.mlp.0": "column", "layers.*.mlp.2": "row"}
    together = {"layers.*.attn.qkv": "column", "layers.*.attn.proj": "row"}
    named = {f"layers.*.attn.{name}": "column" for name in ("ask", "find", "tell")} | {"layers.*.attn.answer": "row"}
    return [
        len(check(lambda: plain(Interleaved, sequential, masked=True), False, together | fed)),
        len(check(lambda: plain(Named, sequential), True, named | fed)),
    ]


def check_torch_attention() -> None:
    """Every kind of mask, with and without weights, of nn.MultiheadAttention."""
    torch.set_default_dtype(torch.float64)
    rows, keys = LENGTH, 7
    padding = torch.zeros(BATCH, keys, dtype=torch.bool)
    padding[0, 4:] = True
    masks: list[dict[str, Any]] = [
        {},
        {"attn_mask": torch.randn(rows, keys, generator=torch.Generator().manual_seed(0))},
        {"attn_mask": torch.ones(rows, keys, dtype=torch.bool).triu(1)},
        {"attn_mask": torch.randn(BATCH * HEADS, rows, keys, generator=torch.Generator().manual_seed(0))},
        {"key_padding_mask": padding},
        {"key_padding_mask": padding, "attn_mask": torch.ones(rows, keys, dtype=torch.bool).triu(1), "is_causal": True},
    ]
    for batch_first, more in ((True, {}), (False, {"kdim": 5, "vdim": 6, "bias": False})):
        torch.manual_seed(1)
        whole = nn.ModuleDict({"a": nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, **more)})
        cut = copy.deepcopy(whole)
        parallelize(cut, Layout(cut), plan={"a": "attention"})
        widths = (WIDTH, more.get("kdim", WIDTH), more.get("vdim", WIDTH))
        shapes = [(BATCH, n, width) for n, width in zip((rows, keys, keys), widths, strict=True)]
        inputs = [torch.randn(shape if batch_first else (shape[1], shape[0], shape[2])) for shape in shapes]
        for mask in masks:
            for how in ({"need_weights": False}, {}, {"average_attn_weights": False}):
                for mode in (True, False):
                    results = [m.train(mode)["a"](*inputs, **mask, **how) for m in (cut, whole)]
                    torch.testing.assert_close(*results)


def check_errors() -> list[str]:
    """What is said of models that cannot run, before or at their first forward."""
    torch.set_default_dtype(torch.float64)

    def failure(model: nn.Module, length: int = LENGTH, **how: Any) -> str:
        def begin() -> None:
            parallelize(model, Layout(model), **how)
            model(batch(0)[:, :length])

        with pytest.raises(PlanError) as caught:
            begin()
        return str(caught.value)

    tied = plain(SeparateAttention, sequential, tied=True)
    return [
        failure(plain(Interleaved, sequential, masked=True)),
        failure(plain(Fixed, sequential, masked=True)),
        failure(plain(SeparateAttention, sequential), length=11, sequence=True),
        failure(Language(OneBlock), sequence=True),
        failure(plain(SeparateAttention, sequential), sequence=True, plan={"layers.*.mlp.0": "column"}),
        failure(tied, plan={"embed": "vocabulary", "head": "row"}),
    ]


Mix = Callable[[torch.Tensor], torch.Tensor]
MIXES: dict[str, Mix] = {
    "nothing": lambda h: F.gelu(h) * h,
    "norm": lambda h: F.gelu(h) * torch.rsqrt(h.pow(2).mean(-1, keepdim=True)),
    "centred": lambda h: h - h.mean(-1, keepdim=True),
    "softmax": lambda h: h.softmax(-1),
    "flip": lambda h: F.gelu(h.flip(-1)),
    "interleaved": lambda h: F.gelu(h[..., ::2]) * h[..., 1::2],
    "fixed": lambda h: F.gelu(h).view(BATCH, -1, h.shape[-1] // 64 * 64),
}


class Mixing(nn.Module):
    """What is between its layers takes different parts of the hidden width together."""

    def __init__(self, mix: str) -> None:
        super().__init__()
        self.mix = MIXES[mix]
        self.up, self.down = nn.Linear(WIDTH, 128 if mix == "interleaved" else 64, bias=False), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.mix(self.up(x)))


class MixingBlock(Mixing):
    """Has both layers in the block itself, whose output does not show them at first."""

    def __init__(self, mix: str) -> None:
        super().__init__(mix)
        self.attn = SeparateAttention()
        self.scale = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = x + self.attn(x)
        return x + self.scale * super().forward(x)


class MixingOneBlock(OneBlock):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        fc1 = self.fc1.forward
        self.fc1.forward = lambda h: fc1(h).softmax(-1)  # type: ignore[assignment,method-assign]
        try:
            return super().forward(x, mask)
        finally:
            self.fc1.forward = fc1  # type: ignore[method-assign]


class Around(Gated):
    """Is not called by its block, which uses its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError


class AroundBlock(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mlp: Any = self.mlp
        return x + mlp.w2(mlp.w1(self.attn(x)).softmax(-1) * mlp.w3(x))


def check_mixing() -> dict[str, str]:
    """What is said of models whose hidden width cannot be shared out, by what they do with it."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    models: dict[str, tuple[nn.Module, bool]] = {}
    for mix in MIXES:
        for sequence in (False, True):
            models[f"{mix} {sequence}"] = (plain(SeparateAttention, partial(Mixing, mix)), sequence)
            models[f"{mix} block {sequence}"] = (Language(partial(MixingBlock, mix)), sequence)
    models["one block"] = (Language(MixingOneBlock), False)
    models["around"] = (Language(lambda: AroundBlock(SeparateAttention(), Around(), False)), False)
    models["half"] = (plain(SeparateAttention, partial(Mixing, "norm")).bfloat16(), False)
    said = {}
    for name, (model, sequence) in models.items():
        parallelize(model, Layout(model), sequence)
        for _ in range(2):  # who goes on is told again
            try:
                model(batch(0))
                said[name] = ""
            except PlanError as error:
                said[name] = str(error)
    return said


def check_unused_parameters() -> None:
    """One rank has no gradient of a parameter that is summed."""
    model = plain(FusedAttention, Gated, masked=True)
    parallel = parallelize(model, Layout(model), sequence=True)
    parameters = dict(model.named_parameters())
    for name in parallel.partial[dist.get_rank() :]:
        parameters[name].grad = torch.ones_like(parameters[name])
    parallel.finish_gradients(parameters)
    grads = [parameters[name].grad for name in parallel.partial]
    assert [float(grad.mean()) for grad in grads if grad is not None] == [1.0] + [2.0] * (len(grads) - 1)


def check_plans_and_errors() -> tuple[list[int], list[str], dict[str, str]]:
    check_torch_attention()
    check_unused_parameters()
    return check_plans(), check_errors(), check_mixing()


def test_user_tensor_plans_apply_and_bad_models_are_refused() -> None:
    cut, errors, mixing = run_ranks(check_plans_and_errors, 2)[1]
    assert cut == [2 * (2 + 3), 2 * (7 + 3)]
    interleaved, fixed, length, one_block, unplanned, tied = errors
    assert "layers.0.attn" in interleaved
    assert "'column'" in interleaved
    assert "layers.0.attn" in fixed
    assert "11" in length
    assert "layers.0" in one_block
    assert "no attention" in unplanned
    assert "embed.weight" in tied
    assert "head.weight" in tied
    assert {name for name, said in mixing.items() if not said} == {
        f"nothing{where} {sequence}" for where in ("", " block") for sequence in (False, True)
    }
    for name, said in mixing.items():
        named = "layers.0 (" if "block" in name else "layers.0.mlp "
        assert not said or named in said, f"{name}: {said}"


def check_on_top(make: Callable[[], nn.Module], sequence: bool) -> None:
    """Two ranks share each layer; across them parameters are sharded, and blocks are computed again in backward."""
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = make()
    cut = copy.deepcopy(whole)
    layout = Layout(cut)
    parallel = TensorParallel(cut, layout, mesh["tp"].get_group(), find_styles(cut, 2), joined(), sequence=sequence)
    for path in find_blocks(cut):
        block = cut.get_submodule(path)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(cut, mesh=mesh["dp"])
    loss_of(whole, batch(0)).backward()
    loss_of(cut, batch(0)).backward()
    parameters = dict(cut.named_parameters())
    parallel.finish_gradients(parameters)
    for name, parameter in whole.named_parameters():
        found: Any = parameters[name].grad
        assert parameter.grad is not None
        expected = layout.take(name, parameter.grad)
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-7, atol=1e-10, msg=name)


def check_four() -> None:
    for name in ("nano", "encoder"):
        for sequence in (False, True):
            check(OURS[name], sequence)
            check_on_top(OURS[name], sequence)


def test_tensor_parallel_on_four_ranks_matches_one_process() -> None:
    run_ranks(check_four, 4)
