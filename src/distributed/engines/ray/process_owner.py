"""RayProcessOwner: a rank in a worker of Ray Train passes the run's reports to Ray, and receives requests to stop."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray.train
from ray.experimental import internal_kv
from ray.train import Checkpoint, CheckpointUploadMode

from distributed.core.atomic import write_private
from distributed.core.env import WorkerEnv, inherited_environ
from distributed.core.events import Warned
from distributed.core.run_dir import RunDir
from distributed.engines.ray.names import NAMESPACE, RAY_RUN, stop_key

_LISTEN_EVERY_S = 0.25
_REPORT_S = 60.0  # for Ray to take one report, when the run waits for that at its end


class RayProcessOwner:
    """Threads of this rank speak with Ray, so that steps wait for none of it.

    A report that fails does not end the run: it becomes a warning at the end.
    """

    def __init__(self, env: WorkerEnv) -> None:
        self._env, self._run = env, inherited_environ().get(RAY_RUN, "")
        self._is_over = threading.Event()
        self._reports: queue.SimpleQueue[tuple[dict[str, Any], str] | None] = queue.SimpleQueue()
        self._reported = ""  # the newest checkpoint that Ray knows
        self._report_name, self._sent = "", 0  # the report that is being sent to Ray, and how many were sent
        self._failures: list[str] = []
        self._reporter = threading.Thread(target=self._send_reports, daemon=True, name="reports to Ray")
        self._reporter.start()

    def on_stop(self, stop: Callable[[int], None]) -> None:
        threading.Thread(target=self._listen, args=(stop,), daemon=True, name="stop requests").start()

    def resumed(self, step: int, source: str) -> None:
        path = RunDir(self._env.run_dir).attempt(self._env.attempt).resumed
        write_private(path, json.dumps({"step": step, "source": source}) + "\n")

    def report(self, metrics: Mapping[str, float], checkpoint: str) -> None:
        self._reports.put((dict(metrics), checkpoint))

    def close(self) -> None:
        self._is_over.set()
        self._reports.put(None)
        sent = -1
        while self._reporter.is_alive() and self._sent != sent:  # there may be many left: each has its time
            sent = self._sent
            self._reporter.join(_REPORT_S)
        if self._reporter.is_alive():
            self._failures.append(f"the report of {self._report_name} was not taken within {_REPORT_S:g} s")
        if self._failures and self._env.is_main:
            self._warn()

    def _listen(self, stop: Callable[[int], None]) -> None:
        while not self._is_over.wait(_LISTEN_EVERY_S):
            asked = internal_kv._internal_kv_get(stop_key(self._run), namespace=NAMESPACE)
            if asked is not None and int(asked) > 0:
                stop(int(asked))
                return

    def _send_reports(self) -> None:
        """Ray counts the reports of every rank, and takes what they say from rank 0."""
        while (report := self._reports.get()) is not None:
            metrics, path = report
            self._report_name = f"step {metrics.get('step', 'unknown')}"
            checkpoint = self._new_checkpoint(path) if self._env.is_main else None
            try:
                if self._env.is_main:
                    ray.train.report(metrics, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
                else:
                    ray.train.report({})
            except Exception as error:  # noqa: BLE001 - the next report is made all the same: every rank waits for it
                self._failures.append(f"the report of {self._report_name} failed: {type(error).__name__}: {error}")
            self._sent += 1

    def _new_checkpoint(self, path: str) -> Checkpoint | None:
        """One that Ray does not know; None where it cannot be shown, as on a full disk, or when it is removed again."""
        if not path or path == self._reported:
            return None
        try:
            shown = self._shown(path)
        except Exception as error:  # noqa: BLE001 - without this report the other ranks would wait for ever
            self._failures.append(f"{path} could not be shown to Ray: {type(error).__name__}: {error}")
            return None
        self._reported = path
        return shown

    def _shown(self, path: str) -> Checkpoint:
        """A checkpoint where Ray lets one lie, below its own folder: links to the files, or the address of others."""
        storage: Any = ray.train.get_context().get_storage()
        folder, name = Path(storage.experiment_fs_path), path.rstrip("/").rpartition("/")[2]
        shown, source = folder / name, Path(path).absolute()
        shown.mkdir(parents=True, exist_ok=True)
        if not source.is_dir():
            (shown / "pointer.json").write_text(json.dumps({"uri": path}) + "\n", encoding="utf-8")
        else:
            _link(folder / "chunks", source.parent / "chunks")
            for file in source.iterdir():
                _link(shown / file.name, file)
        return Checkpoint(str(shown))

    def _warn(self) -> None:
        more = f" (and {len(self._failures) - 1} more)" if len(self._failures) > 1 else ""
        message = f"Ray's result may lack a report: {self._failures[0]}{more}; the run itself lacks nothing"
        line = Warned(time=time.time(), message=message).to_json()
        with suppress(OSError), open(RunDir(self._env.run_dir).events, "a", encoding="utf-8") as events:
            events.write(f"{line}\n")


def _link(path: Path, target: Path) -> None:
    """Relative, so that a run directory that is moved stays whole."""
    if not path.is_symlink():
        path.symlink_to(os.path.relpath(target, path.parent))
