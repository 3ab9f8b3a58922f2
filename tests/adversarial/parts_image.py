"""Parts of models over images: each takes `x` of shape (batch, width, 6, 6) and leaves such an `x`."""

from __future__ import annotations

from tests.adversarial.draft import Choice, Draft


def _conv(d: Draft, out: int, options: str = "") -> str:
    name = d.name("conv")
    d.init(f"self.{name} = nn.Conv2d({d.width}, {out}, 3, padding=1{options})")
    return name


def convolution(d: Draft) -> None:
    out = d.rng.choice([2, 3, 4, 6])
    name = _conv(d, out, d.rng.choice(["", ", bias=False"]))
    d.width = out
    d.forward(f"x = torch.tanh(self.{name}(x))")


def residual(d: Draft) -> None:
    name = _conv(d, d.width)
    d.forward(f"x = x + F.silu(self.{name}(x))")


def depthwise(d: Draft) -> None:
    name = _conv(d, d.width, f", groups={d.width}")
    d.forward(f"x = x + torch.tanh(self.{name}(x))")


def batchnorm(d: Draft) -> None:
    name = d.name("norm")
    options = d.rng.choice(["", ", momentum=None", ", affine=False", ", track_running_stats=False", ", eps=0.01"])
    d.init(f"self.{name} = nn.BatchNorm2d({d.width}{options})")
    d.forward(f"x = self.{name}(x)")
    d.trait("batchnorm")


def batchnorm_subclass(d: Draft) -> None:
    name = d.name("norm")
    d.init(f"self.{name} = {d.helper('Norm2dTanh')}({d.width})")
    d.forward(f"x = x + self.{name}(x)")
    d.trait("batchnorm", "batchnorm_subclass")


def normalized(d: Draft) -> None:
    name = d.name("norm")
    kind = d.rng.choice(["nn.GroupNorm(1, {w})", "nn.InstanceNorm2d({w}, affine=True)", "nn.LayerNorm(({w}, 6, 6))"])
    d.init(f"self.{name} = {kind.format(w=d.width)}")
    d.forward(f"x = self.{name}(x)")


def channels_last(d: Draft) -> None:
    name = _conv(d, d.width)
    d.after(f"model.{name}.to(memory_format=torch.channels_last)")
    d.forward(f"x = x + torch.tanh(self.{name}(x.to(memory_format=torch.channels_last)))")
    d.trait("permuted")


def weight_norm(d: Draft) -> None:
    name = _conv(d, d.width)
    d.init(f"nn.utils.parametrizations.weight_norm(self.{name})")
    d.forward(f"x = x + torch.tanh(self.{name}(x))")
    d.trait("parametrized")


def frozen(d: Draft) -> None:
    name = _conv(d, d.width)
    d.init(f"self.{name}{d.rng.choice(['', '.weight', '.bias'])}.requires_grad_(False)")
    d.forward(f"x = x + torch.tanh(self.{name}(x))")
    d.trait("frozen")


def shared(d: Draft) -> None:
    name = _conv(d, d.width)
    d.forward(f"x = x + torch.tanh(self.{name}(x))", f"x = x + torch.tanh(self.{name}(x))")
    d.trait("tied")


def recomputed(d: Draft) -> None:
    name = _conv(d, d.width)
    d.forward(f"x = x + torch.tanh(checkpoint(self.{name}, x, use_reentrant=False))")
    d.trait("checkpointed")


def gated_channels(d: Draft) -> None:
    name = d.name("gate")
    d.init(f"self.{name} = nn.Parameter(torch.ones({d.width}, 1, 1))")
    d.forward(f"x = x * torch.sigmoid(self.{name})", "x = x.mul_(1.5)")


def stack(d: Draft) -> None:
    name = d.name("stack")
    one = f"nn.Sequential(nn.Conv2d({d.width}, {d.width}, 1), nn.BatchNorm2d({d.width}), nn.ReLU(inplace=True))"
    d.init(f"self.{name} = nn.Sequential(*[{one} for _ in range(2)])")
    d.forward(f"x = self.{name}(x)")
    d.trait("batchnorm", "blocks")


PARTS: dict[str, Choice] = {
    "convolution": Choice(convolution, 3),
    "residual": Choice(residual, 2),
    "depthwise": Choice(depthwise, 1),
    "batchnorm": Choice(batchnorm, 3),
    "batchnorm_subclass": Choice(batchnorm_subclass, 0.5),
    "normalized": Choice(normalized, 1),
    "channels_last": Choice(channels_last, 0.7),
    "weight_norm": Choice(weight_norm, 0.5),
    "frozen": Choice(frozen, 0.8),
    "shared": Choice(shared, 0.7),
    "recomputed": Choice(recomputed, 0.7),
    "gated_channels": Choice(gated_channels, 0.8),
    "stack": Choice(stack, 1.5),
}
