"""The models that are measured: plain PyTorch, in the shapes of MLPerf's families, each with its data and optimizer.

Every row is read in one way, by a bare loop and by all trainers: `outputs = model(*row[:-1])`, and the loss is
`loss_fn(outputs, row[-1])`, or the outputs themselves where there is no loss_fn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from distributed.bench.workloads.gpt import SIZES, Gpt, GptSize
from distributed.bench.workloads.networks import Bert, Dlrm, DlrmSize, ResNet, make_convnet, make_mlp

Rows = tuple[torch.Tensor, ...]
_CHAIN = 512  # tokens that occur in the data, so that a few steps already learn something
_MASK = 0.15  # of the tokens of a sequence
_GRID = 4  # cells in a row of the pattern that tells an image's class
_CONTRAST = 0.2  # of that pattern in the noise, so that a loss is still an ordinary number after a turn


@dataclass(frozen=True)
class Workload:
    """One model with its data. What it makes is seeded: everybody starts with the same weights and rows."""

    name: str
    unit: str  # what is counted: "samples", "images" or "tokens"
    batch: int  # samples
    units_per_sample: int
    make_model: Callable[[], nn.Module]
    make_rows: Callable[[int], Rows]  # n samples; the last tensor is the target
    loss_fn: Callable[[Any, Any], torch.Tensor] | None  # None: the model returns its loss
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    flops_per_unit: float | None  # of forward and backward
    on_cpu: bool  # whether it is small enough to be measured there
    describes: str

    def loss(self, model: nn.Module, row: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of one batch, as every contender computes it."""
        outputs: torch.Tensor = model(*row[:-1])
        return outputs if self.loss_fn is None else self.loss_fn(outputs, row[-1])


# Data


def _vector_rows(count: int, *, width: int, classes: int) -> Rows:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, width, generator=generator)
    return rows, (rows @ torch.randn(width, classes, generator=generator)).argmax(1)


def _image_rows(count: int, *, channels: int, side: int, classes: int) -> Rows:
    """Noise on a coarse pattern that tells the class."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, channels, side, side, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    patterns = torch.randn(classes, channels, _GRID, 1, _GRID, 1, generator=generator)
    images.view(count, channels, _GRID, side // _GRID, _GRID, side // _GRID).add_(patterns[labels], alpha=_CONTRAST)
    return images, labels


def _chains(count: int, length: int, vocabulary: int) -> torch.Tensor:
    """Sequences in which nine of ten tokens follow from the one before."""
    generator = torch.Generator().manual_seed(0)
    used = min(vocabulary - 1, _CHAIN)
    follows = torch.randperm(used, generator=generator)
    sequences = torch.randint(used, (length, count), generator=generator)
    breaks = torch.rand(length, count, generator=generator) < 0.1
    for at in range(1, length):
        sequences[at] = torch.where(breaks[at], sequences[at], follows[sequences[at - 1]])
    return sequences.T.contiguous()


def text_rows(count: int, *, size: GptSize) -> Rows:
    """The labels twice: the model takes them to compute its loss, and the last of a row is the target."""
    ids = _chains(count, size.length + 1, size.vocabulary)
    labels = ids[:, 1:].contiguous()
    return ids[:, :-1].contiguous(), labels, labels


def _masked_rows(count: int, *, size: GptSize) -> Rows:
    """As many masked in each row, so that the head is computed for those alone."""
    ids = _chains(count, size.length, size.vocabulary)
    scores = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1))
    masked = scores.topk(_masked_count(size)).indices
    return ids.scatter(1, masked, size.vocabulary - 1), masked, ids.gather(1, masked)


def _masked_count(size: GptSize) -> int:
    return int(_MASK * size.length)


def _click_rows(count: int, *, size: DlrmSize) -> Rows:
    """Few categories are met often and many seldom; a click depends on numbers and categories."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(count, size.dense, generator=generator)
    drawn = torch.rand(count, len(size.tables), generator=generator) ** 3
    categories = (drawn * torch.tensor(size.tables)).long()
    score = numbers[:, 0] + numbers[:, 1] * ((categories[:, 0] % 2) * 2 - 1)
    return numbers, categories, (score > 0).float()


