"""Ranks that capture together: steps have the same name on all of them, and one rank's reason is everybody's."""

from __future__ import annotations

from typing import Any

import torch

from distributed.core.env import worker_env
from distributed.core.plan import BatchPlan
from distributed.data.loading.loader import Microbatch
from distributed.data.shares import EpochSplit
from distributed.runtime.session import Session
from distributed.testing import run_ranks
from distributed.train.capture.agreement import Agreement

UNEVEN = BatchPlan(per_device=4, ranks=3, accumulation=2)


def ask() -> dict[str, Any]:
    env = worker_env()
    assert env is not None
    session = Session.open(env, device="cpu", collectives="gloo", timeout_s=60)
    agreement = Agreement(UNEVEN, session)

    def key(samples: int, step: int, width: int = 2) -> Any:
        cuts = EpochSplit(samples, UNEVEN, session.rank).micro_cuts(step)
        micros = [Microbatch([torch.zeros(cut.size, width)], cut.weight, cut.size) for cut in cuts]
        return agreement.key(micros, measure=False)

    found: dict[str, Any] = {"whole": key(24 * 2 + 13, 0), "short": [key(24 + left, 1) for left in range(1, 24)]}
    found["fits"] = agreement.fits
    found["nobody"] = agreement.on("")
    found["one"] = agreement.on("it waits" if session.rank == 2 else "")
    found["before"] = agreement.hears()
    found["other shape"] = key(48, 0, width=3 if session.rank == 1 else 2)
    found["not yet"] = agreement.hears()
    found["then"] = agreement.hears()
    found["why"] = agreement.on(agreement.trouble)
    small = Agreement(BatchPlan(per_device=1, ranks=3, whole=2), session)
    found["empty"] = small.on(small.refused())
    return found


def test_ranks_agree_on_step_keys_and_reasons_not_to_capture() -> None:
    ranks = run_ranks(ask, 3)
    assert ranks == ranks[:1] * 3
    found = ranks[0]
    assert found["whole"] == found["other shape"] == (False, 2)
    assert found["short"] == [None] * 23
    assert found["fits"]
    assert (found["nobody"], found["one"]) == ("", "on rank 2, it waits")
    assert (found["before"], found["not yet"], found["then"]) == (False, False, True)
    assert found["why"] == "on rank 1, batches of the same size have different shapes"
    assert "NCCL_GRAPH_REGISTER" in found["empty"]
