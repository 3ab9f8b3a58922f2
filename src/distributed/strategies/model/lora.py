"""LoRA: small trainable matrices beside a model's frozen linear layers, made by peft and stored in its format.

Their initial values depend on the seed and their names only, so every rank and every strategy begins with the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from distributed.core.errors import PlanError, first_of
from distributed.core.plan import LoraPlan
from distributed.core.registry import import_extra
from distributed.strategies.model.blocks import find_blocks

ADAPTER = "default"
_A, _B = f"lora_A.{ADAPTER}.weight", f"lora_B.{ADAPTER}.weight"
_SAVED_PREFIX = "base_model.model."  # what peft calls the model in its wrappers


def ensure_lora(module: nn.Module, lora: LoraPlan, seed: int) -> set[str] | None:
    """Add adapters, unless a resumed model has them; returns the names to save, or None for all."""
    if not adapter_names(module):
        add_lora(module, lora, seed)
    return adapter_names(module) if lora.saves_alone else None


def add_lora(module: nn.Module, plan: LoraPlan, seed: int) -> list[str]:
    """Put adapters beside linear layers and freeze all else, in place; returns the paths of those layers.

    A layer `q` then holds `q.base_layer.weight`, `q.lora_A.default.weight` and `q.lora_B.default.weight`, of the dtype
    of the layer. Tensors on the meta device stay there, for `init_lora` to fill later.
    """
    peft = import_extra("peft", "lora", "lora=")
    paths = find_targets(module, plan.targets)
    _check_rank(module, paths, plan.rank)
    _refuse_twice(module, paths)
    with torch.random.fork_rng(devices=[]):
        config = _config(peft, plan, paths)
        config.fan_in_fan_out = any(not isinstance(module.get_submodule(path), nn.Linear) for path in paths)
        peft.inject_adapter_in_model(config, module, adapter_name=ADAPTER)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if parameter.device.type != "meta":
            init_lora(name, parameter, seed)
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0  # or its fused form in eval would read the frozen weights only
        elif isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False
    return paths


def init_lora(name: str, tensor: torch.Tensor, seed: int) -> bool:
    """Initialize a whole tensor if its name is that of an adapter weight; returns whether it is.

    >>> weight = torch.empty(2, 4)
    >>> init_lora("layers.0.q.lora_A.default.weight", weight, seed=1), bool((weight.abs() <= 0.5).all())
    (True, True)
    >>> init_lora("layers.0.q.base_layer.weight", weight, seed=1)
    False
    """
    if not is_adapter(name):
        return False
    with torch.no_grad():
        if name.endswith(_B):
            tensor.zero_()
            return True
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        bound = 1 / math.sqrt(tensor.shape[1])
        tensor.copy_(torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator))
    return True


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.endswith((f".{_A}", f".{_B}")) or name in (_A, _B)


def adapter_names(module: nn.Module) -> set[str]:
    """The names of the adapters' parameters in the module's state dict, which a checkpoint must hold."""
    return {name for name in module.state_dict() if is_adapter(name)}


def save_adapter(module_state: Mapping[str, torch.Tensor], plan: LoraPlan, path: str | Path) -> None:
    """Write the adapters of a whole state dict as peft does, for `PeftModel.from_pretrained(base, path)` to load."""
    peft = import_extra("peft", "lora", "lora=")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(name for name in module_state if is_adapter(name))
    layers = [name.removesuffix(f".{_A}") for name in names if name.endswith(f".{_A}")]
    if not layers:
        raise PlanError("there is no adapter to save", why="no name of the state ends with 'lora_A.default.weight'")
    tensors = {
        f"{_SAVED_PREFIX}{name.replace(f'.{ADAPTER}.weight', '.weight')}": module_state[name]
        .detach()
        .cpu()
        .contiguous()
        for name in names
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = _config(peft, plan, plan.targets or layers)
    config.inference_mode = True
    config.save_pretrained(str(folder))


def find_targets(module: nn.Module, wanted: Sequence[str] = ()) -> list[str]:
    """The paths of the layers that get an adapter.

    These are the named layers, or peft's choice for this Hugging Face model, or all linear layers of blocks.

    >>> find_targets(nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)]))
    ['0.linear1', '0.linear2', '1.linear1', '1.linear2']
    """
    linear = _linear_layers(module)
    for name in wanted:
        if not any(_ends_with(path, [name]) for path in linear):
            raise _not_found(f"lora.targets names {name!r}, which is no linear layer of the model", linear)
    if wanted:
        return [path for path in linear if _ends_with(path, wanted)]
    known = _known_targets(module)
    found = [path for path in linear if _ends_with(path, known)]
    if not found:
        blocks = find_blocks(module)
        found = [path for path in linear if any(path == block or path.startswith(f"{block}.") for block in blocks)]
    if not found:
        raise _not_found("lora found no layer to put an adapter beside", linear)
    return found


def _known_targets(module: nn.Module) -> Sequence[str]:
    kind = getattr(getattr(module, "config", None), "model_type", None)
    if kind is None:
        return ()
    peft = import_extra("peft", "lora", "lora=")
    known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind, ())
    return () if isinstance(known, str) else tuple(known)


def _linear_layers(module: nn.Module) -> list[str]:
    """The linear layers that are called; nn.MultiheadAttention reads its own weights and would bypass adapters."""
    inside = {id(child) for m in module.modules() if isinstance(m, nn.MultiheadAttention) for child in m.modules()}
    return [path for path, m in module.named_modules() if path and id(m) not in inside and _is_linear(m)]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or f"{type(module).__module__}.{type(module).__name__}" == (
        "transformers.pytorch_utils.Conv1D"
    )


def _ends_with(path: str, names: Sequence[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _not_found(what: str, linear: Sequence[str]) -> PlanError:
    ends = list(dict.fromkeys(path.rpartition(".")[2] for path in linear))
    shown = first_of(ends, 12)
    if not linear:
        return PlanError(what, why="the model has no linear layer that it calls", do="train without lora")
    return PlanError(what, why=f"the linear layers there are: {shown}", do=f"set lora.targets, to [{ends[0]}] for one")


def _check_rank(module: nn.Module, paths: Sequence[str], rank: int) -> None:
    if rank < 1:
        raise PlanError(f"lora.rank is {rank}", why="an adapter needs a rank of at least 1", do="set lora.rank=8")
    weights: dict[str, Any] = {path: module.get_submodule(path).weight for path in paths}
    sizes: dict[str, tuple[int, int]] = {path: tuple(weight.shape) for path, weight in weights.items()}
    path = min(sizes, key=lambda path: min(sizes[path]))
    smallest = min(sizes[path])
    if rank > smallest:
        raise PlanError(
            f"lora.rank is {rank}, and {path} is a layer of {sizes[path][0]} by {sizes[path][1]}",
            why="an adapter with a larger rank than its layer would have more parameters than the layer",
            do=f"set lora.rank={smallest} or less, or leave the layer out of lora.targets",
        )


def _refuse_twice(module: nn.Module, paths: Sequence[str]) -> None:
    """Refuse layers with two names: an adapter replaces one of them, and a call by the other bypasses it."""
    names: dict[int, list[str]] = {}
    for path, m in module.named_modules(remove_duplicate=False):
        names.setdefault(id(m), []).append(path)
    twice = next((found for path in paths if len(found := names[id(module.get_submodule(path))]) > 1), None)
    if twice is not None:
        raise PlanError(
            f"{twice[0]} and {twice[1]} are one layer, and lora would put an adapter beside the first only",
            why="an adapter is put in the place of a layer, under one of its names",
            do="leave the layer out of lora.targets, or register it once",
        )


def _config(peft: Any, plan: LoraPlan, targets: Sequence[str]) -> Any:
    return peft.LoraConfig(
        r=plan.rank, lora_alpha=plan.alpha, lora_dropout=plan.dropout, target_modules=list(targets), bias="none"
    )
