"""Session: one rank joined to its world, with its device, its seed, and collectives that have names and deadlines."""

from __future__ import annotations

import atexit
import itertools
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from distributed.core.engines.launchers import launcher_of
from distributed.core.env import WorkerEnv, announce_unset, inherited_environ
from distributed.core.errors import LaunchError
from distributed.core.mesh import MeshSpec
from distributed.runtime import world
from distributed.runtime.abort.nccl import Communicators, Graphs, leave_errors_to_us
from distributed.runtime.abort.sockets import open_sockets, shut_down
from distributed.runtime.heartbeat import tell_names_to
from distributed.runtime.rank_store import RankStore
from distributed.runtime.step_gate import StepGate
from distributed.runtime.torch_compat import default_store, set_timeout
from distributed.runtime.world import CollectiveError

_REGISTERS = "NCCL_GRAPH_REGISTER"  # of captured collectives: whether NCCL exchanges the ranks' buffers


def _unreported(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class Session:
    """This rank's place in the world; `open` joins it."""

    def __init__(
        self,
        env: WorkerEnv,
        device: torch.device,
        store: dist.Store | None,
        sockets: frozenset[int] = frozenset(),
        *,
        cut_store: Callable[[], None] = lambda: None,
        survives_nccl: bool = False,
        is_dry: bool = False,
    ) -> None:
        """`sockets`: of the process group, if it is ours. `cut_store` ends what this rank waits for in the store.
        `survives_nccl`: whether this process leaves its world alive where collectives are NCCL's. `is_dry`: whether
        tensors hold nothing and collectives do nothing."""
        self.env, self.device, self.store = env, device, store
        self.rank, self.world_size = env.rank, env.world_size
        self.data_rank = env.rank  # which samples it takes: ranks that share the work on the same ones have the same
        self.stream = env.rank  # of random numbers: of ranks that compute the same, the same
        self.is_dry, self._sockets, self._cut_store = is_dry, sockets, cut_store
        # Whether this process can leave its world and join another: the group must be ours, and end when it is cut off.
        self.can_regroup = survives_nccl or (bool(sockets) and dist.get_backend() == "gloo")
        # Whether NCCL does in a CUDA graph what it does outside of one. Where it registers the buffers of a graph, it
        # waits for ranks that do not capture, and fails on memory in expandable segments.
        self.can_capture = inherited_environ().get(_REGISTERS) == "0"
        self.gate = StepGate(device) if survives_nccl else None
        self.graphs = Graphs()
        self._communicators = Communicators(self.graphs) if survives_nccl else None
        self.begins_alike = False  # whether all ranks were handed the same weights before a strategy is set up
        self._cut_beside: Callable[[], None] = lambda: None
        self._calls = itertools.count()
        self._enter: Callable[[str], AbstractContextManager[None]] = _unreported

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def neighbours(self) -> range:
        """The ranks on this host, as launchers number them: one after the other."""
        first = self.rank - self.env.local_rank
        return range(max(0, first), min(first + self.env.local_world_size, self.world_size))

    @staticmethod
    def open(
        env: WorkerEnv,
        *,
        device: str,
        collectives: str,
        timeout_s: float,
        opening: Callable[[Callable[[], None]], None] = lambda cut_off: None,
        is_over: Callable[[], bool] = lambda: False,
        listener: socket.socket | None = None,
        shares_gpus: bool = False,
        regroups: bool = False,
    ) -> Session:
        """Join the world, or the process group that the script has already made.

        `opening` is given what ends the wait for the others, for another thread to call; `is_over` is whether it did.
        `listener` is rank 0's, where it already listens at the meeting point. `regroups`: whether this process is to
        leave its world alive when that breaks.
        """
        chosen = world.choose_device(device, env.local_rank, shares_gpus)
        if env.world_size == 1 and not dist.is_initialized():
            return Session(env, chosen, None)
        if dist.is_initialized():
            store = default_store()
            return Session(env, chosen, dist.PrefixStore(f"session-{world.next_session()}", store))
        world.check_collectives(collectives)
        if shares_gpus:
            world.be_a_host_of_its_own(env)
        if collectives == "nccl":
            announce_unset({_REGISTERS: "0"})
        survives_nccl = regroups and collectives == "nccl"
        if survives_nccl:
            leave_errors_to_us()
        before = set(open_sockets())
        cut_store: list[Callable[[], None]] = []

        def cut_off() -> None:
            shut_down(set(open_sockets()) - before)
            for cut in cut_store:
                cut()

        opening(cut_off)
        try:
            store, rank, world_size = world.meet(env, timeout_s, is_over, listener)
            if isinstance(store, RankStore):
                cut_store.append(store.cut)
            of_store = set(open_sockets())
            world.await_all(store, env, timeout_s, is_over)
            meets_quickly = collectives == "gloo"
            dist.init_process_group(
                world.backends(collectives),
                store=dist.PrefixStore("group", store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=min(timeout_s, world.MESH_S) if meets_quickly else timeout_s),
                device_id=chosen if chosen.type == "cuda" and collectives == "nccl" else None,
            )
            if meets_quickly:
                set_timeout(timeout_s)
        except dist.DistNetworkError as failed:
            if is_over():
                raise CollectiveError(f"[r{env.rank}] the world ended while its ranks met") from failed
            raise LaunchError(
                f"the rendezvous of rank {env.rank} at {env.master_addr}:{env.master_port} failed",
                why=str(failed).splitlines()[0],
                do="check that the address is rank 0's host and that no other job uses the port (--master-port)",
            ) from (failed if env.restarts else None)  # later, a peer has died; at first, it is what it says
        atexit.register(world.leave_world)
        ours = frozenset(set(open_sockets()) - (before if launcher_of(env.launcher).regroups else of_store))
        own = dist.PrefixStore(f"session-{world.next_session(new=True)}", store)
        cut = store.cut if isinstance(store, RankStore) else lambda: None
        return Session(env, chosen, own, ours, cut_store=cut, survives_nccl=survives_nccl)

    def take_place(self, mesh: MeshSpec) -> None:
        """Take the samples and random numbers of this rank's place in a mesh."""
        self.data_rank, self.stream = mesh.data_rank(self.rank), mesh.stream(self.rank)

    def take_weights_as_alike(self) -> None:
        """All ranks were handed the same weights before a strategy is set up."""
        self.begins_alike = True

    def report_collectives_to(self, enter: Callable[[str], AbstractContextManager[None]] | None) -> None:
        """`enter` is called around every collective, with its name; None: nothing is."""
        self._enter = _unreported if enter is None else enter
        tell_names_to(enter)

    def reported(self, name: str) -> AbstractContextManager[None]:
        """Around a wait for other ranks of which another library makes its own errors; else `named`."""
        return self._enter(name)

    def waiting_for_device(self) -> AbstractContextManager[None]:
        """Around a wait for the device where that may wait for other ranks: torch records no collectives of graphs."""
        is_known = self.world_size == 1 or not self.graphs.are_used
        return nullcontext() if is_known else self.reported("captured steps")

    def also_cut(self, cut: Callable[[], None]) -> None:
        """`cut` ends the collectives of a library beside this group."""
        self._cut_beside = cut

    def cut_beside(self) -> None:
        """End the collectives of a library beside this group."""
        self._cut_beside()

    def close_gate(self) -> None:
        """Let no further step of this world count, if it has a gate; for any thread to call."""
        if self.gate is not None:
            self.gate.close()

    def cut_off(self) -> None:
        """End every collective that this rank is in or begins, here and at its peers; for any thread to call.

        Where there is a gate, its peers get garbage: theirs must be closed.
        """
        self.close_gate()
        self.cut_beside()
        self._cut_store()
        if self._communicators is not None:
            self._communicators.abort()
        shut_down(set(self._sockets))

    def check(self) -> None:
        """After the host has read a device's numbers: that no abort stands behind them, which raises nothing itself."""
        if self.gate is not None and self.gate.is_closed:
            raise CollectiveError(f"[r{self.rank}] the world ended")

    def all_have_ended(self, timeout_s: float) -> bool:
        """All ranks leave at the same step: whether the device of each came to the end of it in time.

        Before that, a rank that aborts would take from a peer the last part of a collective that the peer waits for.
        """
        assert self.store is not None
        keys = [f"left/{self.env.attempt}/{rank}" for rank in range(self.world_size)]
        try:
            self._synchronize()
            self.store.set(keys[self.rank], "")
            self.store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:  # a peer was lost, or its store
            return False
        return True

    def come_to_rest(self) -> None:
        """The world is over: until nothing of it runs on the device any more. Aborts, as `cut_off` does."""
        if self.gate is not None:
            self.cut_off()
            self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def number(self) -> int:
        """Counts the calls to it: the same on every rank that makes them in the same order, for names in the store."""
        return next(self._calls)

    def seed(self, seed: int) -> None:
        """Python's, numpy's and torch's generators, a stream of its own for each rank with samples of its own."""
        mixed = (seed + self.stream) % 2**63
        random.seed(mixed)
        np.random.seed(mixed % 2**32)
        torch.manual_seed(mixed)

    def seed_step(self, seed: int, step: int) -> None:
        """The same before every step of a world of several ranks.

        A rank that is killed takes its generators with it; as a function of the step, its replacement has them.
        """
        if self.world_size > 1:
            mixed = (seed * 0x9E3779B97F4A7C15 + self.stream * 0xC2B2AE3D27D4EB4F + step) * 0xBF58476D1CE4E5B9 % 2**64
            mixed ^= mixed >> 31
            random.seed(mixed)
            np.random.seed(mixed % 2**32)
            torch.default_generator.manual_seed(mixed % 2**63)
            if self.device.type == "cuda":
                torch.cuda.default_generators[self.device.index].manual_seed(mixed % 2**63)

    def sum(self, name: str, values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """The sum of a tensor over the ranks of a group (None: over all ranks), in place."""
        if self.world_size > 1:
            with self.named(name):
                dist.all_reduce(values, group=group)
        return values

    def max(self, name: str, values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """The largest values over the ranks of a group (None: over all ranks), in place."""
        if self.world_size > 1:
            with self.named(name):
                dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        return values

    def gather(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """A tensor of each rank, all of one shape, on every rank: a row for each."""
        rows = [torch.empty_like(values) for _ in range(self.world_size)] if self.world_size > 1 else [values]
        if self.world_size > 1:
            with self.named(name):
                dist.all_gather(rows, values)
        return torch.stack(rows)

    def barrier(self, name: str) -> None:
        """Returns when every rank has come here."""
        self.sum(name, torch.zeros(1, device=self.device))

    def send_from(
        self, name: str, rank: int, values: torch.Tensor, group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """One rank's bytes of a contiguous tensor to the ranks of a group (None: to all ranks), in place."""
        if self.world_size > 1:
            with self.named(name):
                flat = values.as_strided((values.numel(),), (1,))  # one element is contiguous with any stride
                dist.broadcast(flat.view(torch.uint8), rank, group=group)
        return values

    def share_text(self, key: str, text: str | None) -> str:
        """A text that one rank has and every rank needs."""
        if self.store is None:
            assert text is not None
            return text
        with self.named(key):
            if text is not None:
                self.store.set(f"text/{key}", text)
            return str(self.store.get(f"text/{key}").decode())

    def gather_texts(self, name: str, text: str) -> list[str]:
        """A text of each rank, on every rank, in their order."""
        if self.world_size == 1:
            return [text]
        mine = text.encode()
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(mine)
        lengths: list[int] = self.sum(name, sizes).tolist()
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8, device=self.device)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8)[: len(mine)].to(self.device)
        found = self.gather(name, padded)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(found, lengths, strict=True)]

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Around a collective: its errors, and the ranks that wait in it, are reported with its name."""
        try:
            with self.reported(name):
                yield
        except torch.OutOfMemoryError:  # this rank's own, and reported as such
            raise
        except (RuntimeError, dist.DistError) as failed:
            raise CollectiveError(f"[r{self.rank}] in the collective {name!r}: {failed}") from failed
