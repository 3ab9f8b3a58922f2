"""A rank that lives but does not move is found and named: by its line, its state, its collective."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from distributed.core.protocol.heartbeat import Phase, read_beat
from distributed.core.run_dir import AttemptDir
from distributed.launch.node.kernel import Kernel
from distributed.launch.ports import free_port
from distributed.launch.supervise.hangs import HangFinding, HangWatch, choose, deadline_s
from distributed.launch.supervise.stack_query import Watched
from distributed.launch.supervise.stacks import Whereabouts, data_line, parse_stacks, standing
from distributed.runtime.heartbeat import Heartbeat

PACKAGES = "/opt/venv/lib/python3.11/site-packages"

BEGIN = """
import faulthandler, os, signal, sys, time
from distributed.runtime.heartbeat import Heartbeat
rank, folder = int(sys.argv[1]), sys.argv[2]
faulthandler.register(signal.SIGUSR2, file=open(f"{folder}/stack-{rank}.txt", "w"), all_threads=True)
heart = Heartbeat(folder, rank)

def train(steps=5):
    for step in range(1, steps + 1):
        heart.beat(step)
"""
JOINED = (
    BEGIN
    + """
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[3]}", rank=rank, world_size=2)
"""
)


@contextmanager
def ranks(folder: Path, script: str, count: int = 1, *more: str):
    """Real processes, watched once all of them train."""
    path = folder / "train.py"
    path.write_text(textwrap.dedent(script))
    started = [
        subprocess.Popen(
            [sys.executable, str(path), str(rank), str(folder), *more], env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        for rank in range(count)
    ]
    try:
        yield [
            Watched(rank, process.pid, AttemptDir(folder).heartbeat(rank), AttemptDir(folder).stack(rank))
            for rank, process in enumerate(started)
        ]
    finally:
        for process in started:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.wait()


def stall_of(watched, timeout_s=0.7, patience_s=60.0):
    watch = HangWatch(watched, timeout_s)
    end = time.monotonic() + patience_s
    longest = 0.0
    try:
        while time.monotonic() < end:
            begun = time.thread_time()
            found = watch.look()
            longest = max(longest, time.thread_time() - begun)
            if found is not None:
                assert longest < 0.5  # it never waits inside
                return found
            time.sleep(0.02)
    finally:
        watch.close()
    return None


def line_of(script: str, text: str) -> int:
    return next(at for at, line in enumerate(textwrap.dedent(script).splitlines(), 1) if text in line)


# what a stack says ----------------------------------------------------------------------------------------------------


def dump(*frames: str, thread: str = "Thread 0x01") -> str:
    """`path:line:function`, the innermost first; a path of no folder is a library's."""
    lines = []
    for frame in frames:
        path, line, name = frame.split(":")
        path = path.replace("python/", "/usr/lib/python3.11/", 1) if path.startswith("python/") else path
        path = path if path.startswith("/") else f"{PACKAGES}/{path}"
        lines.append(f'  File "{path}", line {line} in {name}')
    return "\n".join([f"{thread} (most recent call first):", *lines, "", ""])


RANK = "/src/train.py:90:<module>"
FIT = f"{Path(__file__).parents[2]}/src/distributed/train/loop.py:120:_train_epoch"
BACKWARD = "torch/autograd/graph.py:841:_engine_run_backward"

