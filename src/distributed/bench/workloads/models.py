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

from distributed.bench.gpt import SIZES, Gpt, Size

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


# Models


def make_mlp(widths: Sequence[int]) -> nn.Sequential:
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def make_convnet(width: int = 32, classes: int = 10) -> nn.Sequential:
    """For images of one channel and 28 × 28 points."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 49, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, classes),
    )


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1, around which the input goes; the stride is in the middle, as MLPerf has it (v1.5)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        nn.init.zeros_(self.norm3.weight)  # so that a block begins as the identity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        y = functional.relu(self.norm2(self.conv2(y)))
        return functional.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """With the sizes that are given here, ResNet-50."""

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        )
        channels, stages = width, []
        for stage, depth in enumerate(depths):
            blocks = []
            for number in range(depth):
                blocks.append(Bottleneck(channels, width << stage, 2 if stage and not number else 1))
                channels = 4 * (width << stage)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(images)).mean((2, 3)))  # type: ignore[no-any-return]


class BertLayer(nn.Module):
    """Norms come after the sums, as in BERT. No dropout, so that contenders can be compared number for number."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.num_heads = size.heads
        self.qkv, self.proj = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.fc1, self.fc2 = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = self.norm1(x + self.proj(mixed.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.fc2(functional.gelu(self.fc1(x))))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """Predicts the tokens at the positions that were masked, and only those; the head is the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.norm = nn.LayerNorm(size.width)
        self.layers = nn.ModuleList([BertLayer(size) for _ in range(size.blocks)])
        self.transform, self.head_norm = nn.Linear(size.width, size.width), nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device)))
        for layer in self.layers:
            x = layer(x)
        chosen = x.gather(1, masked.unsqueeze(-1).expand(-1, -1, x.size(-1)))
        return self.head(self.head_norm(functional.gelu(self.transform(chosen))))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class DlrmSize:
    tables: tuple[int, ...]  # rows of each
    width: int  # of an embedding
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    batch: int
    dense: int = 13

    @property
    def pairs(self) -> int:
        """Of the embeddings and the bottom's output, each with each other."""
        count = len(self.tables) + 1
        return count * (count - 1) // 2

    @property
    def layers(self) -> tuple[list[int], list[int]]:
        return [self.dense, *self.bottom, self.width], [self.width + self.pairs, *self.top, 1]


# The numbers of Criteo's categories, of which a large one is folded to a million.
_LARGE = (10131227, 2202608, 93145, 8351593, 14992, 5461306, 7046547, 286181, 142572, 12517)
_SMALL_TABLES = (1460, 583, 305, 24, 633, 3, 5683, 3194, 27, 10, 5652, 2173, 4, 18, 15, 105)
_DLRM = DlrmSize(
    tuple(min(rows, 1_000_000) for rows in (*_LARGE, *_SMALL_TABLES)), 128, (512, 256), (1024, 1024, 512, 256), 32768
)
_DLRM_TINY = DlrmSize((50, 20, 7), 8, (16,), (16,), 16)


class Dlrm(nn.Module):
    """Products of each two of the categories' embeddings and of what the bottom makes of the numbers, into the top."""

    def __init__(self, size: DlrmSize) -> None:
        super().__init__()
        bottom, top = size.layers
        self.tables = nn.ModuleList([nn.Embedding(rows, size.width) for rows in size.tables])
        self.bottom, self.top = nn.Sequential(*make_mlp(bottom), nn.ReLU()), make_mlp(top)
        for table, rows in zip(self.tables, size.tables, strict=True):
            nn.init.uniform_(table.weight, -(rows**-0.5), rows**-0.5)  # type: ignore[arg-type]
        count = len(size.tables) + 1
        self.register_buffer("below", torch.tensor([a * count + b for a in range(count) for b in range(a)]))

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        low = self.bottom(numbers)
        looked_up = [table(categories[:, at]).to(low.dtype) for at, table in enumerate(self.tables)]
        features = torch.stack([low, *looked_up], 1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([low, products.index_select(1, self.below)], 1)).squeeze(1)  # type: ignore


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


def text_rows(count: int, *, size: Size) -> Rows:
    """The labels twice: the model takes them to compute its loss, and the last of a row is the target."""
    ids = _chains(count, size.length + 1, size.vocabulary)
    labels = ids[:, 1:].contiguous()
    return ids[:, :-1].contiguous(), labels, labels


def _masked_rows(count: int, *, size: Size) -> Rows:
    """As many masked in each row, so that the head is computed for those alone."""
    ids = _chains(count, size.length, size.vocabulary)
    scores = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1))
    masked = scores.topk(_masked_count(size)).indices
    return ids.scatter(1, masked, size.vocabulary - 1), masked, ids.gather(1, masked)


