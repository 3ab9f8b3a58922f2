"""Where a run stands, how that goes into a checkpoint and comes back, and how a resumed run proves to be the same."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from distributed.checkpoint.restore.restoring import Restored, restore
from distributed.checkpoint.restore.rng import restore_rng, rng_state
from distributed.checkpoint.save.publishing import Saved
from distributed.checkpoint.save.saver import Saver
from distributed.checkpoint.save.staging import TensorStaging
from distributed.checkpoint.storage.ownership import FolderTakenError
from distributed.core.errors import CheckpointError, first_of
from distributed.core.history import EpochRecord, EvaluationRecord
from distributed.core.plan import Plan
from distributed.core.protocol.failure import is_collateral
from distributed.runtime.session import Session
from distributed.strategies.base import Strategy
from distributed.train.callbacks.calls import Callbacks
from distributed.train.checks.samples import SampleCheck
from distributed.train.checks.user_state import LOSS, TASK, UserState
from distributed.train.meter import Meter
from distributed.train.progress import Progress, RunTime, rating
from distributed.train.resume.certificate import ResumeCertificate, Verdict
from distributed.train.resume.checkpoint_folder import CheckpointFolder, record_reader
from distributed.train.resume.facts import Facts
from distributed.train.resume.proven import Proven
from distributed.train.resume.rates import OwnRates
from distributed.train.resume.resuming import Resuming, resume_from
from distributed.train.resume.survivor_state import HandedOver, SurvivorState
from distributed.train.schedule import Schedule

BEGINNING = "the beginning"  # the source of a run that resumes from nothing


class RunState:
    """Everything of one rank that a checkpoint holds, and the checkpoints themselves. Every rank makes every call."""

    def __init__(
        self,
        plan: Plan,
        strategy: Strategy,
        schedule: Schedule,
        session: Session,
        *,
        meter: Meter,
        samples: int | None,
        data: SampleCheck,
        on_saved: Callable[[Saved], None],
        on_failed: Callable[[CheckpointError], None],
        on_taken: Callable[[], None],
        user: UserState,
        facts: Facts,
        callbacks: Callbacks,
    ) -> None:
        """`facts`: see `train/resume/facts.py`. `on_taken`: stop, as another run has taken the checkpoint folder."""
        self._plan, self._strategy, self._schedule, self._session = plan, strategy, schedule, session
        self._user, self._facts, self._callbacks, self._data = user, facts, callbacks, data
        self._meter, self._samples, self._on_saved, self._on_failed = meter, samples, on_saved, on_failed
        self.progress, self.time = Progress(), RunTime()
        self.proven = Proven(session.gate, schedule, strategy.optimizer)
        self.epochs: list[EpochRecord] = []
        self.evaluations: list[EvaluationRecord] = []
        self._folder = CheckpointFolder(plan, session, on_taken)
        self._certificate = ResumeCertificate(session, self._folder.put_record, steps=plan.checkpoint.certificate)
        self._saver: Saver | None = None
        self._saved_at, self._saved_in = -1, 0  # a step, and an epoch, which may end after its last step was saved
        self._taken: FolderTakenError | None = None  # raised by the next save: all ranks come there
        self.path = ""  # of the newest checkpoint
        self.verdict: Verdict | None = None  # when the checkpoint itself is all there is to compare
        self.is_watched = self._certificate.wants
        self.source = BEGINNING  # of the state that this run resumes from
        self.changes: list[str] = []  # what has changed since the checkpoint that it resumes from
        self._published_at = -1
        self._own_groups: list[dict[str, Any]] = []  # the optimizer's, as this run has made them
        self._is_same_run = False  # whether the state is of this very run, whose world broke

    def restore(self, handed_over: HandedOver | None = None, resume: str | None = None) -> Restored | None:
        """Take what another rank handed over, or the checkpoint that the plan names, or begin; then be ready.

        `resume`: the path of a checkpoint that comes before the plan's.
        """
        checkpoint = self._plan.checkpoint
        restored = None
        self._folder.claim(begins=handed_over is None)
        if handed_over is not None:
            self._is_same_run = True
            self._take(handed_over.tree)
            self._saved_at, self.path = handed_over.tree["published"]
            self._facts = replace(
                self._facts, found=handed_over.tree["run"]
            )  # a loss that has been called is not as it was made
            self.source = f"memory of rank {handed_over.rank}"
        else:
            restored = self._find(resume)
        if restored is not None:
            self._load(restored)
            self.source = restored.path
        self._saved_in = self.progress.epoch
        lineage = self._folder.agree_on_lineage(restored, self.path)
        self._saver = Saver(
            self._folder.storage,
            self._session,
            TensorStaging(pinned=self._session.device.type == "cuda", check=self._session.check),
            asynchronous=checkpoint.asynchronous,
            keep_last=checkpoint.keep_last,
            keep_every=checkpoint.keep_every,
            best=checkpoint.best.partition(":")[0] or None,
            best_count=checkpoint.best_count,
            known=restored.verified if restored is not None else (),
            lineage=lineage,
            check_held=self._folder.check_held,
            neighbours=self._session.neighbours,
            on_saved=self._published,
        )
        if checkpoint.saves:
            self._saver.prepare(self._shared(), self._own())
        return restored

    def _find(self, resume: str | None) -> Restored | None:
        """A restarted run resumes from its own newest checkpoint; another one from what the plan names."""
        checkpoint = self._plan.checkpoint
        expected = self._strategy.state() | self._user.here()
        self._own_groups = expected["optimizer"]["param_groups"]
        how: dict[str, Any] = {"expected": expected, "boxes": self._strategy.shard_ranges}
        if self._session.env.restarts and resume is None:
            own = restore(checkpoint.dir, True, self._session, accept=self._folder.is_own, **how)
            if own is not None:
                self._is_same_run = True
                return own
        return restore(checkpoint.dir, checkpoint.resume if resume is None else resume, self._session, **how)

    def held(self) -> SurvivorState | None:
        """What this rank holds at its last step boundary, without a collective; None when that is not everything."""
        if not self._go_back():
            return None
        of_callbacks = self._callbacks.held()
        state = self._strategy.held_state()
        if state is None or of_callbacks is None:
            return None
        meter = self._meter.state() | {"losses": [], "samples": []}  # those that were not read are each rank's own
        more = {"meter": meter, "ranks": self._plan.batch.ranks, "published": [self._published_at, self.path]}
        more["run"] = dict(self._facts.found)
        more["callbacks"] = of_callbacks
        return SurvivorState(self.progress.step, state | self._user.here() | self._position() | more)

    def _go_back(self) -> bool:
        """From where the host stands to where the device does, which may not have taken its last steps."""
        progress = self.progress
        behind = self.proven.steps_behind(progress.step)
        unread = self._meter.samples_of_last(behind) if behind else 0
        if behind is None or unread is None or (behind and self._keeps_own()):
            return False
        if behind:
            self.proven.go_back(progress.step - behind)
            progress.go_back(behind, unread)
        return True

    def _keeps_own(self) -> bool:
        """Whether a loss, task or callback keeps state in its own way, from which no step can be taken back."""
        found, callbacks = self._user.here(), self._callbacks
        return LOSS in found or TASK in found or callbacks.follows_steps or bool(callbacks.state())

    def _load(self, restored: Restored) -> None:
        self._check(restored)
        self._saved_at = self._published_at = restored.step
        self.path = restored.path
        if (
            "imported" in restored.manifest.meta
        ):  # another program's weights, or state too; all else starts from the beginning
            rates = [group["lr"] for group in self._strategy.optimizer.param_groups]
            self._strategy.load_state(restored.shared)
            for group, rate in zip(self._strategy.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate  # this run's, as its schedule is
            self.progress = Progress(step=restored.step)
            return
        resuming = self._compare(restored)
        self.changes = resuming.lines + self._callbacks.unknown_in(restored.shared.get("callbacks", {}))
        own = OwnRates(self._strategy.optimizer, self._schedule) if self._plan.checkpoint.own_rates else None
        self._take(resuming.tree, resuming)
        if own is not None:
            own.put_back(self.progress.step)
        if self.is_alike(restored) and restored.own is not None:
            restore_rng(restored.own["rng"], self._session.device)
            self._meter.load_state(restored.own["meter"])
            self._data.load_own_state(restored.own.get("data", {}))
            self._strategy.load_own_state(restored.own)
        self.verdict = self._begin_to_compare(restored, resuming)

    def _compare(self, restored: Restored) -> Resuming:
        """With the run that saved it; raises where this run must not resume from it."""
        manifest, checkpoint = restored.manifest, self._plan.checkpoint
        return resume_from(
            restored.shared,
            {"torch": manifest.versions.get("torch", torch.__version__), **manifest.meta},
            self._meta(restored.shared["progress"]["epoch"]),
            path=restored.path,
            groups=self._own_groups,
            schedule=self._schedule.state(),
            allowed=checkpoint.allowed,
            own_rates=checkpoint.own_rates,
        )

    def _begin_to_compare(self, restored: Restored, resuming: Resuming) -> Verdict | None:
        """The steps to come with those that were recorded; a verdict where there is nothing more to compare."""
        if not self._plan.checkpoint.certificate:
            return None
        changed = tuple(map(str, resuming.changes))
        reasons = (
            (self._strategy.is_timed, "with max_staleness above 0, the timing of the ranks is part of every step"),
            (self._plan.checkpoint.own_rates, "it has its own learning rates (resume_hyperparameters=config)"),
            (not self.is_alike(restored), "other ranks, or another mesh, saved the checkpoint"),
            (resuming.others, "another run saved the checkpoint"),
        )
        for is_so, why in reasons:
            if is_so:
                return Verdict(0, why=why, changed=changed)
        if not self._certificate.resumed(restored.step, record_reader(restored.path), changed):
            return Verdict(0, why=f"nothing was recorded after step {restored.step}", changed=changed)
        return self._look({})

    def is_alike(self, restored: Restored) -> bool:
        """Whether the ranks that saved it had the same parts of the state as these: then each takes its own numbers."""
        saved = restored.manifest.meta.get("division", {"dp_replicate": restored.manifest.world_size})
        plain = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "shard": "none"}
        return restored.own is not None and plain | saved == self._plan.division

    def _take(self, shared: dict[str, Any], how: Resuming | None = None) -> None:
        self._strategy.load_state(shared)
        self._user.load(shared, takes_loss=how is None or how.takes_loss)
        of_callbacks = shared.get("callbacks", {})
        self._callbacks.load_state(of_callbacks, is_same_run=self._is_same_run)
        for group, decay in zip(self._strategy.optimizer.param_groups, how.decays if how else (), strict=False):
            group["lr"] = group["lr"] * decay
        self.progress = Progress(**shared["progress"])
        self.time.load(shared.get("seconds", 0.0))
        self._schedule.load_state(shared["schedule"], self.progress.step)
        self._callbacks.load_rates(of_callbacks)
        self.epochs = [EpochRecord(**record) for record in shared["epochs"]]
        self.evaluations = [EvaluationRecord(**record) for record in shared.get("evaluations", ())]
        self._data.load_state(shared.get("data", {}))
        # The same on all ranks, so that others can resume with them; what was not read yet is each rank's own.
        self._meter.load_state({"epoch": shared.get("totals", {}), "losses": [], "samples": []})
        if "meter" in shared:  # of survivor state; each rank's own in a checkpoint
            self._meter.load_state(shared["meter"])

    def _check(self, restored: Restored) -> None:
        """That it is of this model."""
        report = restored.report
        of_model = [
            *(f"{name} is only in this model" for name in report.missing if name.startswith("model/")),
            *(f"{name} is only in the checkpoint" for name in report.unexpected if name.startswith("model/")),
            *(text for text in report.mismatched if text.startswith("model/")),
        ]
        if of_model:
            raise CheckpointError(
                f"the checkpoint {restored.path} is of another model",
                why=first_of(of_model, between="; "),
                do="pass the model that was trained, or another checkpoint_dir",
            )

    def save(self, metrics: dict[str, float] | None = None, *, wait: bool = False) -> None:
        """The state after this step; nothing when it is saved already, except to wait for it."""
        assert self._saver is not None, "restore comes first"
        if not self._plan.checkpoint.saves:
            return
        self._outlive(self._saver.wait)  # at most one is in flight, and all ranks hear the same of it
        self._end_if_taken()
        if (self._saved_at, self._saved_in) != (self.progress.step, self.progress.epoch):
            self._saved_at, self._saved_in = self.progress.step, self.progress.epoch
            metric = rating(self._plan.checkpoint.best, metrics or {}, self.evaluations, self.progress.step)
            parts = self._shared(), self._own(), self._meta(self.progress.epoch)
            write = partial(self._saver.save, self.progress.step, *parts, metric=metric)
            if wait:  # the last one of a run must be written
                write()
            else:
                self._outlive(write)
                self._end_if_taken()
            self._certificate.saved(self.progress.step)
            self._look({})
        if wait:
            self.path = self._saver.wait() or self.path

    def forget_saved(self) -> None:
        """What is saved of this step is not its state any more."""
        self._saved_at = -1

    def poll(self) -> None:
        """Report saves that have ended since, and what went wrong in them."""
        if self._saver is not None:
            self._outlive(self._saver.poll)

    def _outlive(self, save: Callable[[], object]) -> None:
        """A checkpoint that cannot be written is reported and skipped: the next one may be, and training need not end.

        It went wrong on all ranks alike.
        """
        try:
            save()
        except CheckpointError as failed:
            if is_collateral(failed):
                raise
            self._saved_at = -1
            if isinstance(failed, FolderTakenError):
                self._taken = failed
            else:
                self._on_failed(failed)

    def _end_if_taken(self) -> None:
        if self._taken is not None:
            raise self._taken

    def compare_step(self, loss: Any, samples: list[int]) -> Verdict | None:
        """After each step: part of the resume certificate, where this step belongs to one."""
        return self._look({"loss": loss, "samples": samples})

    def _look(self, more: dict[str, Any]) -> Verdict | None:
        step = self.progress.step
        if not self._certificate.wants(step):
            return None
        rates = [group["lr"] for group in self._strategy.optimizer.param_groups]
        components = self._strategy.compared() | self._user.here() | self._own_of_callbacks()
        components |= {
            "position": self.progress.position,
            "schedule": {"state": self._schedule.state(), "rates": rates},
            "rng": rng_state(self._session.device),
        }
        return self._certificate.look(step, components | more)

    def conclude(self) -> Verdict | None:
        """The run ends: what was compared, where there was more to compare. Every rank comes here."""
        return self._certificate.conclude()

    def close(self) -> None:
        try:
            if self._saver is not None:
                self._saver.close()
        finally:
            self._folder.release()

    def abandon(self) -> None:
        """The world broke: the save in flight may never hear of the others."""
        try:
            if self._saver is not None:
                self._saver.abandon()
        finally:
            self._folder.release()

    def _shared(self) -> dict[str, Any]:
        kept = self._callbacks.shared(is_compared=self._plan.replicate.check != "nothing")
        of_callbacks = {"callbacks": kept} if kept else {}
        return self._strategy.state() | self._user.shared() | of_callbacks | self._position()

    def _position(self) -> dict[str, Any]:
        data = self._data.state(self.progress.epoch)
        return ({"data": data} if data else {}) | {
            "schedule": self._schedule.state(),
            "progress": asdict(self.progress),
            "seconds": self.time.seconds,
            "epochs": [asdict(record) for record in self.epochs],
            "evaluations": [asdict(record) for record in self.evaluations],
            "totals": self._meter.state()["epoch"],
        }

    def _own_of_callbacks(self) -> dict[str, Any]:
        found = self._callbacks.state()
        return {"callbacks": found} if found else {}

    def _own(self) -> dict[str, Any]:
        data = self._data.own_state()
        own = {"rng": rng_state(self._session.device), "meter": self._meter.state()} | self._strategy.own_state()
        return own | ({"data": data} if data else {})

    def _meta(self, epoch: int) -> dict[str, Any]:
        """Of a run that stands in this epoch."""
        plan = self._plan.to_plain()
        return {
            "settings": plan.pop("settings"),
            "plan": plan,
            "samples": self._samples,
            "global_batch": self._plan.batch.at(epoch).global_batch,
            "division": self._plan.division,
            "launch": self._folder.launch,
            "machine": platform.machine(),
            "device": torch.cuda.get_device_name() if self._session.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "run": self._facts.to_save(),
        }

    def _published(self, saved: Saved) -> None:
        self.path, self._published_at = saved.path, saved.step
        self._on_saved(saved)
        if self._session.is_main:
            self._folder.drop_records()
