"""Seating: from the offers of the nodes in a round to one record with their node ranks and world size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distributed.core.errors import LaunchError, Problem
from distributed.launch.rendezvous.nodes import world_size
from distributed.launch.request import NodePlace


@dataclass(frozen=True)
class NodeOffer:
    """What a node offers at the rendezvous."""

    host: str
    address: str
    wanted_rank: int | None
    ranks: int
    run_dir: str
    attempt: int
    port: int
    agent: int = 0  # the number of its agent in the run
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class RoundRecord:
    """The result of a round; without `agents` it failed, and the nodes continue with the next one."""

    agents: tuple[int, ...] = ()  # in the order of the nodes' ranks
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()
    attempt: int = -1
    restarts: int = 0  # worlds of this run before this one
    run_dir: str = ""
    master_addr: str = ""
    master_port: int = 0
    problems: tuple[Problem, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> RoundRecord:
        """
        >>> record = RoundRecord((3, 1), ("a", "b"), (2, 0), attempt=5, problems=(Problem("x"),))
        >>> RoundRecord.from_json(record.to_json()) == record
        True
        """
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()
        }
        fields["problems"] = tuple(Problem(**problem) for problem in fields["problems"])
        return RoundRecord(**fields)

    def place(self, agent: int) -> NodePlace:
        node_rank = self.agents.index(agent)
        return NodePlace(
            node_rank=node_rank,
            num_nodes=sum(ranks > 0 for ranks in self.ranks),
            rank_offset=sum(self.ranks[:node_rank]),
            world_size=sum(self.ranks),
            master_addr=self.master_addr,
            master_port=self.master_port,
            ranks=self.ranks[node_rank],
            nodes=tuple(pair for pair in zip(self.addresses, self.ranks, strict=False) if pair[1]),
        )


def arrange(cards: Sequence[NodeOffer], before: RoundRecord | None, *, equal: bool = False) -> RoundRecord:
    """The record of a round. `before`: that of the last one, if any; `equal`: all nodes must run as many ranks.

    Nodes of the last round keep their order and come first, so that rank 0 stays on a node with the state.
    """
    problems: list[Problem] = []
    if before is None:
        order, problems = seat(cards, equal=equal)
    else:
        old = {agent: rank for rank, agent in enumerate(before.agents)}
        order = sorted(range(len(cards)), key=lambda number: (old.get(cards[number].agent, len(old)), number))
    seated = [cards[number] for number in order]
    first = seated[0]
    try:
        left = world_size(sum(card.ranks for card in seated), first.sizes)
    except LaunchError as error:
        problems.extend(error.problems)
        left = 0
    ranks = []
    for card in seated:
        ranks.append(min(card.ranks, left))
        left -= ranks[-1]
    return RoundRecord(
        agents=tuple(card.agent for card in seated),
        hosts=tuple(card.host for card in seated),
        ranks=tuple(ranks),
        addresses=tuple(card.address for card in seated),
        attempt=max(*(card.attempt for card in cards), before.attempt + 1 if before else 0),
        restarts=before.restarts + 1 if before else 0,
        run_dir=first.run_dir,
        master_addr=first.address,
        master_port=first.port,
        problems=tuple(problems),
    )


def seat(cards: Sequence[NodeOffer], *, equal: bool = True) -> tuple[list[int], list[Problem]]:
    """The seat of each node rank, and the problems. Deterministic, so all nodes compute the same."""
    problems = []
    asked: dict[int, list[int]] = {}
    for number, card in enumerate(cards):
        if card.wanted_rank is not None:
            asked.setdefault(card.wanted_rank, []).append(number)
    for rank, seats in asked.items():
        if len(seats) > 1:
            problems.append(
                Problem(
                    f"{len(seats)} nodes have node_rank={rank}: {', '.join(cards[number].host for number in seats)}",
                    do="give each node its own node_rank, or leave node_rank out on all nodes",
                )
            )
    if equal and len({card.ranks for card in cards}) > 1:
        counts = ", ".join(f"{card.host} {card.ranks}" for card in cards)
        problems.append(
            Problem(
                f"the nodes run different numbers of ranks: {counts}",
                why="every node of a run must have the same number of ranks",
                do="set the same gpus_per_node on all nodes",
            )
        )
    # If nodes are missing, nodes with higher numbers move up.
    asked_rank = {seats[0]: rank for rank, seats in sorted(asked.items())}
    kept = {rank: number for number, rank in asked_rank.items() if rank < len(cards)}
    free = iter(
        [number for number in asked_rank if number not in kept.values()]
        + [number for number in range(len(cards)) if number not in asked_rank]
    )
    return [kept[rank] if rank in kept else next(free) for rank in range(len(cards))], problems
