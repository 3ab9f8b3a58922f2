"""Publishing: the background half of a save: store the chunks, report to rank 0, write the manifest last.

A checkpoint exists only when its manifest does. A failure on any rank reaches all, so that all raise the same error.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from distributed.checkpoint.format.digests import digest_bytes
from distributed.checkpoint.format.layout import ChunkPlan
from distributed.checkpoint.format.manifest import manifest_file, render, step_name
from distributed.checkpoint.format.parsing import Damaged, NewerFormat
from distributed.checkpoint.format.tree_spec import TreeSpec
from distributed.checkpoint.save.assembly import (
    RankPart,
    StoredChunk,
    assemble,
    build_part,
    chunk_lengths,
    parse_rank_part,
    part_chunks,
    render_rank_part,
    stored_boxes,
)
from distributed.checkpoint.save.retention import PARTS, Collector
from distributed.checkpoint.storage.chunks import ChunkStore, chunk_name
from distributed.checkpoint.storage.files import NotThere, Storage
from distributed.checkpoint.storage.lineage import NOBODY, RUN, SEQUENCE, Lineage, run_of
from distributed.checkpoint.storage.mailbox import Mailbox, Ranks
from distributed.checkpoint.storage.manifests import read_manifest
from distributed.checkpoint.storage.ownership import FolderTakenError
from distributed.core.errors import CheckpointError, DistributedError

Bytes = np.ndarray[Any, Any]  # in host memory
_WRITERS = 2
_COPYING_S = 2.0  # the longest that a rank waits with its hashes for others on its host that still copy


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was published, the same on every rank save for `stall_s`."""

    step: int
    path: str
    seconds: float  # from the call to the published manifest, on rank 0
    written_bytes: int  # by all ranks together, without what was stored already
    total_bytes: int
    stall_s: float = 0.0  # how long this rank's loop stood still
    warning: str = ""  # of the removal of older ones


@dataclass(frozen=True)
class SaveJob:
    """One save of one rank, independent of the live state."""

    number: int
    step: int
    shared: TreeSpec
    own: TreeSpec
    shared_bytes: list[tuple[int, ChunkPlan, Bytes]]
    box_bytes: list[tuple[ChunkPlan, Bytes]]  # of what is shared in parts
    own_bytes: list[tuple[ChunkPlan, Bytes]]
    meta: dict[str, Any]
    metric: float | None
    begun: float


