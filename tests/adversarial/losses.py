"""Drawn losses: the head of a model, its target, the loss, and what its mean goes over, as text."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.adversarial.draft import Draft

CLASSES = 5


@dataclass(frozen=True)
class Loss:
    make: str  # the expression of `loss_fn`
    column: str  # the target
    result: list[str]  # the last lines of forward
    weight: str = "len(y)"  # what the mean of a batch goes over; "None": it is a sum
    settings: dict[str, object] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()
    owned: bool = False  # the model returns its loss
    weights_column: str = ""  # of samples
    plain: str = "loss_fn(model(*inputs), y)"  # for a loop without the library
    helpers: tuple[str, ...] = ()


_LABELS = f"torch.randint(0, {CLASSES}, (N,), generator=g)"
_VALUES = "torch.randn(N, 2, generator=g, dtype=torch.float64)"
_PLAIN_TOKENS = "torch.randint(0, 8, (N, {length}), generator=g)"
_CLASS_WEIGHTS = "torch.tensor([1.0, 3.0, 0.2, 0.5, 2.0], dtype=torch.float64)"


def draw_loss(rng: random.Random, draft: Draft, kind: str, allowed: Callable[[str], bool], inputs: list[str]) -> Loss:
    """A loss for the model that the draft is of, and the head that it needs."""
    if kind == "tokens":
        return _of_tokens(rng, draft, "stack" if "blocks_2" in draft.traits else "")
    families: list[tuple[Callable[[random.Random, Draft], Loss], float]] = [
        (_of_classes, 4), (_of_values, 4), (_own, 1.5), (_of_labels, 0.7),
    ]  # fmt: skip
    if inputs == ["x"] and "embedding" not in " ".join(draft.inits) and allowed("gradient_penalty"):
        families.append((_penalty, 0.6))
    return rng.choices([make for make, _ in families], [weight for _, weight in families])[0](rng, draft)


def _head(draft: Draft, out: int) -> str:
    bias = draft.rng.random() < 0.7
    name = draft.linear("head", out, bias=bias)
    return f"self.{name}(x)"


def _of_classes(rng: random.Random, draft: Draft) -> Loss:
    head = [f"return {_head(draft, CLASSES)}"]
    smooth = rng.choice(["", "", "label_smoothing=0.1"])
    kind = rng.choice(["plain", "plain", "sum", "weights", "ignore", "ignore_weights", "nll", "default", "function",
                       "margin", "probabilities", "pair"])  # fmt: skip
    ignored = rng.choice([-100, -1, 255])
    some = f"torch.where(torch.arange(N) % 5 == 2, {ignored}, {_LABELS})"
    counted = f"(y != {ignored})"
    match kind:
        case "plain":
            return Loss(f"nn.CrossEntropyLoss({smooth})", _LABELS, head)
        case "sum":
            more = f", {smooth}" if smooth else ""
            return Loss(f"nn.CrossEntropyLoss(reduction='sum'{more})", _LABELS, head, "None")
        case "weights":
            more = f", {smooth}" if smooth else ""
            make = f"nn.CrossEntropyLoss(weight={_CLASS_WEIGHTS}{more})"
            return Loss(make, _LABELS, head, "loss_fn.weight[y].sum()", traits=frozenset({"class_weights"}))
        case "ignore":
            make, settings = f"nn.CrossEntropyLoss(ignore_index={ignored})", {"loss_weighting": "targets"}
            return Loss(make, some, head, f"{counted}.sum()", settings, frozenset({"ignored"}))
        case "ignore_weights":
            make = f"nn.CrossEntropyLoss(weight={_CLASS_WEIGHTS}, ignore_index={ignored})"
            weight = f"(loss_fn.weight[y.clamp(0, {CLASSES - 1})] * {counted}).sum()"
            return Loss(make, some, head, weight, {}, frozenset({"ignored", "class_weights", "ignored_weights"}))
        case "nll":
            return Loss("nn.NLLLoss()", _LABELS, [head[0].replace("return ", "return F.log_softmax(", 1) + ", 1)"])
        case "default":
            return Loss("None", _LABELS, head, plain="F.cross_entropy(model(*inputs), y)")
        case "function":
            return Loss("lambda outputs, y: F.cross_entropy(outputs, y)", _LABELS, head)
        case "margin":
            return Loss("nn.MultiMarginLoss()", _LABELS, head)
        case "probabilities":
            column = f"torch.softmax(torch.randn(N, {CLASSES}, generator=g, dtype=torch.float64), 1)"
            return Loss(f"nn.CrossEntropyLoss({smooth})", column, head)
        case _:
            make = f"lambda outputs, y: (F.cross_entropy(outputs, y, ignore_index={ignored}), {counted}.sum())"
            return Loss(make, some, head, f"{counted}.sum()", plain="loss_fn(model(*inputs), y)[0]")


def _of_values(rng: random.Random, draft: Draft) -> Loss:
    head = [f"return {_head(draft, 2)}"]
    make = rng.choice(
        ["nn.MSELoss()", "nn.MSELoss()", "nn.MSELoss(reduction='sum')", "nn.L1Loss()", "nn.SmoothL1Loss()",
         "nn.HuberLoss(reduction='sum')", "None", "F.mse_loss", "CountingLoss()",
         "lambda outputs, y: (outputs - y).pow(2).sum(1).mean()",
         "lambda outputs, y: (((outputs - y) ** 2).mean(1) * y[:, 0].abs()).sum() / y[:, 0].abs().sum()"]
    )  # fmt: skip
    if make.endswith("y[:, 0].abs().sum()"):
        make = f"lambda outputs, y: ({make.removeprefix('lambda outputs, y: ')}, y[:, 0].abs().sum())"
        return Loss(make, _VALUES, head, "y[:, 0].abs().sum()", plain="loss_fn(model(*inputs), y)[0]")
    if make == "None":
        return Loss("None", _VALUES, head, plain="F.mse_loss(model(*inputs), y)")
    if make == "CountingLoss()":
        return Loss(make, _VALUES, head, traits=frozenset({"loss_state", "counts"}), helpers=("CountingLoss",))
    return Loss(make, _VALUES, head, "None" if "reduction='sum'" in make else "len(y)")


def _of_labels(rng: random.Random, draft: Draft) -> Loss:
    """Several labels a sample."""
    column = "torch.randint(0, 2, (N, 3), generator=g).double()"
    head = [f"return {_head(draft, 3)}"]
    more = rng.choice(["", "pos_weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)", "reduction='sum'"])
    return Loss(f"nn.BCEWithLogitsLoss({more})", column, head, "None" if "sum" in more else "len(y)")


def _own(rng: random.Random, draft: Draft) -> Loss:
    """A model that computes its own loss."""
    head = _head(draft, CLASSES)
    lines = [f"outputs = {head}", "loss = F.cross_entropy(outputs, labels)"]
    kind = rng.choice(["dict", "tuple", "scalar", "weight", "dict_plain"])
    owned = {"owned": True, "column": _LABELS, "make": "None"}
    match kind:
        case "dict":
            done = "return {'loss': loss, 'logits': outputs}"
            return Loss(**owned, result=[*lines, done], plain="model(*inputs, y)['loss']")
        case "tuple":
            return Loss(**owned, result=[*lines, "return loss, outputs"], plain="model(*inputs, y)[0]")
        case "scalar":
            return Loss(**owned, result=[*lines, "return loss"], plain="model(*inputs, y)")
        case "weight":
            column = f"torch.where(torch.arange(N) % 5 == 2, -100, {_LABELS})"
            done = "return {'loss': loss, 'weight': (labels != -100).sum()}"
            owned |= {"column": column}
            return Loss(**owned, result=[*lines, done], weight="(y != -100).sum()", plain="model(*inputs, y)['loss']")
        case _:
            done = [f"return {{'logits': {head}, 'more': [x, (x * 2).detach()]}}"]
            make = "lambda outputs, y: F.cross_entropy(outputs['logits'], y)"
            return Loss(make, _LABELS, done)


def _penalty(rng: random.Random, draft: Draft) -> Loss:
    """A loss with the gradient by the input in it."""
    draft.forwards.insert(0, "start = x = x.detach().requires_grad_()")
    head = _head(draft, 2)
    result = [
        f"outputs = {head}",
        "if not torch.is_grad_enabled():",
        "    return {'loss': F.mse_loss(outputs, labels)}",
        "(slope,) = torch.autograd.grad(outputs.sum(), start, create_graph=True)",
        "return {'loss': F.mse_loss(outputs, labels) + 0.1 * slope.pow(2).flatten(1).sum(1).mean()}",
    ]
    traits = frozenset({"gradient_penalty"})
    return Loss("None", _VALUES, result, traits=traits, owned=True, plain="model(*inputs, y)['loss']")


def _of_tokens(rng: random.Random, draft: Draft, family: str) -> Loss:
    """One class for each position."""
    bias = rng.choice([True, False])
    head = draft.linear("head", 8, bias=bias)
    if "self.embedding = nn.Embedding(8, 8)" in draft.inits and rng.random() < 0.3:
        draft.init(f"self.{head}.weight = self.embedding.weight")
        draft.trait("tied", "tied_head")
    has_words = "embedding" in " ".join(draft.inits)
    ids = "x.roll(-1, 1)" if has_words else "torch.randint(0, 8, (N, x.shape[1]), generator=g)"
    lengths = "torch.randint(1, x.shape[1] + 1, (N, 1), generator=g)"
    padded = f"torch.where(torch.arange(x.shape[1]) >= {lengths}, -100, {ids})"
    kind = rng.choice(["padded", "padded", "whole", "sum", "own", "weighted"])
    result = [f"return self.{head}(x).transpose(1, 2)"]
    counted = "(y != -100).sum()"
    match kind:
        case "padded":
            return Loss("nn.CrossEntropyLoss()", padded, result, counted, traits=frozenset({"ignored"}))
        case "whole":
            return Loss("nn.CrossEntropyLoss()", ids, result, "y.numel()")
        case "sum":
            return Loss("nn.CrossEntropyLoss(reduction='sum')", padded, result, "None")
        case "weighted":
            make = "nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 8, dtype=torch.float64))"
            weight = "(loss_fn.weight[y.clamp(0)] * (y != -100)).sum()"
            return Loss(make, padded, result, weight, traits=frozenset({"ignored", "class_weights"}))
        case _:
            lines = [
                f"logits = self.{head}(x)",
                "loss = F.cross_entropy(logits.transpose(1, 2), labels)",
                "return {'loss': loss, 'logits': logits, 'weight': (labels != -100).sum()}",
            ]
            plain = "model(*inputs, y)['loss']"
            return Loss("None", padded, lines, counted, owned=True, plain=plain)
