"""The console as plain lines, on a real terminal (a pseudo-terminal) and in a notebook's kernel."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.core.events import (
    AttemptEnded,
    EpochEnded,
    EpochStarted,
    EvaluationEnded,
    Event,
    RankFailed,
    RankSlow,
    RankStalled,
    Recovered,
    RunEnded,
    RunReported,
    RunStarted,
    StepEnded,
)
from distributed.observe.console import Console

DECISION = "4 ranks a node: one per core [num_gpus]"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def started(total: int | None = 100, first_step: int = 0) -> RunStarted:
    return RunStarted(
        time=0,
        run_dir="runs/one",
        world_size=4,
        device="cpu",
        backend="pytorch-ddp",
        epochs=2,
        steps_per_epoch=total and total // 2,
        total_steps=total,
        first_step=first_step,
        global_batch=128,
        decisions=[DECISION],
    )


def stepped(step: int, epoch: int = 0) -> StepEnded:
    return StepEnded(
        time=0,
        step=step,
        epoch=epoch,
        loss=0.5,
        learning_rate=0.1,
        samples_per_second=1234.0,
        metrics={"accuracy": 0.25},
    )


def ended(status: str = "done", **metrics: float) -> RunEnded:
    return RunEnded(
        time=0,
        status=status,
        step=100,
        seconds=75,
        samples_per_second=999,
        metrics=metrics,
        model_path="runs/one/model",
    )


def epoch_ended(epoch: int, step: int) -> EpochEnded:
    metrics = {"loss": 0.4, "val_accuracy": 0.75}
    return EpochEnded(time=0, epoch=epoch, step=step, seconds=3, samples=64, samples_per_second=21, metrics=metrics)


def test_plain_console_shows_run_facts_once() -> None:
    stream = io.StringIO()
    console = Console(stream)
    for event in (started(), EpochStarted(time=0, epoch=0, step=0), stepped(50), epoch_ended(0, 50), ended()):
        console.on(event)
    console.close()
    text = stream.getvalue()
    for fact in (
        "4 ranks",
        "cpu",
        "pytorch-ddp",
        "128",
        DECISION,
        "epoch 1/2",
        "step 50/100",
        "0.7500",
        "runs/one/model",
    ):
        assert fact in text, f"{fact!r} is not in:\n{text}"
    assert text.count(DECISION) == 1
    assert "\x1b" not in text
    assert "interrupted" not in text


def test_step_lines_are_throttled_but_epoch_lines_are_not() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(stream, clock=clock)
    console.on(started())
    for step in range(1, 51):
        clock.now += 0.1
        console.on(stepped(step))
    console.on(epoch_ended(0, 50))
    console.on(epoch_ended(1, 100))
    lines = stream.getvalue().splitlines()
    assert sum("step " in line for line in lines) == 3  # in 5 seconds: at once, and every two
    assert [line[:9] for line in lines[-2:]] == ["epoch 1/2", "epoch 2/2"]


def test_interrupted_run_is_shown_with_step_and_metrics() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.on(started())
    console.on(ended("interrupted", val_accuracy=0.875))
    assert "interrupted at step 100" in stream.getvalue()
    assert "val_accuracy 0.8750" in stream.getvalue()


def test_evaluation_metrics_get_the_val_prefix() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.on(started())
    console.on(EvaluationEnded(time=0, step=100, epoch=1, seconds=1, metrics={"accuracy": 0.625}))
    console.on(ended())
    assert "val_accuracy 0.6250" in stream.getvalue()


def test_restart_is_shown_without_repeating_decisions() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.on(started())
    console.on(RankFailed(time=0, rank=3, host="n1", message="out of memory", log_path="rank-3.log"))
    console.on(started(first_step=40))
    text = stream.getvalue()
    assert "rank 3 on n1 failed: out of memory" in text
    assert "step 40" in text
    assert text.count(DECISION) == 1


@pytest.mark.parametrize(
    ("event", "facts"),
    [
        (
            RankSlow(time=0, rank=3, step=9, ratio=1.84, cause="data", seconds=1),
            ("rank 3", "1.8 ×", "waiting for data"),
        ),
        (RankSlow(time=0, rank=3, step=9, ratio=2, cause="compute", seconds=1), ("rank 3", "2.0 ×", "comput")),
        (RankSlow(time=0, rank=3, step=9, ratio=4, cause="communication", seconds=1), ("rank 3", "4.0 ×", "messages")),
        (
            RankStalled(
                time=0,
                rank=1,
                host="n1",
                step=7,
                where="train.py:31 in read",
                late_seconds=75,
                deadline_seconds=30,
                waiting=[0, 2],
                stack_path="stack.txt",
            ),
            ("rank 1 on n1", "step 7", "train.py:31 in read", "1:15", "0:30", "0, 2", "stack.txt"),
        ),
        (
            AttemptEnded(time=0, attempt=2, cause="machine", message="killed by SIGKILL", rank=1, host="n1", step=7),
            ("attempt 2", "step 7", "machine", "rank 1 on n1", "killed by SIGKILL"),
        ),
        (
            AttemptEnded(time=0, attempt=2, cause="resize", message="a node joins"),
            ("attempt 2", "resize", "a node joins"),
        ),
        (
            Recovered(time=0, attempt=3, step=40, lost_steps=2, source="memory of rank 1", seconds=3.2, world_size=4),
            ("step 40", "2 steps", "memory of rank 1", "3.2 s", "4 ranks"),
        ),
    ],
)
def test_rank_event_is_shown_as_one_line(event: Event, facts: tuple[str, ...]) -> None:
    stream = io.StringIO()
    Console(stream).on(event)
    (line,) = stream.getvalue().splitlines()
    for fact in facts:
        assert fact in line, f"{fact!r} is not in: {line}"
    assert "-1" not in line, "what is not known is not said"


def test_run_report_keeps_its_lines() -> None:
    stream = io.StringIO()
    text = "2 attempts\n  time lost 8.0 s"
    Console(stream).on(
        RunReported(time=0, attempts=2, faults={"hang": 1}, seconds=9, seconds_lost=8, goodput=0.1, text=text)
    )
    assert stream.getvalue().splitlines() == text.splitlines()


def test_run_of_unknown_length_shows_steps_without_eta() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.on(started(total=None))
    console.on(stepped(7))
    last = stream.getvalue().splitlines()[-1]
    assert "step 7 " in last
    assert "eta" not in last


def test_disabled_console_shows_only_rank_output() -> None:
    stream = io.StringIO()
    console = Console(stream, enabled=False)
    console.on(started())
    console.progress(5)
    console.rank_line(3, "one\ntwo\n")
    console.on(ended())
    console.close()
    assert stream.getvalue() == "[r3] one\n[r3] two\n"


def test_only_last_state_of_a_ranks_progress_bar_is_kept() -> None:
    stream = io.StringIO()
    Console(stream).rank_line(0, " 10%\r 50%\r100%\n")
    assert stream.getvalue() == "[r0] 100%\n"


def test_unencodable_character_is_replaced() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(stream).rank_line(0, "2 × 3")
    assert raw.getvalue() == b"[r0] 2 ? 3\n"


def test_closed_pipe_does_not_end_the_run() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    console = Console(stream)
    console.on(started())
    console.on(ended())
    console.close()
    with pytest.raises(BrokenPipeError):
        stream.close()


TERMINAL_RUN = """
import sys
from test_observe_console import ended, started, stepped
from distributed.observe.console import Console
clock = iter(range(1000))
console = Console(clock=lambda: float(next(clock)))
console.on(started())
console.progress(3)
console.rank_line(2, "[bold]as it is[/bold] :smile:")
console.on(stepped(50))
if sys.argv[1] == "interrupt":
    raise KeyboardInterrupt  # and nobody closes the console
