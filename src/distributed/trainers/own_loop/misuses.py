"""Errors of a loop of the user's own whose calls come where a run has no place for them."""

from __future__ import annotations

from distributed.core.errors import TaskError

_LOOP = "for epoch in run.epochs(): for batch in loader: …"


def prepared_twice() -> TaskError:
    return TaskError(
        "prepare was called twice",
        why="a run has one plan, made of all that is prepared",
        do="run.prepare(model, optimizer, train_loader, val_loader)",
    )


def not_prepared() -> TaskError:
    return TaskError(
        "the run has no model yet",
        why="its device, its ranks and its plan are made for what is prepared",
        do="call run.prepare(model, optimizer, train_loader) first",
    )


def tracked_late() -> TaskError:
    return TaskError(
        "track was called after the first epoch had begun",
        why="what a run resumes from was loaded before",
        do="call run.track before run.epochs()",
    )


def finished_early() -> TaskError:
    return TaskError("run.finish before run.epochs", why="nothing was trained", do="leave it out")


def outside_of_epochs() -> TaskError:
    return TaskError(
        "the training data was asked for outside of run.epochs()", why="a pass over it is an epoch of the run", do=_LOOP
    )


def outside_of_pass(call: str) -> TaskError:
    return TaskError(
        f"{call} outside of a pass over the training data",
        why="a step belongs to the batch that the prepared DataLoader has yielded",
        do=_LOOP,
    )


def second_pass() -> TaskError:
    return TaskError(
        "a second pass over the training data in one epoch",
        why="each sample is trained on once an epoch, so nothing is left of it",
        do="give run.prepare one more DataLoader of this data to look at it, and epochs= more to train on it longer",
    )


def backward_after_step() -> TaskError:
    return TaskError(
        "run.backward after the batch's run.step",
        why="its gradients would be added to those of the next step",
        do="call run.backward before run.step",
    )


def backward_in_evaluation() -> TaskError:
    return TaskError(
        "run.backward within a pass over evaluation data",
        why="that is shared among the ranks in batches of its own, which are no parts of a step's batch",
        do="train on one DataLoader, of both datasets together: torch.utils.data.StackDataset(labelled, more)",
    )


def two_evaluations() -> TaskError:
    return TaskError(
        "two passes over evaluation data at a time",
        why="each rank has its own share of either, so their batches do not belong together",
        do="evaluate one after the other, or prepare one DataLoader of torch.utils.data.StackDataset(one, other)",
    )


def step_before(call: str) -> TaskError:
    return TaskError(f"run.step before {call}", why="a step has the gradients of its batches", do=f"call {call} first")


def unknown_optimizer(optimizer: object) -> TaskError:
    return TaskError(
        f"run.step got a {type(optimizer).__name__} that was not prepared",
        why="its parameters are not known to this run",
        do="pass it to run.prepare(model, optimizer, …)",
    )


def missing_call(call: str) -> TaskError:
    return TaskError(
        f"the loop asked for the next batch, and did not call {call} for the last one",
        why="every rank takes part in every step",
        do=f"call {call} for every batch; break ends the epoch",
    )
