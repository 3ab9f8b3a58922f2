"""Horovod's part of a plan: what it reduces over what, and how its ring is tuned."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from distributed.core.config import DistributedConfig
from distributed.core.env import worker_env
from distributed.core.errors import Problem
from distributed.core.plan import Decision, Plan

_INSTALL_MPI = "apt-get install libopenmpi-dev openmpi-bin, then make horovod MPI=1"


def plan_engine(
    config: DistributedConfig, profile: Any, plan: Plan, decisions: list[Decision], problems: list[Problem]
) -> dict[str, Any]:
    """Horovod's part of the plan; whether the installed one can do it is checked where it is loaded."""
    controller = "mpi" if config.communication_backend == "mpi" else "gloo"
    if plan.device == "cuda":
        problems.append(
            Problem(
                "backend='horovod' on CUDA devices",
                why="`make horovod` builds it without NCCL, for tensors in host memory",
                do="set device='cpu', or backend='pytorch-ddp'",
            )
        )
    # Ranks that are there already may have been started from another host, or by srun.
    if controller == "mpi" and worker_env() is None and shutil.which("mpirun") is None:
        problems.append(
            Problem(
                f"communication_backend='mpi' ({config.source('communication_backend')}), but there is no mpirun here",
                why="MPI starts the ranks that it connects, with mpirun",
                do=f"{_INSTALL_MPI}; or leave communication_backend out",
            )
        )
    if config.gradient_reduction == "adasum":
        problems += _adasum_problems(controller, plan)
    timeline = os.path.abspath(os.path.expanduser(config.timeline)) if config.timeline else ""
    if timeline:
        problems += _timeline_problems(timeline)
    return {
        "controller": controller,
        "reduction": config.gradient_reduction,
        "compression": config.compression,
        "fusion_mb": config.fusion_threshold_mb,
        "cycle_ms": config.cycle_time_ms,
        "timeline": timeline,
    }


def _adasum_problems(controller: str, plan: Plan) -> list[Problem]:
    found: list[Problem] = []
    if controller != "mpi":
        found.append(
            Problem(
                "gradient_reduction='adasum' without communication_backend='mpi'",
                why="Horovod has Adasum over MPI only",
                do=f"set communication_backend='mpi' and start with mpirun -np {plan.world_size} python …, "
                "or leave gradient_reduction out",
            )
        )
    if plan.world_size & (plan.world_size - 1):
        below = 2 ** (plan.world_size.bit_length() - 1)
        found.append(
            Problem(
                f"gradient_reduction='adasum' with {plan.world_size} ranks",
                why="Adasum combines ranks in pairs, and pairs of pairs: it needs a power of two",
                do=f"start {below} or {2 * below} ranks",
            )
        )
    if plan.precision.kind == "fp16":
        found.append(
            Problem(
                "gradient_reduction='adasum' with mixed_precision='fp16'",
                why="every rank steps by its own gradients, and would skip other steps than its peers",
                do="set mixed_precision='bf16', or gradient_reduction='average'",
            )
        )
    return found


def _timeline_problems(path: str) -> list[Problem]:
    folder = Path(path).parent
    if Path(path).is_dir():
        why, do = "it is a folder", f"name a file: {path}/timeline.json"
    elif not folder.is_dir():
        why, do = f"there is no folder {folder}", f"mkdir -p {folder}"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        why, do = "this user may not write there", "name another file"
    else:
        return []
    return [Problem(f"timeline={path!r} cannot be written", why=why, do=do)]
