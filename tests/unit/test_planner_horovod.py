"""What the planner makes of Horovod's settings, and what it refuses, all at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from distributed.core.config import DistributedConfig
from distributed.core.errors import ConfigError, PlanError
from distributed.core.plan import Plan
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan


def plan(hardware: Hardware | None = None, **settings: Any) -> Plan:
    config = DistributedConfig(**{"backend": "horovod", "num_gpus": 2, "batch_size": 4} | settings)
    return make_plan(config, JobProfile(samples=64), hardware or Hardware(cpu_cores=2), run_dir="unused")


def refusal(**settings: Any) -> str:
    with pytest.raises(PlanError) as refused:
        plan(**settings)
    return str(refused.value)


@pytest.fixture
def path_with_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpirun").write_text("#!/bin/sh\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_unset_horovod_settings_keep_horovods_defaults() -> None:
    made = plan()
    assert made.engine == {
        "controller": "gloo",
        "reduction": "average",
        "compression": "none",
        "fusion_mb": None,
        "cycle_ms": None,
        "timeline": "",
    }
    assert (made.strategy, made.collectives) == ("horovod", "gloo")


@pytest.mark.usefixtures("path_with_mpirun")
def test_horovod_settings_reach_the_engine_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = plan(
        communication_backend="mpi",
        gradient_reduction="adasum",
        compression="fp16",
        fusion_threshold_mb=0,
        cycle_time_ms=2.5,
        timeline="timeline.json",
    )
    assert made.engine == {
        "controller": "mpi",
        "reduction": "adasum",
        "compression": "fp16",
        "fusion_mb": 0,
        "cycle_ms": 2.5,
        "timeline": str(tmp_path / "timeline.json"),
    }
    assert made.collectives == "gloo"  # torch has no MPI, and the session's world is torch's


def test_adasum_reports_all_three_problems_at_once() -> None:
    told = refusal(gradient_reduction="adasum", num_gpus=3, mixed_precision="fp16")
    assert "Adasum over MPI only" in told
    assert "communication_backend='mpi'" in told
    assert "2 or 4 ranks" in told
    assert "mixed_precision='bf16'" in told


def test_mpi_without_mpirun_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    told = refusal(communication_backend="mpi")
    assert "no mpirun" in told
    assert "apt-get install libopenmpi-dev openmpi-bin" in told


def test_mpi_under_srun_needs_no_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the compute nodes of a cluster, where srun starts them."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, value in {"STEP_ID": "0", "STEP_NUM_TASKS": "2", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert plan(communication_backend="mpi").engine["controller"] == "mpi"


def test_unwritable_timeline_is_refused(tmp_path: Path) -> None:
    assert "no folder" in refusal(timeline=str(tmp_path / "missing" / "timeline.json"))
    assert "it is a folder" in refusal(timeline=str(tmp_path))
    if os.getuid() != 0:  # who may write everywhere
        tmp_path.chmod(0o500)
        assert "may not write" in refusal(timeline=str(tmp_path / "timeline.json"))


def test_horovod_without_nccl_refuses_gpus() -> None:
    told = refusal(hardware=Hardware(gpus=(Gpu("H200"), Gpu("H200")), cpu_cores=2))
    assert "without NCCL" in told


def test_unknown_compression_is_refused() -> None:
    with pytest.raises(ConfigError, match="compression='int7'"):
        DistributedConfig(compression="int7")


@pytest.mark.parametrize("kind", ["bf16", "topk", "randomk", "powersgd", "int8", "onebit"])
def test_compression_that_horovod_lacks_names_another_engine(kind: str) -> None:
    assert "backend='pytorch-ddp'" in refusal(compression=kind)
    assert plan(backend="pytorch-ddp", compression=kind).replicate.compression.kind == kind


def test_compression_on_gpus_is_sent_to_an_engine_that_has_it() -> None:
    machine = Hardware(gpus=(Gpu("H200"), Gpu("H200")), cpu_cores=2)
    assert "backend='pytorch-ddp'" in refusal(compression="fp16", hardware=machine)
    for backend in ("pytorch-ddp", "auto"):
        found = plan(backend=backend, compression="fp16", hardware=machine)
        assert (found.strategy, found.replicate.compression.kind) == ("pytorch-ddp", "fp16")


@pytest.mark.parametrize(
    "setting",
    [{"timeline": "t.json"}, {"cycle_time_ms": 1.0}, {"communication_backend": "mpi"}],
)
def test_horovod_settings_are_refused_under_other_engines(setting: dict[str, Any]) -> None:
    assert "horovod" in refusal(backend="pytorch-ddp", **setting)
