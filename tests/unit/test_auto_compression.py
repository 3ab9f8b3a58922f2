"""What a run that resumes knows of what compression="auto" has measured and chosen, on one rank that stands for two."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distributed.core.env import WorkerEnv
from distributed.core.plan_parts.compression import CompressionPlan
from distributed.runtime.session import Session
from distributed.strategies.base import StepOutput
from distributed.strategies.data_parallel.auto.auto_compression import AutoCompression
from distributed.strategies.data_parallel.auto.switch_record import KindSwitch, SwitchRecord
from distributed.strategies.data_parallel.compressed_gradients import CastGradients

COMPARED = 12  # steps after the choice
IN_NO_TIME = 1e-9  # seconds


def make(run_dir: Path, batch: int = 8) -> tuple[AutoCompression, Callable[[], StepOutput]]:
    """It, and a step of the run, which sends nothing."""
    session = Session(WorkerEnv(), torch.device("cpu"), None)
    run_dir.mkdir(exist_ok=True)
    auto = AutoCompression(
        CompressionPlan("auto"),
        session,
        record=SwitchRecord(str(run_dir), session, ranks=2, measured_with=[batch, "fp32"]),
        kinds=["bf16"],
        make=lambda plan: CastGradients(plan, session, is_scaled=False),
        ranks=2,
        stepped=dict,
    )
    module = nn.Linear(2, 2)
    auto.begin(module)
    auto.follow(module)
    return auto, auto.watching(lambda: StepOutput(1.0), lambda: None)


def resumed_between(auto: AutoCompression, whole_s: float) -> Mapping[str, Any]:
    """The state of a run that has chosen, and has not compared times yet."""
    auto.kind, auto.stage = "bf16", "compressed"
    auto._whole_s = whole_s
    return auto.state()


def test_time_of_whole_steps_is_compared_with_after_a_resume(tmp_path: Path) -> None:
    for whole_s, kind in ((IN_NO_TIME, "none"), (1e9, "bf16")):
        saved = resumed_between(make(tmp_path / "first")[0], whole_s)
        auto, take = make(tmp_path / f"resumed for {kind}")
        auto.load(saved)
        assert auto.kind == "bf16"
        for _ in range(COMPARED):
            take()
        assert auto.kind == kind


class Beside:
    """What lies beside checkpoints, by their steps."""

    def __init__(self) -> None:
        self.records: dict[tuple[int, str], bytes] = {}

    def put(self, step: int, name: str, data: bytes) -> None:
        self.records[step, name] = data

    def reader(self, step: int) -> Callable[[str], bytes | None]:
        return lambda name: self.records.get((step, name))


def take_on(folder: Path, beside: Beside) -> None:
    """A run that saves step 2, takes bf16 after step 3 and compares times after step 15."""
    auto, take = make(folder)
    auto.tell_by(lambda text: None, beside.put)
    for step in range(1, 1 + 3 + COMPARED):
        if step == 3:
            auto.saved(2)
            auto._record.add(KindSwitch(3, "bf16", "measured"))  # a link is not measured here
        take()
    auto.saved(15)


def resume_at(folder: Path, beside: Beside, step: int, **settings: Any) -> tuple[AutoCompression, list[str]]:
    """Where it stands after three more steps, and after which of them it took bf16."""
    auto, take = make(folder, **settings)
    told: list[str] = []
    auto.tell_by(told.append, beside.put)
    auto.load({"progress": {"step": step}} | make(folder)[0].state())
    auto.resumed(step, beside.reader(step))
    for _ in range(3):
        take()
    return auto, [text for text in told if "takes bf16 after step 3" in text]


def test_choice_is_found_beside_an_older_checkpoint(tmp_path: Path) -> None:
    beside = Beside()
    take_on(tmp_path / "first", beside)
    assert [step for step, _ in beside.records] == [2], "beside a checkpoint in which it is, nothing is needed"
    assert len(resume_at(tmp_path / "second", beside, 2)[1]) == 1
    first, second = (json.loads((tmp_path / name / "compression.json").read_text()) for name in ("first", "second"))
    assert first == second  # so an attempt that begins again there finds it, too
    assert not resume_at(tmp_path / "other batches", beside, 2, batch=4)[1]


def test_single_rank_between_ends_what_the_record_is_of(tmp_path: Path) -> None:
    """Which saves nothing of a choice. Steps are the run's, and what was chosen before it is not chosen again."""
    beside = Beside()
    take_on(tmp_path, beside)
    record = json.loads((tmp_path / "compression.json").read_text())
    for step in (3, 18):  # that of a run that counts from the resume, and of one that takes what was chosen on both
        text = json.dumps(record | {"switches": [vars(KindSwitch(step, "bf16", "measured"))]})
        (tmp_path / "compression.json").write_text(text)
        auto, take = make(tmp_path)
        auto.load({"progress": {"step": 16}})
        auto.resumed(16, beside.reader(16))
        for _ in range(4):
            take()
        assert (auto.stage, auto.kind) == ("measuring", "none")
    assert auto.state()["compression"]["auto"]["began"] == 16
