"""A step has the gradients of one process, or is not taken: parameters that are left out, clipped, sparse.

Everything is compared with a loop by hand in double precision, whose micro-batches are the ranks' shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.checkpoint.restore.reading import load
from distributed.core.errors import RankFailedError, TaskError
from distributed.testing import run_ranks

SAMPLES, GLOBAL_BATCH, RANKS = 24, 8, 2
USES = {  # which samples let the model use all of its parameters, in three steps of eight
    "not_first": [index >= 8 for index in range(SAMPLES)],
    "not_last": [index < 16 for index in range(SAMPLES)],
    "one_rank": [not 12 <= index < 16 for index in range(SAMPLES)],
}


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.extra, self.scale = FeedForward(), FeedForward(), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = x + self.mlp(x)
        return (x + self.extra(x)) * self.scale if bool(wanted.any()) else x


class Gated(nn.Module):
    """Uses half of its parameters only where a sample of the batch wants it; one of them never."""

    def __init__(self, never: bool = False) -> None:
        super().__init__()
        self.entry, self.blocks, self.head = nn.Linear(4, 4), nn.ModuleList([Block(), Block()]), nn.Linear(4, 1)
        if never:
            self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x, wanted)
        return self.head(x)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(12, 6, sparse=True), nn.Linear(6, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(words))


@dataclass(frozen=True)
class Case:
    settings: dict[str, Any] = field(default_factory=dict)
    use: str = "not_last"
    kind: str = "gated"

    @property
    def share(self) -> int:
        """Samples of a forward pass."""
        shared = self.settings.get("tensor_parallel", 1) * self.settings.get("pipeline_parallel", 1)
        return GLOBAL_BATCH // (RANKS // shared) // self.settings.get("gradient_accumulation_steps", 1)


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(5)
    return (Words() if kind == "words" else Gated(never=kind == "never")).double()


def make_data(case: Case) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    y = torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)
    if case.kind == "words":
        return TensorDataset(torch.randint(0, 12, (SAMPLES,), generator=generator), y)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.tensor(USES[case.use]), y)


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "words":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = model.head.parameters() if kind == "head" else model.parameters()  # type: ignore[union-attr]
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.5)


def by_hand(case: Case, steps: int = 3) -> dict[str, torch.Tensor]:
    model, data = make_model(case.kind), make_data(case)
    if case.kind == "words":
        model.words.sparse = False  # type: ignore[union-attr]
    optimizer, clip = make_optimizer(case.kind, model), case.settings.get("gradient_clipping")
    most = case.settings.get("gradient_clip_value")
    for start in range(0, steps * GLOBAL_BATCH, GLOBAL_BATCH):
        model.zero_grad()
        for first in range(start, start + GLOBAL_BATCH, case.share):
            *inputs, y = data[first : first + case.share]
            (nn.functional.mse_loss(model(*inputs), y) * case.share / GLOBAL_BATCH).backward()
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        if clip is not None:
            nn.utils.clip_grad_norm_(stepped, clip)
        if most is not None:
            nn.utils.clip_grad_value_(stepped, most)
        optimizer.step()
    return model.state_dict()


def train(case: Case, run_dir: Path) -> str:
    """Where the model that was trained lies."""
    model = make_model(case.kind)
    trainer = Trainer(
        model,
        num_gpus=RANKS,
        batch_size=case.share,
        loss_fn=nn.MSELoss(),
        optimizer=make_optimizer(case.kind, model),
        run_dir=str(run_dir),
        progress=False,
        device="cpu",
        **case.settings,
    )
    return trainer.fit(DataLoader(make_data(case), batch_size=case.share)).checkpoint


def difference(expected: dict[str, torch.Tensor], checkpoint: str) -> float:
    found = load(checkpoint, ranks=()).shared["model"]
    return max(float((expected[name] - found[name]).abs().max()) for name in expected)


UNUSED = {"find_unused_parameters": True}
TWICE = {"gradient_accumulation_steps": 2}
FSDP, ZERO_1, TENSOR = {"backend": "fsdp"}, {"zero_stage": 1}, {"tensor_parallel": 2}
PIPELINE = {"pipeline_parallel": 2, "gradient_accumulation_steps": 2}
EXACT = {
    **{f"ddp_{use}": Case(UNUSED, use) for use in USES},
    "ddp_accumulated": Case(UNUSED | TWICE, "one_rank"),
    **{f"fsdp_{use}": Case(FSDP | UNUSED, use) for use in USES},
    "grad_op_accumulated": Case(FSDP | UNUSED | TWICE | {"sharding": "grad_op"}, "one_rank"),
    "zero1_one_rank": Case(ZERO_1 | UNUSED, "one_rank"),
    "tensor_not_last": Case(TENSOR | UNUSED),
    "pipeline_one_pass": Case(PIPELINE | UNUSED, "one_rank"),
    "fsdp_never": Case(FSDP | UNUSED, kind="never"),
    **{
        f"clipped_head_{name}": Case(settings | {"gradient_clipping": 0.5, **UNUSED}, kind="head")
        for name, settings in (("ddp", {}), ("fsdp", FSDP), ("zero1", ZERO_1), ("tp", TENSOR), ("pp", PIPELINE))
    },
    **{
        f"values_{name}": Case(settings | {"gradient_clip_value": 0.02, "log_every_n_steps": 2})
        for name, settings in {
            "ddp": UNUSED | TWICE,
            "fsdp": FSDP | UNUSED,
            "zero1": ZERO_1 | UNUSED,
            "tp": TENSOR | UNUSED,
            "pp": PIPELINE | UNUSED,
            "bitwise": {"reproducible": "bitwise", "virtual_ranks": RANKS},
        }.items()
    },
    "sparse_values": Case({"gradient_clip_value": 0.05}, kind="words"),
    "sparse": Case(kind="words"),
    "sparse_clipped": Case(TWICE | {"gradient_clipping": 0.1}, kind="words"),
}
REFUSED = {
    "ddp": Case(),
    "static_graph": Case({"static_graph": True}),
    "static_graph_late": Case({"static_graph": True}, "not_first"),
    "fsdp": Case(FSDP),
    "fsdp_late": Case(FSDP, "not_first"),
    "zero1": Case(ZERO_1),
    "tensor": Case(TENSOR),
    "pipeline": Case(PIPELINE),
}


def train_all(folder: str) -> tuple[dict[str, float], dict[str, str]]:
    """The differences from one process, and what was refused."""
    exact = {name: difference(by_hand(case), train(case, Path(folder, name))) for name, case in EXACT.items()}
    told = {}
    for name, case in REFUSED.items():
        with pytest.raises(TaskError) as refusal:
            train(case, Path(folder, f"refused-{name}"))
        told[name] = str(refusal.value)
    return exact, told


def test_gradients_match_one_process_or_the_step_is_refused(tmp_path: Path) -> None:
    for exact, told in run_ranks(train_all, RANKS, str(tmp_path)):
        assert {name: value for name, value in exact.items() if value > 1e-12} == {}
        assert {name: text for name, text in told.items() if "find_unused_parameters" not in text} == {}
        assert all("blocks.0.extra.fc1.weight" in text for name, text in told.items() if name in ("ddp", "tensor"))


SCALED = {"mixed_precision": "fp16", "scaler_init_scale": 1024.0, "gradient_clip_value": 0.02}


def clipped_in_fp16(folder: str) -> dict[str, float]:
    """The largest difference from torch's own scaler and clipping in one process, by strategy."""
    data, model = make_data(Case()), make_model("gated").float()
    x, wanted, y = data.tensors
    data = TensorDataset(x.float(), wanted, y.float())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.5), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for start in range(0, SAMPLES, GLOBAL_BATCH):
        optimizer.zero_grad()
        for first in range(start, start + GLOBAL_BATCH, 2):
            *inputs, target = data[first : first + 2]
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.mse_loss(model(*inputs), target) / 4
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        scaler.step(optimizer)
        scaler.update()
    found = {}
    for name, settings in {"ddp": UNUSED, "fsdp": FSDP | UNUSED}.items():
        trained = make_model("gated").float()
        trainer = Trainer(
            trained,
            num_gpus=RANKS,
            batch_size=2,
            loss_fn=nn.MSELoss(),
            optimizer=torch.optim.SGD(trained.parameters(), lr=0.5),
            run_dir=f"{folder}/{name}",
            progress=False,
            device="cpu",
            **TWICE | SCALED | settings,
        )
        checkpoint = trainer.fit(DataLoader(data, batch_size=2)).checkpoint
        found[name] = difference(model.state_dict(), checkpoint)
    return found


