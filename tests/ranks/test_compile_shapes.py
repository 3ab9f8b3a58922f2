"""A compiled run whose batches change their shape trains as one that is not compiled, whichever way is chosen."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from distributed import Trainer
from distributed.checkpoint.restore.reading import load
from distributed.strategies.model.compiled_call import AS_WRITTEN, COMPILED


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(ids)).mean(1))


def padded(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True)
    return ids, torch.stack([label for _, label in rows])


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_compiled_run_of_changing_shapes_matches_eager(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 24, (98,), generator=generator).tolist()
    rows: Any = [(torch.randint(8, (n,), generator=generator), torch.tensor(n % 2)) for n in lengths]
    ended = {}
    for compiled in (False, "whole"):
        torch.manual_seed(0)
        model = Words()
        loader = DataLoader(rows, batch_size=2, collate_fn=padded)
        options = {"compile": compiled, "run_dir": str(tmp_path / str(compiled)), "device": "cpu", "progress": False}
        history = Trainer(model, loss_fn=nn.CrossEntropyLoss(), num_gpus=1, **options).fit(loader)
        ended[compiled] = model.state_dict()
        saved = load(history.checkpoint, ranks=()).shared.get("compile", {})
        assert saved.get("choice") in ([AS_WRITTEN, COMPILED] if compiled else [None])
    for name, value in ended[False].items():
        assert torch.allclose(ended["whole"][name], value, atol=1e-5), name
