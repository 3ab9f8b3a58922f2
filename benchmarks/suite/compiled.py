"""Compiled steps, ours beside a hand-written loop, interleaved in processes that wait for their turn.

python benchmarks/suite/compiled.py gpt --json benchmarks/suite/compiled-gpt.json
python benchmarks/suite/compiled.py lengths --json benchmarks/suite/compiled-lengths.json

`gpt`: 24 blocks of 1024, batch 32 × 1024. `lengths`: a small GPT whose batches have 24 lengths, one after the other,
for which our run tries whether compiled steps are faster; beside it are runs that are always compiled, and never.
`--device cpu` shows that a case runs, with a tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import multiprocessing
from torch.utils.data import DataLoader, Dataset

from distributed import Trainer
from distributed.bench.machine import describe_machine, describe_versions
from distributed.bench.workloads.gpt import Gpt, GptSize
from distributed.strategies.model.compiled_call import COMPILED
from distributed.train.capture.compile_trial import CompileTrial
from distributed.train.meter import Meter

KEPT = 64  # rows that batches are made of
STEPS = 4000  # more than are ever taken


@dataclass(frozen=True)
class Case:
    size: GptSize
    lengths: int  # how many there are
    warm: int  # steps before the first turn
    turn: int  # steps
    ways: tuple[str, ...]
    device: str = "cuda"


BARE, BARE_COMPILED = "bare", "bare compiled"
OURS, TRIES, ALWAYS = "ours", "ours compiled", "ours always compiled"
TARGET = 1.05  # of the better one of those that are always compiled, and never
CASES = {
    "gpt": Case(GptSize(24, 1024, 16, 1024, 32), 1, 24, 10, (BARE_COMPILED, TRIES)),
    "lengths": Case(GptSize(4, 256, 4, 256, 16, 1024), 24, 144, 48, (BARE, BARE_COMPILED, OURS, TRIES, ALWAYS)),
}
COMPILED_BY = 16  # steps; the next ones are those of our trial, which nobody else may slow down
CHOSEN = {"stays compiled": "compiled", "runs as it is written": "as written"}  # by words of the run's


class Rows(Dataset[Any]):
    """Batches of one length after the other; the labels twice, as the model takes them and the last is the target."""

    def __init__(self, case: Case) -> None:
        self._case = case
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(512, (KEPT, case.size.length + 1), generator=generator)

    def __len__(self) -> int:
        return STEPS * self._case.size.batch

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        case = self._case
        number = index // case.size.batch * 7 % case.lengths  # each once in as many batches as there are
        length = case.size.length * (case.lengths + 2 * number + 2) // (3 * case.lengths)
        row = self._ids[index % KEPT]
        return row[:length], row[1 : length + 1], row[1 : length + 1]


class Turns:
    """The clock of one contender: `step` is called after each step, and returns when the next one may begin.

    It waits when it has compiled, when it is warm, and after each turn.
    """

    def __init__(self, case: Case, pipe: Connection) -> None:
        self._case, self._pipe, self._steps, self._begun = case, pipe, 0, 0.0
        self.said: Callable[[], list[str]] = list  # by the run, at its end

    def step(self) -> None:
        self._steps += 1
        rest = self._steps - self._case.warm
        if self._steps == COMPILED_BY or (rest >= 0 and rest % self._case.turn == 0):
            if self._case.device == "cuda":
                torch.cuda.synchronize()
            self._pipe.send((time.perf_counter() - self._begun) / self._case.turn)
            if not self._pipe.recv():
                self._pipe.send(self.said())
                os._exit(0)  # nothing is saved of it
            self._begun = time.perf_counter()


def make_loader(case: Case) -> DataLoader[Any]:
    return DataLoader(Rows(case), batch_size=case.size.batch, pin_memory=case.device == "cuda")


def run_bare(case: Case, turns: Turns, compiled: bool) -> None:
    torch.set_float32_matmul_precision("high")
    with torch.device(case.device):
        model = Gpt(case.size)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02 / case.size.width, fused=True)
    for ids, labels, _ in make_loader(case):
        optimizer.zero_grad()
        with torch.autocast(case.device, torch.bfloat16):
            loss = model(ids.to(case.device, non_blocking=True), labels.to(case.device, non_blocking=True))
        loss.backward()
        optimizer.step()
        turns.step()


def run_ours(case: Case, turns: Turns, compiled: bool) -> None:
    plain = Meter.add

    def add(self: Meter, *args: Any) -> None:  # which the loop calls after every step, captured or not
        plain(self, *args)
        turns.step()

    Meter.add = add  # type: ignore[method-assign]
    with torch.device(case.device):
        model = Gpt(case.size)
    folder = tempfile.mkdtemp()
    trainer = Trainer(
        model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02 / case.size.width, fused=True),
        num_gpus=1,
        device=case.device,
        mixed_precision="bf16",
        compile="whole" if compiled else False,
        run_dir=folder,
        progress=False,
        sample_check=False,
    )
    turns.said = lambda: warnings_of(Path(folder, "events.jsonl"))
    trainer.fit(make_loader(case))


def warnings_of(events: Path) -> list[str]:
    found = map(json.loads, events.read_text(encoding="utf-8").splitlines())
    return [event["message"] for event in found if event["event"] == "Warned"]


def stay_compiled(trial: CompileTrial) -> None:
    trial._call.choose(COMPILED)


def contend(name: str, case: Case, pipe: Connection) -> None:
    torch.manual_seed(0)
    turns, compiled = Turns(case, pipe), name.endswith("compiled")
    if name == ALWAYS:
        CompileTrial._begin_trial = stay_compiled  # type: ignore[method-assign]
    if name.startswith("ours"):
        run_ours(case, turns, compiled)
    else:
        run_bare(case, turns, compiled)


@dataclass(frozen=True)
class Found:
    turns: dict[str, list[float]]  # seconds a step
    said: dict[str, list[str]]  # by each run, at its end


def measure(case: Case, rounds: int) -> Iterator[Found]:
    """What is known after each round, and at the end; the first turn of all begins when everybody is warm."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for name in case.ways:
        pipes[name], other = context.Pipe()
        processes.append(context.Process(target=contend, args=(name, case, other), daemon=True))
        processes[-1].start()
        other.close()
    for pipe in pipes.values():
        pipe.recv()
    for pipe in pipes.values():  # one after the other, so that the trial has the device for itself
        pipe.send(True)
        pipe.recv()
    found = Found({name: [] for name in case.ways}, {})
    for number in range(rounds):
        for name in case.ways if number % 2 else tuple(reversed(case.ways)):
            pipes[name].send(True)
            found.turns[name].append(pipes[name].recv())
        yield found
    for name, pipe in pipes.items():
        pipe.send(False)
        found.said[name] = pipe.recv()
    yield found
    for process in processes:
        process.join(60)