def test_values_are_clipped_in_the_true_scale_under_fp16(tmp_path: Path) -> None:
    for found in run_ranks(clipped_in_fp16, RANKS, str(tmp_path)):
        assert {name: value for name, value in found.items() if value > 1e-3} == {}  # 0.03 in another scale


def refuse_zero(folder: str) -> list[str]:
    told = []
    for stage, use in ((3, "not_first"), (3, "not_last"), (2, "not_first"), (2, "not_last")):
        model, data = make_model("gated").float(), make_data(Case(use=use))
        x, wanted, y = data.tensors
        trainer = Trainer(
            model,
            num_gpus=RANKS,
            batch_size=4,
            loss_fn=nn.MSELoss(),
            optimizer=make_optimizer("gated", model),
            run_dir=f"{folder}/{stage}-{use}",
            progress=False,
            device="cpu",
            backend="deepspeed",
            zero_stage=stage,
        )
        with pytest.raises(TaskError, match=r"blocks\.0\.scale") as refusal:
            trainer.fit(DataLoader(TensorDataset(x.float(), wanted, y.float()), batch_size=4))
        told.append(str(refusal.value))
    return told


def test_zero_refuses_to_step_unused_parameters_by_zeros(tmp_path: Path) -> None:
    for told in run_ranks(refuse_zero, RANKS, str(tmp_path)):
        assert all("AdamW moves them" in text for text in told[0::2])
        assert all("unlike in the first pass" in text for text in told[1::2])


