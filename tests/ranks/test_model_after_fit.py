"""After `fit` in a world that a launcher made, rank 0 has the user's model, whole, however the ranks had cut it.

Two ranks train every way to cut a model once, and four the ways that are put together of two, each set in one world.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.checkpoint.restore.reading import load
from distributed.core.plan import LoraPlan
from distributed.strategies.model.lora import add_lora
from distributed.testing import run_ranks
from tests.meshes import MESHES, make_data, make_model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.second(torch.tanh(self.first(hidden)))


class Tied(nn.Module):
    """With a tied weight, buffers of both kinds, and one that is declared only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.register_buffer("later", None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


WAYS: dict[str, dict[str, Any]] = {
    "fsdp": {"backend": "fsdp"},
    "tensor parallel": {
        "tensor_parallel": 2,
        "tensor_parallel_plan": {"blocks.*.first": "column", "blocks.*.second": "row"},
    },
    "pipeline": {"pipeline_parallel": 2},
    "zero-1": {"zero_stage": 1},
}


def train(folder: str, device: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {}
    for way, settings in WAYS.items():
        torch.manual_seed(0)
        model = Tied()
        parts = [*model.blocks]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randint(0, 8, (16,)), torch.randint(0, 8, (16,)))
        trainer = Trainer(
            model,
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=optimizer,
            batch_size=4,
            progress=False,
            run_dir=f"{folder}/{way}",
            **settings,
            **device,
        )
        history = trainer.fit(data)
        trainer.save_model(f"{folder}/{way}.safetensors")
        if not trainer.is_main:
            continue
        saved = load(history.checkpoint, ranks=()).shared
        assert trainer.model is model
        steps = {name: int(optimizer.state[p]["step"]) for name, p in model.named_parameters() if p in optimizer.state}
        found[way] = {
            "classes": [type(module).__name__ for module in model.modules()],
            "devices": {tensor.device.type for tensor in (*model.parameters(), *model.buffers())},
            "weights": {name: value.cpu() for name, value in model.state_dict().items()},
            "saved": saved["model"],
            "file": load_file(f"{folder}/{way}.safetensors"),
            "is tied": model.head.weight is model.embedding.weight,
            "has its blocks": all(a is b for a, b in zip(parts, model.blocks, strict=True)),
            "outputs": model.cpu()(torch.arange(8)),
            "steps": steps,
            "taken": history.steps,
            "loose": [model.table.tolist(), model.later],
        }
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("model_after_fit")
    return run_ranks(train, 2, str(folder), {"device": "cpu"})[0]


@pytest.mark.parametrize("way", WAYS)
def test_rank_0_model_after_fit_has_the_checkpoint_weights(way: str, trained: Any) -> None:
    assert_whole(way, trained[way])


def assert_whole(way: str, found: dict[str, Any]) -> None:
    made = Tied()
    assert found["classes"] == [type(module).__name__ for module in made.modules()]
    assert found["weights"].keys() == made.state_dict().keys()
    for name, value in found["weights"].items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, found["saved"][name]), name
        assert name == "head.weight" or torch.equal(value, found["file"][name]), name
    assert len(found["devices"]) == 1
    assert found["is tied"]
    assert found["has its blocks"]
    if way != "zero-1":  # with which each rank keeps the state of some parameters
        assert found["steps"] == {name: found["taken"] for name, _ in made.named_parameters()}
    assert found["loose"] == [list(range(8)), None]
    made.load_state_dict(found["weights"])
    torch.testing.assert_close(found["outputs"], made(torch.arange(8)))


OF_FOUR: dict[str, dict[str, Any]] = {
    "hybrid": MESHES["hybrid"].all_settings(),
    "context parallel": {"num_gpus": 4, "batch_size": 4, "context_parallel": 2},
    "context parallel, sharded": MESHES["fsdp_cp"].all_settings(),
    "pipeline and tensor parallel": MESHES["pp_tp"].all_settings(),
    "LoRA": {"num_gpus": 4, "batch_size": 2, "backend": "fsdp", "lora": 4},
}


def train_four(folder: str) -> dict[str, dict[str, Any]]:
    found = {}
    for way, settings in OF_FOUR.items():
        model = make_model()
        optimizer = None if way == "LoRA" else torch.optim.AdamW(model.parameters(), lr=0.01)
        more: dict[str, Any] = {"device": "cpu", "progress": False, "max_steps": 3}
        trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, **settings, **more)
        history = trainer.fit(make_data())
        trainer.save_model(f"{folder}/{way}.safetensors")
        if trainer.is_main:
            assert trainer.model is model
            found[way] = {
                "classes": [type(module).__name__ for module in model.modules()],
                "weights": dict(model.state_dict()),
                "types": {name: type(value).__name__ for name, value in model.state_dict().items()},
                "outputs": model(make_data().tensors[0][:4]),
                "saved": load(history.checkpoint, ranks=()).shared["model"],
                "file": load_file(f"{folder}/{way}.safetensors"),
                "steps": [int(state["step"]) for state in optimizer.state.values()] if optimizer else [],
            }
    return found


@pytest.fixture(scope="module")
def trained_by_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_ranks(train_four, 4, str(tmp_path_factory.mktemp("of_four")))[0]


@pytest.mark.parametrize("way", OF_FOUR)
def test_rank_0_of_four_has_the_checkpoint_weights(way: str, trained_by_four: Any) -> None:
    found, made = trained_by_four[way], make_model()
    weights, saved = found["weights"], found["saved"]
    assert weights.keys() == saved.keys() == found["file"].keys()
    for name, value in weights.items():
        assert found["types"][name] == "Tensor"
        assert torch.equal(value, saved[name]), name
        assert torch.equal(value, found["file"][name]), name
    ids = make_data().tensors[0][:4]
    assert not torch.equal(found["outputs"], made(ids)), "it was trained"
    if way == "LoRA":  # the frozen weights are those that the model had, under other names
        frozen = {name.replace(".base_layer", ""): value for name, value in weights.items() if "lora_" not in name}
        assert len(frozen) < len(weights)
        torch.testing.assert_close(frozen, dict(made.state_dict()), rtol=0, atol=0)
        add_lora(made, LoraPlan(rank=4, alpha=8.0), seed=0)
    else:
        assert found["steps"] == [3] * len([*made.parameters()])
    made.load_state_dict(weights)
    torch.testing.assert_close(found["outputs"], made(ids))
    assert found["classes"] == [type(module).__name__ for module in made.modules()]
