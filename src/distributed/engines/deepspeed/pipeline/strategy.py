"""DeepSpeedPipeline: a deepspeed.pipe.PipelineModule, trained by DeepSpeed's PipelineEngine.

Each rank has the layers of its stage alone, under their places among all layers ("3.weight"). So its checkpoints are
those of an nn.Sequential of the same layers, and of any number of stages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.engines.deepspeed.engine import DeepSpeedEngine
from distributed.engines.deepspeed.pipeline.engine import EnginePipeline
from distributed.engines.deepspeed.process import complete, deepspeed_environ, device_index
from distributed.runtime.session import Session
from distributed.strategies.base import StepTask, Strategy
from distributed.strategies.checks.elementwise import refuse_closure, refuse_step_hooks
from distributed.strategies.checks.sharded_models import refuse_extra_state
from distributed.strategies.data_parallel.used_parameters import UsedParameters
from distributed.strategies.mesh_groups import MeshGroups
from distributed.strategies.pipelined import Pipelined
from distributed.strategies.placement import Layout
from distributed.strategies.sharded_model import ShardedModel

_TORCH = "torch."


class DeepSpeedPipeline(Pipelined):
    """The step of ranks that each hold a stage; forward and backward are DeepSpeed's."""

    def check(self, task: StepTask) -> None:
        _check_module(task.model)
        _check_steps(task)

    def keep_copies(self, labels: Iterable[str]) -> None:
        kept = list(labels)
        if kept:
            raise _not_on_stages(f"the callback {kept[0]}, which averages weights,")
        super().keep_copies(kept)

    def parameters_changed(self) -> None:
        raise _not_on_stages("a callback that freezes parameters")

    def setup(self, task: StepTask, session: Session) -> None:
        self.check(task)
        super().setup(_with_loss(task), session)
        plan = self._plan
        assert isinstance(self._shards, DeepSpeedStages)
        self._until_closed.enter_context(deepspeed_environ(session.device.type, device_index(session)))
        config = complete(plan)  # of one micro-batch: how many there are is said step by step
        config |= {"gradient_accumulation_steps": 1}
        config["train_batch_size"] = config["train_micro_batch_size_per_gpu"] * plan.mesh.data_ranks
        engine = self._shards.stage.start(config, self.optimizer, session.device.type)
        _check_place(engine.grid, plan, session.rank)

    def _prepare_model(self, task: StepTask) -> None:
        refuse_extra_state(self.module)
        made = task.make_optimizer(self.module, self._plan)
        refuse_closure(made, "a PipelineModule of DeepSpeed")
        refuse_step_hooks(made, "a PipelineModule of DeepSpeed")
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self._shards = DeepSpeedStages(self.module, self._plan, self._session)
        self._copied = set()
        self._made, self._groups = (
            made,
            self._all_groups([[names[id(p)] for p in g["params"]] for g in made.param_groups]),
        )
        self._until_closed.callback(self._shards.close)
        task.move_loss_to(self._session.device)

    def _all_groups(self, own: list[list[str]]) -> list[list[str]]:
        """The optimizer's groups, with the names of all stages."""
        found = [json.loads(text) for text in self._session.gather_texts("parameters of other stages", json.dumps(own))]
        if len({len(groups) for groups in found}) > 1:
            raise TaskError(
                "the optimizer has another number of parameter groups on another stage",
                why="the groups of all stages are saved as one optimizer's",
                do="make as many groups on every stage, also empty ones",
            )
        return [list(dict.fromkeys(name for groups in found for name in groups[at])) for at in range(len(own))]