class Normed(nn.Module):
    """Every kind of weight that is computed from others."""

    def __init__(self) -> None:
        super().__init__()
        ways: list[Callable[[nn.Module], nn.Module]] = [
            nn.utils.parametrizations.weight_norm,
            nn.utils.parametrizations.spectral_norm,
            nn.utils.parametrizations.orthogonal,
            nn.utils.spectral_norm,
        ]
        self.layers = nn.Sequential(*(way(nn.Linear(4, 4)) for way in ways))
        upper = nn.Linear(4, 1)
        nn.utils.parametrize.register_parametrization(upper, "weight", nn.Tanh())
        nn.utils.parametrize.register_parametrization(upper, "bias", nn.Identity())
        self.upper = upper

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.upper(self.layers(x).tanh())


def make_normed() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(2)
    return Normed().double(), TensorDataset(torch.randn(16, 4).double(), torch.randn(16, 1).double())


def test_parametrized_model_trains_on_ranks_as_in_one_process(tmp_path: Path) -> None:
    expected, data = make_normed()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for x, y in DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        nn.functional.mse_loss(expected(x), y).backward()
        optimizer.step()
    model, _ = make_normed()
    trainer = Trainer(
        model,
        num_gpus=RANKS,
        batch_size=4,
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        run_dir=str(tmp_path),
        progress=False,
        device="cpu",
    )
    trainer.fit(DataLoader(data, batch_size=4))
    found = model.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-12), name


def test_missing_gradient_on_one_rank_ends_the_run_unrestarted(tmp_path: Path) -> None:
    """One rank's step leaves parameters out: nobody's is taken, nothing starts again, and the run can go on."""
    # A save under way is given up when its run ends with an error.
    often = {"checkpoint_frequency": "1 steps", "checkpoint_async": False}
    case = Case(often, "one_rank")
    with pytest.raises(RankFailedError, match="got no gradient on rank 1"):
        train(case, tmp_path)
    assert [path.name for path in (tmp_path / "attempts").iterdir()] == ["0"]
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("step-*"))] == ["step-000001"]
    fixed = Case(often | UNUSED | {"resume_from_checkpoint": True}, "one_rank")
    assert difference(by_hand(case), train(fixed, tmp_path)) < 1e-12
