"""Where trials find room on a Ray cluster, without one."""

from __future__ import annotations

import pytest

from distributed.core.errors import LaunchError
from distributed.engines.ray.cluster import RayCluster, RayNode
from distributed.engines.ray.tune_actor import ActorSettings, _Place
from distributed.engines.ray.tune_runner import cluster_obstacles, cluster_slots
from distributed.tune.runner import TuneRequest
from distributed.tune.space import Space

GPUS = RayCluster((RayNode("a", 16, 4), RayNode("b", 16, 2), RayNode("login", 8, 0)))
CPUS = RayCluster((RayNode("a", 4, 0), RayNode("b", 2, 0)))


def request(**options: int) -> TuneRequest:
    return TuneRequest(lambda config: None, Space({}), 10, "run", **options)


@pytest.mark.parametrize(
    ("cluster", "options", "slots"),
    [
        (GPUS, {}, 6),
        (GPUS, {"trials_per_gpu": 2}, 12),
        (GPUS, {"num_gpus": 3, "trials_per_gpu": 2}, 6),
        (GPUS, {"gpus_per_trial": 3}, 1),  # the rest of node a and all of node b are too small for a second one
        (CPUS, {}, 6),
        (CPUS, {"gpus_per_trial": 2}, 3),
    ],
)
def test_parallel_ray_trials_are_limited_by_devices_per_node(cluster, options, slots):
    assert cluster_obstacles(request(**options), cluster) == []
    assert cluster_slots(request(**options), cluster) == slots


@pytest.mark.parametrize(
    ("cluster", "options", "part"),
    [
        (GPUS, {"num_gpus": 7}, "num_gpus=7, but the Ray cluster has 6 GPUs"),
        (GPUS, {"gpus_per_trial": 5}, "no node has more than 4"),
        (GPUS, {"num_gpus": 2, "gpus_per_trial": 3}, "gpus_per_trial=3, but num_gpus=2"),
        (GPUS, {"trials_per_gpu": 8}, "48 trials at a time, and the Ray cluster has 40 CPUs"),
        (RayCluster(()), {}, "has 0 CPUs"),
    ],
)
def test_unplaceable_ray_trials_are_refused_with_resources(cluster, options, part):
    (problem,) = cluster_obstacles(request(**options), cluster)
    assert part in problem.what
    assert "there is: " in problem.why


def test_autoscaling_cluster_counts_at_its_maximum():
    growing = RayCluster((RayNode("a", 4, 1),), grows_to={"CPU": 64, "GPU": 16})
    assert cluster_obstacles(request(num_gpus=16, gpus_per_trial=8), growing) == []
    assert cluster_obstacles(request(num_gpus=17), growing)


def test_ray_place_that_cannot_start_trials_raises_and_closes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = _Place(
        ActorSettings(
            str(tmp_path / "gone"),
            function=str(tmp_path),
            ticket="",
            cwd=str(tmp_path),
            modules=(),
            device="cpu",
            devices=1,
        )
    )
    place.begin({"note": {"attempt": 1}})
    with pytest.raises(LaunchError, match="could not be started"):
        place.next()
    place.close()