# Losses, optimizers and operations


def masked_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def sgd(parameters: Iterable[nn.Parameter], lr: float = 0.01, momentum: float = 0.9) -> torch.optim.Optimizer:
    parameters = list(parameters)
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, fused=_on_gpu(parameters))


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    parameters = list(parameters)
    return torch.optim.AdamW(parameters, lr=lr, fused=_on_gpu(parameters))


def _steady(size: GptSize) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """At some four times this learning rate a loss without a warmup jumps in some trainings and not in others: the last
    digits, or the order of the rows, decide on it, and then losses tell nothing of who has trained rightly."""
    return partial(adamw, lr=0.02 / size.width)


def _on_gpu(parameters: list[nn.Parameter]) -> bool:
    return bool(parameters) and all(parameter.is_cuda for parameter in parameters)


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def _mlp_flops(widths: Sequence[int]) -> float:
    return 6.0 * sum(a * b for a, b in pairwise(widths))


def _gpt_flops(size: GptSize) -> float:
    """The same as gpt.flops_per_token, without a model to count in."""
    w = size.width
    parameters = (size.vocabulary + size.length + 2) * w + size.blocks * (12 * w * w + 13 * w)
    return 6.0 * parameters + 12.0 * size.blocks * w * size.length


def _bert_flops(size: GptSize) -> float:
    """A token's; of the head, a masked one's share. Embeddings are looked up, not multiplied."""
    w, masked = size.width, _masked_count(size) / size.length
    blocks = size.blocks * (6.0 * 12 * w * w + 12.0 * w * size.length)
    return blocks + 6.0 * masked * (w * w + w * size.vocabulary)


def _dlrm_flops(size: DlrmSize) -> float:
    bottom, top = size.layers
    return _mlp_flops(bottom) + _mlp_flops(top) + 6.0 * (len(size.tables) + 1) ** 2 * size.width


# Workloads


def _mlp(name: str, widths: Sequence[int], batch: int) -> Workload:
    rows = partial(_vector_rows, width=widths[0], classes=widths[-1])
    flops, text = _mlp_flops(widths), f"MLP {'-'.join(map(str, widths))}"
    make = partial(_seeded, partial(make_mlp, widths))
    return Workload(
        name,
        unit="samples",
        batch=batch,
        units_per_sample=1,
        make_model=make,
        make_rows=rows,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=sgd,
        flops_per_unit=flops,
        on_cpu=True,
        describes=text,
    )


def _convnet(name: str, width: int, batch: int) -> Workload:
    rows = partial(_image_rows, channels=1, side=28, classes=10)
    make, text = partial(_seeded, partial(make_convnet, width)), f"two convolutions of {width} and {2 * width}, 28²"
    return Workload(
        name,
        unit="images",
        batch=batch,
        units_per_sample=1,
        make_model=make,
        make_rows=rows,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=sgd,
        flops_per_unit=None,
        on_cpu=True,
        describes=text,
    )


def _resnet(name: str, make: Callable[[], nn.Module], side: int, classes: int, batch: int) -> Workload:
    rows, text = partial(_image_rows, channels=3, side=side, classes=classes), f"bottleneck ResNet, {side}²"
    flops = _RESNET_FLOPS if make is ResNet and side == 224 else None
    loss, rate, made = nn.CrossEntropyLoss(), partial(sgd, lr=0.05), partial(_seeded, make)
    return Workload(
        name,
        unit="images",
        batch=batch,
        units_per_sample=1,
        make_model=made,
        make_rows=rows,
        loss_fn=loss,
        optimizer=rate,
        flops_per_unit=flops,
        on_cpu=flops is None,
        describes=text,
    )


