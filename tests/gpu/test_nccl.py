"""Every strategy on NCCL, with ranks that share the GPUs there are: 2 and 4 ranks train what one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.core.errors import ReplicasDifferError
from distributed.testing import run_ranks
from tests.meshes import MESHES, WIDE, Case, TrainedCases
from tests.ranks.test_replica_check import Centered

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHARED: dict[str, Any] = {"device": "cuda", "share_gpus": True, "tf32": False}
_TWO_STAGES_A_RANK = ("pp_interleaved", "pp_zero_bubble")  # of a model with more blocks
NAMES = [name for name, mesh in MESHES.items() if mesh.ranks in (2, 4) and name not in _TWO_STAGES_A_RANK]
CASES = {name: Case(name, SHARED) for name in NAMES}
CASES |= {f"{name}/accumulated": Case(name, SHARED | {"accumulation": 2, "gradient_clipping": 0.5}) for name in NAMES}
CASES |= {f"{name}/wide": Case(name, SHARED, {"blocks": 4}) for name in WIDE}
CASES |= {f"{name}/bf16": Case(name, SHARED | {"mixed_precision": "bf16"}) for name in ("ddp", "fsdp_grad_op", "tp")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedCases:
    return TrainedCases(CASES, tmp_path_factory.mktemp("nccl"), "cuda")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> TrainedCases:
    one = SHARED | {"capture": False, "share_gpus": False}
    cases = {
        "": Case("one", one),
        "accumulated": Case("one", one | {"gradient_clipping": 0.5}),
        "wide": Case("one", one, {"blocks": 4}),
        "bf16": Case("one", one | {"mixed_precision": "bf16"}),
    }
    return TrainedCases(cases, tmp_path_factory.mktemp("one"), "cuda")


@pytest.mark.parametrize("name", CASES)
def test_losses_on_nccl_match_one_process(name: str, trained: TrainedCases, alone: TrainedCases) -> None:
    found, plain = trained[name], alone[name.partition("/")[2]]
    tolerance = 0.02 if name.endswith("bf16") else 1e-5
    assert found.losses == pytest.approx(plain.losses, rel=tolerance)
    assert found.norms == pytest.approx(plain.norms, rel=10 * tolerance)
    assert found.validation == pytest.approx(plain.validation, rel=tolerance)


def centered(folder: str) -> str:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(320, 4), torch.randn(320, 2))
    trainer = Trainer(
        Centered(),
        batch_size=4,
        loss_fn=nn.MSELoss(),
        progress=False,
        checkpoint_dir=folder,
        log_every_n_steps=3,
        **SHARED,
    )
    try:
        trainer.fit(DataLoader(data, batch_size=4))
    except ReplicasDifferError as error:
        return str(error)
    return ""


def test_ranks_that_differ_are_found_at_the_next_replica_check(tmp_path: Path) -> None:
    for told in run_ranks(centered, 2, str(tmp_path), device="cuda"):
        assert "after step 1: buffer center" in told
