"""The optimizer of a task: the user's, what a function of the user's makes, or the one that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from distributed.core.choices import OptimizerName
from distributed.core.errors import Problem, TaskError, first_of
from distributed.core.plan import Plan
from distributed.optimizers import LAMB, LARS
from distributed.strategies.joint_optimizer import JointOptimizer, OptimizerSetup
from distributed.train.given.schedulers import check_scheduler

OptimizerFactory = Callable[..., torch.optim.Optimizer]
_OPTIMIZERS: dict[OptimizerName, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "lars": LARS,
    "lamb": LAMB,
}
_RETURN = "return an optimizer, or a dict of names and optimizers (or distributed.OptimizerSetup)"


def by_plan(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    wanted = plan.optimizer
    options = {"weight_decay": wanted.weight_decay, "momentum": wanted.momentum}
    given = {name: value for name, value in options.items() if value is not None}
    return _OPTIMIZERS[wanted.name](_trained(model), lr=wanted.learning_rate, **given)


def by_factory(make: OptimizerFactory, model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """What the user's function makes of the trained parameters, with the rates that `lr_scaling` asks for."""
    made = make(_trained(model))
    if not isinstance(made, torch.optim.Optimizer):
        raise _no_optimizer("the function passed as optimizer", made)
    check_optimizer(made, model)
    return scaled(made, plan)