class DeepSpeedStages(ShardedModel):
    """The layers of this rank's stage, which DeepSpeed has made there, among those of all stages."""

    def __init__(self, module: Any, plan: Plan, session: Session) -> None:
        spec = plan.mesh
        self.module, self._device, self._session, self._kind = module, session.device, session, plan.shard.kind
        self.is_fsdp, self.low, self.tensor, self.context = False, None, None, None
        self.groups = MeshGroups(spec, session.rank, session.device.type)
        self.stage = EnginePipeline(module)
        self.layout = Layout(module)
        self.names = self._find_names()
        self.pipeline = self.stage  # type: ignore[assignment]  # has what a step uses of ours
        place = self.groups.place
        self.owns_metrics = place["pp"] == spec.pp - 1
        self._norm, self._shared, self._sharded_use = None, None, None
        self._stepped = frozenset()
        self._used = UsedParameters(self.parameters, self._agree_on_use, every_step=False, alike=[], rank=session.rank)

    def _find_names(self) -> list[str]:
        """What is saved of all stages, in the order of the layers."""
        tensors = self.module.state_dict(keep_vars=True)
        mine = {name: [list(t.shape), str(t.dtype).removeprefix(_TORCH)] for name, t in tensors.items()}
        found: dict[str, Any] = {}
        for text in self._session.gather_texts("tensors of other stages", json.dumps(mine)):
            found |= json.loads(text)
        for name, (shape, dtype) in found.items():
            if name not in mine:
                self.layout.add_elsewhere(name, tuple(shape), getattr(torch, dtype))
        return list(found)

    def finish_gradients(self) -> None:
        """Does nothing: the engine has reduced them over the data ranks."""

    def reshard(self) -> None:
        """Does nothing: no parameter is gathered."""

    def close(self) -> None:
        self.stage.close()
        self.groups.close()


def _with_loss(task: StepTask) -> StepTask:
    """With the loss of the module, unless the trainer was given one."""
    own, given = task.model.loss_fn, task.loss_fn  # type: ignore[union-attr,attr-defined]
    if own is not None and given is not None and own is not given:
        raise TaskError(
            "there are two losses: the trainer's loss_fn, and that of the PipelineModule",
            why="only one of them can be trained with",
            do="leave one of them out",
        )
    return task if own is None else replace(task, loss_fn=own)  # type: ignore[type-var]


def _check_module(module: Any) -> None:
    """What DeepSpeed's pipelines can and is not trained here."""
    if len(module.tied_modules):
        raise TaskError(
            f"the layer {next(iter(module.tied_modules))!r} of the PipelineModule is tied (TiedLayerSpec)",
            why="one tensor would be trained on several stages, and saved under several names",
            do="untie it, or give the layers as a model of torch's: nn.Sequential(…), pipeline_parallel=2",
        )
    if module.get_additional_losses() is not None:
        raise TaskError(
            "the PipelineModule has additional losses",
            why="DeepSpeed reports them beside the loss, and does not train with them",
            do="add them to the loss, or report them as metrics=",
        )


def _check_steps(task: StepTask) -> None:
    """DeepSpeed's engine runs the layers and the loss, and calls no step of the user's."""
    if task.has_own_step or task.has_own_validation:
        raise _not_on_stages("a training_step or validation_step of your own")


def _not_on_stages(what: str) -> TaskError:
    return TaskError(
        f"{what} with a PipelineModule of DeepSpeed",
        why="DeepSpeed's engine runs the layers of a stage, and no rank has the others",
        do="leave it out, or give the layers as a model of torch's: nn.Sequential(…), pipeline_parallel=2",
    )


def _check_place(grid: Any, plan: Plan, rank: int) -> None:
    """The mesh says which samples a rank reads, and DeepSpeed's topology which stage it is."""
    place = plan.mesh.coordinates(rank)
    theirs = (grid.get_stage_id(), grid.get_data_parallel_id(), grid.get_slice_parallel_world_size())
    if theirs != (place["pp"], place["dp_replicate"], 1):
        raise TaskError(
            f"the PipelineModule's topology has rank {rank} at stage {theirs[0]}, data rank {theirs[1]}",
            why=f"by the mesh of this run it is at stage {place['pp']}, data rank {place['dp_replicate']}",
            do="give num_stages in place of a topology: stages are the outer axis, and there is no other beside data",
        )


def strategy_of(plan: Plan) -> Strategy:
    """Which of DeepSpeed's engines trains a plan: its ZeRO, or its pipeline."""
    return DeepSpeedPipeline(plan) if plan.mesh.pp > 1 else DeepSpeedEngine(plan)
