"""Drawn models: what goes in, some parts of a family, and what comes out. All as text."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.adversarial import parts_image, parts_sequence, parts_vector
from tests.adversarial.draft import Choice, Draft, draw_part
from tests.adversarial.helpers import NEEDS
from tests.adversarial.losses import Loss, draw_loss

VOCABULARY, LENGTH = 8, parts_sequence.LENGTH


@dataclass(frozen=True)
class DrawnModel:
    """The text of a model, of its data and of its loss, and what is peculiar about them."""

    text: str  # classes
    afters: tuple[str, ...]
    columns: dict[str, str]  # of the data: name to expression, the target last
    form: str  # how a batch holds them: "tuple", "dict" or "nested"
    loss: Loss
    traits: frozenset[str]
    helpers: tuple[str, ...] = ()  # that the data needs
    call: str = "model(*inputs)"
    family: str = ""
    notes: tuple[str, ...] = field(default=())


def draw_model(rng: random.Random, family: str, allowed: Callable[[str], bool]) -> DrawnModel:
    """A model of a family, of parts that are allowed."""
    draft = Draft(rng)
    columns: dict[str, str] = {}
    inputs = _INPUTS[family](draft, columns)
    grammar = {"vector": parts_vector.PARTS, "two": parts_vector.PARTS, "image": parts_image.PARTS}.get(
        family, parts_sequence.PARTS
    )
    if family == "bag":
        grammar = parts_vector.PARTS
    if family != "stack":
        _add_parts(draft, grammar, allowed)
    wants_tokens = family in ("tokens", "stack", "sequence") and rng.random() < 0.6
    _leave(draft, family, wants_tokens)
    loss = draw_loss(rng, draft, "tokens" if wants_tokens else "", allowed, inputs)
    columns["y"] = loss.column
    if loss.weights_column:
        columns["w"] = loss.weights_column
    form = rng.choices(["tuple", "dict", "nested"], [6, 1.5, 1.5])[0]
    if loss.owned:
        form = "dict"  # the only one in which a model is given the target
    elif loss.make == "None" and form == "dict":
        form = "nested"
    arguments = ", ".join([*inputs, *(["labels"] if loss.owned else [])])
    draft.helpers.sort(key=lambda name: (name in NEEDS, name))  # those that others need come first
    text = draft.model_text(arguments, loss.result)
    if loss.owned:
        draft.trait("own_loss")
    return DrawnModel(
        text, tuple(draft.afters), columns, form, loss, frozenset(draft.traits | loss.traits), (), family=family
    )


def _add_parts(draft: Draft, grammar: dict[str, Choice], allowed: Callable[[str], bool]) -> None:
    for _ in range(draft.rng.choice([1, 2, 2, 3, 3, 4, 5])):
        name = draw_part(draft.rng, grammar, allowed)
        if name == "batchnorm_frozen" and draft.methods:  # one `train` of its own is enough
            continue
        grammar[name].part(draft)


def _vector(draft: Draft, columns: dict[str, str]) -> list[str]:
    columns["x"] = "torch.randn(N, 6, generator=g, dtype=torch.float64)"
    draft.forwards.append(f"x = torch.tanh(self.{_first(draft)}(x))")
    return ["x"]


def _first(draft: Draft) -> str:
    out = draft.rng.choice([4, 5, 8])
    name = draft.linear("first", out)
    draft.width = out
    return name


def _two(draft: Draft, columns: dict[str, str]) -> list[str]:
    columns["x"] = "torch.randn(N, 6, generator=g, dtype=torch.float64)"
    columns["z"] = "torch.randn(N, 3, generator=g, dtype=torch.float64)"
    first = draft.linear("first", 5)
    draft.init("self.other = nn.Linear(3, 5, bias=False)")
    draft.width = 5
    draft.forward(f"x = torch.tanh(self.{first}(x) + self.other(z))")
    return ["x", "z"]


def _image(draft: Draft, columns: dict[str, str]) -> list[str]:
    columns["x"] = "torch.randn(N, 2, 6, 6, generator=g, dtype=torch.float64)"
    draft.width = 2
    draft.init("self.first = nn.Conv2d(2, 4, 3, padding=1)")
    draft.width = 4
    draft.forward("x = torch.tanh(self.first(x))")
    return ["x"]


def _sequence(draft: Draft, columns: dict[str, str]) -> list[str]:
    columns["x"] = f"torch.randn(N, {LENGTH}, 4, generator=g, dtype=torch.float64)"
    draft.width = 4
    first = draft.linear("first", 8)
    draft.width = 8
    draft.forward(f"x = torch.tanh(self.{first}(x))")
    return ["x"]


def _embedding(draft: Draft, columns: dict[str, str]) -> str:
    columns["x"] = f"torch.randint(0, {VOCABULARY}, (N, {LENGTH}), generator=g)"
    draft.width = 8
    option = draft.rng.choices(
        ["", ", padding_idx=0", ", sparse=True", ", max_norm=1.0", ", scale_grad_by_freq=True"], [6, 1, 0.8, 0.6, 0.3]
    )[0]
    for word in ("sparse", "max_norm", "scale_grad_by_freq"):
        if word in option:
            draft.trait(word)
    draft.init(f"self.embedding = nn.Embedding({VOCABULARY}, 8{option})")
    return option


def _tokens(draft: Draft, columns: dict[str, str]) -> list[str]:
    _embedding(draft, columns)
    draft.forward("x = self.embedding(x)")
    return ["x"]


def _bag(draft: Draft, columns: dict[str, str]) -> list[str]:
    """Bags of words into vectors."""
    columns["x"] = f"torch.randint(0, {VOCABULARY}, (N, {LENGTH}), generator=g)"
    draft.width = 5
    option = draft.rng.choice(["", ", mode='sum'", ", sparse=True"])
    if "sparse" in option:
        draft.trait("sparse")
    draft.init(f"self.embedding = nn.EmbeddingBag({VOCABULARY}, 5{option})")
    draft.forward("x = self.embedding(x)")
    return ["x"]


def _stack(draft: Draft, columns: dict[str, str]) -> list[str]:
    """A transformer as people write it, for the strategies that cut models into parts."""
    rng = draft.rng
    columns["x"] = f"torch.randint(0, {VOCABULARY}, (N, {LENGTH + 2}), generator=g)"
    draft.width = 8
    draft.init(f"self.embedding = nn.Embedding({VOCABULARY}, 8)")
    draft.forward("x = self.embedding(x)")
    if rng.random() < 0.5:
        draft.init(f"self.positions = nn.Embedding({LENGTH + 2}, 8)")
        draft.forward(f"x = x + self.positions(torch.arange({LENGTH + 2}, device=x.device))")
    kind, bias = rng.choice(["Block", "Block", "Mlp", "Gated", "encoder"]), rng.choice(["", ", bias=False"])
    arguments = {"Block": "8, 2, 16", "Mlp": "8, 16", "Gated": "8, 12"}
    if kind == "encoder":
        one = "nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)"
        draft.trait("torch_attention")
    else:
        one = f"{parts_sequence._use(draft, kind)}({arguments[kind]}{bias})"
    if kind in ("Mlp", "Gated"):
        draft.trait("no_attention")
    count = rng.choice([2, 2, 3, 4])
    draft.init(f"self.blocks = nn.ModuleList([{one} for _ in range({count})])")
    if rng.random() < 0.2 and kind != "encoder":
        norm = "norm1" if kind == "Block" else "norm"
        draft.init(f"self.blocks[{rng.randrange(count)}].{norm}.requires_grad_(False)")
        draft.trait("frozen")
    if rng.random() < 0.1 and kind in ("Block", "Mlp"):
        draft.init("self.blocks[0].fc1.weight.requires_grad_(False)")
        draft.trait("frozen")
    draft.forward("for block in self.blocks:", "    x = block(x)")
    draft.trait("blocks", f"blocks_{count}")
    return ["x"]


_INPUTS: dict[str, Callable[[Draft, dict[str, str]], list[str]]] = {
    "vector": _vector,
    "two": _two,
    "image": _image,
    "sequence": _sequence,
    "tokens": _tokens,
    "bag": _bag,
    "stack": _stack,
}


def _leave(draft: Draft, family: str, wants_tokens: bool) -> None:
    """From the family's `x` to one vector a sample, or to one a position."""
    if family == "image":
        draft.forward("x = x.mean((2, 3))")
    elif family in ("sequence", "tokens", "stack"):
        if draft.rng.random() < 0.5:
            draft.init(f"self.norm = nn.LayerNorm({draft.width})")
            draft.forward("x = self.norm(x)")
        if not wants_tokens:
            draft.forward("x = x.mean(1)")
