"""Layers that take the samples of a batch together, and those that change their parameters: as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import batch_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.core.errors import TaskError
from distributed.data.order import shuffled_order
from distributed.strategies.checks.forward_changes import ForwardChanges
from distributed.strategies.data_parallel.whole_batch import NoWholeBatch, PartsOfBatch, WholeBatch
from distributed.testing import run_ranks
from tests.meshes import joined

WIDTH, CLOSE = 4, 1e-12
SHARES = [(3, 2), (1, 4), (5, 0)]  # of the two ranks, in one step after the other


class WithActivation(nn.BatchNorm1d):
    """A norm with its activation, as timm has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


class Calls(nn.Module):
    """The function, by every name that it has, and without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = batch_norm(torch.cat([x, x.tanh()]), self.mean, self.var, training=True).chunk(2)[0] + x  # imported by name
        x = F.batch_norm(x.exp(), None, None, training=True) + x
        return torch.batch_norm(x.sin(), None, None, self.mean, self.var, True, 0.2, 1e-4, False)


class StandardizedWeight(nn.Linear):
    """The function on a weight, which is no batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = F.batch_norm(self.weight.view(1, self.out_features, -1), None, None, training=True)
        return F.linear(x, rows.view_as(self.weight), self.bias)


class Penalty(nn.Module):
    """A gradient through BatchNorm, whose own gradient is one of second order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(torch.tanh(self.norm(x)).sum(), x, create_graph=True)
        return slope + x


class Rows(nn.Module):
    """Embeddings that shorten the rows that are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = (
            nn.Embedding(9, WIDTH, max_norm=0.7),
            nn.EmbeddingBag(9, WIDTH, max_norm=0.5, norm_type=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x * 100).long() % 9
        return self.table(rows).sum(1) * x + self.bag(rows)


def hooked() -> nn.Module:
    layer = nn.BatchNorm1d(WIDTH)
    layer.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    layer.register_forward_hook(lambda m, args, kwargs, out: out.sigmoid(), with_kwargs=True)
    layer.register_full_backward_hook(lambda m, into, out: (into[0] * 3,))
    return layer


def shared() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH)
    return nn.Sequential(norm, nn.Linear(WIDTH, WIDTH), norm, nn.Tanh(), nn.ModuleDict({"again": norm})["again"])


def parametrized() -> nn.Module:
    layer = nn.BatchNorm1d(WIDTH)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    return layer


def spread(kind: type[nn.Module], dims: int, **options: Any) -> nn.Module:
    shape = (2,) + (1,) * (dims - 2) + (2,)
    return nn.Sequential(nn.Unflatten(1, shape), kind(2, **options), nn.Flatten())


def lazy() -> nn.Module:
    layer = nn.LazyBatchNorm1d()
    layer.initialize_parameters(torch.zeros(2, WIDTH))
    layer._infer_parameters(layer, (torch.zeros(2, WIDTH),))
    return layer


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm1d(WIDTH),
    "activation": lambda: WithActivation(WIDTH),
    "hooks": hooked,
    "shared": shared,
    "parametrized": parametrized,
    "lazy": lazy,
    "functions": Calls,
    "standardized weight": lambda: StandardizedWeight(WIDTH, WIDTH),
    "torch's SyncBatchNorm": lambda: nn.SyncBatchNorm(WIDTH),
    "penalty": Penalty,
    "cumulative": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "not affine": lambda: nn.BatchNorm1d(WIDTH, affine=False),
    "no statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "no statistics, eval": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False).eval(),
    "frozen": lambda: nn.BatchNorm1d(WIDTH).eval(),
    "4 dims": lambda: spread(nn.BatchNorm2d, 3),
    "5 dims": lambda: spread(nn.BatchNorm3d, 4),
    "instances": lambda: spread(nn.InstanceNorm1d, 2, track_running_stats=True, affine=True),
    "rows": Rows,
}


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), MODELS[name]()).double()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def compare(name: str) -> float:
    """The largest difference between this rank and one process, of gradients, outputs and state, after three passes."""
    rank, worst = dist.get_rank(), [0.0]
    whole, part, scope = make("plain" if name == "torch's SyncBatchNorm" else name), make(name), WholeBatch()
    generator = torch.Generator().manual_seed(1)
    for shares in SHARES:
        x = torch.randn(sum(shares), WIDTH, generator=generator, dtype=torch.float64)
        first, size = sum(shares[:rank]), shares[rank]
        expected = whole(x.clone())
        expected.square().sum().backward()
        with scope.of(size):
            output = part(x[first : first + size].clone() if size else torch.full((1, WIDTH), 1e3, dtype=torch.float64))
            (output.square().sum() * bool(size)).backward()
        if size:
            worst.append((output - expected[first : first + size]).abs().max().item())
        for found, wanted in zip(gradients(part), gradients(whole), strict=True):
            total = found.clone()
            dist.all_reduce(total)
            worst.append((total - wanted).abs().max().item())
        for found, wanted in zip(part.state_dict().values(), whole.state_dict().values(), strict=True):
            worst.append((found.double() - wanted.double()).abs().max().item())
        whole.zero_grad()
        part.zero_grad()
    return max(worst)