STACKS = """
user code | train.py:31 in forward
    /src/train.py:31:forward torch/nn/modules/module.py:1:_call_impl FIT RANK
user code | net.py:3 in get
    python/threading.py:5:wait /src/net.py:3:get FIT RANK
user code | net.py:3 in get
    requests/api.py:5:get /src/net.py:3:get FIT RANK
user code | timm/vit.py:5 in forward
    timm/vit.py:5:forward FIT RANK
unknown | torch/optim/adam.py:5 in step
    torch/optim/adam.py:5:step FIT RANK
unknown | distributed/train/loop.py:120 in _train_epoch
    FIT RANK
collective | the reduction of gradients in backward
    BACKWARD torch/_tensor.py:1:backward FIT RANK
user code | ops.py:9 in backward
    /src/ops.py:9:backward torch/autograd/function.py:3:apply BACKWARD FIT RANK
collective | the collective 'all_reduce'
    torch/distributed/distributed_c10d.py:1:all_reduce torch/distributed/c10d_logger.py:2:wrapper FIT RANK
user code | net.py:3 in forward
    /src/net.py:3:forward torch/distributed/fsdp/fsdp.py:1:forward FIT RANK
unknown | torch/nn/modules/linear.py:1 in forward
    torch/nn/modules/linear.py:1:forward torch/nn/parallel/distributed.py:2:forward FIT RANK
data | data.py:31 in __getitem__
    /src/data.py:31:__getitem__ torch/utils/data/dataloader.py:7:__next__ FIT RANK
data | data.py:8 in collate
    torch/utils/data/_utils/collate.py:7:default /src/data.py:8:collate torch/utils/data/_utils/fetch.py:7:fetch RANK
compiling | compiling for net.py:3 in forward
    torch/_inductor/codecache.py:3:compile /src/net.py:3:forward FIT RANK
compiling | compiling
    torch/_dynamo/symbolic_convert.py:3:step torch/_dynamo/eval_frame.py:3:compile_wrapper FIT
compiling | compiling for train.py:3 in forward
    python/subprocess.py:3:run torch/utils/cpp_extension.py:3:load /src/train.py:3:forward
compiling | compiling
    triton/compiler/compiler.py:3:compile FIT
user code | net.py:3 in forward
    /src/net.py:3:forward torch/_dynamo/eval_frame.py:3:compile_wrapper FIT RANK
collective | the collective 'synchronize'
    horovod/torch/mpi_ops.py:1300:synchronize FIT RANK
collective | the collective 'allreduce_bucket'
    deepspeed/runtime/zero/stage_1_and_2.py:7:allreduce_bucket deepspeed/runtime/engine.py:9:backward FIT RANK
user code | net.py:3 in forward
    /src/net.py:3:forward torch/nn/modules/module.py:1:_call_impl deepspeed/runtime/engine.py:9:forward FIT RANK
collective | the lock of an extension that another process builds
    torch/utils/file_baton.py:3:wait torch/utils/cpp_extension.py:3:load /src/train.py:3:forward
"""  # what is found, and below it the frames that say so, the innermost first


CASES = STACKS.strip().splitlines()


@pytest.mark.parametrize(("expected", "frames"), list(zip(CASES[::2], CASES[1::2], strict=True)))
def test_stack_is_classified_by_its_frames(expected, frames):
    named = {"FIT": FIT, "RANK": RANK, "BACKWARD": BACKWARD}
    found = standing(parse_stacks(dump(*(named.get(frame, frame) for frame in frames.split()))))
    assert f"{found.kind} | {found.where}" == expected


def test_last_stack_dump_is_used_with_main_thread_last():
    old = dump("/src/a.py:1:old", thread="Thread 0x02") + dump("/src/b.py:1:old", thread="Current thread 0x01")
    new = dump("/src/a.py:2:new", thread="Current thread 0x02") + dump("/src/b.py:2:new")
    threads = parse_stacks("\0\0" + old + "garbage\n" + new)
    assert [str(thread.frames[0]) for thread in threads] == ["a.py:2 in new", "b.py:2 in new"]
    assert parse_stacks("") == ()
    assert standing(()).kind == "unknown"
    named = parse_stacks(dump("/src/a.py:1:x", thread="Current thread 0x02 [pool-1]"))  # as Python 3.14 writes it
    assert named[0].frames[0].line == 1


