"""WorkerEnv: the only environment contract between a launcher and a rank.

Our launchers, torchrun, srun, mpirun and those of engines each give a process its rank in variables of their own; here
they become one value.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from distributed.core.engines.engine import ENGINES
from distributed.core.engines.launchers import OURS, launcher_of, launchers_of_engines
from distributed.core.errors import ConfigError
from distributed.core.registry import load_target
from distributed.core.run_dir import RunDir

RUN_DIR = "DISTRIBUTED_RUN_DIR"  # set by our launchers: the run directory that all ranks share
ATTEMPT = "DISTRIBUTED_ATTEMPT"
LAUNCHER = "DISTRIBUTED_LAUNCHER"  # which of our launchers it was, where it is not the one of this machine
LAUNCHER_PID = "DISTRIBUTED_LAUNCHER_PID"  # the process whose end a rank does not outlive
CONTROL_FD = "DISTRIBUTED_CONTROL_FD"  # a rank's end of the line to its launcher
RESTARTS = "DISTRIBUTED_RESTARTS"  # worlds of this run before this one, since it was launched
LOCAL_PLACE = "DISTRIBUTED_LOCAL_PLACE"  # local rank / ranks of the node, where LOCAL_RANK names a GPU that ranks share
NOMINAL = "DISTRIBUTED_NOMINAL_RANKS"  # the world size that was set, for which the global batch is planned
TICKET = "DISTRIBUTED_TICKET"  # JSON: the job of a process that `fit` started, and where its modules are
OVERRIDES = "DISTRIBUTED_OVERRIDES"  # JSON: settings given where the run was launched; they win over the script's
TRIAL = "DISTRIBUTED_TRIAL"  # the file that says which trial of a search this process belongs to
STORE = "DISTRIBUTED_STORE"  # the address of the rendezvous store of our launcher's ranks
STORE_SECRET = "DISTRIBUTED_STORE_SECRET"  # what a rank shows there; others are refused
JOIN_TOKEN = "DISTRIBUTED_JOIN_TOKEN"  # the secret of a run over several nodes, or @ and a file that holds it
FIND = "DISTRIBUTED_FIND"  # what `fit` is to find by trials in place of training
NETWORK = "DISTRIBUTED_NETWORK"  # variables of this environment that network_profile has set
DRY_RUN = "DISTRIBUTED_DRY_RUN"  # ranks of a world that `fit` is to try out in this process alone
FAILURE_MARK = "\x1edistributed: this rank failed"  # in a rank's log; what follows is not echoed to the screen


@dataclass(frozen=True)
class StoreDoor:
    """Where the store of a run is, and the secret that opens it. Never printed, never written into a run's files."""

    address: str
    secret: str = field(repr=False)

    def to_environ(self) -> dict[str, str]:
        return {STORE: self.address, STORE_SECRET: self.secret}


@dataclass(frozen=True)
class WorkerEnv:
    """The rank of this process, its world, and the world's rendezvous."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    launcher: str = "none"  # "distributed", "torchrun", "srun", "mpirun", or that of an engine; "none": alone
    run_dir: str = ""
    attempt: int = 0
    restarts: int = 0
    nominal_ranks: int = 0  # 0: as many as there are
    store: StoreDoor | None = None  # where the ranks of our own launcher find each other

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_followed(self) -> bool:
        """Whether a launcher of ours started it, which shows the progress and answers for the end of the run."""
        return launcher_of(self.launcher).is_ours

    def to_environ(self) -> dict[str, str]:
        """The variables that our launchers set; a plain torch script understands them through `env://`."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            **self._as_torchrun(),
            RUN_DIR: self.run_dir,
            ATTEMPT: str(self.attempt),
            RESTARTS: str(self.restarts),
            NOMINAL: str(self.nominal_ranks),
            **{name: text for engine in ENGINES.entries.values() for name, text in engine.environ.items()},
        }

    def _as_torchrun(self) -> dict[str, str]:
        """What else torchrun sets, and scripts read: to see that they were launched, and for which time."""
        # Not TORCHELASTIC_USE_AGENT_STORE: torch would expect a store in the launcher.
        roles = {"ROLE_NAME": "default", "ROLE_RANK": str(self.rank), "ROLE_WORLD_SIZE": str(self.world_size)}
        if not self.run_dir:
            return roles
        return roles | {
            "TORCHELASTIC_RUN_ID": os.path.basename(os.path.abspath(self.run_dir)),
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "TORCHELASTIC_ERROR_FILE": os.path.abspath(RunDir(self.run_dir).attempt(self.attempt).error(self.rank)),
        }