def _masked_count(size: Size) -> int:
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


def _steady(size: Size) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
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


def _gpt_flops(size: Size) -> float:
    """The same as gpt.flops_per_token, without a model to count in."""
    w = size.width
    parameters = (size.vocabulary + size.length + 2) * w + size.blocks * (12 * w * w + 13 * w)
    return 6.0 * parameters + 12.0 * size.blocks * w * size.length


def _bert_flops(size: Size) -> float:
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
    return Workload(name, "samples", batch, 1, make, rows, nn.CrossEntropyLoss(), sgd, flops, True, text)


def _convnet(name: str, width: int, batch: int) -> Workload:
    rows = partial(_image_rows, channels=1, side=28, classes=10)
    make, text = partial(_seeded, partial(make_convnet, width)), f"two convolutions of {width} and {2 * width}, 28²"
    return Workload(name, "images", batch, 1, make, rows, nn.CrossEntropyLoss(), sgd, None, True, text)


def _resnet(name: str, make: Callable[[], nn.Module], side: int, classes: int, batch: int) -> Workload:
    rows, text = partial(_image_rows, channels=3, side=side, classes=classes), f"bottleneck ResNet, {side}²"
    flops = _RESNET_FLOPS if make is ResNet and side == 224 else None
    loss, rate, made = nn.CrossEntropyLoss(), partial(sgd, lr=0.05), partial(_seeded, make)
    return Workload(name, "images", batch, 1, made, rows, loss, rate, flops, flops is None, text)


def _bert(name: str, size: Size, on_cpu: bool = False) -> Workload:
    make, rows = partial(_seeded, partial(Bert, size)), partial(_masked_rows, size=size)
    flops, text = _bert_flops(size), f"BERT of {size.blocks} layers of {size.width}, masked words of {size.length}"
    return Workload(
        name, "tokens", size.batch, size.length, make, rows, masked_loss, _steady(size), flops, on_cpu, text
    )


def _gpt(name: str, size: Size, on_cpu: bool = False) -> Workload:
    make, rows = partial(_seeded, partial(Gpt, size)), partial(text_rows, size=size)
    flops, text = _gpt_flops(size), f"GPT of {size.blocks} blocks of {size.width}, next words of {size.length}"
    return Workload(name, "tokens", size.batch, size.length, make, rows, None, _steady(size), flops, on_cpu, text)


def _dlrm(name: str, size: DlrmSize, on_cpu: bool = False) -> Workload:
    make, rows = partial(_seeded, partial(Dlrm, size)), partial(_click_rows, size=size)
    rate = partial(sgd, lr=1.0, momentum=0.0)  # as MLPerf's: tables with a state would hold it for rows never met
    loss, text = nn.BCEWithLogitsLoss(), f"DLRM of {len(size.tables)} tables, {sum(size.tables):,} rows of {size.width}"
    return Workload(name, "samples", size.batch, 1, make, rows, loss, rate, _dlrm_flops(size), on_cpu, text)


_BERT = Size(24, 1024, 16, 512, 64, 30528)
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
    _bert("bert-large", Size(2, 32, 2, 32, 4, 64), on_cpu=True),
    _gpt("gpt2-124m", SIZES["tiny"], on_cpu=True),
    _dlrm("dlrm", _DLRM_TINY, on_cpu=True),
)
TINY: dict[str, Workload] = {workload.name: workload for workload in _SMALL}
"""The same families, which run anywhere within a moment."""
