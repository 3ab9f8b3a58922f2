"""Runs cases one after the other on warm worlds, and says of each what became of it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.adversarial.case import Case, draw
from tests.adversarial.rank import Answer, Phase
from tests.adversarial.strategies import Strategy
from tests.adversarial.verdict import Verdict, difference, tolerance_of
from tests.adversarial.world import Reference, World

_TIMEOUT_S = 60.0
_PHASES = 40  # after which a world is made anew, so that nothing that a library keeps adds up
_NOISE = {True: 1e-14, False: 3e-6}  # in double precision or not, of the first weights: what rounding may do
_ROUNDING = 1e3  # a case may move by so many times what the noise moves it


class Runner:
    """Keeps the worlds; as a context manager, it ends them."""

    def __init__(self, *, timeout_s: float = _TIMEOUT_S, logs: Path | None = None) -> None:
        self._timeout_s = timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="cases-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self._logs = logs or self._folder
        self._logs.mkdir(parents=True, exist_ok=True)
        self._worlds: dict[str, World] = {}
        self._reference: Reference | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        for world in self._worlds.values():
            world.end()
        if self._reference is not None:
            self._reference.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, seed: int) -> Verdict:
        begun = time.monotonic()
        case = draw(seed)
        folder = self._folder / f"case-{seed}"
        try:
            kind, why, detail = self._judge(case, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return Verdict(seed, kind, why, detail, time.monotonic() - begun)

    def _judge(self, case: Case, folder: Path) -> tuple[str, str, str]:
        self._reference = self._reference or Reference(self._logs)
        self._reference.ask((case.seed, 0.0))
        answers = self._train(case.strategy, Phase(case.seed, str(folder / "first")))
        (wanted,) = self._reference.answers(self._timeout_s)
        if wanted is None or wanted.error == "the process ended":
            self._reference.end()
            self._reference = None
            return "failed", "the reference did not end", ""
        trouble = _trouble(answers)
        if wanted.kind != "trained":
            # Not to be trained in one process either, whatever it is told here.
            if trouble is None and wanted.error.startswith("FloatingPointError"):
                return "failed", "trained on with a loss that is not finite", wanted.error
            return "void", _short(wanted.error), ""
        if trouble and "more than 1 value per channel" in trouble[2] and "track_running_stats=False" in case.text:
            return "void", "torch does not normalize a batch of one sample, which an evaluation may have", ""
        if trouble:
            return trouble
        judged = self._compare(case, answers, wanted.value)
        if judged is not None or case.again is None:
            return judged or ("agreed", "", "")
        return self._go_on(case, folder, answers, wanted.value)

    def _go_on(self, case: Case, folder: Path, first: list[Any], wanted: dict[str, Any]) -> tuple[str, str, str]:
        """From the checkpoint in the middle to the same end; on the same ranks, to the same bytes."""
        assert case.again is not None
        found = sorted((folder / "first").glob(f"checkpoints/step-{case.resume_step:06d}*"))
        if not found:
            return "failed", "no checkpoint at the step that was asked for", str(sorted(folder.rglob("step-*"))[:5])
        answers = self._train(case.again, Phase(case.seed, str(folder / "second"), str(found[0])))
        trouble = _trouble(answers)
        if trouble:
            return trouble[0], f"resumed: {trouble[1]}", trouble[2]
        judged = self._compare(case, answers, wanted)
        # With a static graph DDP lays its buckets out after the first step, so three ranks add in another order then.
        is_laid_out_late = case.strategy.ranks > 2 and "static_graph=True" in str(case)
        if judged is None and case.again == case.strategy and not is_laid_out_late:
            before = {"model": first[0].value["saved"], **first[0].value}
            off, where = difference(answers[0].value, before, compares_validation=False)  # type: ignore[union-attr]
            if off > 0:
                return "failed", "resumed: not the same bytes", f"{where} by {off:.2g}"
        return (judged[0], f"resumed: {judged[1]}", judged[2]) if judged else ("agreed", "", "")

    def _compare(self, case: Case, answers: list[Any], wanted: dict[str, Any]) -> tuple[str, str, str] | None:
        compares = "track_running_stats=False" not in case.text
        apart = [difference(answer.value, wanted, compares_validation=compares) for answer in answers]
        off, where = max(apart)
        if off <= tolerance_of(case):
            return None
        noise = self._noise(case, wanted)
        if off <= noise * _ROUNDING:
            return "unstable", "rounding moves it as far in one process", f"{where} by {off:.2g}, noise {noise:.2g}"
        ranks = [index for index, (value, _) in enumerate(apart) if value > tolerance_of(case)]
        return "failed", "differs from one process", f"{where} by {off:.2g} on ranks {ranks}, noise {noise:.1g}"

    def _noise(self, case: Case, wanted: dict[str, Any]) -> float:
        """How far rounding alone can move this case."""
        assert self._reference is not None
        self._reference.ask((case.seed, _NOISE[case.is_double]))
        (moved,) = self._reference.answers(self._timeout_s)
        if moved is None or moved.kind != "trained":
            return 0.0
        return difference(moved.value, wanted, compares_validation=False)[0]

    def _train(self, strategy: Strategy, phase: Phase) -> list[Answer | None]:
        world = self._worlds.get(strategy.world)
        if world is None or world.phases >= _PHASES:
            self._drop(strategy.world)
            world = self._worlds[strategy.world] = World(strategy.ranks, self._logs)
        answers = world.train(phase, self._timeout_s)
        if any(answer is None for answer in answers):
            world.dump_stacks()
        if not all(answer is not None and answer.kind != "failed" for answer in answers) or _is_mixed(answers):
            self._drop(strategy.world)
        return answers

    def _drop(self, name: str) -> None:
        world = self._worlds.pop(name, None)
        if world is not None:
            world.end()


def _is_mixed(answers: list[Answer | None]) -> bool:
    return len({answer.kind for answer in answers if answer is not None}) > 1


def _trouble(answers: list[Answer | None]) -> tuple[str, str, str] | None:
    """What stood in the way of training, if anything did."""
    kinds = [answer.kind if answer is not None else "silent" for answer in answers]
    if set(kinds) == {"trained"}:
        return None
    first = next((a for a in answers if a is not None and a.kind == "failed"), None)
    first = first or next((a for a in answers if a is not None and a.kind == "refused"), None)
    if set(kinds) == {"refused"}:
        assert first is not None
        return "refused", _short(first.error), first.error
    named = next((a for a in answers if a is not None and a.kind == "refused"), None)
    if named is not None and all(a is None or a.kind == "refused" or a.is_collateral for a in answers):
        # The ranks' data decided it: a launcher tells of the one that knows, and ends the others where they wait.
        return "refused", f"on some ranks: {_short(named.error)}", named.error
    told = first or Answer("failed", None, "no rank answered in time")
    why = _short(told.error) if len(set(kinds)) == 1 else f"ranks part ({', '.join(kinds)}): {_short(told.error)}"
    return "failed", why, told.where


def _short(error: str) -> str:
    """The first line of an error without names and numbers, so that the same ones are counted together."""
    lines = error.splitlines() or [""]
    line = lines[0] if " problems" not in lines[0] or len(lines) < 2 else f"{lines[0].split(':')[0]}: {lines[1]}"
    return re.sub(r"\d+", "#", line)[:150]


def run_all(runner: Runner, seeds: list[int], told: Callable[[Verdict], None]) -> list[Verdict]:
    found = []
    for seed in seeds:
        found.append(runner.run(seed))
        told(found[-1])
    return found
