"""Replica check: what several ranks should hold alike is digested and compared, so that one that went apart is found.

Ranks go apart without an error when a forward pass changes a parameter in place, a gradient is not reduced, a buffer is
computed of a rank's own samples, a learning rate follows a rank's own metric, or a bit flips. Each rank digests what it
holds under a name that says which part of which tensor it is; ranks with the same name must have the same digest. The
digests are compared in one collective: at the first steps (1, 2, 4, 8, …), at every save, and at the end of every epoch
after its evaluation. On a GPU nothing waits for the device: they are read with the next losses, and always before a
checkpoint is written.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from distributed.core.errors import ReplicasDifferError
from distributed.runtime.fingerprint import fingerprints, numbers_on
from distributed.runtime.session import Session

Held = Callable[[], Iterator[tuple[str, torch.Tensor | str]]]

_CAUSES = {
    "parameter": "forward changes it in place, its gradient is not reduced over the ranks, the script gives it another "
    "value on some rank, or the hardware of a rank made a mistake",
    "buffer": "forward computes it of the rank's own samples, the script gives it another value on some rank, or the "
    "hardware of a rank made a mistake",
    "optimizer": "a scheduler or the script sets it by a number that is the rank's own, or the hardware of a rank made "
    "a mistake",
    "task": "the task changes it by the rank's own samples, or the script gives it another value on some rank",
    "copy": "it is an average of what differs, a callback changes it by what is the rank's own, or the hardware of a "
    "rank made a mistake",
    "callback": "it counts or keeps what only this rank has seen",
    "random": "ranks that share the work on the same samples drew other random numbers: some rank called more or other "
    "random functions",
}
_CURES = {
    "parameter": "let the optimizer alone change parameters, and forward use them alike on all ranks",
    "buffer": "reduce it over the ranks in forward (torch.distributed.all_reduce); where rank 0's is good enough, set "
    "check_replicas='parameters'",
    "optimizer": "set rates and other options alike on all ranks",
    "task": "change it alike on all ranks; what need not be kept is not returned by the task's state(), and a module "
    "that is random is made after torch.manual_seed(…)",
    "copy": "change it alike on all ranks",
    "callback": "let state() return what is the same on all ranks, and leave the rest out of it; with "
    "check_replicas=False rank 0's is saved",
    "random": "draw the same random numbers on all of these ranks",
}


@dataclass(frozen=True)
class _Round:
    """One comparison whose result was not read yet."""

    step: int
    names: dict[int, str]  # of this rank's digests
    table: torch.Tensor  # of every rank: pairs of a name's number and a digest
    is_same: torch.Tensor  # whether all ranks have the same row, of which one number is read


class ReplicaCheck:
    """`is_due` costs an integer's comparison; `compare` one pass over what is held, and one collective."""

    def __init__(self, session: Session, held: Held, *, is_on: bool, shares_random: bool = False) -> None:
        """`held`: this rank's tensors, and texts of its settings, by names under which equal ranks hold the same.

        `shares_random`: whether ranks with the same stream of random numbers must draw alike.
        """
        self._session, self._held, self._shares_random = session, held, shares_random
        self.is_on = is_on and session.world_size > 1 and not session.is_dry
        self._reads_at_once = session.device.type == "cpu"
        self._begun = 0
        self._compared_at = -1
        self._capacity = 0  # how many digests a row has, on all ranks
        self._sizes_open = 2  # comparisons that agree on it: before the first step, and with the optimizer's state
        self._rounds: list[_Round] = []

    def begin(self, step: int) -> None:
        """The state of the run is there: all ranks begin with the same."""
        self._begun = step
        self.compare(step)
        self.settle()

    def is_due(self, step: int) -> bool:
        """After 1, 2, 4, 8 … steps of this world."""
        done = step - self._begun
        return self.is_on and not done & (done - 1)

    def compare(self, step: int, *, again: bool = False) -> None:
        """Begin a comparison of the state after `step`; a second one of the same step only with `again`. Every rank
        comes here."""
        if not self.is_on or (self._compared_at == step and not again):
            return
        self._compared_at = step
        names, row = self._row()
        table = self._session.gather("replica check", row)
        self._rounds.append(_Round(step, names, table, is_same=(table == table[0]).all()))
        if self._reads_at_once:
            self.settle()

    def settle(self) -> None:
        """Raise what the comparisons since the last time have found. Every rank comes here."""
        rounds, self._rounds = self._rounds, []
        for one in rounds:
            if one.is_same:
                continue
            table = one.table.cpu()
            differing = _differing(table)  # none where ranks hold different parts of the model
            if differing:
                raise self._explain(one, table, differing)

    def _row(self) -> tuple[dict[int, str], torch.Tensor]:
        """This rank's digests, as pairs with the numbers of their names."""
        names: dict[int, str] = {}
        values: list[torch.Tensor] = []
        device = self._session.device
        for name, value in self._everything():
            key = _number(name)
            if key not in names:  # a tied tensor has its first name
                names[key] = name
                values.append(_bytes(value) if isinstance(value, str) else value)
        keys, found = list(names), fingerprints(values, device)
        if self._sizes_open:
            self._sizes_open -= 1
            largest = torch.tensor([len(keys)], device=device)
            self._capacity = int(self._session.max("size of the replica check", largest).item())
        size = self._capacity
        if len(keys) > size:  # tensors that were made later share the last digest
            late = ", ".join(names[key] for key in keys[size - 1 :])
            found[size - 1] = found[size - 1 :].sum()
            keys[size - 1 :] = [_number(late)]
            names[keys[-1]] = late
        row = torch.zeros(size, 2, dtype=torch.int64, device=device)
        row[: len(keys), 0] = numbers_on(device, tuple(keys))
        row[: len(keys), 1] = found[: len(keys)]
        return names, row

    def _everything(self) -> Iterator[tuple[str, torch.Tensor | str]]:
        yield from self._held()
        if self._shares_random:
            device, stream = self._session.device, self._session.stream
            yield f"random generator of stream {stream}", torch.get_rng_state()
            if device.type == "cuda":
                yield f"random generator of stream {stream} on the GPU", torch.cuda.get_rng_state(device)

    def _explain(self, one: _Round, table: torch.Tensor, differing: list[int]) -> ReplicasDifferError:
        """Every rank comes here: the one that has a tensor knows its name."""
        known = {str(key): one.names[key] for key in differing if key in one.names}
        texts = self._session.gather_texts("what differs", json.dumps(known))
        names = {key: name for text in texts for key, name in json.loads(text).items()}
        first = names[str(differing[0])]
        kind = first.partition(" ")[0]
        more = f", and {len(differing) - 1} more tensors" if len(differing) > 1 else ""
        when = f"after step {one.step}" if one.step > self._begun else "before the first step"
        return ReplicasDifferError(
            f"ranks that should be equal differ {when}: {first}{more}",
            why=f"{_sides(table, differing[0])}; known causes: {_CAUSES[kind]}",
            do=f"{_CURES[kind]}; the newest checkpoint is from before and sound",
        )


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)


