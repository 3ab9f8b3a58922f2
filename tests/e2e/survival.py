"""Runs that are hurt on purpose: a small training job whose ranks kill, stop, hang and fail themselves as a plan says.

A plan is a list of faults. Each happens once, in the rank that comes to its place first, unless it says `always`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distributed.checkpoint.restore.reading import load
from distributed.data.checks.ledger import LedgerReport, check_ledgers
from tests.conftest import clean_environ
from tests.template import SOCKET
from tests.warm_python import SCRIPTS, WarmPython

SAMPLES, GLOBAL_BATCH, EPOCHS = 102, 12, 4
PER_EPOCH = -(-SAMPLES // GLOBAL_BATCH)  # 9 steps, the last one short
STEPS = PER_EPOCH * EPOCHS
PATIENCE_S = 200  # for a whole run on a machine that others use too

_LAUNCHERS = WarmPython("distributed.cli.main")

SCRIPT = """
import hashlib, json, os, resource, signal, sys, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distributed import Callback, Trainer, callbacks

SAMPLES, EPOCHS = 102, 4
PLACE = Path(os.environ["SURVIVAL_PLACE"])
FAULTS = json.loads(os.environ["SURVIVAL_FAULTS"])
OPTIONS = json.loads(os.environ["SURVIVAL_OPTIONS"])
DRAGGED = []  # seconds that each step of this process takes longer, once a fault has slowed it


def my_rank():
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def attempt():
    # A rank's environment is that of the world that it was started for.
    return max(int(folder.name) for folder in (PLACE / "run" / "attempts").iterdir())


def come_to(place, step=None, rank=None, now=None):
    rank = my_rank() if rank is None else rank
    now = attempt() if now is None else now
    for number, fault in enumerate(FAULTS):
        asked = fault["place"], fault.get("rank", rank), fault.get("step", step)
        if asked == (place, rank, step) and now >= fault.get("attempt", 0):
            try:
                os.close(os.open(PLACE / f"fault-{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                if not fault.get("always"):
                    continue
            suffer(fault["what"], rank)


def suffer(what, rank):
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "kill all":
        mine = PLACE / f"pid-{rank}"
        for other in PLACE.glob("pid-*"):
            if other != mine:
                os.kill(int(other.read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "kill the parent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "hang":
        hang_in_user_code()
    elif what == "slow":
        time.sleep(3)
    elif what == "drag":
        DRAGGED.append(0.15)
    elif what == "extra barrier":
        dist.barrier()
    elif what == "exit well":
        os._exit(0)
    elif what == "raise":
        raise RuntimeError("a bad day")
    elif what == "no memory":
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), hard))
        bytearray(1 << 32)
    elif what == "killed for memory":
        held = bytearray(64 << 20)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        raise AssertionError(what)


def hang_in_user_code():
    while True:
        time.sleep(600)


class Numbers(Dataset):
    def __init__(self, length=SAMPLES, place=None):
        self.length, self.place = length, place
        generator = torch.Generator().manual_seed(length)
        self.x = torch.randn(length, 8, generator=generator)
        self.y = (self.x[:, 0] > 0).long() + (self.x[:, 1] > 0).long()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.place and "RANK" in os.environ:  # a script that starts its ranks looks at its data too
            come_to(self.place, index)
            if OPTIONS.get("bad_sample") == index:
                raise RuntimeError("read error in shard-17.parquet")
        return self.x[index].to(DTYPE), self.y[index]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        # Without what depends on who computes it, another number of ranks comes to the same.
        plain = OPTIONS.get("plain")
        norm, dropout = nn.LayerNorm(32) if plain else nn.BatchNorm1d(32), nn.Dropout(0.0 if plain else 0.2)
        self.layers = nn.Sequential(nn.Linear(8, 32), norm, nn.ReLU(), dropout, nn.Linear(32, 3))
        if OPTIONS.get("own_buffer"):
            self.register_buffer("mean", torch.zeros(8))
        if OPTIONS.get("buffer") in ("counter", "mask"):
            self.register_buffer("own", torch.ones(8))
        if OPTIONS.get("buffer") == "grows":
            self.register_buffer("own", torch.zeros(1, 8))
            self.register_buffer("loose", torch.zeros(1, 8), persistent=False)

    def forward(self, x):
        step = int(getattr(self.layers[1], "num_batches_tracked", -1))  # counts in all worlds of a run
        if self.training:
            step += 1
            time.sleep(0.0 if (PLACE / "hurry").exists() else OPTIONS.get("pace", 0.0))
            if OPTIONS.get("own_buffer"):
                self.mean += x.mean(0) - self.mean / 10
            x = self.use_buffer(x)
        come_to("training" if self.training else "evaluation", step)
        time.sleep(sum(DRAGGED) if self.training else 0)
        return self.layers(x) * (float("nan") if self.training and OPTIONS.get("nan_at") == step else 1.0)

    def use_buffer(self, x):
        kind = OPTIONS.get("buffer")
        if kind == "lazy" and not hasattr(self, "own"):
            self.register_buffer("own", torch.ones(8))
        if kind == "counter":
            self.own += 1
        if kind == "grows":
            self.own = torch.cat([self.own, self.own[-1:] + 1])
            self.loose = torch.cat([self.loose, self.loose[-1:] + 1])
            return x + 1 / len(self.own) + 1 / len(self.loose)
        return x if kind is None else x * self.own


class CountingLoss(nn.CrossEntropyLoss):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, outputs, target):
        self.count += 1
        return super().forward(outputs, target) * (1 + 1 / self.count)