def taken_over(optimizer: torch.optim.Optimizer, plan: Plan, *, has_scheduler: bool) -> torch.optim.Optimizer:
    """The user's instance, with the state of an earlier training where its parameters are now."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())
    if plan.optimizer.lr_factor == 1.0:
        return optimizer
    moves = has_scheduler or not plan.schedule.is_constant  # then it is not the user who did
    for group in optimizer.param_groups:  # scaled once, unless the user has set another rate since
        if "scaled_lr" not in group or (group["lr"] != group["scaled_lr"] and not moves):
            group["unscaled_lr"] = group["lr"]
        group["lr"] = group["scaled_lr"] = group["unscaled_lr"] * plan.optimizer.lr_factor
    return optimizer


def scaled(optimizer: torch.optim.Optimizer, plan: Plan) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * plan.optimizer.lr_factor
    return optimizer


def read_setups(made: Any) -> dict[str, OptimizerSetup]:
    """What `configure_optimizers` returned, by name; a single optimizer has the name "".

    >>> list(read_setups(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)))
    ['']
    """
    if isinstance(made, torch.optim.Optimizer | OptimizerSetup):
        made = {"": made}
    elif not isinstance(made, Mapping) or not made:
        raise _no_optimizer("configure_optimizers", made)
    setups = {}
    for name, given in made.items():
        setup = OptimizerSetup(given) if isinstance(given, torch.optim.Optimizer) else given
        if not isinstance(setup, OptimizerSetup) or not isinstance(setup.optimizer, torch.optim.Optimizer):
            raise _no_optimizer(f"configure_optimizers, under {name!r},", getattr(setup, "optimizer", setup))
        if name and not (isinstance(name, str) and name.isidentifier()):
            raise TaskError(
                f"an optimizer cannot be called {name!r}",
                why="its name is a part of the names of metrics, as in loss_generator",
                do="use letters, digits and underscores",
            )
        setups[name] = setup
    problems = [problem for name, setup in setups.items() for problem in _of_setup(name, setup)]
    if problems:
        raise TaskError(problems)
    return setups


def configured(
    made: Any, model: nn.Module, plan: Plan, *, has_phases: bool, is_manual: bool, has_scheduler: bool
) -> tuple[torch.optim.Optimizer, dict[str, OptimizerSetup]]:
    """What `configure_optimizers` returned, as one optimizer, and by name; a single one has the name ""."""
    setups = read_setups(made)
    problems = list(_of_use(setups, has_phases=has_phases, is_manual=is_manual, has_scheduler=has_scheduler))
    if problems:
        raise TaskError(problems)
    if (single := setups.get("")) is not None:
        check_optimizer(single.optimizer, model)
        counts_steps = single.scheduler is not None and single.scheduler_interval == "step"
        has_own = is_manual and (counts_steps or single.gradient_clipping is not None)
        return scaled(JointOptimizer(setups) if has_own else single.optimizer, plan), setups
    return _joined(setups, model, plan), setups


def _of_use(
    setups: Mapping[str, OptimizerSetup], *, has_phases: bool, is_manual: bool, has_scheduler: bool
) -> Iterator[Problem]:
    """Problems of what the optimizers are used for."""
    is_single, own = "" in setups, [setup for setup in setups.values() if setup.scheduler is not None]
    if has_phases and is_single:
        yield Problem(
            "training_step takes the name of an optimizer, and configure_optimizers returned one without a name",
            why="it is called once for each optimizer",
            do="return {'name': optimizer, …} from configure_optimizers, or leave the argument out",
        )
    if has_scheduler and (own or not is_single):
        yield Problem(
            "a scheduler is passed, and " + ("an optimizer has its own" if own else "there are several optimizers"),
            why="it is not known whose learning rate the scheduler sets",
            do="give each its scheduler: distributed.OptimizerSetup(optimizer, scheduler=…)",
        )
    odd = [name for name, setup in setups.items() if setup.every != 1]
    if odd and not has_phases:
        yield Problem(
            f"every={setups[odd[0]].every} of {odd[0] or 'the optimizer'!r}, which has no phase of its own",
            why="a manual step says itself when an optimizer steps" if is_manual else "all step by one loss",
            do="leave every out, or let training_step take (model, batch, optimizer)",
        )
    elif odd and all(setup.every != 1 for setup in setups.values()):
        yield Problem(
            f"every={', '.join(str(setup.every) for setup in setups.values())}: in the first step no optimizer steps",
            why="each step of a run is a step of some optimizer",
            do="leave every=1 for one of them",
        )
    clipped = [name for name, setup in setups.items() if setup.gradient_clipping is not None]
    if clipped and not has_phases and not is_manual:
        yield Problem(
            f"gradient_clipping of {clipped[0] or 'the optimizer'!r}, whose gradient is that of one loss for all",
            why="what is clipped is the whole gradient",
            do="set gradient_clipping of the run, or let training_step take (model, batch, optimizer)",
        )


def _joined(setups: Mapping[str, OptimizerSetup], model: nn.Module, plan: Plan) -> JointOptimizer:
    """Several optimizers as one; together they have every trained parameter of the model."""
    for setup in setups.values():
        check_optimizer(setup.optimizer, model)
    problems = []
    held = {id(p) for setup in setups.values() for group in setup.optimizer.param_groups for p in group["params"]}
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if left:
        problems.append(
            Problem(
                f"parameters in no optimizer: {first_of(left)}",
                why=f"they require a gradient, and neither {' nor '.join(setups)} would ever step them",
                do="give them to an optimizer, or requires_grad_(False)",
            )
        )
    for name, setup in setups.items():
        if not any(p.requires_grad for group in setup.optimizer.param_groups for p in group["params"]):
            problems.append(
                Problem(
                    f"the optimizer {name!r} has no parameter that requires a gradient",
                    why="the steps of this optimizer would change nothing",
                    do="leave it out, or requires_grad_(True)",
                )
            )
    if problems:
        raise TaskError(problems)
    joint = JointOptimizer(setups)
    scaled(joint, plan)
    return joint


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    own = {id(p): name for name, p in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in held if id(p) not in own]
    if foreign:
        shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:3])
        raise TaskError(
            f"the optimizer is not over this model's parameters: {len(foreign)} of its {len(held)} are not ({shapes})",
            why="the optimizer would train tensors that the model does not use, as after the model was copied",
            do="make it of this model: torch.optim.AdamW(model.parameters(), …), or pass a function of the parameters",
        )


def _of_setup(name: str, setup: OptimizerSetup) -> Iterator[Problem]:
    of = f"of {name!r}" if name else "of the optimizer"
    if not isinstance(setup.every, int) or setup.every < 1:
        yield Problem(
            f"every={setup.every!r} {of}",
            why="every is a number of steps, at least 1",
            do="every=2: in each second step",
        )
    clipping = setup.gradient_clipping
    if clipping is not None and not clipping > 0:
        yield Problem(f"gradient_clipping={clipping!r} {of}", why="it is the largest norm of a gradient", do="1.0, say")
    if setup.scheduler_interval not in ("epoch", "step"):
        yield Problem(f"scheduler_interval={setup.scheduler_interval!r} {of}", do="it is 'epoch' or 'step'")
    owner = getattr(setup.scheduler, "optimizer", setup.optimizer)
    if isinstance(owner, torch.optim.Optimizer) and owner is not setup.optimizer:
        yield Problem(
            f"the scheduler {of} belongs to another optimizer",
            why="it would change the learning rates of an optimizer that is not stepped with it",
            do="make it of this one, or pass a function: scheduler=lambda optimizer: …",
        )
    check_scheduler(setup.scheduler)


def _no_optimizer(where: str, found: Any) -> TaskError:
    kind = "nothing" if found is None else f"a {type(found).__name__}"
    return TaskError(f"{where} returned {kind}", why="the trainer steps optimizers of torch", do=_RETURN)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
