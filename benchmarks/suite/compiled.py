"""Compiled steps, ours beside a hand-written loop, interleaved in processes that wait for their turn.

python benchmarks/suite/compiled.py gpt --json benchmarks/suite/compiled-gpt.json
python benchmarks/suite/compiled.py lengths --json benchmarks/suite/compiled-lengths.json

`gpt`: 24 blocks of 1024, batch 32 × 1024. `lengths`: a small GPT whose batches have 24 lengths, one after the other.
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
from distributed.bench.workloads.gpt import Gpt, Size
from distributed.train.meter import Meter

KEPT = 64  # rows that batches are made of
STEPS = 4000  # more than are ever taken


@dataclass(frozen=True)
class Case:
    size: Size
    lengths: int  # how many there are
    warm: int  # steps before the first turn
    turn: int  # steps
    ways: tuple[str, ...]


CASES = {
    "gpt": Case(Size(24, 1024, 16, 1024, 32), 1, 24, 10, ("bare compiled", "ours compiled")),
    "lengths": Case(Size(4, 256, 4, 256, 16, 1024), 24, 144, 48, ("ours", "ours compiled")),
}


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
    """The clock of one contender: `step` is called after each step, and returns when the next one may begin."""

    def __init__(self, case: Case, pipe: Connection) -> None:
        self._case, self._pipe, self._steps, self._begun = case, pipe, 0, 0.0
        self.at_end: Callable[[], None] = lambda: None

    def step(self) -> None:
        self._steps += 1
        rest = self._steps - self._case.warm
        if rest >= 0 and rest % self._case.turn == 0:
            torch.cuda.synchronize()
            self._pipe.send((time.perf_counter() - self._begun) / self._case.turn)
            if not self._pipe.recv():
                self.at_end()
                os._exit(0)  # nothing is saved of it
            self._begun = time.perf_counter()


def run_bare(case: Case, turns: Turns, compiled: bool) -> None:
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = Gpt(case.size)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02 / case.size.width, fused=True)
    for ids, labels, _ in DataLoader(Rows(case), batch_size=case.size.batch, pin_memory=True):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True))
        loss.backward()
        optimizer.step()
        turns.step()


def run_ours(name: str, case: Case, turns: Turns, compiled: bool) -> None:
    plain = Meter.add

    def add(self: Meter, *args: Any) -> None:  # which the loop calls after every step, captured or not
        plain(self, *args)
        turns.step()

    Meter.add = add  # type: ignore[method-assign]
    with torch.device("cuda"):
        model = Gpt(case.size)
    folder = tempfile.mkdtemp()
    trainer = Trainer(
        model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02 / case.size.width, fused=True),
        num_gpus=1,
        mixed_precision="bf16",
        compile="whole" if compiled else False,
        run_dir=folder,
        progress=False,
        sample_check=False,
    )
    turns.at_end = lambda: tell_all(name, Path(folder, "events.jsonl"))
    trainer.fit(DataLoader(Rows(case), batch_size=case.size.batch, pin_memory=True))


def tell_all(name: str, events: Path) -> None:
    """What the run has said."""
    for event in map(json.loads, events.read_text(encoding="utf-8").splitlines()):
        if event["event"] == "Warned":
            print(f"{name}: {event['message']}", flush=True)


def contend(name: str, case: Case, pipe: Connection) -> None:
    torch.manual_seed(0)
    turns, compiled = Turns(case, pipe), name.endswith("compiled")
    if name.startswith("ours"):
        run_ours(name, case, turns, compiled)
    else:
        run_bare(case, turns, compiled)


def measure(case: Case, rounds: int) -> Iterator[dict[str, list[float]]]:
    """Seconds a step of each turn, after each round; the first turn of all begins when everybody is warm."""
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
    found: dict[str, list[float]] = {name: [] for name in case.ways}
    for number in range(rounds):
        for name in case.ways if number % 2 else tuple(reversed(case.ways)):
            pipes[name].send(True)
            found[name].append(pipes[name].recv())
        yield found
    for pipe in pipes.values():
        pipe.send(False)
    for process in processes:
        process.join(60)


def record(name: str, case: Case, found: dict[str, list[float]]) -> dict[str, Any]:
    milliseconds = {way: round(1e3 * median(turns), 3) for way, turns in found.items()}
    compared = case.ways[0]
    return {
        "benchmark": f"compiled-{name}",
        "unit": f"milliseconds a step, medians over {len(found[case.ways[0]])} turns of {case.turn} steps",
        "machine": describe_machine(),
        "versions": describe_versions(),
        "device": torch.cuda.get_device_name(),
        "milliseconds": milliseconds,
        "turns": {way: [round(1e3 * turn, 3) for turn in turns] for way, turns in found.items()},
        "ours_compiled_over": {compared: round(milliseconds["ours compiled"] / milliseconds[compared], 4)},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    case = CASES[asked.case]
    if asked.blocks:
        case = replace(case, size=replace(case.size, blocks=asked.blocks))
    for found in measure(case, asked.rounds):
        made = record(asked.case, case, found)
        print(json.dumps({key: made[key] for key in ("milliseconds", "ours_compiled_over")}), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
