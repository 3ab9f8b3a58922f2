"""The runs of a chaos run: real `distributed train` processes, one a host, that are always ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from distributed.chaos.hosts import Host, Hosts
from distributed.chaos.view import RunView, wait_for

_GRACE_S = 5.0
_SHOWN_LINES = 15


@dataclass(frozen=True)
class Order:
    """What is run, twice."""

    script: str
    arguments: tuple[str, ...]
    config: str | None
    settings: Mapping[str, str]  # as key=value words
    num_gpus: int
    nodes: int = 1

    def argv(self, run_dir: Path, more: Mapping[str, str], master: str = "") -> list[str]:
        """
        >>> order = Order("train.py", ("--lr", "1"), None, {"max_steps": "9"}, num_gpus=2)
        >>> order.argv(Path("run"), {})[3:]
        ['train', '--script', 'train.py', '--run-dir', 'run', '--num-gpus', '2', 'max_steps=9', '--', '--lr', '1']
        """
        words = [f"{name}={value}" for name, value in {**self.settings, **more}.items()]
        size = ["--num-gpus", str(self.num_gpus)]
        if self.nodes > 1:
            size = ["--num-nodes", str(self.nodes), "--gpus-per-node", str(self.num_gpus // self.nodes)]
            size += ["--master-addr", master]
        config = ["--config", self.config] if self.config is not None else []
        head = [sys.executable, "-m", "distributed.cli", "train", "--script", self.script, "--run-dir", str(run_dir)]
        return [*head, *size, *config, *words, *(["--", *self.arguments] if self.arguments else [])]


class ChaosRun:
    """One run: started on entering, ended on leaving."""

    def __init__(
        self, order: Order, run_dir: Path, more: Mapping[str, str] | None = None, hosts: Hosts | None = None
    ) -> None:
        self._order, self.run_dir, self._more, self._hosts = order, run_dir, more or {}, hosts
        self._processes: list[subprocess.Popen[bytes]] = []
        self.logs: list[Path] = []

    def __enter__(self) -> ChaosRun:
        hosts = self._hosts
        argv = self._order.argv(self.run_dir, self._more, hosts[0].address if hosts is not None else "")
        commands = [host.command(argv) for host in _all(hosts)] if hosts is not None else [argv]
        try:
            for number, command in enumerate(commands):
                suffix = f"-{number}" if len(commands) > 1 else ""
                self.logs.append(self.run_dir.with_name(f"{self.run_dir.name}{suffix}.log"))
                with self.logs[-1].open("wb") as log:
                    # A session of its own: a Ctrl-C is for us, and we end it.
                    self._processes.append(
                        subprocess.Popen(
                            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                        )
                    )
        except BaseException:
            self.end()
            raise
        self.view = RunView(self.run_dir, [psutil.Process(process.pid) for process in self._processes])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    @property
    def has_ended(self) -> bool:
        return all(code is not None for code in self.codes)

    def end(self) -> None:
        """At once, and nothing of it is left."""
        everyone: list[psutil.Process] = []
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                launcher = psutil.Process(process.pid)
                everyone += [launcher, *launcher.children(recursive=True)] if process.poll() is None else []
        for one in everyone:
            _send(one, signal.SIGKILL)
        wait_for(everyone, _GRACE_S)
        for process in self._processes:
            process.wait()

    def tail(self) -> str:
        """The last lines that it said."""
        texts = [log.read_text(errors="replace").rstrip().splitlines()[-_SHOWN_LINES:] for log in self.logs]
        return "\n".join(line for lines in texts for line in lines)


def _all(hosts: Hosts) -> list[Host]:
    return [hosts[number] for number in range(len(hosts))]


def _send(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess, PermissionError):
        process.send_signal(number)