DTYPE = torch.float64 if OPTIONS.get("plain") else torch.float32


class Watched(Callback):
    # Counts the calls of its hooks, in each of which a rank may be lost, and changes what the optimizer does.
    def __init__(self):
        self.calls = {}

    def note(self, run, hook):
        self.calls[hook] = self.calls.get(hook, 0) + 1
        come_to(hook, run.step)

    def on_epoch_start(self, run):
        for group in run.optimizer.param_groups:
            group["weight_decay"] *= 0.5
        run.model.layers[0].bias.requires_grad_(run.epoch % 2 == 0)
        self.note(run, "on_epoch_start")

    def on_step_end(self, run):
        self.note(run, "on_step_end")

    def on_validation_start(self, run):
        self.note(run, "on_validation_start")

    def on_validation_end(self, run, metrics):
        self.note(run, "on_validation_end")

    def on_epoch_end(self, run, metrics):
        self.note(run, "on_epoch_end")

    def on_fit_end(self, run):
        self.note(run, "on_fit_end")

    def state(self):
        return {"calls": self.calls}

    def load_state(self, state):
        self.calls = dict(state["calls"])


def watch_ourselves():
    from distributed import worker
    from distributed.runtime import session, world
    from distributed.train import state

    class Saver(state.Saver):
        def __init__(self, *args, **kwargs):
            now = attempt()  # a save that is still in flight belongs to the world that it was begun in
            super().__init__(*args, at=lambda place: come_to(place, now=now), **kwargs)

    state.Saver = Saver
    meet, send_from, hand_over = world.meet, session.Session.send_from, worker.hand_over

    def watched_meet(env, *args):
        come_to("meeting", rank=env.rank)
        return meet(env, *args)

    def watched_send(self, name, *args):
        sent = send_from(self, name, *args)
        if name == "survivor state":
            come_to("taking over")
        return sent

    def watched_hand_over(*args):
        come_to("before survivor state is sent")
        return hand_over(*args)

    world.meet, session.Session.send_from, worker.hand_over = watched_meet, watched_send, watched_hand_over