def in_low_precision() -> tuple[torch.dtype, float]:
    rank, x = dist.get_rank(), torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(2))
    norm = nn.BatchNorm1d(WIDTH)
    with torch.autocast("cpu", torch.bfloat16), WholeBatch().of(3):
        output = norm(x[3 * rank : 3 * rank + 3].bfloat16())
    expected = nn.BatchNorm1d(WIDTH)(x.bfloat16())
    return output.dtype, (output.float() - expected[3 * rank : 3 * rank + 3].float()).abs().max().item()


def outside_of_a_pass() -> bool:
    """An evaluation, of which ranks take other numbers of batches, meets nobody."""
    own = F.batch_norm, torch.batch_norm, torch.instance_norm, torch.embedding_renorm_, nn.SyncBatchNorm.forward
    with pytest.raises(RuntimeError, match="mine"), WholeBatch().of(1):
        raise RuntimeError("mine")
    now = F.batch_norm, torch.batch_norm, torch.instance_norm, torch.embedding_renorm_, nn.SyncBatchNorm.forward
    if dist.get_rank() == 0:
        nn.BatchNorm1d(2)(torch.randn(3, 2))
    return own == now


class Changing(nn.Linear):
    """Changes its weight when it is called: by its samples, or by nothing but itself."""

    how = "no"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.how == "samples":
                self.weight[0] += x.mean(0)
            elif self.how == "itself":
                self.weight.clamp_(0, 0.1)
        return super().forward(x)


def change(how: str, *, is_sharded: bool) -> str:
    torch.manual_seed(4)
    model = nn.Sequential(Changing(2, 2))
    model[0].how = how  # type: ignore[assignment]
    watched = ForwardChanges(model, (None,), joined(), is_sharded=is_sharded)
    try:
        with watched.watching():
            model(torch.full((2, 2), float(dist.get_rank())))
    except TaskError as error:
        return str(error)
    return ""


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operation gives."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            self.nbytes = max(self.nbytes, output.nbytes)
        return output


def memory_of_a_look() -> float:
    """The most that the comparison of a changed parameter takes at once, in sizes of the parameter."""
    torch.manual_seed(4)
    model = Changing(512, 256)
    model.how = "itself"
    with Largest() as largest, ForwardChanges(model, (None,), joined(), is_sharded=False).watching():
        model(torch.ones(2, 512))
    return largest.nbytes / model.weight.nbytes


def layers_in_two_ranks() -> dict[str, Any]:
    return {
        **{name: compare(name) for name in MODELS},
        "bf16": in_low_precision(),
        "outside": outside_of_a_pass(),
        "changes": [change(how, is_sharded=False) for how in ("no", "itself", "samples")],
        "memory": memory_of_a_look(),
        "lost": [change(how, is_sharded=True) for how in ("no", "samples")],
    }


def test_batch_wide_layers_on_two_ranks_match_one_process() -> None:
    for found in run_ranks(layers_in_two_ranks, 2):
        off = {name: found[name] for name in MODELS if not found[name] < CLOSE}
        assert not off
        dtype, difference = found["bf16"]
        assert dtype == torch.bfloat16
        assert difference < 0.05
        assert found["outside"]
        assert found["changes"][:2] == ["", ""]
        assert "0.weight" in found["changes"][2]
        assert found["memory"] <= 1
        assert found["lost"][0] == ""
        assert "0.weight" in found["lost"][1]


