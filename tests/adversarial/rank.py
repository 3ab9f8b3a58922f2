"""What a rank of a warm world does with a case: the front door of the library, as a script under a launcher uses it."""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from distributed import Trainer
from distributed.checkpoint.restore.reading import load
from distributed.core.errors import DistributedError
from distributed.core.protocol.failure import is_collateral
from tests.adversarial.case import Case, draw
from tests.adversarial.program import load_program
from tests.adversarial.reference import train_plainly


class Phase(NamedTuple):
    """What a world is asked to do: train a case, from a checkpoint if one is named."""

    seed: int
    folder: str
    resume: str = ""


class Answer(NamedTuple):
    """What came of it on one rank."""

    kind: str  # "trained", "refused" or "failed"
    value: Any = None  # what was trained
    error: str = ""  # the type and the message
    where: str = ""  # the traceback
    is_collateral: bool = False  # a peer was lost


def serve_rank(connection: Connection, rank: int, ranks: int, port: int, log: str) -> None:
    """The main function of a rank's process: case after case, until it is told to end."""
    _settle(log)
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    while (phase := _next(connection)) is not None:
        connection.send_bytes(pickle.dumps(_answer(lambda phase=phase: train(phase))))
    os._exit(0)  # without the end of libraries that wait for peers


def serve_reference(connection: Connection, log: str) -> None:
    """The main function of the process that trains plainly."""
    _settle(log)
    while (asked := _next(connection)) is not None:
        seed, noise = asked
        connection.send_bytes(pickle.dumps(_answer(lambda seed=seed, noise=noise: train_reference(seed, noise))))
    os._exit(0)


def train(phase: Phase) -> dict[str, Any]:
    """One `fit` of this rank."""
    case = draw(phase.seed)
    strategy = case.again if phase.resume and case.again is not None else case.strategy
    settings = case.settings_for(strategy)
    if case.again is not None:
        settings |= {"checkpoint_frequency": f"{case.resume_step} steps"}
    if phase.resume:
        settings |= {"resume_from_checkpoint": phase.resume}
    program = load_program(case)
    trainer, data = make_trainer(case, program, settings | {"run_dir": phase.folder, "progress": False})
    history = trainer.fit(program["make_loader"](data), *([program["make_data"]()] if case.evaluates else []))
    found = {"loss": history["loss"], "val_loss": history["val_loss"], "steps": history.steps}
    if strategy.gives_back:
        found["model"] = trainer.model.state_dict()
    if trainer.is_main:
        saved = load(history.checkpoint, ranks=()).shared
        rates = [float(group["lr"]) for group in saved["optimizer"]["param_groups"]]
        found |= {"saved": saved["model"], "optimizer": saved["optimizer"]["state"], "rates": rates}
    return found


def make_trainer(case: Case, program: dict[str, Any], settings: dict[str, Any]) -> tuple[Trainer, Any]:
    """As a user's script does."""
    model = program["make_model"]()
    optimizer = program["make_optimizer"] if case.is_called else program["make_optimizer"](model)
    scheduler = None
    if program["make_scheduler"](torch.optim.SGD(model.parameters())) is not None:
        scheduler = program["make_scheduler"] if case.is_called else program["make_scheduler"](optimizer)
    given = {"loss_fn": program["make_loss"](), "optimizer": optimizer, "scheduler": scheduler}
    return Trainer(model, **given, device="cpu", **settings), program["make_data"]()


def train_reference(seed: int, noise: float) -> dict[str, Any]:
    case = draw(seed)
    return train_plainly(
        load_program(case),
        case.settings,
        micro_batch=case.micro_batch,
        evaluates=case.evaluates,
        is_called=case.is_called,
        noise=noise,
    )


def _settle(log: str) -> None:
    os.setsid()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    faulthandler.register(signal.SIGUSR2, file=sys.__stderr__)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def _next(connection: Connection) -> Any:
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        return None


def _answer(work: Any) -> Answer:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    try:
        return Answer("trained", work())
    except Exception as failed:  # noqa: BLE001 - an answer of any kind is what the case is about
        told = f"{type(failed).__name__}: {failed}"
        lost = is_collateral(failed)
        is_named = isinstance(failed, DistributedError) and not lost
        return Answer("refused" if is_named else "failed", None, told, traceback.format_exc(), lost)
