"""What a rank writes into its heartbeat is what a watcher reads: phases, the slowest step, the collective it is in."""

from __future__ import annotations

import subprocess
import sys
import time

from distributed.core.protocol.heartbeat import Phase, read_beat
from distributed.core.run_dir import AttemptDir
from distributed.runtime.heartbeat import Heartbeat


def test_first_steps_of_an_attempt_are_in_phase_starting(tmp_path):
    heart = Heartbeat(tmp_path, 1)
    phases = []
    for step in range(10, 15):
        heart.beat(step)
        phases.append(read_beat(AttemptDir(tmp_path).heartbeat(1)).phase)
    assert phases == [Phase.STARTING] * 3 + [Phase.TRAINING] * 2
    assert read_beat(AttemptDir(tmp_path).heartbeat(1)).step == 14


def test_evaluation_and_saving_do_not_count_as_step_time(tmp_path):
    path, heart = AttemptDir(tmp_path).heartbeat(0), Heartbeat(tmp_path, 0)
    for step in range(5):
        heart.beat(step)
    for phase in (Phase.EVALUATING, Phase.SAVING):
        with heart.phase(phase):
            assert read_beat(path).phase is phase
            time.sleep(0.2)
        assert read_beat(path).phase is Phase.TRAINING
    before = time.monotonic_ns()
    heart.beat(5)
    assert read_beat(path).slowest_ns < 200_000_000
    assert before <= read_beat(path).time_ns <= time.monotonic_ns()
    heart.close()
    assert read_beat(path).phase is Phase.ENDED


def test_slowest_step_time_decays_slowly(tmp_path):
    path, heart = AttemptDir(tmp_path).heartbeat(0), Heartbeat(tmp_path, 0)
    for step in range(4):
        heart.beat(step)
    time.sleep(0.2)
    heart.beat(4)
    slow = read_beat(path).slowest_ns
    assert slow >= 200_000_000
    heart.beat(5)
    assert slow // 2 < read_beat(path).slowest_ns < slow
    for step in range(6, 600):
        heart.beat(step)
    assert read_beat(path).slowest_ns < slow // 2


def test_heartbeat_names_the_collective_while_it_lasts(tmp_path):
    path, heart = AttemptDir(tmp_path).heartbeat(0), Heartbeat(tmp_path, 0)
    heart.beat(7)
    with heart.collective("validation metrics"):
        assert read_beat(path).collective == "validation metrics"
        heart.beat(8)
        assert read_beat(path).collective == "validation metrics"
    assert read_beat(path).collective == ""
    with heart.collective("x" * 100):
        assert read_beat(path).collective == "x" * 48


def test_heartbeat_module_imports_no_torch():
    code = "import sys, distributed.runtime.heartbeat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
