"""RayHost: a rank that lives in a worker of Ray Train tells Ray what the run reports, and hears when it shall stop."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray.train
from ray.experimental import internal_kv
from ray.train import Checkpoint, CheckpointUploadMode

from distributed.core.env import WorkerEnv, ray_run
from distributed.core.ray_run import NAMESPACE, RESUMED, stop_key

_LISTEN_EVERY_S = 0.25


class RayHost:
    """Threads of this rank speak with Ray, so that steps wait for none of it."""

    def __init__(self, env: WorkerEnv) -> None:
        self._env, self._run = env, ray_run()
        self._is_over = threading.Event()
        self._reports: queue.SimpleQueue[tuple[dict[str, Any], str] | None] = queue.SimpleQueue()
        self._reported = ""  # the newest checkpoint that Ray knows
        self._reporter = threading.Thread(target=self._tell_reports, daemon=True, name="reports to Ray")
        self._reporter.start()

    def on_stop(self, stop: Callable[[int], None]) -> None:
        threading.Thread(target=self._listen, args=(stop,), daemon=True, name="stop requests").start()

    def resumed(self, step: int, source: str) -> None:
        path = Path(self._env.attempt_dir(self._env.run_dir), RESUMED)
        partial = path.with_name(f".{path.name}")
        partial.write_text(json.dumps({"step": step, "source": source}) + "\n", encoding="utf-8")
        os.replace(partial, path)

    def report(self, metrics: Mapping[str, float], checkpoint: str) -> None:
        self._reports.put((dict(metrics), checkpoint))

    def close(self) -> None:
        self._is_over.set()
        self._reports.put(None)
        self._reporter.join()

    def _listen(self, stop: Callable[[int], None]) -> None:
        while not self._is_over.wait(_LISTEN_EVERY_S):
            asked = internal_kv._internal_kv_get(stop_key(self._run), namespace=NAMESPACE)
            if asked is not None and int(asked) > 0:
                stop(int(asked))
                return

    def _tell_reports(self) -> None:
        """Ray counts the reports of every rank, and takes what they say from rank 0."""
        while (report := self._reports.get()) is not None:
            if not self._env.is_main:
                ray.train.report({})
                continue
            metrics, path = report
            checkpoint = self._shown(path) if path and path != self._reported else None
            self._reported = path
            ray.train.report(metrics, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

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


def _link(path: Path, target: Path) -> None:
    """Relative, so that a run directory that is moved stays whole."""
    if not path.is_symlink():
        path.symlink_to(os.path.relpath(target, path.parent))
