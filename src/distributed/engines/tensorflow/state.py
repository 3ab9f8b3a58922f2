"""What of a TensorFlow run goes into a checkpoint and comes back: variables by name, and where the run stands.

One process writes, since every process of a synchronous world holds all of the state. It also chooses what they resume
from, and each reads that for itself. The format is that of every other engine, and no tensor of torch is in it.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ml_dtypes  # noqa: F401  # numpy knows bfloat16 and the like by name once it is there
import numpy as np
import tensorflow as tf

from distributed.checkpoint.format.manifest import Manifest, line_of, manifest_file, step_name
from distributed.checkpoint.format.parsing import Damaged
from distributed.checkpoint.restore.candidates import Candidate, find, none_usable, report_on
from distributed.checkpoint.restore.fetching import StateTree, fetch_parts
from distributed.checkpoint.save.arrays import ArrayMemory, ArrayStaging, LoneWriter
from distributed.checkpoint.save.publishing import Saved
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.storage.chunks import ChunkStore
from distributed.checkpoint.storage.lineage import Lineage, check_unused, choose_lineage
from distributed.checkpoint.storage.manifests import read_manifest
from distributed.checkpoint.storage.ownership import FolderTakenError, check_held, hold_folder
from distributed.checkpoint.storage.urls import open_storage
from distributed.core.env import WorkerEnv
from distributed.core.errors import CheckpointError, first_of
from distributed.core.locks import Lock
from distributed.core.plan import Plan
from distributed.runtime.launch_id import launch_id, note_launch, recall_launch
from distributed.train.resume.changes import Effect, changes

Position = dict[str, Any]  # numbers, texts, lists and dicts of these
_POSITION = "progress"
_LOOK_EVERY_S = 0.05


class Checkpoints:
    """The checkpoints of a run. Every process makes one and makes every call; the main one writes."""

    def __init__(
        self,
        plan: Plan,
        is_main: bool,
        world: WorkerEnv,
        *,
        samples: int | None = None,
        shuffle: bool | None = None,
        spread: Callable[[int], int] = lambda number: number,
        on_saved: Callable[[Saved], None] = lambda saved: None,
        on_failed: Callable[[CheckpointError], None] = lambda failed: None,
    ) -> None:
        """`samples` of an epoch, and whether they are shuffled: a run is not resumed with others. `spread` gives all
        processes the number that the main one passes. A save that fails goes to `on_failed`, unless it was waited
        for."""
        self._plan, self._is_main, self._world, self._samples, self._spread = plan, is_main, world, samples, spread
        self._shuffle = shuffle
        self._on_saved, self._on_failed = on_saved, on_failed
        self._storage = open_storage(plan.checkpoint.dir)
        self._launch = launch_id(plan.run_dir, world) if is_main else ""
        self._lineage = Lineage()
        self._lock: Lock | None = None  # of the folder, in the main process
        self._saver: Saver | None = None
        self._verified: frozenset[str] = frozenset()
        self._saved_at = -1
        self.path = ""  # of the newest checkpoint
        self.skipped: tuple[tuple[str, str], ...] = ()  # checkpoints that had to be passed over, and why
        self.changed: tuple[str, ...] = ()  # what is not as it was when the checkpoint was saved

    def restore(self, variables: Mapping[str, Any]) -> Position | None:
        """Assign what the checkpoint that the plan names holds to these variables; None: there is none to resume.

        Names are `component/name`, as in `save`. Of a checkpoint that was imported from another program only the model
        is taken, and the position has its step alone.
        """
        if self._is_main:
            self._claim()
        try:
            return self._restore(variables)
        except BaseException:
            self._release()
            raise

    def _restore(self, variables: Mapping[str, Any]) -> Position | None:
        candidates, is_own = self._find() if self._is_main else ([], False)
        found = self._first_sound(candidates, variables) if candidates else None
        step, is_own = self._spread(-1 if found is None else found[1].step), bool(self._spread(is_own))
        line = _line(self._spread(_number(line_of(self.path.rpartition("/")[2]))))
        if self._is_main:
            self._lineage = self._choose_lineage(found)
        self._lineage = Lineage(self._lineage.run, _line(self._spread(_number(self._lineage.line))))
        if step < 0:
            return None
        if found is None:
            found = self._first_sound(self._same(step_name(step, line), is_own), variables)
        tree, manifest = found
        is_imported = "imported" in manifest.meta
        for name, variable in variables.items():
            component, _, key = name.partition("/")
            if not is_imported or component == "model":
                variable.assign(tree[component][key])
        self._saved_at = manifest.step
        return {"step": manifest.step} if is_imported else dict(tree[_POSITION])

    def save(
        self,
        step: int,
        arrays: Mapping[str, np.ndarray[Any, Any]],
        position: Position,
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
    ) -> None:
        """The state after this step, by names such as `model/dense/kernel`; nothing when it is saved already.

        Returns when the arrays are copied; hashing and writing run in the background. `wait` for the last one of a run.
        """
        if not self._is_main:
            if wait and self._saved_at != step:  # else it is the one that all began with, which may lie elsewhere
                self._await(step)
            return
        writer = self._saver = self._saver or self._make_saver()
        if self._saved_at != step:
            self._outlive(writer.wait)  # at most one is in flight
            self._saved_at = step
            best = self._plan.checkpoint.best
            metric = (metrics or {}).get(best.partition(":")[2]) if best else None
            tree: StateTree = {}
            for name, array in arrays.items():
                component, _, key = name.partition("/")
                assert key, f"{name} has no component"
                tree.setdefault(component, {})[key] = np.asarray(array)
            tree[_POSITION] = json.loads(json.dumps(position))
            begin = partial(writer.save, step, tree, {}, self._meta(), metric=metric)
            if wait:
                begin()
            else:
                self._outlive(begin)
        if wait:
            self.path = writer.wait() or self.path

    def _await(self, step: int) -> None:
        """Until the main process has written it."""
        checkpoint = step_name(step, self._lineage.line)
        name, deadline = manifest_file(checkpoint), time.monotonic() + self._plan.collective_timeout_s
        while self._storage.size(name) is None:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the checkpoint of step {step} is not there after {self._plan.collective_timeout_s:.0f} s",
                    why=f"the main process has not written {self._storage.locate(name)}, or it does not show here",
                    do="see its log; set checkpoint_dir to a disk that all hosts share",
                )
            time.sleep(_LOOK_EVERY_S)
        self.path = self._storage.locate(checkpoint)

    def poll(self) -> None:
        """Report saves that have ended since, and what went wrong in them."""
        if self._saver is not None:
            self._outlive(self._saver.poll)

    def close(self) -> None:
        """Wait for the save in flight; raises what went wrong in it."""
        try:
            if self._saver is not None:
                self._saver.close()
        finally:
            self._release()

    def _check_held(self) -> None:
        if self._lock is not None:  # one that has restored nothing has claimed nothing
            check_held(self._lock)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _claim(self) -> None:
        """The folder is this run's alone, or it is refused with nothing written."""
        resumes = bool(self._plan.checkpoint.resume) or self._world.restarts > 0
        if not resumes and (problems := check_unused(self._storage)):
            raise CheckpointError(problems)
        self._lock = self._lock or hold_folder(self._storage, self._launch, resume=resumes)

    def _choose_lineage(self, found: tuple[StateTree, Manifest] | None) -> Lineage:
        """Which run this is: in the first world of a launch, for all that come after it."""
        known = recall_launch(self._plan.run_dir) if self._world.restarts else {}
        if "run" in known:
            return Lineage(known["run"], known["line"])
        begun_with = (self.path, found[1]) if found is not None else None
        chosen = choose_lineage(self._storage, self._launch, begun_with, [path for path, _ in self.skipped])
        note_launch(self._plan.run_dir, run=chosen.run, line=chosen.line)
        return chosen

    def _find(self) -> tuple[list[Candidate], bool]:
        """A restarted run resumes from its own newest checkpoint (True); another one from what the plan names."""
        if self._world.restarts:
            own = [found for found in find(self._storage, True) if self._is_own(found)]
            if own:
                return own, True
        return find(self._storage, self._plan.checkpoint.resume), False

    def _same(self, name: str, is_own: bool) -> list[Candidate]:
        """What the main process chose, as this one sees it."""
        seen = find(self._storage, True if is_own else self._plan.checkpoint.resume)
        same = [candidate for candidate in seen if candidate.name == name]
        if not same:
            raise CheckpointError(
                "the processes do not see the same checkpoints",
                why=f"the main process resumes from {name}, and the newest here is "
                + (seen[0].path if seen else f"none: {self._storage.root} has no checkpoint"),
                do="set checkpoint_dir to a disk that all hosts share, or to a URL such as s3://…",
            )
        return same

    def _first_sound(self, candidates: list[Candidate], variables: Mapping[str, Any]) -> tuple[StateTree, Manifest]:
        """The newest that verifies. A newer format or a store that does not answer is an error: no training is lost."""
        skipped: list[tuple[str, str]] = []
        for candidate in candidates:
            storage = open_storage(candidate.root)
            chunks = ChunkStore(storage)
            try:
                manifest = read_manifest(storage, candidate.name)
                self._check(candidate, manifest, variables)
                (tree,) = fetch_parts(manifest, [manifest.shared], chunks, ArrayMemory())
            except Damaged as bad:
                skipped.append((candidate.path, f"{bad.problems[0].what} ({bad.problems[0].why})"))
                continue
            self.path, self.skipped, self._verified = candidate.path, tuple(skipped), chunks.known
            return tree, manifest
        raise none_usable(skipped)

    def _is_own(self, candidate: Candidate) -> bool:
        """Of this run since it was launched: a folder may hold others, also of a past that the user went back from."""
        try:
            manifest = read_manifest(self._storage, candidate.name)
        except CheckpointError:  # whether it can be skipped is decided when it is loaded
            return True
        return bool(self._launch) and manifest.meta.get("launch") == self._launch

    def _check(self, candidate: Candidate, manifest: Manifest, variables: Mapping[str, Any]) -> None:
        """What would make it another run: another model or optimizer, another order of samples."""
        is_imported = "imported" in manifest.meta
        live = {name: (tf.as_dtype(v.dtype).name, tuple(v.shape)) for name, v in variables.items()}
        report = report_on(candidate, manifest, live, self._world.world_size, ())
        texts = [
            *(f"{name} is only in this run" for name in report.missing),
            *(f"{name} is only in the checkpoint" for name in report.unexpected),
            *report.mismatched,
        ]
        differs = [text for text in texts if text.startswith("model/") or not is_imported]
        if differs:
            raise CheckpointError(
                f"the checkpoint {candidate.path} is of another model or optimizer",
                why=first_of(differs, between="; "),
                do="pass the model and the optimizer that were trained, or another checkpoint_dir",
            )
        if not is_imported:
            self._compare(candidate, manifest)

    def _compare(self, candidate: Candidate, manifest: Manifest) -> None:
        """With the run that saved it: what would repeat samples or leave some out is refused, the rest is reported."""
        position = manifest.shared.skeleton.get(_POSITION, {})
        progress = {name: int(position.get(name, 0)) for name in ("samples_in_epoch", "steps_in_epoch")}
        found = changes(manifest.meta, self._meta(), progress, path=candidate.path)
        allowed = self._plan.checkpoint.allowed
        refused = [change for change in found if change.effect is Effect.BREAKS and change.name not in allowed]
        if refused:
            raise CheckpointError([change.refusal(candidate.path) for change in refused])
        self.changed = tuple(f"changed since the checkpoint: {change}" for change in found)

    def _make_saver(self) -> Saver:
        checkpoint = self._plan.checkpoint
        return Saver(
            self._storage,
            LoneWriter(),
            ArrayStaging({"tensorflow": tf.__version__}),
            asynchronous=checkpoint.asynchronous,
            keep_last=checkpoint.keep_last,
            keep_every=checkpoint.keep_every,
            best=checkpoint.best.partition(":")[0] or None,
            best_count=checkpoint.best_count,
            known=self._verified,
            lineage=self._lineage,
            check_held=self._check_held,
            on_saved=self._published,
        )

    def _published(self, saved: Saved) -> None:
        self.path = saved.path
        self._on_saved(saved)

    def _outlive(self, save: Callable[[], object]) -> None:
        """A checkpoint that cannot be written is reported and skipped: the next one may be, and training need not end.
        The last one of a run must be written."""
        try:
            save()
        except FolderTakenError:
            raise
        except CheckpointError as failed:
            self._saved_at = -1
            self._on_failed(failed)

    def _meta(self) -> dict[str, Any]:
        plan = self._plan.to_plain()
        return {
            "settings": plan.pop("settings"),
            "plan": plan,
            "samples": self._samples,
            "global_batch": self._plan.batch.global_batch,
            "launch": self._launch,
            "machine": platform.machine(),
            "run": {"shuffle": self._shuffle},
        }


def _number(line: str) -> int:
    """A line as a number that processes can exchange; 0 for none."""
    return int(f"1{line}", 16) if line else 0


def _line(number: int) -> str:
    return f"{number:x}"[1:] if number else ""