def join_token_in_env() -> str:
    """What this process was given to join a run over several nodes with."""
    return os.environ.get(JOIN_TOKEN, "")


def worker_env(environ: Mapping[str, str] | None = None) -> WorkerEnv | None:
    """This process's place in a world that some launcher made, or None when it was started alone.

    >>> worker_env({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}).rank
    1
    >>> worker_env({}) is None
    True
    """
    env = os.environ if environ is None else environ
    for launcher in launchers_of_engines():
        if launcher.announces(env):
            found: WorkerEnv = load_target(launcher.reads_env)(env)
            return found
    if "RANK" in env and "WORLD_SIZE" in env:
        return replace(read_torch_env(env), store=take_door() if environ is None else _door_in(environ))
    if "SLURM_STEP_ID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _from_slurm(env)
    for rank, size, local_rank, local_size in _MPI_NAMES:
        if rank in env and int(env.get(size, "1")) > 1:
            return _from_mpi(env, rank, size, local_rank, local_size)
    return None


class _Taken:
    """What was taken out of this process's environment, so that its own children do not inherit it."""

    door: StoreDoor | None = None


def take_door() -> StoreDoor | None:
    if STORE in os.environ:
        _Taken.door = _door_in(os.environ)
        del os.environ[STORE], os.environ[STORE_SECRET]
    return _Taken.door


def _door_in(environ: Mapping[str, str]) -> StoreDoor | None:
    return StoreDoor(environ[STORE], environ[STORE_SECRET]) if STORE in environ else None


_MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def read_torch_env(env: Mapping[str, str]) -> WorkerEnv:
    """From the variables of torchrun, which our own launchers set too."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    world_size = int(env["WORLD_SIZE"])
    if missing and world_size > 1:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set, but {' and '.join(missing)} not",
            why="the rendezvous of the ranks needs all of them",
            do="start with `distributed train` or torchrun, which set all of them, or unset RANK and WORLD_SIZE",
        )
    local_rank, local_ranks = env.get("LOCAL_RANK", env["RANK"]), env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])
    if env.get(RUN_DIR) and LOCAL_PLACE in env:
        local_rank, _, local_ranks = env[LOCAL_PLACE].partition("/")
    return WorkerEnv(
        rank=int(env["RANK"]),
        local_rank=int(local_rank),
        world_size=world_size,
        local_world_size=int(local_ranks),
        node_rank=int(env.get("GROUP_RANK", "0")),
        num_nodes=int(env.get("GROUP_WORLD_SIZE", "1")),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(env.get("MASTER_PORT", "0")),
        launcher=env.get(LAUNCHER, OURS) if env.get(RUN_DIR) else "torchrun",
        run_dir=env.get(RUN_DIR, ""),
        attempt=int(env.get(ATTEMPT, env.get("TORCHELASTIC_RESTART_COUNT", "0"))),
        restarts=int(env.get(RESTARTS, "0")),
        nominal_ranks=int(env.get(NOMINAL, "0")),
    )


def _from_slurm(env: Mapping[str, str]) -> WorkerEnv:
    world_size = int(env["SLURM_STEP_NUM_TASKS"])
    num_nodes = int(env.get("SLURM_STEP_NUM_NODES", "1"))
    job = f"{env.get('SLURM_JOB_ID', '0')}.{env['SLURM_STEP_ID']}"
    return WorkerEnv(
        rank=int(env["SLURM_PROCID"]),
        local_rank=int(env["SLURM_LOCALID"]),
        world_size=world_size,
        local_world_size=_tasks_on_node(
            env.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)), int(env["SLURM_NODEID"])
        ),
        node_rank=int(env["SLURM_NODEID"]),
        num_nodes=num_nodes,
        master_addr=env.get(
            "MASTER_ADDR", _first_host(env.get("SLURM_STEP_NODELIST", "")) if num_nodes > 1 else "127.0.0.1"
        ),
        master_port=int(env.get("MASTER_PORT", _port_of(job))),
        launcher="srun",
    )


def _from_mpi(env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str) -> WorkerEnv:
    world_size, local_world_size = int(env[size]), int(env.get(local_size, env[size]))
    if local_world_size < world_size and "MASTER_ADDR" not in env:
        raise ConfigError(
            f"mpirun started {world_size} ranks on several hosts, but MASTER_ADDR is not set",
            why="MPI does not give the ranks the address of rank 0",
            do="mpirun -x MASTER_ADDR=HOST_OF_RANK_0 …",
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or str(os.getppid())
    return WorkerEnv(
        rank=int(env[rank]),
        local_rank=int(env.get(local_rank, env[rank])),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=int(env[rank]) // local_world_size,
        num_nodes=-(-world_size // local_world_size),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(env.get("MASTER_PORT", _port_of(job))),
        launcher="mpirun",
    )


def _port_of(job: str) -> int:
    """A port that every rank of a job derives alike, below the range that kernels hand out by themselves."""
    return 20000 + zlib.crc32(job.encode()) % 12000


def _first_host(nodelist: str) -> str:
    """
    >>> _first_host("gpu[07-09,12],login1"), _first_host("n1,n2"), _first_host("n3")
    ('gpu07', 'n1', 'n3')
    """
    match = re.match(r"([^,\[]+)(?:\[(\w+))?([^,\[\]]*)", nodelist)
    return (match.group(1) + (match.group(2) or "")) if match else "127.0.0.1"


def _tasks_on_node(tasks_per_node: str, node: int) -> int:
    """
    >>> _tasks_on_node("4(x2),1", 1), _tasks_on_node("4(x2),1", 2)
    (4, 1)
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        assert match, tasks_per_node
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts[node]