def test_backward_thread_of_gpu_explains_the_main_threads_wait():
    main = dump(BACKWARD, FIT, RANK)
    stuck = dump("/src/ops.py:9:backward", "torch/autograd/function.py:3:apply", thread="Thread 0x02")
    beside = dump("/src/log.py:9:send", "python/threading.py:5:_bootstrap", thread="Thread 0x02")
    assert standing(parse_stacks(stuck + main)).where == "ops.py:9 in backward"
    assert standing(parse_stacks(beside + main)).waits


def test_collective_named_by_the_heartbeat_is_reported():
    assert standing(parse_stacks(dump(RANK)), "validation metrics").where == "the collective 'validation metrics'"


def test_idle_data_loader_worker_has_no_data_line():
    outer = [
        "torch/utils/data/_utils/worker.py:7:_worker_loop",
        "python/multiprocessing/process.py:1:run",
        "torch/utils/data/dataloader.py:7:__init__",
        RANK,
    ]
    assert data_line(parse_stacks(dump("python/multiprocessing/queues.py:1:get", *outer))) == ""
    assert data_line(parse_stacks(dump("/src/data.py:3:__getitem__", *outer))) == "data.py:3 in __getitem__"


# whom to blame --------------------------------------------------------------------------------------------------------

WAITS = Whereabouts("collective", "the collective 'a'")
USER = Whereabouts("user code", "train.py:1 in f")
DATA = Whereabouts("data", "data.py:1 in f")
STOPPED = Whereabouts("stopped", "stopped (SIGSTOP)")
UNKNOWN = Whereabouts("unknown", "?")
COMPILES = Whereabouts("compiling", "compiling")


def blamed(*findings: HangFinding, others=False, second=False):
    return choose(findings, others, second)


def test_rank_not_waiting_in_a_collective_is_blamed():
    assert blamed(HangFinding(0, 9, WAITS), HangFinding(1, 9, USER), HangFinding(2, 9, WAITS)) == (1, USER)
    assert blamed(HangFinding(0, 9, WAITS), HangFinding(1, 9, UNKNOWN)) == (1, UNKNOWN)


def test_stopped_rank_is_blamed_before_the_rank_behind():
    assert blamed(HangFinding(0, 9, USER), HangFinding(1, 9, DATA), HangFinding(2, 9, STOPPED)) == (2, STOPPED)
    assert blamed(HangFinding(0, 9, USER), HangFinding(1, 9, DATA), HangFinding(2, 9, UNKNOWN)) == (1, DATA)
    assert blamed(HangFinding(0, 10, USER), HangFinding(1, 9, UNKNOWN)) == (1, UNKNOWN)


def test_no_rank_is_blamed_while_a_peer_compiles_or_is_not_late():
    assert blamed(HangFinding(0, 9, WAITS), others=True, second=True) is None
    assert blamed(HangFinding(0, 9, WAITS), HangFinding(1, 9, COMPILES), second=True) is None
    assert blamed(HangFinding(0, 9, WAITS), HangFinding(1, 9, USER, is_late=False), second=True) is None


def test_when_all_wait_the_rank_behind_is_blamed_or_none_yet():
    other = Whereabouts("collective", "the collective 'b'")
    assert blamed(HangFinding(0, 9, WAITS), HangFinding(1, 8, WAITS)) == (1, WAITS)
    assert blamed(HangFinding(0, 9, WAITS), HangFinding(1, 9, other)) == (
        0,
        Whereabouts("collective", "rank 0 in 'a', rank 1 in 'b'"),
    )
    assert blamed(HangFinding(0, 9, WAITS), HangFinding(1, 9, WAITS)) is None
    assert blamed(HangFinding(0, 9, WAITS), HangFinding(1, 9, WAITS), second=True) == (
        0,
        Whereabouts("unknown", WAITS.where),
    )


