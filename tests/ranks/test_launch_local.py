"""What the local launcher renders, how it follows logs, and what is checked before it starts anything."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time

import pytest

from distributed.core.env import FAILURE_MARK, worker_env
from distributed.core.errors import LaunchError, RankFailedError
from distributed.launch.local import LocalLauncher
from distributed.launch.node.log_tail import LogTail
from distributed.launch.node.stop_signals import Stopped
from distributed.launch.ports import free_port, port_in_use
from distributed.launch.preflight import check_port, check_run_dir, check_script, new_run_dir, next_attempt
from distributed.launch.request import LaunchRequest, NodePlace
from distributed.launch.supervise.restart_limits import RestartLimits

IGNORES_CTRL_C = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


def rendered(environ=None, place=None, **changes):
    request = LaunchRequest(("train.py", "--x", "a b"), "runs/1", 2, threads_per_rank=3, **changes)
    return LocalLauncher(environ=environ or {}).node_processes(request, place or NodePlace.alone(request, 29511))


def test_rendered_environment_gives_each_rank_its_place():
    place = NodePlace(1, num_nodes=2, rank_offset=2, world_size=4, master_addr="n0", master_port=4000, ranks=2)
    workers = [worker_env(process.env) for process in rendered(place=place, num_nodes=2, attempt=5).processes]
    assert [(w.rank, w.local_rank, w.world_size, w.local_world_size, w.node_rank) for w in workers] == [
        (2, 0, 4, 2, 1),
        (3, 1, 4, 2, 1),
    ]
    assert {(w.master_addr, w.master_port, w.launcher, w.run_dir, w.attempt) for w in workers} == {
        ("n0", 4000, "distributed", "runs/1", 5)
    }


def test_omp_num_threads_of_the_user_is_kept():
    assert rendered().processes[0].env["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in rendered({"OMP_NUM_THREADS": "8"}).processes[0].env


def test_dry_run_text_is_quoted_for_a_shell():
    text = rendered(env={"GREETING": "good day"}).command_lines()
    assert len(text) == 2
    assert "GREETING='good day'" in text[1]
    assert "train.py --x 'a b' > runs/1/attempts/0/rank-1.log" in text[1]


def test_submit_with_missing_python_raises_launch_error(tmp_path):
    request = LaunchRequest(("x.py",), str(tmp_path), 1)
    launcher = LocalLauncher(python=str(tmp_path / "no-python"))
    with pytest.raises(LaunchError, match="no-python"):
        launcher.submit(request)


@pytest.mark.usefixtures("own_warm_parents")
def test_process_that_ranks_are_forked_from_is_named_if_it_ends(tmp_path, monkeypatch):
    (tmp_path / "ends_here.py").write_text("import os\nprint('no licence', flush=True)\nos._exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    request = LaunchRequest(("train.py",), str(tmp_path / "run"), 2, warm=True, preload=("ends_here",))
    with pytest.raises(RankFailedError) as caught:
        LocalLauncher().run(request)
    assert "the process that ranks are forked from ended with exit code 7" in str(caught.value)
    assert "memory" not in str(caught.value)
    assert caught.value.traceback == "no licence"
    assert caught.value.exit_code == LaunchError.exit_code


def test_second_interrupt_during_the_first_kills_the_ranks(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(IGNORES_CTRL_C)
    limits = RestartLimits(interrupt_grace_s=3600.0)  # after which also the first request would end it
    log = tmp_path / "run" / "attempts" / "0" / "rank-0.log"
    running = LocalLauncher().submit(
        LaunchRequest((str(script),), str(tmp_path / "run"), 1), limits=limits, on_stop=lambda number: interrupt()
    )
    while not log.exists() or "up" not in log.read_text():
        time.sleep(0.05)
    threading.Timer(0.2, interrupt).start()
    with pytest.raises(Stopped):
        running.wait()


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_log_tail_passes_whole_lines_up_to_the_failure(tmp_path):
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"first\nha")
    tail = LogTail(str(path))
    assert tail.lines() == ["first"]
    with path.open("ab") as log:
        log.write("lf ½\n10%\r20%\r100%\n\npart".encode())
    assert tail.lines() == ["half ½", "100%", ""]
    with path.open("a") as log:
        log.write(f"ial{FAILURE_MARK}\nTraceback\nboom\n")
    assert tail.lines(final=True) == ["partial"]
    tail.close()


def test_log_tail_has_the_last_state_of_an_unfinished_line(tmp_path):
    path = tmp_path / "log"
    path.touch()
    tail, log = LogTail(str(path)), path.open("a")
    said = []
    for text in ("start\n 10%", "\r 20%", "\r 30%\r", "\r 40%\nnext?", f"\n{FAILURE_MARK[:5]}"):
        log.write(text)
        log.flush()
        said.append((tail.lines(), tail.unfinished))
    tail.close()
    log.close()
    assert said == [(["start"], " 10%"), ([], " 20%"), ([], " 30%"), ([" 40%"], "next?"), (["next?"], "")]


def test_log_tail_shows_unterminated_last_line_at_the_end(tmp_path):
    path = tmp_path / "rank-0.log"
    path.write_text("no newline")
    tail = LogTail(str(path))
    assert tail.lines() == []
    assert tail.lines(final=True) == ["no newline"]
    tail.close()


def test_bar_that_has_removed_itself_leaves_no_line(tmp_path):
    path = tmp_path / "rank-0.log"
    path.write_text("done\n\r100%|####|\r          \r")
    tail = LogTail(str(path))
    assert tail.lines(final=True) == ["done"]
    tail.close()


def test_bars_below_a_bar_are_states_of_its_line(tmp_path):
    path = tmp_path / "rank-0.log"
    inner = [f"\n\r inner {part}%\x1b[A" for part in (0, 50, 100)]
    removed, lowest = "\n\r          \r\x1b[A", "\n\n\r lowest 0%\x1b[A\x1b[A"
    epochs = [f"\r outer {epoch}/2{lowest}{''.join(inner)}{removed}" for epoch in (0, 1)]
    path.write_text(f"begin\n\n{''.join(epochs)}\r outer 2/2\n\r\nend\n{inner[0]}")
    tail = LogTail(str(path))
    assert tail.lines() == ["begin", "", " outer 2/2", "", "end"]
    assert tail.unfinished == " inner 0%"
    tail.close()


def test_missing_script_error_suggests_the_nearest(tmp_path):
    (tmp_path / "train_mnist.py").touch()
    (tmp_path / "other.py").touch()
    assert check_script(str(tmp_path / "train_mnist.py")) == []
    (problem,) = check_script(str(tmp_path / "train_mnits.py"))
    assert "train_mnist.py" in problem.do
    assert "other.py" not in problem.do
    (problem,) = check_script(str(tmp_path))
    assert "train_mnist.py" in problem.do
    assert check_script(str(tmp_path / "no" / "train.py"))


def test_port_in_use_is_a_problem_only_on_the_node_that_opens_it():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_in_use(port)
        alone = LaunchRequest(("x.py",), "r", 1, master_port=port)
        (problem,) = check_port(alone)
        assert str(port) in problem.what
        several = {"num_nodes": 2, "master_addr": "127.0.0.1", "master_port": port}
        assert check_port(LaunchRequest(("x.py",), "r", 1, node_rank=0, **several))
        assert not check_port(LaunchRequest(("x.py",), "r", 1, node_rank=1, **several))
        assert not check_port(LaunchRequest(("x.py",), "r", 1, **several))
    assert not check_port(alone)
    assert not port_in_use(free_port())


@pytest.mark.parametrize("trace", ["events.jsonl", "plan.json", "config.json", "attempts/0/rank-0.log"])
def test_run_directory_with_traces_of_another_run_is_refused(tmp_path, trace):
    assert check_run_dir(str(tmp_path), resume=False) == []
    (tmp_path / trace).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / trace).write_text("it began\n")
    (problem,) = check_run_dir(str(tmp_path), resume=False)
    assert time.strftime("%Y-%m-%d") in problem.what
    assert "resume_from_checkpoint" in problem.do
    assert check_run_dir(str(tmp_path), resume=True) == []


def test_refused_run_directory_error_says_how_that_run_ended(tmp_path):
    lines = [json.dumps({"event": "RunStarted"}), json.dumps({"event": "RankFailed"}), '{"torn']
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    (problem,) = check_run_dir(str(tmp_path), resume=False)
    assert "failed" in problem.what


def test_run_directory_that_cannot_be_created_is_a_problem(tmp_path):
    (tmp_path / "file").touch()
    assert check_run_dir(str(tmp_path / "file"), resume=False)
    assert check_run_dir(str(tmp_path / "file" / "below"), resume=False)
    assert check_run_dir(str(tmp_path / "new" / "deep"), resume=False) == []
    assert not (tmp_path / "new").exists()


def test_next_attempt_number_follows_the_highest(tmp_path):
    assert next_attempt(str(tmp_path)) == 0
    for number in ("0", "1", "10"):
        os.makedirs(tmp_path / "attempts" / number)
    assert next_attempt(str(tmp_path)) == 11


def test_run_directories_of_the_same_second_differ():
    assert len({new_run_dir(now=1.0) for _ in range(20)}) > 1