def record(name: str, case: Case, found: Found) -> dict[str, Any]:
    milliseconds = {way: round(1e3 * median(turns), 3) for way, turns in found.turns.items()}
    made = {
        "benchmark": f"compiled-{name}",
        "unit": f"milliseconds a step, medians over {len(found.turns[TRIES])} turns of {case.turn} steps",
        "machine": describe_machine(),
        "versions": describe_versions(),
        "device": torch.cuda.get_device_name() if case.device == "cuda" else case.device,
        "milliseconds": milliseconds,
        "turns": {way: [round(1e3 * turn, 3) for turn in turns] for way, turns in found.turns.items()},
        "ours_compiled_over": {
            way: round(milliseconds[TRIES] / took, 4) for way, took in milliseconds.items() if way != TRIES
        },
        "said": found.said,
    }
    if ALWAYS in case.ways:
        told = " ".join(found.said.get(TRIES, ()))
        chosen = next((way for words, way in CHOSEN.items() if words in told), None)
        ratio = round(milliseconds[TRIES] / min(milliseconds[OURS], milliseconds[ALWAYS]), 4)
        made |= {"chosen": chosen, "ours_compiled_over_the_better": ratio, "target": TARGET, "passed": ratio <= TARGET}
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    case = CASES[asked.case]
    if asked.blocks:
        case = replace(case, size=replace(case.size, blocks=asked.blocks))
    if asked.device == "cpu":
        tiny = GptSize(1, 32, 2, 48, 2, 512)
        case = replace(case, size=tiny, device="cpu", warm=60, turn=8)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # of each process, which all compile at once
    shown = ("milliseconds", "ours_compiled_over", "chosen", "ours_compiled_over_the_better")
    for found in measure(case, asked.rounds):
        made = record(asked.case, case, found)
        print(json.dumps({key: made[key] for key in shown if key in made}), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
