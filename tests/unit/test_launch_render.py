"""What this machine's launcher would start, as text: compared whole, the same each time, without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distributed.launch.local import LocalLauncher
from distributed.launch.node.command import ENTRY
from distributed.launch.request import LaunchRequest, Rendered
from distributed.launch.supervise.supervisor import RestartLimits

OWN_INTERFACE = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}  # so that Linux and macOS have one text


def rendered(**changes: Any) -> Rendered:
    request = LaunchRequest(("train.py", "--x", "a b"), "runs/1", **({"ranks_per_node": 2} | changes))
    return LocalLauncher(environ=OWN_INTERFACE, python="python").render(request, RestartLimits())


def test_rendered_run_of_one_node_is_the_exact_commands() -> None:
    text = rendered(threads_per_rank=3, env={"GREETING": "good day", "HF_TOKEN": "hf_123"})
    errors = Path("runs/1/attempts/0").absolute()
    rank = (
        "[r{0}] RANK={0} LOCAL_RANK={0} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1"
        " MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ROLE_NAME=default ROLE_RANK={0} ROLE_WORLD_SIZE=2"
        f" TORCHELASTIC_RUN_ID=1 TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_ERROR_FILE={errors}/error-{{0}}.json"
        " DISTRIBUTED_RUN_DIR=runs/1 DISTRIBUTED_ATTEMPT=0"
        " DISTRIBUTED_RESTARTS=0 DISTRIBUTED_NOMINAL_RANKS=2 HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo"
        " PYTHONUNBUFFERED=1 TORCH_FR_BUFFER_SIZE=256 OMP_NUM_THREADS=3 CUDA_VISIBLE_DEVICES=''"
        f" TORCHELASTIC_MAX_RESTARTS=0 GREETING='good day' HF_TOKEN='***' python {ENTRY} rank train.py --x 'a b'"
        " > runs/1/attempts/0/rank-{0}.log 2>&1"
    )
    assert text.notes == (
        "MASTER_PORT is a free port that is chosen at the start; 29500 stands for it here",
        "run directory runs/1",
    )
    assert text.commands == (rank.format(0), rank.format(1))
    assert str(text) == "\n".join((*text.notes, *text.commands))


def test_rendered_node_of_several_has_its_own_ranks() -> None:
    text = rendered(num_nodes=3, node_rank=1, master_addr="n0", master_port=4000)
    assert text.notes[0].startswith("rendezvous of the nodes at n0:4000; shown is node 1;")
    assert [line.split()[1] for line in text.commands] == ["RANK=2", "RANK=3"]
    assert all(" MASTER_PORT=4000 " in line and " WORLD_SIZE=6 " in line for line in text.commands)
