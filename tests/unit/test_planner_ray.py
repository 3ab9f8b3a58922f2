"""What is planned, and refused, for ranks that Ray places."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from distributed import RayTrainer
from distributed.core.config import DistributedConfig
from distributed.core.errors import ConfigError, PlanError
from distributed.core.plan import Plan
from distributed.planner.hardware import Gpu, Hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.planner.resources import plan_resources

CPUS = Hardware(cpu_cores=4)


def planned(profile: JobProfile | None = None, **settings: Any) -> Plan:
    config = DistributedConfig(backend="ray", batch_size=4, **settings)
    return make_plan(config, profile or JobProfile(samples=64), CPUS, run_dir="unused")


def test_ray_plan_of_several_nodes_needs_no_master_addr() -> None:
    plan = planned(num_nodes=4, gpus_per_node=8, address="auto")
    assert (plan.world_size, plan.num_nodes, plan.strategy) == (32, 4, "ray")
    assert plan.engine == {"address": "auto", "fewest": 32, "most": 32}


def test_address_alone_selects_ray() -> None:
    plan = make_plan(
        DistributedConfig(address="auto", batch_size=4, num_gpus=2), JobProfile(samples=64), CPUS, run_dir="unused"
    )
    assert plan.strategy == "ray"


def test_gpus_missing_here_are_left_to_the_ray_cluster() -> None:
    config = DistributedConfig(backend="ray", address="auto", device="cuda", num_nodes=2, gpus_per_node=8)
    _, _, problems = plan_resources(config, Hardware(gpus=(Gpu("one"),)))
    assert problems == []


@pytest.mark.parametrize(
    "address", ["auto", "10.0.0.7:6379", "head:6379", "ray://head.example.org:10001", "[::1]:6379"]
)
def test_valid_ray_addresses_are_accepted(address: str) -> None:
    assert planned(num_gpus=2, address=address).engine["address"] == address


@pytest.mark.parametrize("address", ["head", "ray://head", "http://head:8265", "head:port", "head:99999", ""])
def test_invalid_ray_address_is_refused(address: str) -> None:
    with pytest.raises(PlanError, match="is not the address of a Ray cluster"):
        planned(num_gpus=2, address=address)


@pytest.mark.parametrize("nodes", [{"num_nodes": 2}, {"num_nodes": 1, "max_nodes": 3}])
def test_several_nodes_without_a_ray_address_are_refused(nodes: dict[str, int]) -> None:
    with pytest.raises(PlanError, match=r"_nodes=\d \(.*\), but no address"):
        planned(gpus_per_node=2, **nodes)


def test_settings_that_ray_decides_are_refused_together() -> None:
    with pytest.raises(PlanError) as refused:
        planned(num_gpus=2, master_addr="n0", master_port=29500, hang_timeout_s=5.0)
    assert [problem.what.split()[0] for problem in refused.value.problems] == [
        "master_addr",
        "master_port",
        "hang_timeout_s",
    ]


def test_elastic_range_of_ranks_is_reported() -> None:
    plan = planned(num_nodes=2, gpus_per_node=2, min_nodes=1, max_nodes=3, address="auto")
    assert (plan.engine["fewest"], plan.engine["most"]) == (2, 6)
    assert any("2 to 6 ranks" in decision.choice for decision in plan.decisions)


def test_elastic_range_with_illegal_world_sizes_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot train with 3") as refused:
        planned(num_gpus=4, min_gpus=2, reproducible="bitwise", virtual_ranks=4)
    assert "min_gpus" in refused.value.problems[0].do


def test_missing_checkpoint_frequency_is_reported_for_ray() -> None:
    said = [decision.override for decision in planned(num_gpus=2).decisions]
    assert "checkpoint_frequency" in said
    kept = planned(num_gpus=2, checkpoint_frequency=1)
    assert "checkpoint_frequency" not in [decision.override for decision in kept.decisions]


def test_address_with_another_engine_is_refused() -> None:
    with pytest.raises(PlanError, match="address"):
        make_plan(
            DistributedConfig(backend="fsdp", address="auto", batch_size=4, num_gpus=2),
            JobProfile(samples=64),
            CPUS,
            run_dir="unused",
        )


def test_search_parameters_are_separated_from_settings() -> None:
    trainer = RayTrainer(nn.Linear(4, 2), {"hidden_size": 8, "lr": 0.5, "batch_size": 4})
    assert trainer.config.given_values() == {"backend": "ray", "learning_rate": 0.5, "batch_size": 4}
    assert ["hidden_size" in str(note) for note in trainer.notes] == [True]


def test_mistyped_setting_among_search_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="learning_rate"):
        RayTrainer(nn.Linear(4, 2), {"hidden_size": 8, "learning_rat": 0.5})


def test_missing_ray_names_its_extra(tmp_path: Path) -> None:
    """In a process of its own, which cannot import it."""
    program = (
        "import sys, torch\n"
        "sys.modules['ray'] = None\n"
        "from distributed import DistributedError, RayTrainer\n"
        "data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))\n"
        "trainer = RayTrainer(torch.nn.Linear(4, 2), num_gpus=2, batch_size=2)\n"
        "for more in ({}, {'address': '127.0.0.1:6379'}):\n"
        "    try:\n"
        "        trainer.fit(data, **more)\n"
        "    except DistributedError as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.count("MissingExtraError") == 2, done.stdout + done.stderr
    assert done.stdout.count('pip install "distributed-training[ray]"') == 2
    assert list(tmp_path.iterdir()) == []