@functools.lru_cache(maxsize=1 << 16)
def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big") + 1  # 0: nothing


def _differing(table: torch.Tensor) -> list[int]:
    """The numbers of names for which ranks have different digests, in the order of the first rank that has them.

    >>> _differing(torch.tensor([[[1, 70], [2, 80]], [[1, 70], [2, 81]], [[3, 90], [0, 0]]]))
    [2]
    """
    keys, digests = table[:, :, 0].flatten(), table[:, :, 1].flatten()
    order = torch.argsort(keys, stable=True)
    keys_sorted, digests_sorted = keys[order], digests[order]
    differs = (keys_sorted[1:] == keys_sorted[:-1]) & (digests_sorted[1:] != digests_sorted[:-1])
    if not differs.any():
        return []
    found = set(keys_sorted[1:][differs].tolist()) - {0}
    return [key for key in dict.fromkeys(keys.tolist()) if key in found]


def _sides(table: torch.Tensor, key: int) -> str:
    """Who holds the same as whom; of many, those that are in the minority."""
    by_digest: dict[int, list[int]] = {}
    for rank, row in enumerate(table.tolist()):
        for number, digest in row:
            if number == key:
                by_digest.setdefault(digest, []).append(rank)
    sides = sorted(by_digest.values(), key=len)
    if len(sides[-1]) > len(sides[0]) and len(sides) == 2:
        apart, rest = sides
        return f"{_ranks(apart)} {'differs' if len(apart) == 1 else 'differ'} from {_ranks(rest)}"
    shown = " and ".join(_ranks(side) for side in sides[:3])
    return f"{shown} hold different values" + (f", {len(sides)} in all" if len(sides) > 3 else "")


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (f" … ({len(ranks)} in all)" if len(ranks) > 6 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