def _bert(name: str, size: GptSize, on_cpu: bool = False) -> Workload:
    text = f"BERT of {size.blocks} layers of {size.width}, masked words of {size.length}"
    flops = _bert_flops(size)
    return _of_words(
        name, size, Bert, _masked_rows, loss_fn=masked_loss, flops_per_unit=flops, on_cpu=on_cpu, describes=text
    )


def _gpt(name: str, size: GptSize, on_cpu: bool = False) -> Workload:
    text = f"GPT of {size.blocks} blocks of {size.width}, next words of {size.length}"
    flops = _gpt_flops(size)
    return _of_words(name, size, Gpt, text_rows, loss_fn=None, flops_per_unit=flops, on_cpu=on_cpu, describes=text)


def _of_words(
    name: str, size: GptSize, model: Callable[[GptSize], nn.Module], rows: Callable[..., Any], **rest: Any
) -> Workload:
    """A workload of tokens, whose optimizer is that of its size."""
    return Workload(
        name,
        unit="tokens",
        batch=size.batch,
        units_per_sample=size.length,
        make_model=partial(_seeded, partial(model, size)),
        make_rows=partial(rows, size=size),
        optimizer=_steady(size),
        **rest,
    )


def _dlrm(name: str, size: DlrmSize, on_cpu: bool = False) -> Workload:
    make, rows = partial(_seeded, partial(Dlrm, size)), partial(_click_rows, size=size)
    rate = partial(sgd, lr=1.0, momentum=0.0)  # as MLPerf's: tables with a state would hold it for rows never met
    loss, text = nn.BCEWithLogitsLoss(), f"DLRM of {len(size.tables)} tables, {sum(size.tables):,} rows of {size.width}"
    return Workload(
        name,
        unit="samples",
        batch=size.batch,
        units_per_sample=1,
        make_model=make,
        make_rows=rows,
        loss_fn=loss,
        optimizer=rate,
        flops_per_unit=_dlrm_flops(size),
        on_cpu=on_cpu,
        describes=text,
    )


# The numbers of Criteo's categories, of which a large one is folded to a million.
_LARGE = (10131227, 2202608, 93145, 8351593, 14992, 5461306, 7046547, 286181, 142572, 12517)
_SMALL_TABLES = (1460, 583, 305, 24, 633, 3, 5683, 3194, 27, 10, 5652, 2173, 4, 18, 15, 105)
_DLRM = DlrmSize(
    tuple(min(rows, 1_000_000) for rows in (*_LARGE, *_SMALL_TABLES)), 128, (512, 256), (1024, 1024, 512, 256), 32768
)
_DLRM_TINY = DlrmSize((50, 20, 7), 8, (16,), (16,), 16)
_BERT = GptSize(24, 1024, 16, 512, 64, 30528)
_GPT_LARGE = replace(SIZES["1.3b"], length=2048, batch=24)  # the context that GPT-3's 1.3B was trained with
_RESNET_FLOPS = 3 * 2 * 4.089e9  # an image of 224²: 4.089e9 products and sums in forward, twice that in backward

_ALL = (
    _mlp("mlp", (784, 512, 10), 256),
    _convnet("convnet", 32, 64),
    _resnet("resnet50", ResNet, 224, 1000, 256),
    _bert("bert-large", _BERT),
    _gpt("gpt2-124m", SIZES["124m"]),
    _gpt("gpt-1.3b", _GPT_LARGE),
    _dlrm("dlrm", _DLRM),
)
WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ALL}

_SMALL = (
    _mlp("mlp", (16, 32, 4), 16),
    _convnet("convnet", 4, 8),
    _resnet("resnet50", partial(ResNet, (1, 1, 1, 1), 8, 4), 32, 4, 8),
    _bert("bert-large", GptSize(2, 32, 2, 32, 4, 64), on_cpu=True),
    _gpt("gpt2-124m", SIZES["tiny"], on_cpu=True),
    _dlrm("dlrm", _DLRM_TINY, on_cpu=True),
)
TINY: dict[str, Workload] = {workload.name: workload for workload in _SMALL}
"""The same families, which run anywhere within a moment."""
