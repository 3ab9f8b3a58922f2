"""A model's summary: its figures are those of a step that is taken, and it neither takes memory nor leaves a trace."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.train.task import Task
from distributed.trainers.summary.model_summary import LayerSummary, ModelSummary
from tests.meshes import make_data, make_model

SAMPLES = 8


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 3))


def loader(width: int = 6) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(20, width), torch.randint(0, 3, (20,))), batch_size=SAMPLES)


def layer(summary: ModelSummary, name: str) -> LayerSummary:
    return next(each for each in summary.layers if each.name == name)


def test_figures_are_those_of_a_step_that_is_taken() -> None:
    model, kept = mlp(), dict[int, int]()
    trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(), optimizer="adamw")
    summary = trainer.summary(loader())
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x, y = next(iter(loader()))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    state = sum(value.nbytes for held in optimizer.state.values() for value in held.values())
    assert (summary.parameters, summary.trained, summary.batch) == (numbers, numbers, SAMPLES)
    assert summary.memory.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert (summary.memory.optimizer, summary.memory.activations) == (state, sum(kept.values()))
    products = [(6, 16), (16, 16), (16, 3)]
    assert summary.flops == sum(2 * a * b for a, b in products)
    assert summary.backward_flops == sum(4 * a * b for a, b in products) - 2 * 6 * 16  # nothing is before the first
    assert layer(summary, "2").flops == 2 * 16 * 16
    assert layer(summary, "2").shape == "[8, 16]"
    assert not summary.unknown


def test_depth_names_and_totals_are_in_the_table() -> None:
    text = str(Trainer(mlp(), loss_fn=nn.CrossEntropyLoss()).summary(loader(), depth=1))
    assert [line.split()[0] for line in text.splitlines()[1:6]] == ["(model)", "0", "1", "2", "3"]
    assert "435" in text.splitlines()[1]
    assert "memory of the whole model" in text
    whole = Trainer(mlp()).summary(loader())
    assert [each.name for each in whole.layers] == ["", "0", "1", "2", "2.0", "2.1", "3"]


def test_attention_and_recurrent_layers_are_counted() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x.unsqueeze(1))[0][:, 0])

    summary = Trainer(Recurrent(), loss_fn=nn.CrossEntropyLoss()).summary(loader())
    assert layer(summary, "rnn").flops == 2 * 4 * 8 * (6 + 8)
    transformer = Trainer(make_model(), loss_fn=nn.CrossEntropyLoss()).summary(DataLoader(make_data(), batch_size=4))
    width, length, wide = 32, 16, 128
    block = 2 * length * (4 * width * width + 2 * width * wide) + 2 * 2 * length * length * width
    assert layer(transformer, "blocks.0").flops == block
    assert layer(transformer, "blocks").flops == 2 * block  # which is not called, and holds them
    assert layer(transformer, "blocks").shape == "–"


def test_model_without_memory_takes_none() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(40)))
    data = TensorDataset(torch.zeros(4, 8192), torch.zeros(4, 8192))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    summary = Trainer(model, loss_fn=nn.MSELoss(), optimizer="lamb").summary(DataLoader(data, batch_size=2))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    assert summary.memory.parameters == 40 * (8192 * 8192 + 8192) * 4
    assert summary.memory.optimizer is not None
    assert summary.memory.optimizer >= 2 * summary.memory.parameters
    assert all(parameter.is_meta for parameter in model.parameters())


def test_batches_of_dicts_and_a_loss_of_the_models_own_work() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.head(self.embed(ids))
            return {"loss": nn.functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}

    rows = [{"ids": torch.zeros(5, dtype=torch.long), "labels": torch.zeros(5, dtype=torch.long)}] * 6
    summary = Trainer(Own(), mixed_precision="bf16").summary(DataLoader(rows, batch_size=3))  # type: ignore[arg-type]
    assert (layer(summary, "").shape, summary.flops) == ("[], [3, 5, 10]", 2 * 5 * 4 * 10)
    assert summary.memory.total is not None


def test_what_depends_on_values_is_said_to_be_unknown() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.last(x if x.sum().item() > 0 else -x)

    summary = Trainer(Branches()).summary(loader())
    assert (summary.parameters, summary.flops, summary.memory.activations, summary.memory.total) == (
        43,
        None,
        None,
        None,
    )
    assert layer(summary, "first").shape == "[8, 4]"
    assert any("item()" in why for why in summary.unknown)
    assert "unknown" in str(summary)
    plain = Trainer(Branches()).summary()
    assert (plain.batch, plain.memory.gradients, plain.flops) == (None, 43 * 4, None)
    assert any("train_loader" in why for why in plain.unknown)


def test_summary_leaves_no_trace() -> None:
    """Of the model, its optimizer and gradients, of the generators, and of a loss that reaches past its model."""
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    class Penalized(Task):
        def training_step(self, given: nn.Module, batch: Any) -> Any:
            return nn.functional.cross_entropy(given(batch[0]), batch[1]) + model[0].weight.pow(2).sum()  # type: ignore[operator]

    before, data = {name: value.clone() for name, value in model.state_dict().items()}, loader()
    drawn = torch.get_rng_state()
    summary = Trainer(Penalized(model, optimizer=optimizer)).summary(data)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not optimizer.state
    assert all(parameter.grad is None and type(parameter) is nn.Parameter for parameter in model.parameters())
    assert summary.parameters == 27


def test_plain_form_has_all_of_it() -> None:
    summary = Trainer(mlp()).summary(loader(), depth=1)
    content = json.loads(summary.to_json())
    assert content["parameters"] == 435
    assert content["memory"]["gradients"] == 435 * 4
    assert [each["kind"] for each in content["layers"]] == ["Sequential", "Linear", "Tanh", "Sequential", "Linear"]


def test_setting_prints_it_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how: dict[str, Any] = {"num_gpus": 1, "max_steps": 1, "progress": False, "device": "cpu"}
    Trainer(mlp(), run_dir=tmp_path / "a", model_summary=1, **how).fit(loader())
    assert "(model)" in capsys.readouterr().out
    Trainer(mlp(), run_dir=tmp_path / "b", **how).fit(loader())
    assert "(model)" not in capsys.readouterr().out
