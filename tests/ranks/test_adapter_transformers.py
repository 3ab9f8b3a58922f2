"""hf_trainer trains to the numbers of the transformers Trainer, and on two ranks to those of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from distributed.adapters import hf_trainer
from distributed.testing import run_ranks
from tests.hf_models import Rows, arguments, bert, gpt, measure

CASES: dict[str, dict[str, Any]] = {  # arguments; all shuffle, as transformers does
    "classifier": {"weight_decay": 0.1, "warmup_steps": 3, "eval_strategy": "epoch"},
    "evaluated by steps": {"eval_strategy": "steps", "eval_steps": 4, "learning_rate": 0.01},
    "language": {
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "cosine",
        "max_steps": 5,
        "max_grad_norm": 0.3,
        "adam_epsilon": 1e-5,  # else Adam makes steps of the rounding in a key's bias, whose gradient is zero
    },
    "smoothed": {"label_smoothing_factor": 0.1, "optim": "sgd", "lr_scheduler_type": "constant", "data_seed": 7},
}


def parts(case: str) -> dict[str, Any]:
    tokens = case == "language"
    found: dict[str, Any] = {"model": gpt() if tokens else bert(), "train_dataset": Rows(44, tokens=tokens)}
    if case in ("classifier", "evaluated by steps"):
        found |= {"eval_dataset": Rows(21, seed=1), "compute_metrics": measure}
    return found


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([value.double().flatten() for value in model.state_dict().values()])


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Of the steps and evaluations of a log, those that both write."""
    kept = ("loss", "grad_norm", "epoch", "step", "eval_loss", "eval_hits", "eval_first", "eval_last")
    return [{name: row[name] for name in kept if name in row} for row in rows if "loss" in row or "eval_loss" in row]


@pytest.mark.parametrize("case", CASES)
def test_hf_trainer_trains_to_numbers_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = transformers.Trainer(args=arguments(tmp_path / "theirs", **CASES[case]), **parts(case))
    expected = theirs.train()
    evaluated = theirs.evaluate(Rows(21, tokens=case == "language", seed=1))
    ours = hf_trainer(
        args=arguments(tmp_path / "ours", **CASES[case]), num_gpus=1, run_dir=tmp_path / "run", **parts(case)
    )
    found = ours.train()
    assert torch.allclose(weights(ours.model), weights(theirs.model), rtol=0, atol=1e-6)
    assert (found.global_step, found.training_loss) == (expected.global_step, pytest.approx(expected.training_loss))
    logged, told = numbers(ours.state.log_history), numbers(theirs.state.log_history)[:-1]  # without the evaluation
    assert logged == [pytest.approx(row, abs=2e-6) for row in told]
    again = ours.evaluate(Rows(21, tokens=case == "language", seed=1))
    if case == "language":  # theirs is a mean of means of batches
        labels = Rows(21, tokens=True, seed=1).labels
        loss = theirs.model(Rows(21, tokens=True, seed=1).ids, labels=labels).loss.detach()
        assert again["eval_loss"] == pytest.approx(float(loss), abs=1e-5)
    else:
        shared = {name: evaluated[name] for name in again.keys() & evaluated.keys()}
        assert {"eval_loss"} <= shared.keys()
        assert {name: again[name] for name in shared} == pytest.approx(shared, abs=1e-5)


def train_all(folder: str, ranks: int) -> dict[str, Any]:
    found = {}
    for case, given in CASES.items():
        args = arguments(f"{folder}/{case}-{ranks}", **given, per_device_train_batch_size=8 // ranks)
        trainer = hf_trainer(args=args, run_dir=f"{folder}/run-{case}-{ranks}", **parts(case))
        trainer.train()
        found[case] = weights(trainer.model), numbers(trainer.state.log_history)
    return found


def test_hf_trainer_on_two_ranks_trains_to_numbers_of_one(tmp_path: Path) -> None:
    alone = train_all(str(tmp_path), 1)
    for found in run_ranks(train_all, 2, str(tmp_path), 2):
        for case, (trained, rows) in found.items():
            assert torch.allclose(trained, alone[case][0], rtol=0, atol=2e-6), case
            assert rows == [pytest.approx(row, abs=2e-5) for row in alone[case][1]], case
