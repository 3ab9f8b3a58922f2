"""Which modules are cut is found by names and shapes; what has no plan, or does not divide, is said by its path."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from distributed.core.errors import PlanError
from distributed.strategies.tensor.plans import find_styles, styles_from


class Attention(nn.Module):
    def __init__(self, names: str, width: int = 8, heads: int = 4, key_width: int | None = None) -> None:
        super().__init__()
        self.num_heads = heads
        q, k, v, o = names.split()
        for name, outputs in ((q, width), (k, key_width or width), (v, key_width or width), (o, width)):
            self.add_module(name, nn.Linear(width, outputs))


class Fused(nn.Module):
    def __init__(self, name: str = "qkv", width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.n_head = heads
        self.add_module(name, nn.Linear(width, 3 * width))
        self.proj = nn.Linear(width, width)


class Network(nn.Module):
    """A feed-forward network of layers with these inputs and outputs."""

    def __init__(self, **layers: tuple[int, int]) -> None:
        super().__init__()
        for name, (inputs, outputs) in layers.items():
            self.add_module(name, nn.Linear(inputs, outputs, bias=False))


def stack(*parts: nn.Module) -> nn.Module:
    """Two blocks of these parts, which are called 0, 1 and so on."""
    block = nn.Module()
    for at, part in enumerate(parts):
        block.add_module(str(at), part)
    model = nn.Module()
    model.layers = nn.ModuleList([block, copy.deepcopy(block)])
    return model


def in_block(model: nn.Module, degree: int = 2) -> dict[str, str]:
    """The styles of the second block, by the paths within it."""
    prefix = "layers.1."
    return {p.removeprefix(prefix): s for p, s in find_styles(model, degree).items() if p.startswith(prefix)}


@pytest.mark.parametrize(
    "names", ["q_proj k_proj v_proj o_proj", "wq wk wv wo", "query key value dense", "q k v proj", "to_q to_k to_v out"]
)
def test_separate_qkv_attention_is_column_then_row(names: str) -> None:
    q, k, v, o = names.split()
    columns = {f"0.{name}": "column" for name in (q, k, v)}
    assert in_block(stack(Attention(names))) == {"0": "heads", **columns, f"0.{o}": "row"}


@pytest.mark.parametrize("name", ["qkv", "c_attn", "in_proj", "Wqkv", "qkv_proj"])
def test_fused_qkv_attention_is_column_then_row(name: str) -> None:
    assert in_block(stack(Fused(name))) == {"0": "heads", f"0.{name}": "fused_qkv_column", "0.proj": "row"}


def test_qkv_interleaved_by_head_is_plain_column() -> None:
    assert in_block(stack(Fused("query_key_value")))["0.query_key_value"] == "column"


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({"fc1": (8, 32), "fc2": (32, 8)}, "column row"),
        ({"up": (8, 32), "down": (32, 8)}, "column row"),
        ({"gate_proj": (8, 24), "up_proj": (8, 24), "down_proj": (24, 8)}, "column column row"),
        ({"w1": (8, 24), "w2": (24, 8), "w3": (8, 24)}, "column row column"),
        ({"w1": (8, 24), "w2": (8, 24), "w3": (24, 8)}, "column column row"),
        ({"c_fc": (8, 32), "c_proj": (32, 8)}, "column row"),
        ({"gate_up_proj": (8, 48), "down_proj": (24, 8)}, "fused_gate_column row"),
    ],
)
def test_feed_forward_layers_get_column_and_row_styles(layers: dict[str, tuple[int, int]], expected: str) -> None:
    styles = in_block(stack(Network(**layers)))
    assert " ".join(styles[f"0.{name}"] for name in layers) == expected
    assert len(styles) == len(layers)


def test_sequential_of_two_linears_is_a_feed_forward() -> None:
    mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Dropout(0.1))
    assert in_block(stack(mlp)) == {"0.0": "column", "0.2": "row"}


def test_torch_decoder_layers_get_tensor_styles() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2)
    styles = {path.removeprefix("layers.1."): s for path, s in find_styles(model, 2).items() if "layers.1." in path}
    assert styles == {"self_attn": "attention", "multihead_attn": "attention", "linear1": "column", "linear2": "row"}


def test_linear_without_a_role_stays_whole() -> None:
    assert "1.other" not in in_block(stack(Fused(), Network(other=(8, 8))))


def test_norm_of_a_single_head_is_partial() -> None:
    attention = Fused()
    attention.q_norm = nn.LayerNorm(2)
    attention.norm = nn.LayerNorm(8)
    styles = in_block(stack(attention))
    assert styles["0.q_norm"] == "partial"
    assert "0.norm" not in styles


@pytest.mark.parametrize(("vocabulary", "expected"), [(12, ["vocabulary", "column_gather"]), (13, [None, None])])
@pytest.mark.parametrize("tied", [True, False])
def test_vocabulary_is_sharded_only_when_it_divides(vocabulary: int, expected: list[str | None], tied: bool) -> None:
    model = stack(Fused())
    model.embed, model.position = nn.Embedding(vocabulary, 8), nn.Embedding(10, 8)
    model.head = nn.Linear(8, vocabulary, bias=False)
    if tied:
        model.head.weight = model.embed.weight
    styles = find_styles(model, 2)
    assert [styles.get("embed"), styles.get("head")] == expected
    assert "position" not in styles


def test_embedding_without_a_head_stays_whole() -> None:
    model = stack(Fused())
    model.embed = nn.Embedding(12, 8)
    assert "embed" not in find_styles(model, 2)


def fails(call: object, *parts: str) -> None:
    with pytest.raises(PlanError) as caught:
        call()  # type: ignore[operator]
    for part in parts:
        assert part in str(caught.value)


def test_heads_that_do_not_divide_are_refused() -> None:
    fails(lambda: find_styles(stack(Fused(heads=4)), 3), "layers.1.0", "4 heads", "3", "1, 2, 4")
    grouped = Attention("wq wk wv wo", width=8, heads=4, key_width=2)
    fails(lambda: find_styles(stack(grouped), 2), "layers.1.0", "1 key and value heads")
    layer = nn.TransformerEncoderLayer(9, 3, 16)
    fails(
        lambda: find_styles(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 2),
        "layers.1.self_attn",
        "3 heads",
    )


def test_all_indivisible_widths_are_refused_at_once() -> None:
    model = stack(Fused(heads=1), Network(fc1=(8, 9), fc2=(9, 8)))
    fails(lambda: find_styles(model, 2), "layers.1.1.fc1", "9 outputs", "layers.1.1.fc2", "9 inputs", "1 heads")


def test_unrecognised_block_is_refused_by_its_path() -> None:
    fails(lambda: find_styles(stack(Network(one=(8, 4), two=(4, 8))), 2), "layers.1", "tensor_parallel_plan")


def test_unrecognised_model_is_refused_with_plan_hint() -> None:
    fails(lambda: find_styles(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), 2), "tensor_parallel_plan=", "'column'")


def test_attention_without_a_head_count_is_refused() -> None:
    attention = Fused()
    del attention.n_head
    fails(lambda: find_styles(stack(attention), 2), "layers.1.0", "heads")


def test_attention_without_an_output_layer_is_refused() -> None:
    attention = Fused()
    attention.proj = nn.Linear(4, 8)
    fails(lambda: find_styles(stack(attention), 2), "layers.1.0", "output")


def test_unknown_parts_of_an_attention_are_refused_by_path() -> None:
    attention = Fused()
    attention.gate = nn.Linear(8, 8)
    attention.temperature = nn.Parameter(torch.ones(4))
    attention.q_norm = nn.LayerNorm(8)
    fails(lambda: find_styles(stack(attention), 2), "layers.1.0.gate", "layers.1.0.temperature", "layers.1.0.q_norm")


def test_torch_attention_with_add_bias_kv_is_refused() -> None:
    model = stack(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    fails(lambda: find_styles(model, 2), "layers.1.0", "add_bias_kv")


def test_user_tensor_plan_is_applied() -> None:
    model = stack(Fused(), Network(one=(8, 4), two=(4, 8)))
    plan = {"layers.*.0.qkv": "fused_qkv_column", "layers.*.0.proj": "row", "layers.0.1.one": "column_gather"}
    styles = styles_from(plan, model, 2)
    assert styles["layers.1.0"] == "heads"  # counted by its attributes
    assert styles["layers.0.1.one"] == "column_gather"
    assert "layers.1.1.one" not in styles


def test_user_plan_for_custom_attention_names_counts_heads() -> None:
    plan = {f"layers.*.0.{name}": "column" for name in ("ask", "find", "tell")} | {"layers.*.0.answer": "row"}
    model = stack(Attention("ask find tell answer", heads=4, key_width=4))
    assert styles_from(plan, model, 2)["layers.1.0"] == "heads"
    fails(lambda: styles_from(plan, model, 4), "layers.1.0", "2 key and value heads")


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        ({"layers.*.0.qkv": "colwise"}, ["colwise", "column"]),
        ({"layers.*.nowhere": "column"}, ["layers.*.nowhere", "layers.*.*.qkv"]),
        ({"layers.*": "row"}, ["layers.1", "row"]),
        ({"layers.*.0.qkv": "vocabulary"}, ["layers.1.0.qkv", "Linear"]),
        ({"layers.*.0.qkv": "attention"}, ["layers.1.0.qkv", "Linear"]),
        ({"layers.*.1.one": "column"}, ["layers.1.1.one", "5 outputs"]),
        ({"layers.*.0": "heads"}, ["layers.1.0", "not known"]),
    ],
)
def test_wrong_user_tensor_plan_is_refused(plan: dict[str, str], parts: list[str]) -> None:
    fails(lambda: styles_from(plan, stack(Fused(), Network(one=(8, 5))), 2), *parts)