def test_hang_deadline_is_20_times_the_slowest_step():
    second = 1_000_000_000
    assert deadline_s(0, None) == deadline_s(second // 10, None) == 10
    assert deadline_s(3 * second, None) == 60
    assert deadline_s(3 * second, 2.5) == 2.5


# real processes -------------------------------------------------------------------------------------------------------


def test_hang_in_user_code_is_named_by_its_line(tmp_path):
    script = BEGIN + "def wait_for_godot():\n    time.sleep(600)\n\ntrain()\nwait_for_godot()\n"
    with ranks(tmp_path, script) as watched:
        found = stall_of(watched)
    assert (found.rank, found.step, found.kind) == (0, 5, "user code")
    assert found.where == f"train.py:{line_of(script, 'time.sleep')} in wait_for_godot"
    assert found.late_s > found.deadline_s == 0.7
    assert "wait_for_godot" in found.stack
    assert "wait_for_godot" in Path(found.stack_path).read_text()


@pytest.mark.parametrize("library", ["CDLL", "PyDLL"])  # the second keeps the interpreter to itself
def test_hang_in_native_code_is_named_by_the_calling_line(tmp_path, library):
    script = BEGIN + textwrap.dedent(f"""
        import ctypes
        libc = ctypes.{library}(None)
        def native():
            libc.sleep(600)
        train()
        while True:  # a signal ends libc's sleep
            native()
        """)
    with ranks(tmp_path, script) as watched:
        found = stall_of(watched)
    assert (found.kind, found.where) == ("user code", f"train.py:{line_of(script, 'libc.sleep')} in native")


def test_rank_in_uninterruptible_sleep_is_reported_as_stopped(tmp_path):
    # Between vfork and what its child does next, the parent sleeps so.
    script = BEGIN + "import ctypes\nlibc = ctypes.PyDLL(None)\ntrain()\nif libc.vfork() == 0:\n    libc.sleep(600)\n"
    with ranks(tmp_path, script) as watched:
        wait_for(lambda: psutil.Process(watched[0].pid).children())
        child = psutil.Process(watched[0].pid).children()[0]
        try:
            found = stall_of(watched)
        finally:
            child.kill()
    assert found.kind == "stopped"
    assert found.where.startswith("uninterruptible sleep")


def test_rank_under_sigstop_is_reported_as_stopped(tmp_path):
    script = BEGIN + "train()\nwhile True: time.sleep(0.1)\n"
    with ranks(tmp_path, script, 2) as watched:
        wait_for(lambda: (beat := read_beat(watched[1].heartbeat)) and beat.phase is Phase.TRAINING)
        os.kill(watched[1].pid, signal.SIGSTOP)
        wait_for(lambda: Kernel().state(watched[1].pid) == "T")
        found = stall_of(watched)
        assert Kernel().state(watched[1].pid) == "T"
    assert (found.kind, found.where) == ("stopped", "stopped (SIGSTOP)")
    assert found.rank == 1


def test_rank_stopped_while_saving_is_reported_as_hung(tmp_path):
    script = BEGIN + "train()\nwith heart.phase(Phase.SAVING):\n    while True: time.sleep(0.1)\n"
    with ranks(tmp_path, "from distributed.core.protocol.heartbeat import Phase\n" + script, 2) as watched:
        wait_for(lambda: all((beat := read_beat(w.heartbeat)) and beat.phase is Phase.SAVING for w in watched))
        os.kill(watched[0].pid, signal.SIGSTOP)
        found = stall_of(watched)
    assert (found.rank, found.kind, found.waiting) == (0, "stopped", (1,))


DATASET = """
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 20:
            time.sleep(600)
        return index

{more}
for step, batch in enumerate(DataLoader(Numbers(), batch_size=2, num_workers={workers})):
    heart.beat(step)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_hang_in_the_dataset_is_named_by_its_line(tmp_path, workers):
    more = "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    script = BEGIN + DATASET.format(workers=workers, more=more if workers else "")
    with ranks(tmp_path, script) as watched:
        found = stall_of(watched)
        alive = [child for child in psutil.Process(watched[0].pid).children() if child.status() != "zombie"]
    assert (found.rank, found.kind, found.step) == (0, "data", 9)
    line = line_of(script, "            time.sleep")
    assert found.where.startswith(f"train.py:{line} in __getitem__")
    assert ("worker" in found.where) == bool(workers)
    assert len(alive) == (workers + 1 if workers else 0)  # a program that does not know the signal was not sent it


def wait_for(happened, patience_s=30.0):
    end = time.monotonic() + patience_s
    while not happened() and time.monotonic() < end:
        time.sleep(0.02)
    assert happened()


def test_sleeping_rank_is_blamed_not_the_one_in_all_reduce(tmp_path):
    script = (
        JOINED + "\ndef nap():\n    time.sleep(600)\ntrain()\nif rank == 1: nap()\ndist.all_reduce(torch.ones(1))\n"
    )
    with ranks(tmp_path, script, 2, str(free_port())) as watched:
        found = stall_of(watched, timeout_s=2)
    assert (found.rank, found.kind, found.waiting) == (1, "user code", (0,))
    assert found.where.endswith("in nap")


def test_rank_hung_in_forward_is_blamed_not_the_one_in_backward(tmp_path):
    script = JOINED + textwrap.dedent("""
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 4)
            def forward(self, x):
                if rank == 1 and step == 7:
                    time.sleep(600)
                return self.layer(x)
        model = torch.nn.parallel.DistributedDataParallel(Model())
        for step in range(1, 10):
            model(torch.ones(2, 4)).sum().backward()
            heart.beat(step)
        """)
    with ranks(tmp_path, script, 2, str(free_port())) as watched:
        found = stall_of(watched, timeout_s=2)
    assert (found.rank, found.step, found.kind, found.waiting) == (1, 6, "user code", (0,))
    assert found.where == f"train.py:{line_of(script, 'time.sleep(600)')} in forward"


def test_ranks_in_different_collectives_are_reported(tmp_path):
    script = BEGIN + "train()\nwith heart.collective('ab'[rank]): time.sleep(600)\n"
    with ranks(tmp_path, script, 2) as watched:
        found = stall_of(watched)
    assert (found.kind, found.where) == ("collective", "rank 0 in 'a', rank 1 in 'b'")


def test_hang_with_all_in_one_collective_is_unknown_and_later(tmp_path):
    script = BEGIN + "train()\nwith heart.collective('a'): time.sleep(600)\n"
    with ranks(tmp_path, script, 2) as watched:
        found = stall_of(watched)
    assert (found.kind, found.where) == ("unknown", "the collective 'a'")
    assert found.late_s > 2 * found.deadline_s


def test_rank_without_stack_answer_is_unknown_and_survives(tmp_path):
    script = BEGIN + "faulthandler.unregister(signal.SIGUSR2)\ntrain()\ntime.sleep(600)\n"
    with ranks(tmp_path, script) as watched:
        found = stall_of(watched)
        assert Kernel().state(watched[0].pid) == "S"
    assert found.kind == "unknown"


def test_compiling_rank_is_not_hung_until_after_it_compiled(tmp_path):
    compiler = tmp_path / "site-packages" / "torch" / "_inductor" / "codecache.py"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("import time\ndef compile(until):\n    while time.monotonic() < until: time.sleep(0.05)\n")
    script = BEGIN + textwrap.dedent(f"""
        import importlib.util
        spec = importlib.util.spec_from_file_location("codecache", {str(compiler)!r})
        codecache = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(codecache)
        def hang():
            time.sleep(600)
        train()
        if rank == 0:
            codecache.compile(time.monotonic() + 4)
            hang()
        with heart.collective("a"):
            time.sleep(600)
        """)
    with ranks(tmp_path, script, 2) as watched:
        found = stall_of(watched)
    assert (found.rank, found.kind, found.waiting) == (0, "user code", (1,))
    assert found.where.endswith("in hang")
    assert found.late_s >= 4


# in this process: no child is needed to see that nothing is said ------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = time.monotonic_ns()

    def __call__(self):
        return self.now


def own(folder: Path, rank: int = 0, pid: int | None = None) -> Watched:
    return Watched(rank, pid or os.getpid(), AttemptDir(folder).heartbeat(rank), folder / "stack")


def looks(watch: HangWatch, clock: Clock, seconds: float):
    """What is found while so much time goes by."""
    for _ in range(round(seconds * 10)):
        clock.now += 100_000_000
        if (found := watch.look()) is not None:
            return found
    return None


def test_only_the_training_phase_has_a_hang_deadline(tmp_path):
    clock = Clock()
    heart, watch = Heartbeat(tmp_path, 0), HangWatch([own(tmp_path)], 1.0, clock_ns=clock)
    assert looks(watch, clock, 5) is None  # STARTING
    for step in range(5):
        heart.beat(step)
    for phase in (Phase.EVALUATING, Phase.SAVING):
        with heart.phase(phase):
            assert looks(watch, clock, 5) is None
    assert looks(watch, clock, 5) is not None  # TRAINING
    heart.close()
    assert looks(watch, clock, 5) is None  # ENDED


def test_hang_deadline_adapts_to_the_runs_steps(tmp_path):
    heart = Heartbeat(tmp_path, 0)
    for step in range(4):
        heart.beat(step)
    heart._last -= 2_000_000_000  # a step of two seconds
    heart.beat(4)
    clock = Clock()
    watch = HangWatch([own(tmp_path)], None, clock_ns=clock)
    assert looks(watch, clock, 38) is None
    found = looks(watch, clock, 7)
    assert found is not None
    assert found.deadline_s == pytest.approx(40, rel=0.01)


def test_saving_rank_excuses_the_peer_that_waits(tmp_path):
    clock = Clock()
    waits, saves = Heartbeat(tmp_path, 0), Heartbeat(tmp_path, 1)
    for step in range(5):
        waits.beat(step)
        saves.beat(step)
    watch = HangWatch([own(tmp_path), own(tmp_path, 1)], 1.0, clock_ns=clock)
    with waits.collective("saved"):
        with saves.phase(Phase.SAVING):
            assert looks(watch, clock, 20) is None
        assert looks(watch, clock, 20) is not None


def test_stall_is_reported_once_per_deadline_not_for_dead_ranks(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    clock = Clock()
    here, dead = Heartbeat(tmp_path, 0), Heartbeat(tmp_path, 1)
    for step in range(5):
        here.beat(step)
        dead.beat(step)
    watch = HangWatch([own(tmp_path, 1, gone.pid)], 1.0, clock_ns=clock)
    assert looks(watch, clock, 10) is None
    watch = HangWatch([own(tmp_path)], 3.0, clock_ns=clock)
    clock.now = time.monotonic_ns()
    assert looks(watch, clock, 8) is not None
    assert looks(watch, clock, 2) is None
    assert looks(watch, clock, 5) is not None


def test_late_or_replaced_heartbeat_is_no_stall(tmp_path):
    clock = Clock()
    watch = HangWatch([own(tmp_path)], 1.0, clock_ns=clock)
    assert looks(watch, clock, 5) is None
    for begin in range(2):
        AttemptDir(tmp_path).heartbeat(0).unlink(missing_ok=True)
        heart = Heartbeat(tmp_path, 0)
        for step in range(3 + begin):
            heart.beat(step)
        assert (looks(watch, clock, 5) is None) == (begin == 0)
    AttemptDir(tmp_path).heartbeat(0).unlink()
    Heartbeat(tmp_path, 0)
    assert looks(watch, clock, 30) is None


def test_time_the_job_was_suspended_does_not_count_as_stall(tmp_path):
    clock = Clock()
    heart, watch = Heartbeat(tmp_path, 0), HangWatch([own(tmp_path)], 5.0, clock_ns=clock)
    for step in range(5):
        heart.beat(step)
    assert looks(watch, clock, 2) is None
    clock.now += 3600_000_000_000
    assert looks(watch, clock, 2.5) is None
    assert looks(watch, clock, 5) is not None