console.on(ended())
console.close()
"""


def on_terminal(ending: str) -> str:
    """Everything that a run writes to a terminal of 100 columns."""
    main, child = pty.openpty()
    env = os.environ | {"COLUMNS": "100", "TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parent)}
    env.pop("CI", None)
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINAL_RUN, ending], stdout=child, stderr=subprocess.DEVNULL, env=env
    )
    os.close(child)
    written = b""
    while True:
        try:
            new = os.read(main, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not new:
            break
        written += new
    process.wait()
    os.close(main)
    return written.decode()


def test_terminal_shows_progress_bar_below_lines() -> None:
    written = on_terminal("end")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    assert "━" in text
    assert "3/100" in text
    assert "50/100" in text
    assert "[r2] [bold]as it is[/bold] :smile:" in text
    assert "done: 100 steps" in text
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")  # the cursor is shown again


def test_interrupted_run_leaves_the_cursor_visible() -> None:
    written = on_terminal("interrupt")
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


NOTEBOOK_CELL = """
import sys
sys.path.insert(0, {folder!r})
from test_observe_console import ended, epoch_ended, started, stepped
from distributed.observe.console import Console
clock = iter(range(10_000))
console = Console(clock=lambda: float(next(clock)))
console.on(started())
for step in range(1, 101):
    console.progress(step)
    if step % 25 == 0:
        console.on(stepped(step, epoch=step > 50))
console.rank_line(1, "hello <b>")
console.on(epoch_ended(1, 100))
console.on(ended())
console.close()
"""


def test_notebook_has_one_updated_progress_bar() -> None:
    nbclient = pytest.importorskip("nbclient", reason="the notebook extra is not installed")
    nbformat = pytest.importorskip("nbformat", reason="the notebook extra is not installed")
    pytest.importorskip("ipykernel", reason="the notebook extra is not installed")
    cell = nbformat.v4.new_code_cell(NOTEBOOK_CELL.format(folder=str(Path(__file__).parent)))
    notebook = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    bars = [output for output in outputs if output.output_type == "display_data"]
    lines = "".join(output.text for output in outputs if output.output_type == "stream")
    assert len(bars) == 1
    assert "100/100" in bars[0].data["text/plain"]
    assert 'value="100" max="100"' in bars[0].data["text/html"]
    assert "[r1] hello <b>" in lines
    assert "done: 100 steps" in lines
