"""Parts of models over sequences: each takes `x` of shape (batch, 6, width) and leaves such an `x`."""

from __future__ import annotations

from tests.adversarial.draft import Choice, Draft
from tests.adversarial.helpers import NEEDS

LENGTH = 6


def _use(d: Draft, name: str) -> str:
    for other in NEEDS.get(name, ()):
        d.helper(other)
    return d.helper(name)


def feed_forward(d: Draft) -> None:
    name = d.name("mlp")
    d.init(f"self.{name} = {_use(d, d.rng.choice(['Mlp', 'Gated']))}({d.width}, {d.rng.choice([4, 6, 12])})")
    d.forward(f"x = self.{name}(x)")


def attention(d: Draft) -> None:
    name = d.name("attention")
    d.init(f"self.{name} = {_use(d, 'Attention')}({d.width}, 2)")
    d.forward(f"x = x + self.{name}(x)")


def torch_attention(d: Draft) -> None:
    name = d.name("attention")
    d.init(f"self.{name} = nn.MultiheadAttention({d.width}, 2, dropout=0.0, batch_first=True)")
    d.forward(f"x = x + self.{name}(x, x, x, need_weights=False)[0]")


def encoder_layer(d: Draft) -> None:
    name = d.name("layer")
    first = d.rng.choice(["", ", norm_first=True"])
    d.init(f"self.{name} = nn.TransformerEncoderLayer({d.width}, 2, 12, 0.0, batch_first=True{first})")
    d.forward(f"x = self.{name}(x)")


def recurrent(d: Draft) -> None:
    name, kind = d.name("recurrent"), d.rng.choice(["LSTM", "GRU", "RNN"])
    more = d.rng.choice(["", ", num_layers=2", ", bidirectional=True"])
    size = d.width // 2 if "bidirectional" in more else d.width
    d.init(f"self.{name} = nn.{kind}({d.width}, {size}, batch_first=True{more})")
    d.forward(f"x = x + self.{name}(x)[0]")
    d.trait("recurrent")


def convolution(d: Draft) -> None:
    name = d.name("conv")
    d.init(f"self.{name} = nn.Conv1d({d.width}, {d.width}, 3, padding=1)")
    d.forward(f"x = x + torch.tanh(self.{name}(x.transpose(1, 2)).transpose(1, 2))")


def batchnorm(d: Draft) -> None:
    name = d.name("norm")
    d.init(f"self.{name} = nn.BatchNorm1d({d.width})")
    d.forward(f"x = self.{name}(x.transpose(1, 2)).transpose(1, 2)")
    d.trait("batchnorm")


def normalized(d: Draft) -> None:
    name = d.name("norm")
    d.init(f"self.{name} = {d.rng.choice(['nn.LayerNorm', 'nn.RMSNorm'])}({d.width})")
    d.forward(f"x = self.{name}(x)")


def positions(d: Draft) -> None:
    name = d.name("positions")
    if d.rng.random() < 0.5:
        d.init(f"self.{name} = nn.Parameter(0.1 * torch.randn(1, {LENGTH}, {d.width}))")
        d.forward(f"x = x + self.{name}")
    else:
        d.init(f"self.{name} = nn.Embedding({LENGTH}, {d.width})")
        d.forward(f"x = x + self.{name}(torch.arange({LENGTH}, device=x.device))")


def stack(d: Draft) -> None:
    name, kind = d.name("blocks"), d.rng.choice(["Block", "Mlp", "Gated"])
    arguments = f"{d.width}, 2, 12" if kind == "Block" else f"{d.width}, 8"
    d.init(f"self.{name} = nn.ModuleList([{_use(d, kind)}({arguments}) for _ in range(2)])")
    d.forward(f"for block in self.{name}:", "    x = block(x)")
    d.trait("blocks")


def frozen(d: Draft) -> None:
    name = d.name("frozen")
    d.init(f"self.{name} = {_use(d, 'Mlp')}({d.width}, 6)", f"self.{name}.fc1.requires_grad_(False)")
    d.forward(f"x = self.{name}(x)")
    d.trait("frozen")


def recomputed(d: Draft) -> None:
    name = d.name("again")
    d.init(f"self.{name} = {_use(d, 'Mlp')}({d.width}, 6)")
    d.forward(f"x = checkpoint(self.{name}, x, use_reentrant=False)")
    d.trait("checkpointed")


PARTS: dict[str, Choice] = {
    "feed_forward": Choice(feed_forward, 2),
    "attention": Choice(attention, 2),
    "torch_attention": Choice(torch_attention, 1),
    "encoder_layer": Choice(encoder_layer, 1),
    "recurrent": Choice(recurrent, 1.5),
    "convolution": Choice(convolution, 1),
    "batchnorm": Choice(batchnorm, 1),
    "normalized": Choice(normalized, 1),
    "positions": Choice(positions, 1),
    "stack": Choice(stack, 2),
    "frozen": Choice(frozen, 0.7),
    "recomputed": Choice(recomputed, 0.7),
}