@dataclass
class Publisher:
    """The background half of one rank's saver."""

    storage: Storage
    session: Ranks
    chunks: ChunkStore
    notes: Mailbox
    collector: Collector
    timeout_s: float
    at: Callable[[str], None]
    frameworks: Mapping[str, str]  # versions of what makes the state
    lineage: Lineage = NOBODY
    check_held: Callable[[], None] = lambda: None  # on rank 0: raises where another run has the folder by now
    neighbours: Sequence[int] = ()  # the ranks on this host, this one among them, whose loops wait for their copies
    visible_s: float = 60.0  # how long a file that another host wrote may take to show here
    _sequence: int | None = None  # of the last save in this folder, of any run

    def run(self, job: SaveJob) -> Saved | DistributedError:
        """Store this rank's part, then publish or hear how it ended."""
        try:
            try:
                self._leave_cores(job)
                self._store_part(job)
                if self.session.is_main:
                    saved = self._publish(job)
                    self.notes.leave(f"{job.number}/outcome", json.dumps({"saved": asdict(saved)}))
            except Exception as failed:  # noqa: BLE001 - the boundary of a thread: reported to all ranks
                self._report_failure(job, failed)
            return self._hear(job)
        except Exception as failed:  # noqa: BLE001 - the boundary of a thread: raised by the loop
            error = _explain(job.step, self.session.rank, failed)
            error.__cause__ = None if error is failed else failed  # which shows whether the world or the disk failed
            return error

    def _leave_cores(self, job: SaveJob) -> None:
        """Until all on this host have copied: training waits for that, and for none of the hashes and files after."""
        if len(self.neighbours) > 1:
            self.notes.leave(f"{job.number}/copied-{self.session.rank}", "")
            self.notes.found([f"{job.number}/copied-{rank}" for rank in self.neighbours], _COPYING_S)

    def _store_part(self, job: SaveJob) -> None:
        with ThreadPoolExecutor(_WRITERS, thread_name_prefix="checkpoint-writer") as writers:
            shared = list(writers.map(lambda item: self._store_chunk(item[1], item[2]), job.shared_bytes))
            boxes = list(writers.map(lambda item: self._store_chunk(*item), job.box_bytes))
            own = list(writers.map(lambda item: self._store_chunk(*item), job.own_bytes))
        self.at("chunks written")
        in_boxes, mine = [stored for stored, _ in boxes], [stored for stored, _ in own]
        whole = len(job.own.plan)
        own_part, _ = build_part(job.own, mine[:whole], stored_boxes(job.own, mine[whole:]))
        plans = (*job.shared.box_plan, *job.own.plan, *job.own.box_plan)
        text = render_rank_part(
            RankPart(
                self.session.rank,
                signature=job.shared.signature,
                shared={index: stored for (index, _, _), (stored, _) in zip(job.shared_bytes, shared, strict=True)},
                own=own_part,
                chunks=chunk_lengths(plans, [*in_boxes, *mine]),
                written_bytes=sum(written for _, written in [*shared, *boxes, *own]),
                boxes=stored_boxes(job.shared, in_boxes),
            )
        )
        self.storage.write(self._part_file(job, self.session.rank), text)
        self.at("part written")
        self.notes.leave(f"{job.number}/host-{self.session.rank}", socket.gethostname())
        self.notes.leave(f"{job.number}/part-{self.session.rank}", digest_bytes(text))

    def _store_chunk(self, chunk: ChunkPlan, content: Bytes) -> tuple[StoredChunk, int]:
        digest, written = self.chunks.put(content)
        self.at("chunk written")
        if len(chunk.ranges) == 1:
            return StoredChunk(digest, (digest,)), written
        blocks = [digest_bytes(content[s.offset : s.offset + s.length]) for s in chunk.ranges]
        return StoredChunk(digest, tuple(blocks)), written

    def _publish(self, job: SaveJob) -> Saved:
        ranks = range(self.session.world_size)
        digests = self._await_parts(job)
        parts = [self._read_part(job, rank, digest) for rank, digest in zip(ranks, digests, strict=True)]
        name, meta = self._name(job.step), job.meta | self._owner()
        manifest = assemble(job.step, job.shared, parts, meta=meta, metric=job.metric, frameworks=self.frameworks)
        self._await_chunks(job, dict(manifest.chunks), parts)
        self.at("before the manifest")
        self.check_held()
        self.storage.write(manifest_file(name), render(manifest))
        self.at("manifest written")
        self.check_held()
        warning = self._tidy(job, name)
        return Saved(
            step=job.step,
            path=self.storage.locate(name),
            seconds=time.perf_counter() - job.begun,
            written_bytes=sum(part.written_bytes for part in parts),
            total_bytes=manifest.nbytes,
            warning=warning,
        )

    def _owner(self) -> dict[str, Any]:
        """Whose checkpoint this is, and the how-manieth of its folder."""
        if self._sequence is None:
            self._sequence = self.collector.last_sequence()
        self._sequence += 1
        return {SEQUENCE: self._sequence} | ({RUN: self.lineage.run} if self.lineage.run else {})

    def _name(self, step: int) -> str:
        """Not that of a sound checkpoint of another run: nothing of others is replaced."""
        name = step_name(step, self.lineage.line)
        try:
            is_free = run_of(read_manifest(self.storage, name).meta) == self.lineage.run
        except Damaged:  # or not there
            is_free = True
        except NewerFormat:
            is_free = False
        return name if is_free else step_name(step, (self.lineage.run or self.notes.token)[:8])

    def _await_parts(self, job: SaveJob) -> list[str]:
        """The digests of all ranks' parts; ends early when a rank says that it failed."""

        def late(missing: list[str]) -> CheckpointError:
            return CheckpointError(
                f"the checkpoint of step {job.step} is not complete after {self.timeout_s:.0f} s",
                why=f"no report came from {', '.join(key.split('/')[1].replace('part-', 'rank ') for key in missing)}",
                do="see the logs of these ranks; if the storage is slow, save less often: checkpoint_frequency",
            )

        keys = [f"{job.number}/part-{rank}" for rank in range(self.session.world_size)]
        found = self.notes.wait(keys, self.timeout_s, late)
        for text in found:
            if text.startswith("{"):
                raise _error_from(text)
        return found

    def _read_part(self, job: SaveJob, rank: int, digest: str) -> RankPart:
        name, deadline = self._part_file(job, rank), time.monotonic() + self.visible_s
        while True:
            try:
                text = self.storage.read(name)
                if digest_bytes(text) == digest:
                    return parse_rank_part(text, self.storage.locate(name))
            except NotThere:
                pass
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {rank} wrote {self.storage.locate(name)}, and rank 0 does not see it",
                    why="all ranks must write into one folder",
                    do="set checkpoint_dir to a disk that all hosts share, or to a URL such as s3://…",
                )
            self.notes.sleep(0.2)

    def _await_chunks(self, job: SaveJob, lengths: Mapping[str, int], parts: list[RankPart]) -> None:
        """Until all are visible here. Other ranks have reported them written; a shared disk may show them later."""
        writers = {digest: part.rank for part in parts for digest in part_chunks(part)}
        deadline, pause = time.monotonic() + self.visible_s, 0.02
        missing, others = self.chunks.wrong_sizes(lengths), list[int]()
        while missing:
            others = sorted({writers[digest] for digest in missing if writers[digest] != self.session.rank})
            if not others or time.monotonic() > deadline:
                break
            self.notes.sleep(pause)
            pause = min(2 * pause, 2.0)
            missing = self.chunks.wrong_sizes({digest: lengths[digest] for digest in missing}, again=True)
        if not missing:
            return
        if not others:
            self.chunks.check_sizes({digest: lengths[digest] for digest in missing})
        first = next(digest for digest in missing if writers[digest] in others)
        host = self.notes.look(f"{job.number}/host-{writers[first]}")
        raise CheckpointError(
            f"rank {writers[first]} on {host} wrote {self.storage.locate(chunk_name(first))}, and rank 0 on "
            f"{socket.gethostname()} does not see it after {self.visible_s:.0f} s",
            why=f"{len(missing)} of {len(lengths)} chunks are missing here, from ranks {', '.join(map(str, others))}: "
            "the hosts do not write to one folder, or one is very late in seeing what others write",
            do="set checkpoint_dir to a disk that all hosts share, or to a URL such as s3://…; for NFS, see actimeo",
        )

    def _tidy(self, job: SaveJob, name: str) -> str:
        """Remove the parts and what retention does not keep. The checkpoint is published: no failure here undoes it."""
        try:
            for rank in range(self.session.world_size):
                self.storage.delete(self._part_file(job, rank))
            collected = self.collector.collect(newest=name)
            return str(collected) if collected.blocked_by else ""
        except CheckpointError as failed:
            return str(failed)

    def _report_failure(self, job: SaveJob, failed: Exception) -> None:
        error = _explain(job.step, self.session.rank, failed)
        is_taken = isinstance(error, FolderTakenError)
        text = json.dumps({"error": [asdict(problem) for problem in error.problems], "is_taken": is_taken})
        if self.session.is_main:
            self.notes.leave(f"{job.number}/outcome", text)
        else:
            self.notes.leave(f"{job.number}/part-{self.session.rank}", text)

    def _hear(self, job: SaveJob) -> Saved | DistributedError:
        late = CheckpointError(
            f"rank 0 has not published the checkpoint of step {job.step}",
            why="rank 0 failed, or its storage is slow",
            do="see the log of rank 0",
        )
        text = self.notes.wait([f"{job.number}/outcome"], 2 * (self.timeout_s + self.visible_s), lambda missing: late)[
            0
        ]
        document = json.loads(text)
        return Saved(**document["saved"]) if "saved" in document else _error_from(text)

    def _part_file(self, job: SaveJob, rank: int) -> str:
        return f"{PARTS}/{self.notes.token}/{step_name(job.step)}-{job.number}-rank-{rank}.json"


def _explain(step: int, rank: int, failed: Exception) -> CheckpointError:
    if isinstance(failed, CheckpointError):
        return failed
    return CheckpointError(
        f"the checkpoint of step {step} was not written: rank {rank} failed",
        why=f"{type(failed).__name__}: {failed}",
        do="the checkpoint before it is whole; see the log of that rank",
    )


def _error_from(text: str) -> CheckpointError:
    failure = json.loads(text)
    first = failure["error"][0]
    return (FolderTakenError if failure["is_taken"] else CheckpointError)(
        str(first["what"]), why=str(first["why"]), do=str(first["do"])
    )
