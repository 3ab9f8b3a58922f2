"""Ray as an engine: what it can, and where its parts are."""

from __future__ import annotations

from distributed.core.engines.engine import Engine, LauncherTraits, Support
from distributed.core.engines.features import Feature, by_setting
from distributed.strategies.declaration import BITWISE, MESH, OFFLOADS, TORCH_MESH, WHOLE

RAY = Engine(
    TORCH_MESH,
    needs="ray.train",
    extra="ray",
    does="PyTorch's own, on ranks that Ray places on its cluster",
    can=MESH | WHOLE | {"cluster": Support()},
    features={"cluster": Feature("ranks placed on a Ray cluster", by_setting("address"))},
    claims=lambda wanted: "a Ray cluster's address is given" * (wanted.config.address is not None),
    places=("keras",),
    bitwise=BITWISE,
    offloads=OFFLOADS,
    checks="distributed.engines.ray.plan:problems_of",
    counts="distributed.engines.ray.cluster:largest_node",
    plans="distributed.engines.ray.plan:plan_engine",
    reads="distributed.engines.ray.data:read_data",
    starts="distributed.engines.ray.launcher:RayLauncher",
    spans=True,
    launcher=LauncherTraits(
        "ray",
        owns="distributed.engines.ray.process_owner:RayProcessOwner",
        is_ours=True,
        shows_one_gpu=True,
        runs_threads=True,
    ),
)
