"""LoRA through peft: what is trained, how it begins, and that peft itself loads what is saved."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from distributed.core.errors import MissingExtraError, PlanError
from distributed.strategies.model.lora import adapter_names, add_lora, find_targets, init_lora, save_adapter


@pytest.fixture(scope="module", autouse=True)
def _needed() -> None:
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")


@dataclass(frozen=True)
class Lora:
    rank: int = 4
    alpha: float = 8.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)])
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=4, **sizes))


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, eos_token_id=1)
    )


def trained(model: nn.Module) -> nn.Module:
    """As after some steps: every adapter has values of its own."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in adapter_names(model):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_peft_loads_the_saved_adapter(make, targets: tuple[str, ...], tmp_path: Path) -> None:
    if make is gpt2 and targets:
        targets = ("attn.c_proj", "c_fc")
    plan = Lora(targets=targets, alpha=6.5)
    model = make()
    kind, tokens = type(model), torch.randint(0, 64, (2, 8))
    plain = model.eval()(tokens).logits
    add_lora(model, plan, seed=1)
    assert type(model) is kind
    assert torch.equal(model(tokens).logits, plain), "an adapter changes nothing at first"
    ours = trained(model)(tokens).logits
    assert not torch.allclose(ours, plain)
    save_adapter(model.state_dict(), plan, tmp_path)
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(make(), str(tmp_path)).eval()
    assert torch.equal(loaded(tokens).logits, ours)


def test_adapter_file_has_the_tensors_peft_writes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    plan = Lora(targets=("q_proj",))
    model = llama()
    add_lora(model, plan, seed=1)
    save_adapter(model.state_dict(), plan, tmp_path / "ours")
    from peft import LoraConfig, get_peft_model

    theirs = get_peft_model(llama(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    theirs.save_pretrained(tmp_path / "theirs")
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert {name: value.shape for name, value in one.items()} == {name: value.shape for name, value in two.items()}


def test_only_the_adapters_get_gradients() -> None:
    model = Plain()
    add_lora(model, Lora(), seed=1)
    model(torch.randint(0, 16, (2, 4))).sum().backward()
    assert {name for name, p in model.named_parameters() if p.requires_grad} == adapter_names(model)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == adapter_names(model)
    assert len(adapter_names(model)) == 8, "two for each of the four layers, none for the head"


def test_initial_adapter_values_depend_only_on_seed_and_name() -> None:
    def values(seed: int, noise: int) -> dict[str, torch.Tensor]:
        model = Plain()
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        add_lora(model, Lora(), seed)
        assert torch.equal(torch.get_rng_state(), before)
        return {name: model.state_dict()[name] for name in sorted(adapter_names(model))}

    one, again, other = values(1, noise=3), values(1, noise=4), values(2, noise=3)
    assert all(torch.equal(one[name], again[name]) for name in one)
    firsts = [value for name, value in one.items() if "lora_A" in name]
    assert all(not torch.equal(one[name], other[name]) for name in one if "lora_A" in name)
    assert not torch.equal(firsts[0], firsts[1]), "layers of one shape begin with different values"


def test_adapters_on_the_meta_device_are_initialised_later() -> None:
    with torch.device("meta"):
        model = Plain()
    add_lora(model, Lora(), seed=1)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    filled = {name for name, parameter in model.named_parameters() if init_lora(name, parameter, seed=1)}
    assert filled == adapter_names(model)
    real = Plain()
    add_lora(real, Lora(), seed=1)
    assert all(torch.equal(model.state_dict()[name], real.state_dict()[name]) for name in filled)


def test_torch_encoder_uses_its_adapters_in_eval() -> None:
    """Its fused form in eval would read the frozen weights only."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    add_lora(model, Lora(), seed=1)
    trained(model)
    x = torch.randn(2, 4, 8)
    with_gradients = model.train()(x)
    with torch.no_grad():
        assert torch.allclose(model.eval()(x), with_gradients, atol=1e-6)


def test_unknown_lora_targets_and_bad_rank_are_refused() -> None:
    with pytest.raises(PlanError, match="q_proj") as refused:
        add_lora(Plain(), Lora(targets=("q_proj",)), seed=1)
    assert "head" in str(refused.value), "it names the layers there are"
    with pytest.raises(PlanError, match="no layer"):
        find_targets(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with pytest.raises(PlanError, match="rank is 9"):
        add_lora(Plain(), Lora(rank=9), seed=1)


def test_missing_peft_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"distributed-training\[lora\]"):
        add_lora(Plain(), Lora(), seed=1)
