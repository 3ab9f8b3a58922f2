"""A small transformer and the meshes that it is trained on: what the tests of strategies and checkpoints share."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.checkpoint.restore.restoring import Restored, restore
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.core.env import worker_env
from distributed.core.errors import RankFailedError
from distributed.runtime.session import Session
from distributed.strategies.base import Strategy
from distributed.testing import run_ranks

VOCABULARY, WIDTH, HEADS, LENGTH, BLOCKS = 64, 32, 4, 16, 2
SAMPLES, EPOCHS, GLOBAL_BATCH = 80, 2, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, *, tied: bool = False, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


def make_model(*, tied: bool = False, meta: bool = False, blocks: int = BLOCKS) -> nn.Module:
    torch.manual_seed(5)
    with torch.device("meta" if meta else "cpu"):
        return Transformer(tied=tied, blocks=blocks)


def make_data(samples: int = SAMPLES) -> TensorDataset:
    """Of a quarter of the words, which a few steps learn."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY // 4, (samples, LENGTH), generator=generator)
    return TensorDataset(ids, ids.roll(-1, 1))


@dataclass(frozen=True)
class Mesh:
    """A number of ranks and the settings by which they share the work."""

    ranks: int
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def data_ranks(self) -> int:
        shared = 1
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
            shared *= self.settings.get(name, 1)
        return self.ranks // shared

    def all_settings(self, accumulation: int = 1) -> dict[str, Any]:
        """With the one global batch."""
        batch = GLOBAL_BATCH // self.data_ranks // accumulation
        return {
            "num_gpus": self.ranks,
            "batch_size": batch,
            "gradient_accumulation_steps": accumulation,
        } | self.settings


MESHES = {
    "one": Mesh(1),
    "ddp": Mesh(2),
    "fsdp": Mesh(4, {"backend": "fsdp"}),
    "fsdp_grad_op": Mesh(2, {"backend": "fsdp", "sharding": "grad_op"}),
    "hybrid": Mesh(4, {"sharding": "hybrid", "shard_groups": 2}),
    "zero1": Mesh(2, {"zero_stage": 1}),
    "tp": Mesh(2, {"tensor_parallel": 2}),
    "tp_sequence": Mesh(2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "cp": Mesh(2, {"context_parallel": 2}),
    "pp": Mesh(2, {"pipeline_parallel": 2}),
    "pp_gpipe": Mesh(2, {"pipeline_parallel": 2, "pipeline_schedule": "gpipe"}),
    "pp_interleaved": Mesh(2, {"pipeline_parallel": 2, "pipeline_schedule": "interleaved"}),
    "pp_zero_bubble": Mesh(2, {"pipeline_parallel": 2, "pipeline_schedule": "zero_bubble"}),
    "pp_dp": Mesh(4, {"pipeline_parallel": 2}),
    "dp_tp": Mesh(4, {"tensor_parallel": 2}),
    "pp_tp": Mesh(4, {"pipeline_parallel": 2, "tensor_parallel": 2}),
    "3d": Mesh(8, {"pipeline_parallel": 2, "tensor_parallel": 2, "backend": "fsdp"}),
    "3d_replicated": Mesh(8, {"pipeline_parallel": 2, "tensor_parallel": 2}),
    "zero1_tp": Mesh(4, {"zero_stage": 1, "tensor_parallel": 2}),
    "fsdp_cp": Mesh(4, {"backend": "fsdp", "context_parallel": 2}),
}

WIDE = {  # one axis over four ranks
    "ddp4": Mesh(4),
    "zero1_4": Mesh(4, {"zero_stage": 1}),
    "tp4": Mesh(4, {"tensor_parallel": 4}),
    "cp4": Mesh(4, {"context_parallel": 4}),
    "pp4": Mesh(4, {"pipeline_parallel": 4}),  # of a model with four blocks
}


ENGINES = {  # the same work behind other doors
    "deepspeed": Mesh(2, {"backend": "deepspeed", "zero_stage": 3}),
    "horovod": Mesh(2, {"backend": "horovod"}),
}


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    validation: list[float]
    checkpoint: str


def train(mesh: str, run_dir: Path, model: nn.Module | None = None, **settings: Any) -> Trained:
    """Through the front door, with every step's loss written down."""
    accumulation = settings.pop("accumulation", 1)
    data = make_data(settings.pop("samples", SAMPLES))
    options = (MESHES | WIDE)[mesh].all_settings(accumulation) | {
        "epochs": EPOCHS,
        "learning_rate": 0.01,
        "log_every_n_steps": 1,
        "progress": False,
        "run_dir": str(run_dir),
        "checkpoint_dir": str(run_dir / "checkpoints"),
    }
    trainer = Trainer(model or make_model(), loss_fn=nn.CrossEntropyLoss(), **options | settings)
    history = trainer.fit(data, make_data(13))
    events = [json.loads(line) for line in (Path(history.run_dir) / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "StepEnded"]
    losses = [event["loss"] for event in steps]
    return Trained(losses, [event["gradient_norm"] for event in steps], history["val_loss"], history.checkpoint)


def joined() -> Session:
    """The place of this rank in the world of `run_ranks`."""
    env = worker_env()
    assert env is not None
    return Session(env, torch.device("cpu"), None)


def save_state(strategy: Strategy, session: Session, folder: str, step: int) -> None:
    saver = Saver(folder, session, TensorStaging(), asynchronous=False)
    saver.save(step, strategy.state(), {}, {})
    saver.close()


def load_state(strategy: Strategy, session: Session, folder: str) -> Restored:
    restored = restore(folder, True, session, expected=strategy.state(), boxes=strategy.shard_ranges)
    assert restored is not None
    assert not restored.report.missing
    assert not restored.report.mismatched
    strategy.load_state(restored.shared)
    return restored


@dataclass(frozen=True)
class Case:
    """One training: of which model, on which mesh, with which settings besides."""

    mesh: str
    settings: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    is_soak: bool = False

    @property
    def world(self) -> tuple[int, bool]:
        return (MESHES | WIDE)[self.mesh].ranks, self.is_soak


class TrainedCases:
    """What trainings come to; all of those with one number of ranks are trained in one world, which costs its start.

    Those of `make soak` have worlds of their own.
    """

    def __init__(self, cases: dict[str, Case], folder: Path, device: str = "cpu") -> None:
        self._cases, self._folder, self._device = cases, folder, device
        self._found: dict[str, Trained] = {}
        self._failed: dict[tuple[int, bool], RankFailedError] = {}  # a world that failed is not tried again

    def __getitem__(self, name: str) -> Trained:
        world = self._cases[name].world
        if world in self._failed:
            raise self._failed[world]
        if name not in self._found:
            mates = {key: case for key, case in self._cases.items() if case.world == world}
            try:
                self._found |= run_ranks(_train_all, world[0], mates, self._folder, device=self._device)[0]
            except RankFailedError as failed:
                self._failed[world] = failed
                raise
        return self._found[name]


def _train_all(cases: dict[str, Case], folder: Path) -> dict[str, Trained]:
    return {
        name: train(case.mesh, folder / name.replace("/", "-"), make_model(**case.model), **case.settings)
        for name, case in cases.items()
    }
