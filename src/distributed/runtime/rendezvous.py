"""How a rank joins its world: where the ranks meet, the session that comes of it, and the next world after this one."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from distributed.core.engines.engine import ENGINES
from distributed.core.engines.launchers import launcher_of
from distributed.core.env import WorkerEnv, worker_env
from distributed.core.plan import Plan
from distributed.core.protocol.failure import is_collateral
from distributed.core.protocol.rank_protocol import Joined, LauncherLink, Lost
from distributed.core.registry import load_target
from distributed.runtime.abort.sockets import CAN_SHUT_DOWN
from distributed.runtime.agent_line import launcher_line
from distributed.runtime.session import Session
from distributed.runtime.world import CollectiveError, abandon_world


@dataclass(frozen=True)
class Rendezvous:
    """A world with the address of its rendezvous; rank 0 already listens there."""

    env: WorkerEnv
    listener: socket.socket | None = None


def meet(env: WorkerEnv, run_dir: str, timeout_s: float) -> Rendezvous:
    """Where the ranks of this world meet, and what rank 0 says there of the run: by the environment, or the launcher's
    own way."""
    meets = "" if dist.is_initialized() else launcher_of(env.launcher).meets
    rendezvous: Rendezvous = load_target(meets)(env, run_dir, timeout_s) if meets else Rendezvous(env)
    return rendezvous


def open_session(
    plan: Plan, env: WorkerEnv, line: LauncherLink | None = None, meeting: Rendezvous | None = None
) -> Session:
    """Join the world. With a line to the launcher: or the one after it, should it break while the ranks meet.

    `meeting` is that of this world, where it was asked for already.
    """
    while True:
        try:
            meeting = meeting or meet(env, plan.run_dir, plan.collective_timeout_s)
            env = meeting.env
            return _join(plan, env, line, meeting.listener)
        except Exception as failed:
            if line is None or not line.regroups or not is_collateral(failed):
                raise
            if not env.restarts and not line.is_cut_off(env.attempt):  # a first rendezvous that failed is not retried
                raise
            env, meeting = next_world(line, env.attempt, str(failed)), None


def _join(plan: Plan, env: WorkerEnv, line: LauncherLink | None, listener: socket.socket | None) -> Session:
    """The launcher can end the wait for the others, and later any collective."""
    how: dict[str, Any] = {"device": plan.device, "collectives": plan.collectives, "listener": listener}
    how["shares_gpus"] = plan.shares_gpus
    is_coordinated = plan.collectives != "nccl" or env.num_nodes == 1  # a launcher closes the gates of its node only
    how["regroups"] = line is not None and line.regroups and is_coordinated
    if line is not None:
        how["opening"] = line.on_cut_off
        how["is_over"] = lambda: line.is_cut_off(env.attempt)
    session = Session.open(env, timeout_s=plan.collective_timeout_s, **how)
    if line is not None:
        line.on_close(env.attempt, session.close_gate)
        line.on_cut_off(session.cut_off)
        if line.is_cut_off(env.attempt):  # the message came during the rendezvous
            session.cut_off()
    return session


def next_world(line: LauncherLink, attempt: int, message: str, *, holds: bool = False) -> WorkerEnv:
    """Leave the world that broke, and wait for the next one, of survivors and new ranks."""
    line.cut_off()
    abandon_world()
    line.tell(Lost(attempt, message, holds))
    env = line.next_world(attempt)
    if env is None:
        raise CollectiveError("the launcher of this rank is gone")
    return env


def line_for(plan: Plan, *, is_first: bool = True) -> LauncherLink | None:
    """The link to the launcher, to which it is reported whether this rank can continue in another world.

    In a second `fit` it cannot: a replacement runs the script from its beginning, and would join the first `fit`.
    """
    line = launcher_line()
    if line is not None:
        is_alone = is_first and not dist.is_initialized()
        is_plain = plan.precision.kind != "fp16" and plan.speed.parameters == "fp32"  # see `OneRankStep._gate_steps`
        env = worker_env()
        can_be_gated = is_plain and line.closes_gates and (env is None or env.num_nodes == 1)
        can_be_cut = plan.collectives == "gloo" or (plan.collectives == "nccl" and can_be_gated)
        can_regroup = can_be_cut and plan.is_held_by_each and CAN_SHUT_DOWN
        regroups = can_regroup and is_alone and "regroup" in ENGINES.entries[plan.strategy].can
        has_gate = regroups and plan.collectives == "nccl"
        line.tell(Joined(regroups, plan.legal_sizes, in_run=True, has_gate=has_gate))
    return line
