"""Every strategy trains what one process trains: the loss of each step, the gradient's norm and the validation loss."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from distributed.checkpoint.reading import load
from distributed.cli.checkpoint_transfers import export_adapter
from tests.meshes import MESHES, Trained, make_model, train

STEPS = 25
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clipping": 0.5, "accumulation": 2},
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory):
    """What one process comes to, trained once for each way of training."""

    @functools.cache
    def of(case: str, tied: bool = False) -> Trained:
        return train("one", tmp_path_factory.mktemp("one") / "run", make_model(tied=tied), **CASES[case])

    return of


def assert_same(found: Trained, wanted: Trained, relative: float = 1e-5) -> None:
    assert len(wanted.losses) == STEPS
    assert found.losses == pytest.approx(wanted.losses, rel=relative)
    assert found.norms == pytest.approx(wanted.norms, rel=max(relative, 1e-4))
    assert found.validation == pytest.approx(wanted.validation, rel=relative)
    assert wanted.losses[-1] < wanted.losses[0], "it must have learned something"


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "one"])
def test_it_trains_what_one_process_trains(mesh: str, one_process, tmp_path: Path) -> None:
    assert_same(train(mesh, tmp_path / "run"), one_process("plain"))


@pytest.mark.parametrize("mesh", ["fsdp_grad_op", "zero1", "tp", "pp", "3d"])
def test_with_accumulation_and_clipping(mesh: str, one_process, tmp_path: Path) -> None:
    assert_same(train(mesh, tmp_path / "run", **CASES["clipped"]), one_process("clipped"))


@pytest.mark.parametrize("mesh", ["fsdp_grad_op", "zero1", "tp", "pp"])
def test_with_tied_weights(mesh: str, one_process, tmp_path: Path) -> None:
    assert_same(train(mesh, tmp_path / "run", make_model(tied=True)), one_process("plain", tied=True))


@pytest.mark.parametrize("mesh", ["ddp", "fsdp_grad_op", "tp", "pp"])
def test_activation_checkpointing_changes_nothing(mesh: str, one_process, tmp_path: Path) -> None:
    kind = "selective" if mesh in ("ddp", "tp") else 2
    assert_same(train(mesh, tmp_path / "run", activation_checkpointing=kind), one_process("plain"))


@pytest.mark.parametrize("mesh", ["fsdp", "tp", "cp", "pp"])
def test_mixed_precision_stays_near_full_precision(mesh: str, one_process, tmp_path: Path) -> None:
    found = train(mesh, tmp_path / "run", mixed_precision="bf16")
    assert found.losses == pytest.approx(one_process("plain").losses, rel=0.03)


@pytest.mark.parametrize("mesh", ["fsdp_grad_op", "tp", "pp"])
def test_fp16_with_a_scaler(mesh: str, one_process, tmp_path: Path) -> None:
    found = train(mesh, tmp_path / "run", mixed_precision="fp16", gradient_clipping=1.0, scaler_init_scale=1024.0)
    assert found.losses[0] == pytest.approx(one_process("plain").losses[0], rel=0.01)
    assert found.losses[-1] < 0.9 * found.losses[0]


@pytest.mark.parametrize("mesh", ["ddp", "fsdp", "tp", "3d"])
def test_a_model_without_memory_begins_alike(mesh: str, from_meta: Trained, tmp_path: Path) -> None:
    assert_same(train(mesh, tmp_path / "run", make_model(meta=True)), from_meta)


@pytest.fixture(scope="module")
def from_meta(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train("one", tmp_path_factory.mktemp("meta") / "run", make_model(meta=True))


@pytest.mark.parametrize("mesh", ["fsdp", "tp", "pp", "3d"])
def test_adapters_of_low_rank(mesh: str, adapted: Trained, tmp_path: Path) -> None:
    only = mesh in ("fsdp", "3d")
    found = train(mesh, tmp_path / "run", lora={"rank": 4}, save_adapters_only=only)
    assert_same(found, adapted)
    names = load(found.checkpoint, ranks=()).shared["model"].keys()
    assert all("lora_" in name for name in names) == only
    if mesh == "fsdp":
        export_adapter(found.checkpoint, str(tmp_path / "adapter"))
        written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert len(written) == len(names)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train("one", tmp_path_factory.mktemp("lora") / "run", lora={"rank": 4})
