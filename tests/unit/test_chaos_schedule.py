"""Faults come as their seed says, and no figure of a report hides what went wrong."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from distributed.chaos.faults import KINDS, damage_newest
from distributed.chaos.report import CLOSE, ChaosReport, Injury, Samples, WeightsComparison
from distributed.chaos.schedule import by_steps, by_time, parse_span
from distributed.chaos.verdict import compare_samples
from distributed.data.checks.ledger import Ledger


def test_fault_schedule_is_determined_by_its_seed():
    def first(seed: int) -> list[object]:
        return list(islice(by_time(list(KINDS), 15.0, seed), 30))

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_faults_arrive_with_the_requested_mean_time():
    spans = [arrival.after_s for arrival in islice(by_time(["kill"], 15.0, seed=0), 5000)]
    assert 14.0 < sum(spans) / len(spans) < 16.0
    assert 0.3 < sum(span < 15.0 * 0.5 for span in spans) / len(spans) < 0.45  # exponential: 0.393


def test_every_fault_kind_occurs_before_one_repeats():
    kinds = [arrival.kind for arrival in islice(by_time(list(KINDS), 1.0, seed=5), 3 * len(KINDS))]
    for turn in range(3):
        assert sorted(kinds[turn * len(KINDS) : (turn + 1) * len(KINDS)]) == sorted(KINDS)


@pytest.mark.parametrize(("count", "steps"), [(1, 1), (5, 3), (200, 2000)])
def test_counted_faults_all_fall_within_the_run(count, steps):
    at = [arrival.at_step for arrival in by_steps(["kill"], count, steps, seed=0)]
    assert len(at) == count
    assert at == sorted(at)
    assert min(at) >= 1
    assert max(at) <= steps


@pytest.mark.parametrize("text", ["", "s", "-1s", "1d", "1 s 2", "0", "0ms", "inf", "nan"])
def test_invalid_time_span_is_not_parsed(text):
    assert parse_span(text) is None


def report(**changes: object) -> ChaosReport:
    sound = ChaosReport("train.py", 0, steps=100, undisturbed_s=10.0, disturbed_s=20.0, reached=100, finished=True)
    sound.injuries = [Injury("kill", 1.0, 10, 0, recovered_s=2.0, broke=True)]
    sound.samples, sound.weights = Samples(800, 0, 0), WeightsComparison(True, 4)
    for name, value in changes.items():
        setattr(sound, name, value)
    return sound


def test_chaos_report_of_equal_runs_passes():
    assert report().failures == []


@pytest.mark.parametrize(
    "changes",
    [
        {"finished": False, "ending": "exit code 1"},
        {"injuries": []},
        {"wanted": 2},
        {"samples": Samples(799, 1, 0)},
        {"samples": Samples(801, 0, 1)},
        {"samples": None},
        {"weights": WeightsComparison(False, 4, 1, 1e-9, "model/w")},
        {"weights": WeightsComparison(False, 4, problem="damaged"), "tolerance": 1.0},
        {"weights": WeightsComparison(False, 4, 1, float("nan"), "model/w"), "tolerance": 1.0},
        {"weights": WeightsComparison(False, 4, 1, 2 * CLOSE, "model/w"), "was_resized": True},
        {"weights": WeightsComparison(False, 4, 1, CLOSE / 2, "model/w"), "was_resized": True, "is_bitwise": True},
        {"injuries": [Injury("hang", 1.0, 10, 0, recovered_s=2.0, wrong=["no rank was named"])]},
    ],
)
def test_chaos_report_fails_on_any_deviation(changes):
    assert len(report(**changes).failures) == 1
    assert not report(**changes).to_dict()["passed"]


def test_close_weights_pass_only_with_tolerance_or_after_resize():
    off = WeightsComparison(False, 4, 1, CLOSE / 2, "model/w")
    assert report(weights=off, was_resized=True).failures == []
    assert report(weights=off, tolerance=CLOSE).failures == []
    assert report(weights=off).failures


def test_goodput_subtracts_waiting_and_repeated_steps():
    kill = Injury("kill", 1.0, 10, 0, recovered_s=2.0, broke=True, lost_steps=20)
    slow = Injury("slow", 5.0, 40, 1, recovered_s=3.0)
    found = report(injuries=[kill, slow])
    assert found.recoveries == [2.0]
    # 18 s were spent in 120 steps, of which 20 were taken twice: 3 s, and 2 s of waiting.
    assert found.goodput == pytest.approx(1 - 5.0 / 20.0)


def test_lost_and_repeated_samples_are_counted_by_epoch(tmp_path: Path):
    def write(name: str, *steps: tuple[int, int, list[int]]) -> Path:
        ledger = Ledger(tmp_path / name / "ledger", 0)
        for step, epoch, indices in steps:
            ledger.record(step, epoch, np.array(indices))
        ledger.close()
        return tmp_path / name

    whole = write("whole", (1, 0, [1, 2]), (2, 0, [3]), (3, 1, [1, 2]))
    assert compare_samples(whole, whole) == Samples(5, 0, 0)
    other = write("other", (1, 0, [1, 2]), (2, 0, [2]), (3, 1, [1, 2]))
    assert compare_samples(whole, other) == Samples(5, lost=1, repeated=1)
    assert compare_samples(tmp_path / "nothing", other) is None


def test_injected_damage_spares_the_older_checkpoint(tmp_path: Path):
    def files() -> dict[str, bytes]:
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    for step, chunks in ((5, ["aa1", "bb2"]), (10, ["aa1", "cc3"])):
        (tmp_path / f"step-{step:06d}").mkdir()
        names = ", ".join(f'"{chunk}": 4' for chunk in chunks)
        (tmp_path / f"step-{step:06d}" / "manifest.json").write_text(f'{{"chunks": {{{names}}}}}')
        for chunk in chunks:
            (tmp_path / "chunks" / chunk[:2]).mkdir(parents=True, exist_ok=True)
            (tmp_path / "chunks" / chunk[:2] / chunk).write_bytes(b"good")
    before = files()
    damaged = set()
    for seed in range(20):
        done = damage_newest(tmp_path, random.Random(seed))
        assert done is not None
        assert done[1] == str(tmp_path / "step-000010")
        after = files()
        changed = {name for name in before if before[name] != after[name]}
        assert len(changed) == 1
        assert all(len(before[name]) == len(after[name]) for name in before)
        damaged |= changed
        for name in changed:
            (tmp_path / name).write_bytes(before[name])
    assert damaged == {"chunks/cc/cc3", "step-000010/manifest.json"}


def test_only_checkpoint_is_not_damaged(tmp_path: Path):
    (tmp_path / "step-000005").mkdir()
    (tmp_path / "step-000005" / "manifest.json").write_text('{"chunks": {}}')
    assert damage_newest(tmp_path, random.Random(0)) is None
