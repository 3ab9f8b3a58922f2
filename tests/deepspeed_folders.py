"""Folders as DeepSpeed alone writes them, on two processes, and beside each what its engine held when it saved.

Run as a script, with the folder to write into: it needs nothing of this library.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

RANKS, GLOBAL_BATCH, STEPS, MORE_STEPS = 2, 8, 3, 2
# One group of parameters where training goes on from it, else two with different options.
FOLDERS: dict[str, dict[str, Any]] = {
    "stage1": {"zero_optimization": {"stage": 1}},
    "stage2": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "stage3": {"zero_optimization": {"stage": 3, "sub_group_size": 30}},
    "stage1-bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "stage2-bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "stage3-bf16": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
    "stage1-bf16-sums": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "stage0": {"zero_optimization": {"stage": 0}},
}
UNIVERSAL = ("stage1", "stage3-bf16")
TELLING = ("stage1", "stage3", "stage3-bf16")  # whose engines give the optimizer's state of every parameter


class Model(nn.Module):
    """Odd sizes, a tied weight, a frozen one, and buffers of which one is not saved."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.middle = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.weight.requires_grad_(False)
        self.single = nn.Parameter(torch.tensor([0.5]))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(torch.tanh(self.middle(self.embed(x))) * self.single)
        return self.head(hidden * self.scale.to(hidden.dtype)).float()


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 7, (GLOBAL_BATCH * (STEPS + MORE_STEPS),), generator=generator)
    return TensorDataset(ids, (ids * 3 + 1) % 7)


def make_groups(model: nn.Module, groups: int) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if groups == 1:
        return [{"params": trained}]
    large = [parameter for parameter in trained if parameter.dim() > 1]
    small = [parameter for parameter in trained if parameter.dim() == 1]
    return [{"params": large, "weight_decay": 0.1, "lr": 2e-3}, {"params": small, "weight_decay": 0.0}]


def write_all(rank: int, out: Path, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, which takes a minute
    deepspeed.init_distributed("gloo")
    for name, config in FOLDERS.items():
        _write(deepspeed, name, config, out, rank)
    torch.distributed.barrier()
    if rank == 0:
        for name in UNIVERSAL:
            _convert(out / name, out / f"{name}-universal")
        _damage(out)
    torch.distributed.barrier()


def _write(deepspeed: Any, name: str, config: dict[str, Any], out: Path, rank: int) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(make_groups(model, 2 if "bf16" in name else 1), lr=1e-2)
    share = GLOBAL_BATCH // RANKS
    common = {
        "train_micro_batch_size_per_gpu": share,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=common | config)
    x, y = make_data().tensors

    def train(steps: range) -> None:
        for step in steps:
            mine = slice(step * GLOBAL_BATCH + rank * share, step * GLOBAL_BATCH + (rank + 1) * share)
            engine.backward(nn.functional.cross_entropy(engine(x[mine]), y[mine]))
            engine.step()

    train(range(STEPS))
    engine.save_checkpoint(str(out / name), client_state={"mine": argparse.Namespace(a=1)})
    held = _held(deepspeed, model, name)
    train(range(STEPS, STEPS + MORE_STEPS))
    after = _held(deepspeed, model, name)
    if rank == 0:
        from safetensors.torch import save_file

        save_file(held, out / f"{name}.safetensors")
        save_file(after, out / f"{name}-after.safetensors")


def _held(deepspeed: Any, model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Whole tensors by their names, as the engine itself gives them; the optimizer's under exp_avg/…

    With round_robin_gradients it (0.19) gives one parameter's elements for another's, and in bf16 it finds no state of
    some parameters unless in stage 3: there the model's own parameters are taken, and no state.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    zero = FOLDERS[name]["zero_optimization"]
    stage, takes_own = zero["stage"], zero["stage"] == 0 or zero.get("round_robin_gradients")
    found = {f"model/{key}": buffer.clone() for key, buffer in model.named_buffers() if key != "passing"}
    for key, parameter in model.named_parameters():
        if takes_own or not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                found[f"model/{key}"] = parameter.detach().float().clone()
        else:
            found[f"model/{key}"] = safe_get_full_fp32_param(parameter).detach().clone()
        for state in ("exp_avg", "exp_avg_sq") if name in TELLING and parameter.requires_grad else ():
            whole = safe_get_full_optimizer_state(parameter, state)
            found[f"{state}/{key}"] = whole.detach().clone().reshape(found[f"model/{key}"].shape)
    return found


def _convert(source: Path, target: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    main(
        argparse.Namespace(
            input_folder=str(source / f"global_step{STEPS}"),
            output_folder=str(target / f"global_step{STEPS}"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def _damage(out: Path) -> None:
    """Copies with something wrong that only a process with DeepSpeed's classes can put there."""

    def of_three_ranks(state: dict[str, Any]) -> None:
        count = state["partition_count"]
        state["partition_count"] = [3] * len(count) if isinstance(count, list) else 3

    def cut_short(state: dict[str, Any]) -> None:
        key = "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"
        state[key] = [part.detach()[:-3].clone() for part in state[key]]

    def of_another_step(state: dict[str, Any]) -> None:
        base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
        for values in base["state"].values():
            values["step"] = values["step"] + 1

    changes: dict[str, Callable[[dict[str, Any]], None]] = {
        "world": of_three_ranks,
        "short": cut_short,
        "step": of_another_step,
    }
    for name in ("stage2", "stage3"):
        for kind, change in changes.items():
            shutil.copytree(out / name, out / f"{name}-bad-{kind}")
            path = out / f"{name}-bad-{kind}" / f"global_step{STEPS}" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
            tree = torch.load(path, weights_only=False)
            change(tree["optimizer_state_dict"])
            torch.save(tree, path)


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        free_port = free.getsockname()[1]
    torch.multiprocessing.spawn(write_all, args=(Path(sys.argv[1]), free_port), nprocs=RANKS)