def launcher_pid() -> int | None:
    """The process of our launcher that started this rank. Taken out: this rank's own children do not read it."""
    pid = os.environ.pop(LAUNCHER_PID, "")
    return int(pid) if pid else None


def control_fd() -> int | None:
    """This rank's end of the line to its launcher. Taken out: it is not for this rank's own children."""
    fd = os.environ.pop(CONTROL_FD, "")
    return int(fd) if fd else None


def known_control_fd() -> int | None:
    """The same, left in the environment for the part of this process that takes it."""
    return int(os.environ[CONTROL_FD]) if CONTROL_FD in os.environ else None


def ticket_in_env() -> str:
    """What `fit` gave this process, as JSON. Taken out: it is not for this rank's own children."""
    return os.environ.pop(TICKET, "")


def overrides_in_env() -> str:
    """The settings that were given where this run was launched, as JSON."""
    return os.environ.get(OVERRIDES, "")


def trial_in_env() -> str:
    """The file of the trial that this process belongs to; "": it is no part of a search."""
    return os.environ.get(TRIAL, "")


def finding_in_env() -> str | None:
    """What `fit` is to find by trials in place of training: "learning_rate" or "batch_size"; None: it trains."""
    return os.environ.get(FIND) or None


def dry_ranks() -> int | None:
    """Of how many ranks this process shall try out a run; None: it is no dry run."""
    ranks = os.environ.get(DRY_RUN, "")
    if ranks and not (ranks.isdecimal() and int(ranks)):
        raise ConfigError(
            f"{DRY_RUN}={ranks!r}",
            why="the variable holds a number of ranks, which is at least 1",
            do=f"export {DRY_RUN}=8, or unset {DRY_RUN}",
        )
    return int(ranks) if ranks else None


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES, which hides devices from the count."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def gpu_names(visible: str | None, count: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the first `count` GPUs, for a process that is to see some of them; `visible` is
    what hides others from all.

    >>> gpu_names("4,5", 2), gpu_names(None, 2)
    (['4', '5'], ['0', '1'])
    """
    names = visible.split(",") if visible else []
    return names[:count] if len(names) >= count else [str(number) for number in range(count)]


def inherited_environ() -> dict[str, str]:
    """A copy of this process's environment, for the ranks that a launcher starts."""
    return dict(os.environ)


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # where users configure torch's GPU memory allocator


def user_cache(environ: Mapping[str, str]) -> Path:
    """Where this user's own files of ours are kept between runs.

    >>> user_cache({"XDG_CACHE_HOME": "/cache"}).as_posix()
    '/cache/distributed-training'
    """
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distributed-training"


def take_out(name: str) -> str:
    """A variable of this process, which its children do not inherit then; "": it is not set."""
    return os.environ.pop(name, "")


def announce(variables: Mapping[str, str]) -> None:
    """Set them in the environment of this process for good: for a library that reads them whenever it likes."""
    os.environ.update(variables)


def announce_unset(variables: Mapping[str, str]) -> None:
    """The same for those that are not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def withdraw(names: Iterable[str]) -> None:
    """Take variables out of the environment of this process, where they are there."""
    for name in names:
        os.environ.pop(name, None)


def become_environ(variables: Mapping[str, str]) -> None:
    """Let this process have these variables and no others."""
    os.environ.clear()
    os.environ.update(variables)


@contextmanager
def environ_with(variables: Mapping[str, str]) -> Iterator[None]:
    """While this lasts, these variables stand in the environment of this process: for a library that reads them.

    >>> with environ_with({"A_LIBRARY_READS": "1"}):
    ...     os.environ["A_LIBRARY_READS"]
    '1'
    >>> "A_LIBRARY_READS" in os.environ
    False
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
