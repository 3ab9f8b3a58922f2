"""The folder that a run's checkpoints go to: this run's alone while it trains, and which run that is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from distributed.checkpoint.format.manifest import Manifest, line_of
from distributed.checkpoint.restore.restoring import Restored
from distributed.checkpoint.storage.lineage import Lineage, check_unused, choose_lineage, whole_names
from distributed.checkpoint.storage.manifests import open_checkpoint, read_manifest
from distributed.checkpoint.storage.ownership import check_held, hold_folder
from distributed.checkpoint.storage.urls import open_storage
from distributed.core.errors import CheckpointError, Problem
from distributed.core.locks import Lock
from distributed.core.plan import Plan
from distributed.runtime.launch_id import launch_id, note_launch, recall_launch
from distributed.runtime.session import Session


class CheckpointFolder:
    """Every rank makes one and makes every call; rank 0 looks and decides."""

    def __init__(self, plan: Plan, session: Session, on_taken: Callable[[], None]) -> None:
        """`on_taken`: called from another thread, on rank 0, when another run is found to have taken the folder."""
        self._plan, self._session, self._on_taken = plan, session, on_taken
        self.storage = open_storage(plan.checkpoint.dir)
        self.launch = launch_id(plan.run_dir, session.env) if session.is_main else ""
        self._lineage = Lineage()
        self._lock: Lock | None = None
        self._is_released = False

    def claim(self, *, begins: bool) -> None:
        """Hold the folder for this run, or raise on all ranks with nothing written there. A run that neither `begins`
        nor resumes was handed its state."""
        error = ""
        if self._session.is_main:
            resumes = bool(self._plan.checkpoint.resume) or self._session.env.restarts > 0
            try:
                if begins and not resumes and (problems := check_unused(self.storage)):
                    raise CheckpointError(problems)
                self._lock = hold_folder(self.storage, self.launch, resume=resumes, on_lost=self._on_taken)
            except CheckpointError as failed:
                error = json.dumps([asdict(problem) for problem in failed.problems])
        if found := self._session.share_text(f"checkpoint-folder-{self._session.number()}", error):
            raise CheckpointError([Problem(**problem) for problem in json.loads(found)])

    def check_held(self) -> None:
        """Raises where another run has the folder by now."""
        if self._session.is_main:
            assert self._lock is not None, "claim comes first"
            if self._is_released:
                raise CheckpointError("the checkpoint was given up", why="the run ended while it was being written")
            check_held(self._lock)

    def release(self) -> None:
        """A save that still runs in its thread finds that out."""
        self._is_released = True
        if self._lock is not None:
            self._lock.release()

    def is_own(self, manifest: Manifest) -> bool:
        """Of this run since it was launched: a folder may hold others, also of a past that the user went back from."""
        return bool(self.launch) and manifest.meta.get("launch") == self.launch

    def agree_on_lineage(self, restored: Restored | None, newest: str) -> Lineage:
        """Rank 0 says which run this is: in the first world of a launch, for all worlds that come after it. `newest` is
        the checkpoint that the state belongs to where it was handed over."""
        text = None
        if self._session.is_main:
            known = recall_launch(self._plan.run_dir) if self._session.env.restarts else {}
            if "run" in known:
                chosen = Lineage(known["run"], known["line"])
            else:
                passed = restored.report.skipped if restored is not None else ()
                found = (restored.path, restored.manifest) if restored is not None else _read(newest)
                chosen = choose_lineage(self.storage, self.launch, found, [path for path, _ in passed])
                note_launch(self._plan.run_dir, run=chosen.run, line=chosen.line)
            text = json.dumps(asdict(chosen))
        self._lineage = Lineage(**json.loads(self._session.share_text(f"lineage-{self._session.number()}", text)))
        return self._lineage

    def put_record(self, name: str, data: bytes) -> None:
        """Records of the steps after a checkpoint lie under its name, so that those of other runs stay."""
        self.storage.write(_record_of(name, self._lineage.line), data)

    def put_beside(self, step: int, name: str, data: bytes) -> None:
        """For who resumes from the checkpoint of that step, which may be older than what is to be known."""
        self.put_record(f"witness/step-{step:06d}/{name}", data)

    def drop_records(self) -> None:
        """Those of checkpoints that are there no longer."""
        kept = whole_names(self.storage)
        for name in self.storage.list("witness"):
            if name.split("/")[1] not in kept:
                self.storage.delete(name)


def record_reader(path: str) -> Callable[[str], bytes | None]:
    """Reads the records that belong to the checkpoint at a path."""
    storage, checkpoint = open_checkpoint(path)

    def read(name: str) -> bytes | None:
        record = _record_of(name, line_of(checkpoint))
        return storage.read(record) if storage.size(record) is not None else None

    return read


def read_beside(path: str, step: int, name: str) -> bytes | None:
    """What `put_beside` wrote for who resumes from the checkpoint at a path, which is of that step."""
    return record_reader(path)(f"witness/step-{step:06d}/{name}")


def _read(path: str) -> tuple[str, Manifest] | None:
    try:
        return (path, read_manifest(*open_checkpoint(path))) if path else None
    except CheckpointError:
        return None


def _record_of(name: str, line: str) -> str:
    """
    >>> _record_of("witness/step-000005/rank-0-step-6.json", "1f2e3d4c")
    'witness/step-000005-1f2e3d4c/rank-0-step-6.json'
    """
    top, step, last = name.split("/")
    return f"{top}/{step}-{line}/{last}" if line else name
