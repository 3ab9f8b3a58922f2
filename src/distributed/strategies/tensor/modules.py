"""Facts about single modules for tensor parallelism: linear layers, and numbers of heads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from distributed.strategies.checks.plain_modules import is_plain

HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "nhead", "nheads", "heads", "h")
KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "n_query_groups")
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_head", "d_k")


@dataclass(frozen=True)
class Heads:
    """The heads of an attention: the numbers of query heads and of key and value heads, and their width."""

    queries: int
    keys: int
    size: int

    @property
    def parts(self) -> tuple[int, int, int]:
        """The widths of query, key and value."""
        return self.queries * self.size, self.keys * self.size, self.keys * self.size


def core_of(module: nn.Module) -> nn.Module | None:
    """The linear layer of a module: itself, or the one inside a LoRA layer.

    >>> core_of(nn.Linear(2, 3))
    Linear(in_features=2, out_features=3, bias=True)
    """
    core = module.base_layer if is_lora(module) else module
    if is_plain(core, nn.Linear, "weight"):  # type: ignore[arg-type]
        return core  # type: ignore[return-value]
    return core if is_transposed(core) else None  # type: ignore[arg-type,return-value]


def is_lora(module: nn.Module) -> bool:
    """Whether a module is peft's layer around the layer that it adapts."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A") and hasattr(module, "lora_B")


def is_transposed(module: object) -> bool:
    """Whether a module is a linear layer with a transposed weight, as in GPT-2."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def features(core: nn.Module) -> tuple[int, int]:
    """How many inputs and outputs a linear layer has.

    >>> features(nn.Linear(2, 3))
    (2, 3)
    """
    rows, columns = core.weight.shape  # type: ignore[union-attr,misc]
    return (int(rows), int(columns)) if is_transposed(core) else (int(columns), int(rows))


def separate_heads(parent: nn.Module, query: int, key: int) -> Heads | None:
    count = find_number(parent, HEAD_COUNTS)
    size = find_number(parent, HEAD_SIZES)
    if count is None and size:
        count = query // size
    if not count or query % count:
        return None
    size = query // count
    return None if key % size else Heads(count, key // size, size)


def fused_heads(parent: nn.Module, width: int) -> Heads | None:
    count = find_number(parent, HEAD_COUNTS)
    size = find_number(parent, HEAD_SIZES)
    if count is None and size:
        count = width // size // 3
    if not count:
        return None
    keys = find_number(parent, KEY_HEAD_COUNTS) or count
    size = width // (count + 2 * keys)
    return Heads(count, keys, size) if size and size * (count + 2 * keys) == width else None


def find_number(m: nn.Module, names: Iterable[str]) -> int | None:
    """The first of these attributes that is an integer, of the module or of its configuration."""
    for holder in (m, getattr(m, "config", None)):
        for name in names:
            value = None if holder is None else getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None