def test_pipeline_refuses_layers_over_the_whole_batch() -> None:
    x = torch.randn(4, 2)
    with NoWholeBatch().of(4):
        nn.BatchNorm1d(2).eval()(x)
        nn.InstanceNorm1d(2)(x[None])
        with pytest.raises(TaskError, match="pipeline_parallel"):
            nn.BatchNorm1d(2)(x)
        with pytest.raises(TaskError, match="pipeline_parallel"):
            nn.InstanceNorm1d(4, track_running_stats=True)(x[None])
        with pytest.raises(TaskError, match="pipeline_parallel"):
            nn.Embedding(9, 2, max_norm=1.0)(x.abs().long())


@pytest.mark.parametrize("scope", [WholeBatch, NoWholeBatch, PartsOfBatch])
def test_scale_grad_by_freq_in_a_function_call_is_refused(scope: type[WholeBatch]) -> None:
    rows, table = torch.tensor([[0, 1, 1]]), torch.randn(3, 2)
    with scope().of(1):
        assert F.embedding(rows, table).equal(table[rows])
        F.embedding_bag(rows, table)
        with pytest.raises(TaskError, match="scale_grad_by_freq"):
            F.embedding(rows, table, scale_grad_by_freq=True)
        with pytest.raises(TaskError, match="scale_grad_by_freq"):
            F.embedding_bag(rows, table, scale_grad_by_freq=True)
    F.embedding(rows, table, scale_grad_by_freq=True)


class CountsRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.embedding((x[:, 0] > 0).long(), self.table, scale_grad_by_freq=True)


def test_fit_with_virtual_ranks_refuses_scale_grad_by_freq(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(8, 1), torch.randn(8, 1))
    settings: dict[str, Any] = {"batch_size": 4, "loss_fn": nn.MSELoss(), "progress": False, "run_dir": str(tmp_path)}
    with pytest.raises(TaskError, match="scale_grad_by_freq"):
        Trainer(CountsRows(), reproducible="bitwise", virtual_ranks=2, **settings).fit(data)


class Everything(nn.Module):
    """All of it in one model, and a hook on a gradient that is not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.first, self.norm = nn.Embedding(7, 6, max_norm=0.8), nn.Linear(6, WIDTH), WithActivation(WIDTH)
        self.penalty, self.last = Penalty(), nn.Linear(WIDTH, 2)
        self.norm.register_forward_hook(lambda m, args, out: out * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x + self.rows((x[:, 0] * 50).long() % 7))
        x = self.penalty(self.norm(x))
        return self.last(self.norm(F.batch_norm(x, None, None, training=True)))


def take_root(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.sign() * parameter.grad.abs().sqrt()


def make_everything() -> Everything:
    torch.manual_seed(5)
    model = Everything().double()
    model.last.weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    model.first.weight.register_post_accumulate_grad_hook(take_root)
    return model


def test_fit_on_two_ranks_matches_one_process(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(18, 6, generator=generator, dtype=torch.float64)  # the last step has one sample a rank
    y = torch.randn(18, 2, generator=generator, dtype=torch.float64)

    def train() -> tuple[dict[str, torch.Tensor], int]:
        model = make_everything()
        trainer = Trainer(
            model,
            loss_fn=nn.MSELoss(),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
            batch_size=4,
            epochs=2,
            seed=1,
            run_dir=str(tmp_path / "run"),
            progress=False,
            device="cpu",
        )
        trainer.fit(DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True))
        return model.state_dict(), len(model.last.weight._backward_hooks or ())

    expected = make_everything()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.05)
    for epoch in range(2):
        order = shuffled_order(18, 1, epoch)
        for start in range(0, 18, 8):
            step = order[start : start + 8]
            optimizer.zero_grad()
            F.mse_loss(expected(x[step]), y[step]).backward()
            optimizer.step()
    for state, hooks in run_ranks(train, 2):
        assert hooks == 1  # given back
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=CLOSE, rtol=0, msg=name)
