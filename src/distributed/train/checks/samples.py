"""Every sample once, checked: the ranks compare their datasets, the order of each epoch, and what they took of it.

    a world begins    the datasets that the ranks built      lengths, indices, some rows
    an epoch begins   the order of its samples               a digest
    steps are taken   what was read of a stream              a digest, at steps 1, 2, 4, 8 … and where steps are logged
    it ends           what was taken, over all ranks         every position of its steps once

What is compared is a few bytes. A difference is an error, after which no restart is tried.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from distributed.core.errors import DataError
from distributed.core.plan import Plan
from distributed.data.checks.fingerprint import fingerprint
from distributed.data.checks.tally import Tally, agree
from distributed.data.drawn import Tree
from distributed.data.loading.loader import EvalLoader
from distributed.data.source import Source
from distributed.runtime.session import Session
from distributed.train.loaders import Loader


def check_datasets(plan: Plan, session: Session, sources: Mapping[str, Source]) -> None:
    """Every rank of a new world: each may have built its data by itself, and must have built the same."""
    if session.world_size == 1 or not plan.sample_check:
        return
    mine = {role: fingerprint(source) for role, source in sources.items()}
    texts = session.gather_texts("the ranks' datasets", json.dumps(mine))
    first: dict[str, dict[str, str]] = json.loads(texts[0])
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise _other_data(rank, first, json.loads(text))


class SampleCheck:
    """Of one world's training data. Every rank makes every call at the same step."""

    def __init__(self, plan: Plan, session: Session, train: Loader) -> None:
        self._session, self._train = session, train
        self._is_on = plan.sample_check
        self._is_stream = train.samples_per_epoch is None
        self._is_shared = plan.iterable_split == "share"  # all ranks read the same
        self._counts = plan.mesh.is_first_of_replica(session.rank)
        self._epoch, self._first_step = 0, 0
        self._read: tuple[int, int, int] | None = None  # of a stream, after its last step: epoch, steps, digest
        self._is_reported = False

    def epoch_begins(self, epoch: int, first_step: int) -> str:
        """Before its first step; returns a warning, or ""."""
        self._epoch, self._first_step = epoch, first_step
        if not self._is_stream:
            digest = self._train.order_digest(epoch)  # draws it, where a sampler does
            if self._is_on:
                self._compare(digest, f"the order of epoch {epoch + 1}")
        elif self._is_on and self._read is not None and self._read[:2] == (epoch, first_step) and first_step:
            self._train.expect(self._read[2])
        note, self._is_reported = (
            "" if self._is_reported else self._train.note,
            self._is_reported or bool(self._train.note),
        )
        return note

    def step_ended(self, steps: int, *, looks: bool) -> None:
        """After as many steps of the epoch."""
        if not self._is_stream:
            return
        self._read = self._epoch, steps, self._train.read_digest
        if self._is_on and self._is_shared and (looks or steps & (steps - 1) == 0):
            _compare_read(self._session, self._train.read_digest, f"until step {steps} of epoch {self._epoch + 1}")

    def epoch_ended(self, steps: int) -> None:
        """After as many steps of the epoch, whether it is whole or not."""
        if self._session.world_size == 1 or self._is_stream or not self._is_on:
            return
        mine = self._train.tally(self._epoch, self._first_step, steps) if self._counts else Tally(0, 0, 0, 0)
        sums = torch.tensor(mine, dtype=torch.int64, device=self._session.device)
        total = Tally(*self._session.sum("samples of an epoch", sums).tolist())
        if not agree(total):
            raise DataError(
                f"the ranks took {total.taken} samples in {steps - self._first_step} steps of epoch "
                f"{self._epoch + 1}, and {total.due} were due: some were repeated or left out",
                why="the ranks do not shard the epoch in the same way",
                do="start every rank with the same settings and the same version of this library",
            )

    def evaluated(self, evaluation: EvalLoader) -> None:
        """After an evaluation that all ranks went through."""
        if self._is_on and self._is_shared:
            check_read(self._session, evaluation)

    def state(self, epoch: int) -> Tree:
        """What a run must save in this epoch to resume with the same samples; the same on every rank."""
        if not self._is_stream:
            return self._train.state(epoch)
        return self._stream_state() if self._is_shared else {}

    def own_state(self) -> Tree:
        """The same of a rank that reads a stream of its own."""
        return self._stream_state() if self._is_stream and not self._is_shared else {}

    def load_state(self, state: Tree) -> None:
        if not self._is_stream:
            self._train.load_state(state)
        else:
            self.load_own_state(state)

    def load_own_state(self, state: Tree) -> None:
        if state:
            self._read = state["epoch"], state["steps"], state["digest"]

    def _stream_state(self) -> Tree:
        return {} if self._read is None else dict(zip(("epoch", "steps", "digest"), self._read, strict=True))

    def _compare(self, digest: str, what: str) -> None:
        if self._session.world_size == 1:
            return
        found = self._session.gather_texts("the order of samples", digest)
        others = [rank for rank, text in enumerate(found) if text != found[0]]
        if others:
            raise DataError(
                f"{what} is not the same on all ranks: {_ranks(others)} another than rank 0",
                why="each rank takes its shard of that order, so samples would be repeated and others left out",
                do="give every rank the same `seed`, the same dataset and the same sampler",
            )


def check_read(session: Session, evaluation: EvalLoader) -> None:
    """After an evaluation that all ranks went through: of a stream that all read, all have read the same."""
    if evaluation.is_stream:
        _compare_read(session, evaluation.read_digest, "in an evaluation")


def _compare_read(session: Session, digest: int, where: str) -> None:
    if session.world_size == 1:
        return
    ends = torch.tensor([digest, -digest], dtype=torch.int64, device=session.device)
    most, least = session.max("what was read of a stream", ends).tolist()
    if most == -least:
        return
    found = [int(text) for text in session.gather_texts("what was read of a stream", str(digest))]
    others = [rank for rank, value in enumerate(found) if value != found[0]]
    raise DataError(
        f"the ranks do not read the same stream: {where}, {_ranks(others)} other samples than rank 0",
        why="every rank reads the whole stream and keeps its share, so samples would be repeated and others left "
        "out; a stream that shuffles with a generator of its own differs, and so do one that splits itself over "
        "the ranks, and files that differ from node to node",
        do="let it draw from Python's, numpy's or torch's global generators, which are seeded alike on every rank, "
        "or seed its own in set_epoch(epoch); if it splits itself, set iterable_split='dataset'; if only an "
        "augmentation differs, set sample_check=False",
    )


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {named} ha{'ve' if len(ranks) > 1 else 's'}"


def _other_data(rank: int, first: dict[str, dict[str, str]], other: dict[str, dict[str, str]]) -> DataError:
    roles = [role for role in {**first, **other} if first.get(role) != other.get(role)]
    role = roles[0]
    mine, theirs = first.get(role, {}), other.get(role, {})
    part = next((name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)), role)
    values: tuple[Any, Any] = mine.get(part, "nothing"), theirs.get(part, "nothing")
    return DataError(
        f"the ranks' datasets differ: {part} of {role} is {values[0]} on rank 0 and {values[1]} on rank {rank}",
        why="each rank takes its share of what all must have alike; samples would be repeated, left out, or trained on "
        "by one rank and evaluated by another",
        do="pass the whole dataset on every rank, built under one seed: "
        "random_split(data, lengths, generator=torch.Generator().manual_seed(0)), sorted(glob(…))",
    )
