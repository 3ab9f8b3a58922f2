"""The names that tensor parallelism uses: of its styles, and of the layers in users' models."""

from __future__ import annotations

Style = str
STYLES: dict[Style, str] = {
    "column": "a linear layer cut by its outputs",
    "row": "a linear layer cut by its inputs, whose outputs are summed",
    "column_gather": "a linear layer cut by its outputs, which are gathered",
    "fused_qkv_column": "query, key and value in one linear layer, one after the other, each cut by its outputs",
    "fused_gate_column": "gate and up projection in one linear layer, one after the other, each cut by its outputs",
    "vocabulary": "an embedding cut by its rows",
    "attention": "an nn.MultiheadAttention cut by its heads",
    "heads": "a module that has its share of the heads, by its attributes",
    "partial": "a whole module that gets only a share of the heads, so that its gradients are summed",
}
COLUMNS = ("column", "fused_qkv_column", "fused_gate_column")

SEPARATE = (
    *(
        tuple(pattern.format(x) for x in "qkv")
        for pattern in ("{}_proj", "w{}", "{}", "to_{}", "{}_lin", "w_{}", "W_{}")
    ),
    *(tuple(pattern.format(x) for x in "qkv") for pattern in ("W{}", "{}_linear", "linear_{}", "proj_{}", "fc_{}")),
    *(tuple(pattern.format(x) for x in ("query", "key", "value")) for pattern in ("{}", "{}_proj", "{}_layer")),
    ("queries", "keys", "values"),
)
FUSED = ("qkv", "c_attn", "in_proj", "Wqkv", "wqkv", "qkv_proj", "to_qkv", "w_qkv", "W_qkv", "attn_qkv", "qkv_linear")
INTERLEAVED = ("query_key_value",)  # for each head its query, key and value
OUTPUTS = (
    *("o_proj", "out_proj", "proj", "c_proj", "wo", "o", "to_out", "w_o", "W_o", "Wo", "out", "out_lin", "proj_o"),
    *("output_proj", "out_linear", "linear_out", "proj_out", "fc_o", "fc_out", "resid_proj", "dense", "output", "fc"),
    *("projection", "attn_proj", "linear"),
)
FEED_FORWARD: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("gate", "up"), "down"),
    (("up",), "down"),
    (("w1", "w3"), "w2"),
    (("w1", "w2"), "w3"),
    (("w1",), "w2"),
    (("w12",), "w3"),
    (("fc_1", "fc_2"), "proj"),
    (("fc1", "fc2"), "fc3"),
    (("fc1",), "fc2"),
    (("fc_1",), "fc_2"),
    (("c_fc",), "c_proj"),
    (("linear1",), "linear2"),
    (("linear_1",), "linear_2"),
    (("lin1",), "lin2"),
    (("dense1",), "dense2"),
    (("ff1",), "ff2"),
    (("fc_in",), "fc_out"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("w_in",), "w_out"),
    (("intermediate.dense",), "output.dense"),
    (("fc",), "proj"),
)

OWN_PLAN = (
    "give tensor_parallel_plan={path pattern: style}, such as {'layers.*.mlp.up': 'column', 'layers.*.mlp.down': 'row'}"
    f"; styles are {', '.join(STYLES)}"
)