def main():
    if "RANK" in os.environ:
        written = PLACE / f"rank-{os.environ['RANK']}.part"  # a file that is there is whole
        written.write_text(str(os.getpid()))
        written.replace(PLACE / f"pid-{os.environ['RANK']}")
        come_to("start")
        watch_ourselves()
    torch.manual_seed(0)
    model = Model().to(DTYPE)
    settings = dict(
        epochs=EPOCHS, learning_rate=0.01, optimizer="adamw", lr_schedule="cosine", warmup_steps=5,
        gradient_clipping=1.0, checkpoint_frequency="5 steps", keep_last=3, sample_ledger=True, log_every_n_steps=3,
        progress=False,
    )
    if OPTIONS.get("adam"):
        settings = {n: v for n, v in settings.items() if n not in ("learning_rate", "lr_schedule", "warmup_steps")}
        settings["optimizer"] = optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer.register_step_post_hook(
            lambda optimizer, *_: come_to("stepped", int(next(iter(optimizer.state.values()))["step"]))
        )
        if OPTIONS.get("plateau"):
            settings["scheduler"] = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=0.2  # it sees one soon
            )
    if OPTIONS.get("buffer") == "grows":
        settings["loss_fn"] = CountingLoss()
    if OPTIONS.get("callbacks"):
        stopping = callbacks.EarlyStopping("val_loss", patience=100)
        freeze = callbacks.Freeze("layers.4.bias", until_epoch=3)
        settings["callbacks"] = [Watched(), callbacks.EMA(0.9, warmup=10), stopping, freeze]
    workers = OPTIONS.get("workers", 0)
    train = DataLoader(Numbers(place="reading"), shuffle=True, num_workers=workers)
    Trainer(model, **settings | OPTIONS.get("settings", {})).fit(train, DataLoader(Numbers(40), batch_size=10))
    if OPTIONS.get("adam"):
        tensors = [*model.state_dict().values()]
        tensors += [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        digest = hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()
        (PLACE / f"digest-{os.environ['RANK']}").write_text(digest)
    come_to("after fit")
    print("end of the script", flush=True)


if __name__ == "__main__":
    main()
"""


def fault(place: str, what: str = "kill", **where: Any) -> dict[str, Any]:
    """`where`: `rank`, `step` (of a training step or evaluation; of reading, the sample), `attempt` (or later)."""
    return {"place": place, "what": what} | where


@dataclass
class Result:
    """How a run ended, and what it came to."""

    folder: Path
    code: int
    shown: str
    trace: str  # in the environment of every process of it
    shared_memory: set[str] = field(repr=False)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @functools.cached_property
    def events(self) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    @functools.cached_property
    def bytes(self) -> str:
        """Of weights, optimizer, averages and callbacks in the last checkpoint, which is that of the last step."""
        last = sorted((self.run_dir / "checkpoints").glob("step-*"))[-1]
        assert last.name.startswith(f"step-{STEPS:06d}")  # of a run that went back, with its run behind it
        shared, digest = load(str(last), ranks=()).shared, hashlib.sha256()
        for value in _leaves([shared.get(name) for name in ("model", "optimizer", "copies", "callbacks")]):
            if isinstance(value, torch.Tensor):
                digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            else:
                digest.update(repr(value).encode())
        return digest.hexdigest()

    @property
    def digests(self) -> list[str]:
        """Of the model and the optimizer as each rank's script had them at its end, with `adam` among the options."""
        return [path.read_text() for path in sorted(self.folder.glob("digest-*"))]

    @property
    def ledger(self) -> LedgerReport:
        return check_ledgers(self.run_dir / "ledger", SAMPLES)

    @property
    def losses(self) -> dict[int, float]:
        return {event["step"]: event["loss"] for event in self.events_of("StepEnded")}

    @property
    def recoveries(self) -> list[tuple[str, int]]:
        """(from where, lost steps) in order; a checkpoint is told by its name."""
        return [(Path(event["source"]).name, event["lost_steps"]) for event in self.events_of("Recovered")]

    def assert_same_as(self, undisturbed: Result) -> None:
        """The same bytes, and every sample once."""
        assert self.code == 0, self.shown
        assert str(self.ledger) == str(undisturbed.ledger)
        assert self.ledger.is_exact
        assert self.bytes == undisturbed.bytes

    def assert_nothing_left(self) -> None:
        """No process, hence no port; no socket that somebody listens at; no shared memory."""
        left = functools.partial(processes_with, self.trace, self.folder)
        wait_until(lambda: not left(), f"all processes have ended: {left()}")
        assert str(temporary_folder(self.trace)) not in Path("/proc/net/unix").read_text()
        shutil.rmtree(temporary_folder(self.trace), ignore_errors=True)
        # Waits, since a cluster of another test makes files there that have no process's name for a moment.
        wait_until(lambda: not self._orphans(), f"no shared memory is left: {self._orphans()}")

    def _orphans(self) -> list[str]:
        return _orphans(set(os.listdir("/dev/shm")) - self.shared_memory)


def temporary_folder(trace: str) -> Path:
    """Of a run; short, since sockets are made in it, whose names may have 107 characters."""
    return Path(tempfile.gettempdir()) / f"sv-{trace[:12]}"


class Running:
    """A run that is under way."""

    def __init__(self, folder: Path, command: list[str], faults: list[dict[str, Any]], options: dict[str, Any]) -> None:
        (folder / "train.py").write_text(SCRIPT)
        self.folder, self._trace, self._shared_memory = folder, uuid.uuid4().hex, set(os.listdir("/dev/shm"))
        events = folder / "run" / "events.jsonl"
        self._events_before = len(events.read_text().splitlines()) if events.exists() else 0
        temporary_folder(self._trace).mkdir()
        environ = clean_environ(
            SURVIVAL_PLACE=str(folder),
            SURVIVAL_FAULTS=json.dumps(faults),
            SURVIVAL_OPTIONS=json.dumps(options),
            SURVIVAL_TRACE=self._trace,
            TMPDIR=str(temporary_folder(self._trace)),
            OMP_NUM_THREADS="1",
        )
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when the run is
        self.process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Those of this run alone, where it goes on with another one."""
        path = self.folder / "run" / "events.jsonl"
        lines = path.read_text().splitlines()[self._events_before :] if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def wait_for(self, kind: str, true: Callable[[dict[str, Any]], bool] = lambda event: True) -> None:
        """Until there is such an event."""

        def is_there() -> bool:
            assert self.process.poll() is None, self.end().shown
            return any(map(true, self.events(kind)))

        wait_until(is_there, f"a {kind}")

    def wait_for_step(self, step: int) -> None:
        self.wait_for("StepEnded", lambda event: event["step"] >= step)

    def wait_for_world(self, ranks: int) -> None:
        """Until a world of so many ranks has taken over."""
        self.wait_for("Recovered", lambda event: event["world_size"] == ranks)

    def hurry(self) -> None:
        """Steps take no time of their own any more."""
        (self.folder / "hurry").touch()

    def resize(self, ranks: int) -> None:
        partial = self.folder / "run" / ".resize"
        partial.write_text(json.dumps({"ranks": ranks}))
        partial.rename(self.folder / "run" / "resize.json")

    def processes(self) -> list[int]:
        """All of this run; not the one that only waits for the launcher that was forked for it."""
        return [pid for pid in processes_with(self._trace, self.folder) if pid != self.process.pid]

    def _stacks(self) -> str:
        """Where the ranks of a run stand that does not end: the signal by which a launcher asks writes them."""
        catches = 1 << (signal.SIGUSR2 - 1)
        for pid in self.processes():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                if int(status.partition("SigCgt:")[2].split()[0], 16) & catches:
                    os.kill(pid, signal.SIGUSR2)
        time.sleep(2.0)
        found = sorted((self.folder / "run").glob("attempts/*/stack-*.txt"), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"{path}:\n{path.read_text()}" for path in found if path.stat().st_size)

    def end(self) -> Result:
        stacks = ""
        try:
            code = self.process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            stacks = self._stacks()
            for pid in processes_with(self._trace, self.folder):
                os.kill(pid, signal.SIGKILL)
            code = -1000
        self._output.seek(0)
        shown = self._output.read()
        self._output.close()
        assert code != -1000, f"did not end:\n{shown}\n{stacks}"
        result = Result(self.folder, code, shown, self._trace, self._shared_memory)
        result.assert_nothing_left()
        return result


def launching_python() -> list[str]:
    """What runs `-m distributed.cli`: a fork, unless the test looks for ranks among its children."""
    return _LAUNCHERS.command if SOCKET in os.environ else [sys.executable]


def start(
    folder: Path, ranks: int, *faults: dict[str, Any], options: dict[str, Any] | None = None, **settings: Any
) -> Running:
    """`distributed train` with these settings; global batches are of the same size for any number of ranks."""
    settings = {"batch_size": GLOBAL_BATCH // ranks // settings.get("gradient_accumulation_steps", 1)} | settings
    words = [f"{name}={json.dumps(value) if not isinstance(value, str) else value}" for name, value in settings.items()]
    command = [*launching_python(), "-m", "distributed.cli", "train", "--script", "train.py", "--run-dir", "run"]
    return Running(folder, [*command, "--num-gpus", str(ranks), *words], list(faults), options or {})


def start_alone(
    folder: Path, ranks: int, *faults: dict[str, Any], options: dict[str, Any] | None = None, **settings: Any
) -> Running:
    """The same script without our command line: `Trainer.fit` starts the ranks."""
    settings = {"batch_size": GLOBAL_BATCH // ranks, "num_gpus": ranks, "run_dir": "run"} | settings
    return Running(folder, [*SCRIPTS.command, "train.py"], list(faults), {"settings": settings} | (options or {}))


class Undisturbed:
    """Runs without a fault, made once for each setting in a folder that all workers of a test session share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Result] = {}

    def __call__(self, ranks: int = 2, options: dict[str, Any] | None = None, **settings: Any) -> Result:
        asked = json.dumps([SCRIPT, ranks, options, settings], sort_keys=True)
        key = hashlib.sha256(asked.encode()).hexdigest()[:16]
        if key not in self._made:
            with locked(self._folder / f"{key}.lock"):
                self._made[key] = self._find(key) or self._make(key, ranks, options, settings)
        return self._made[key]

    def _find(self, key: str) -> Result | None:
        """What another worker made; a run that failed left no such file, and is tried again."""
        try:
            made = json.loads((self._folder / f"{key}.json").read_text())
        except FileNotFoundError:
            return None
        return Result(self._folder / made["folder"], 0, made["shown"], made["trace"], set())

    def _make(self, key: str, ranks: int, options: dict[str, Any] | None, settings: dict[str, Any]) -> Result:
        folder = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=self._folder))
        made = start(folder, ranks, options=options, **settings).end()
        assert made.code == 0, made.shown
        assert made.ledger.is_exact
        described = {"folder": folder.name, "shown": made.shown, "trace": made.trace}
        (self._folder / f"{key}.json").write_text(json.dumps(described))  # under the lock: whole to all who read it
        return made


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel opens the lock of one that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def from_memory(*ranks: int) -> list[tuple[str, int]]:
    """`Result.recoveries` where these ranks handed over what they held."""
    return [(f"memory of rank {rank}", 0) for rank in ranks]


def processes_with(trace: str, folder: Path | None = None) -> list[int]:
    """Those of a run: the environment is passed on to all that they start; forks of others work in its folder."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            is_marked = trace.encode() in Path(f"/proc/{name}/environ").read_bytes()
            if state not in "ZX" and (is_marked or os.readlink(f"/proc/{name}/cwd") == str(folder)):
                found.append(int(name))
        except OSError:
            continue
    return found


def wait_until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.02)


def _orphans(names: set[str]) -> list[str]:
    """Of files in shared memory, those that name no process which still runs: others may use this machine too.

    Semaphores, which horovodrun has and our runs have not, name none.
    """
    ours = (name for name in names if not name.startswith("sem."))
    return [name for name in ours if not any(os.path.exists(f"/proc/{pid}") for pid in re.findall(r"\d+", name))]


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | list | tuple):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(child)
    else:
        yield tree
