"""The report of a run: what its faults cost, whatever order they came in."""

from __future__ import annotations

import pytest

from distributed.core.events import RunReported, parse_event
from distributed.launch.supervise.policy import Fault
from distributed.launch.supervise.report import RunReport


def fault(step: int, kind: str = "machine", rank: int = 1) -> Fault:
    return Fault(kind, rank, "n1", step, "killed by SIGKILL\nmore")  # type: ignore[arg-type]


def undisturbed() -> RunReport:
    report = RunReport()
    report.attempt_began(0, 100.0)
    report.ended(200.0, "done", 50)
    return report


def disturbed() -> RunReport:
    """One second a step: 40 steps, 10 seconds of nothing, 5 steps again, then 60 more."""
    report = RunReport()
    report.attempt_began(0, 100.0)
    report.fault(140.0, fault(40))
    report.fault(140.5, fault(39, "collateral", rank=0))
    report.attempt_began(1, 144.0)
    report.recovered(150.0, 1, 35, 5, "/runs/one/checkpoints/step-35")
    report.ended(215.0, "done", 100)
    return report


def test_run_without_faults_has_goodput_1() -> None:
    report = undisturbed()
    assert (report.attempts, report.faults, report.seconds, report.seconds_lost) == (1, {}, 100.0, 0.0)
    assert report.goodput == 1.0
    assert report.recovery_p50 is None
    assert "lost" not in str(report)


def test_fault_costs_waiting_and_repeated_steps() -> None:
    report = disturbed()
    assert (report.attempts, report.faults, report.seconds) == (2, {"machine": 1}, 115.0)
    assert report.seconds_lost == pytest.approx(10 + 5 * 1.0)
    assert report.goodput == pytest.approx(100 / 115)
    assert (report.recovery_p50, report.recovery_p95) == (10.0, 10.0)


def test_mean_step_of_a_resumed_run_starts_at_its_first_step() -> None:
    report = RunReport()
    report.attempt_began(0, 0.0, step=1000)
    report.fault(40.0, fault(1040))
    report.recovered(40.0, 1, 1030, 10, "the beginning")
    report.ended(110.0, "done", 1100)
    assert report.seconds_lost == pytest.approx(10.0)


def test_fault_during_recovery_is_not_counted_twice() -> None:
    report = RunReport()
    report.attempt_began(0, 0.0)
    report.fault(10.0, fault(10))
    report.attempt_began(1, 11.0)
    report.fault(14.0, fault(10, "hang"))
    report.attempt_began(2, 15.0)
    report.recovered(20.0, 2, 10, 0, "memory of rank 0")
    report.ended(30.0, "done", 20)
    assert (report.attempts, report.faults) == (3, {"machine": 1, "hang": 1})
    assert report.seconds_lost == pytest.approx(10.0)
    assert (report.recovery_p50, report.recovery_p95) == (6.0, 10.0)


def test_final_fault_costs_all_time_after_it() -> None:
    report = RunReport()
    report.attempt_began(0, 0.0)
    report.fault(10.0, fault(10))
    report.ended(25.0, "failed", 10)
    assert report.seconds_lost == pytest.approx(15.0)
    assert report.goodput == pytest.approx(0.4)
    assert "not recovered" in str(report)


def test_run_without_a_step_has_no_goodput() -> None:
    report = RunReport()
    report.attempt_began(0, 0.0)
    report.fault(10.0, fault(0, "code"))
    report.ended(10.0, "failed", 0)
    assert report.goodput == 0.0


def test_script_without_trainer_has_no_steps_and_no_goodput() -> None:
    report = RunReport()
    report.attempt_began(0, 0.0)
    report.fault(10.0, fault(-1))
    report.attempt_began(1, 10.5)
    report.fault(20.0, fault(-1))
    report.ended(30.0, "failed", 0, counts_steps=False)
    text = str(report)
    assert report.goodput is None
    assert report.event(0.0).goodput is None
    assert "step" not in text
    assert "goodput" not in text
    assert "the script was started again after 0.5 s" in text
    assert text.count("not recovered") == 1


def test_run_without_counted_steps_has_goodput_by_time() -> None:
    report = RunReport()
    report.attempt_began(0, 0.0)
    report.fault(10.0, fault(-1))
    report.recovered(20.0, 1, -1, 0, "the beginning")
    report.ended(100.0, "done", -1)
    assert report.goodput == pytest.approx(0.9)
    assert "step" not in str(report)


def test_report_text_names_attempts_faults_and_source() -> None:
    text = str(disturbed())
    for fact in ("2 attempts", "done at step 100", "machine", "rank 1 on n1", "step 40", "SIGKILL", "step-35", "0:10"):
        assert fact in text, f"{fact!r} is not in:\n{text}"
    assert "collateral" not in text
    assert "more" not in text


def test_report_lists_only_the_last_ten_faults() -> None:
    report = RunReport()
    report.attempt_began(0, 0.0)
    for number in range(1, 31):
        report.fault(10.0 * number, fault(number, "hang" if number % 3 == 0 else "machine"))
        report.attempt_began(number, 10.0 * number + 1)
        report.recovered(10.0 * number + 2 + number % 2, number, number, 0, "memory of rank 0")
    text = str(report)
    assert text.count("rank 1 on n1") == 10
    assert "30 faults (20 machine, 10 hang)" in text
    assert "p95 3.0 s" in text


def test_report_event_equals_the_report() -> None:
    event = disturbed().event(7.0)
    assert parse_event(event.to_json()) == event
    assert isinstance(event, RunReported)
    assert (event.time, event.attempts, event.faults, event.text) == (7.0, 2, {"machine": 1}, str(disturbed()))
