"""Parts of models over vectors: each takes `x` of shape (batch, width) and leaves such an `x`."""

from __future__ import annotations

from tests.adversarial.draft import Choice, Draft


def linear(d: Draft) -> None:
    out = d.rng.choice([1, 2, 3, 4, 5, 7, 8, 12])
    name = d.linear(out=out, bias=d.rng.random() < 0.8)
    d.width = out
    d.forward(f"x = {d.rng.choice(['torch.tanh', 'F.gelu', 'F.silu', ''])}(self.{name}(x))")


def residual(d: Draft) -> None:
    d.forward(f"x = x + torch.tanh(self.{d.linear()}(x))")


def normalized(d: Draft) -> None:
    name = d.name("norm")
    kinds = ["nn.LayerNorm({w})", "nn.RMSNorm({w})", "nn.GroupNorm(1, {w})", "nn.LayerNorm({w}, bias=False)"]
    kind = d.rng.choice(kinds)
    d.init(f"self.{name} = {kind.format(w=d.width)}")
    d.forward(f"x = self.{name}(x)")


def batchnorm(d: Draft) -> None:
    name = d.name("norm")
    options = d.rng.choice(["", ", momentum=None", ", affine=False", ", track_running_stats=False", ", momentum=0.3"])
    d.init(f"self.{name} = nn.BatchNorm1d({d.width}{options})")
    d.forward(f"x = self.{name}(x)")
    d.trait("batchnorm")


def batchnorm_subclass(d: Draft) -> None:
    name = d.name("norm")
    d.init(f"self.{name} = {d.helper('NormReLU')}({d.width})")
    d.forward(f"x = self.{name}(x)")
    d.trait("batchnorm", "batchnorm_subclass")


def batchnorm_hooked(d: Draft) -> None:
    name = d.name("norm")
    d.init(f"self.{name} = nn.BatchNorm1d({d.width})")
    hook = d.rng.choice(
        ["register_forward_hook(lambda module, inputs, output: output * 1.5)",
         "register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.5 * inputs[0] ** 2,))"]
    )  # fmt: skip
    d.init(f"self.{name}.{hook}")
    d.forward(f"x = self.{name}(x)")
    d.trait("batchnorm", "batchnorm_hook")


def batchnorm_shared(d: Draft) -> None:
    name, again = d.name("norm"), d.name("again")
    d.init(f"self.{name} = nn.BatchNorm1d({d.width})", f"self.{again} = self.{name}")
    d.forward(f"x = self.{name}(x)", f"x = self.{again}(torch.tanh(x)) + x")
    d.trait("batchnorm", "batchnorm_shared")


def batchnorm_frozen(d: Draft) -> None:
    name = d.name("norm")
    d.init(f"self.{name} = nn.BatchNorm1d({d.width})", f"self.{name}.running_mean.fill_(0.1)")
    d.forward(f"x = self.{name}(x)")
    d.method(f"""
        def train(self, mode=True):
            super().train(mode)
            self.{name}.eval()
            return self
    """)
    d.trait("batchnorm", "own_train")


def shared_module(d: Draft) -> None:
    name = d.linear("shared")
    again = d.name("again")
    d.init(f"self.{again} = self.{name}")
    d.forward(f"x = torch.tanh(self.{name}(x))", f"x = x + self.{again}(x)")
    d.trait("tied")


def tied_weight(d: Draft) -> None:
    one, other = d.linear("tied"), d.linear("tied")
    d.init(f"self.{other}.weight = self.{one}.weight")
    d.forward(f"x = torch.tanh(self.{one}(x))", f"x = self.{other}(x) + x")
    d.trait("tied")


def transposed_weight(d: Draft) -> None:
    name = d.linear("twice", out=5)
    d.forward(f"x = F.linear(torch.tanh(self.{name}(x)), self.{name}.weight.t())")
    d.trait("tied")


def frozen(d: Draft) -> None:
    name = d.linear("frozen")
    what = d.rng.choice(["", ".weight", ".bias"])
    d.init(f"self.{name}{what}.requires_grad_(False)")
    d.forward(f"x = x + torch.tanh(self.{name}(x))")
    d.trait("frozen")


def unused(d: Draft) -> None:
    if d.rng.random() < 0.5:
        d.linear("unused")
    else:
        name = d.linear("looked")
        d.forward("with torch.no_grad():", f"    shift = self.{name}(x).mean(1, keepdim=True)", "x = x + 0.1 * shift")
    d.trait("unused")


def unused_in_some_steps(d: Draft) -> None:
    name, count = d.linear("sometimes"), d.name("count")
    d.init(f"self.register_buffer({count!r}, torch.zeros((), dtype=torch.long))")
    d.forward(
        f"if self.{count} % 2 == {d.rng.choice([0, 1])}:",
        f"    x = x + torch.tanh(self.{name}(x))",
        "if self.training and torch.is_grad_enabled():",
        f"    self.{count} += 1",
    )
    d.trait("unused_sometimes", "counts")


def used_by_some_samples(d: Draft) -> None:
    name = d.linear("few")
    d.forward(
        "chosen = x[:, 0] > 0.8",
        "if chosen.any():",
        f"    x = x.index_put((chosen,), x[chosen] + torch.tanh(self.{name}(x[chosen])))",
    )
    d.trait("unused_by_ranks")


def complex_parameter(d: Draft) -> None:
    name = d.name("phase")
    d.init(f"self.{name} = nn.Parameter(torch.randn({d.width}, dtype=torch.complex128))")
    d.forward(f"x = (x * self.{name}).real + (x * self.{name}).imag")
    d.trait("complex")


def permuted_parameter(d: Draft) -> None:
    name = d.name("permuted")
    d.init(f"self.{name} = nn.Parameter(0.3 * torch.randn({d.width}, 3).t())")
    d.forward(f"x = x + torch.tanh(x @ self.{name}.t()) @ self.{name}")
    d.trait("permuted")


def scalar_parameter(d: Draft) -> None:
    name = d.name("scalar")
    d.init(f"self.{name} = nn.Parameter(torch.tensor(0.7))")
    d.forward(f"x = x * self.{name}.expand({d.width})" if d.rng.random() < 0.5 else f"x = x + self.{name}")
    d.trait("scalar")


def empty_parameter(d: Draft) -> None:
    name = d.name("empty")
    d.init(f"self.{name} = nn.Parameter(torch.empty(0, {d.width}))")
    d.forward(f"x = x + self.{name}.sum(0)")
    d.trait("empty")


def parameter_containers(d: Draft) -> None:
    name, table = d.name("listed"), d.name("table")
    d.init(
        f"self.{name} = nn.ParameterList([nn.Parameter(torch.randn({d.width})) for _ in range(2)])",
        f"self.{table} = nn.ParameterDict({{'a': nn.Parameter(torch.randn({d.width})), 'b.c'.replace('.', '_'): "
        f"nn.Parameter(torch.randn(1))}})",
    )
    d.forward(
        f"x = x * self.{name}[0] + self.{name}[1]", f"x = torch.tanh(x + self.{table}['a']) * self.{table}['b_c']"
    )


def weight_norm(d: Draft) -> None:
    name = d.linear("normed")
    d.init(f"nn.utils.parametrizations.weight_norm(self.{name})")
    d.forward(f"x = x + torch.tanh(self.{name}(x))")
    d.trait("parametrized")


def old_weight_norm(d: Draft) -> None:
    name = d.linear("normed")
    d.init(f"nn.utils.weight_norm(self.{name})")
    d.forward(f"x = x + torch.tanh(self.{name}(x))")
    d.trait("old_weight_norm")


def spectral_norm(d: Draft) -> None:
    name = d.linear("spectral", out=d.width)
    d.init(f"nn.utils.parametrizations.spectral_norm(self.{name})")
    d.forward(f"x = x + torch.tanh(self.{name}(x))")
    d.trait("parametrized", "spectral", "counts")  # each forward pass is an iteration


def orthogonal(d: Draft) -> None:
    name = d.linear("orthogonal")
    d.init(f"nn.utils.parametrizations.orthogonal(self.{name})")
    d.forward(f"x = x + torch.tanh(self.{name}(x))")
    d.trait("parametrized", "orthogonal")


def own_parametrization(d: Draft) -> None:
    name = d.linear("shaped")
    kind = d.helper(d.rng.choice(["Doubled", "Symmetric"]))
    d.init(f"nn.utils.parametrize.register_parametrization(self.{name}, 'weight', {kind}())")
    d.forward(f"x = x + torch.tanh(self.{name}(x))")
    d.trait("parametrized")


def forward_hook(d: Draft) -> None:
    name = d.linear("hooked")
    hook = d.rng.choice(
        ["register_forward_hook(lambda module, inputs, output: output.tanh() * 0.5)",
         "register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))"]
    )  # fmt: skip
    d.init(f"self.{name}.{hook}")
    d.forward(f"x = x + self.{name}(x)")
    d.trait("hook")


def gradient_hook(d: Draft) -> None:
    name = d.linear("hooked")
    hook = d.rng.choice(
        [".weight.register_hook(lambda grad: grad * 0.5)",
         ".register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))"]
    )  # fmt: skip
    d.init(f"self.{name}{hook}")
    d.forward(f"x = x + torch.tanh(self.{name}(x))")
    d.trait("gradient_hook", "parameter_hook" if ".weight" in hook else "module_gradient_hook")


def custom_function(d: Draft) -> None:
    kind = d.rng.choice(["Cube", "StraightThrough"])
    d.forward(f"x = x + 0.1 * {d.helper(kind)}.apply(torch.tanh(x))")
    d.trait("custom_function")


def buffers(d: Draft) -> None:
    name, kept = d.name("shift"), d.name("mask")
    persistent = d.rng.choice(["", ", persistent=False"])
    d.init(
        f"self.register_buffer({name!r}, 0.1 * torch.randn({d.width}){persistent})",
        f"self.register_buffer({kept!r}, torch.arange({d.width}) % 3 != 1)",
    )
    d.forward(f"x = (x + self.{name}) * self.{kept}")


def counting_buffer(d: Draft) -> None:
    name = d.name("steps")
    d.init(f"self.register_buffer({name!r}, torch.zeros((), dtype=torch.long))")
    d.forward(
        "if self.training and torch.is_grad_enabled():",
        f"    self.{name} += 1",
        f"x = x * (1 + 0.1 / (1 + self.{name}))",
    )
    d.trait("counts")


def averaged_weight(d: Draft) -> None:
    name, average = d.linear("followed"), d.name("average")
    d.init(f"self.register_buffer({average!r}, self.{name}.weight.detach().clone())")
    d.forward(
        "if self.training and torch.is_grad_enabled():",
        f"    self.{average}.lerp_(self.{name}.weight.detach(), 0.5)",
        f"x = x + torch.tanh(self.{name}(x)) + 0.1 * x @ self.{average}.t()",
    )
    d.trait("counts", "follows_weight")


def in_place(d: Draft) -> None:
    lines = ["x = torch.tanh(x).mul_(1.5)", "x = F.relu(x + 0.5, inplace=True)", "x = x.clone(); x[:, 0] = 0.25"]
    d.forward(d.rng.choice(lines))


def recomputed(d: Draft) -> None:
    name = d.linear("again")
    reentrant = d.rng.random() < 0.25
    d.forward(f"x = x + torch.tanh(checkpoint(self.{name}, x, use_reentrant={reentrant}))")
    d.trait("checkpointed_reentrant" if reentrant else "checkpointed")


def dropout(d: Draft) -> None:
    name = d.name("dropout")
    d.init(f"self.{name} = nn.Dropout(0.0)")
    d.forward(f"x = self.{name}(x)")


def bilinear(d: Draft) -> None:
    name = d.name("bilinear")
    d.init(f"self.{name} = nn.Bilinear({d.width}, {d.width}, 3)")
    d.forward(f"x = torch.tanh(self.{name}(x, x))")
    d.width = 3


def extra_state(d: Draft) -> None:
    name = d.name("remembering")
    d.init(f"self.{name} = {d.helper('Remembering')}()")
    d.forward(f"x = self.{name}(x)")
    d.trait("extra_state")


def single_precision(d: Draft) -> None:
    name = d.linear("single")
    d.after(f"model.{name}.float()")
    d.forward(f"x = x + torch.tanh(self.{name}(x.float())).double()")
    d.trait("single")


def sub_sequence(d: Draft) -> None:
    name = d.name("stack")
    one = f"nn.Sequential(nn.Linear({d.width}, {d.width}), nn.Tanh())"
    d.init(f"self.{name} = nn.Sequential(*[{one} for _ in range(2)])")
    d.forward(f"x = self.{name}(x)")
    d.trait("blocks")


def detached(d: Draft) -> None:
    name = d.linear("side")
    d.forward(f"x = x + torch.tanh(self.{name}(x.detach()))")


PARTS: dict[str, Choice] = {
    "linear": Choice(linear, 4),
    "residual": Choice(residual, 3),
    "normalized": Choice(normalized, 2),
    "batchnorm": Choice(batchnorm, 2),
    "batchnorm_subclass": Choice(batchnorm_subclass, 0.4),
    "batchnorm_hooked": Choice(batchnorm_hooked, 0.4),
    "batchnorm_shared": Choice(batchnorm_shared, 0.4),
    "batchnorm_frozen": Choice(batchnorm_frozen, 0.4),
    "shared_module": Choice(shared_module, 1),
    "tied_weight": Choice(tied_weight, 1),
    "transposed_weight": Choice(transposed_weight, 0.6),
    "frozen": Choice(frozen, 1.2),
    "unused": Choice(unused, 0.8),
    "unused_in_some_steps": Choice(unused_in_some_steps, 0.6),
    "used_by_some_samples": Choice(used_by_some_samples, 0.6),
    "complex_parameter": Choice(complex_parameter, 0.6),
    "permuted_parameter": Choice(permuted_parameter, 0.8),
    "scalar_parameter": Choice(scalar_parameter, 0.8),
    "empty_parameter": Choice(empty_parameter, 0.4),
    "parameter_containers": Choice(parameter_containers, 0.6),
    "weight_norm": Choice(weight_norm, 0.6),
    "old_weight_norm": Choice(old_weight_norm, 0.3),
    "spectral_norm": Choice(spectral_norm, 0.4),
    "orthogonal": Choice(orthogonal, 0.3),
    "own_parametrization": Choice(own_parametrization, 0.5),
    "forward_hook": Choice(forward_hook, 0.8),
    "gradient_hook": Choice(gradient_hook, 0.8),
    "custom_function": Choice(custom_function, 0.8),
    "buffers": Choice(buffers, 0.8),
    "counting_buffer": Choice(counting_buffer, 0.8),
    "averaged_weight": Choice(averaged_weight, 0.4),
    "in_place": Choice(in_place, 1),
    "recomputed": Choice(recomputed, 0.8),
    "dropout": Choice(dropout, 0.5),
    "bilinear": Choice(bilinear, 0.4),
    "extra_state": Choice(extra_state, 0.4),
    "single_precision": Choice(single_precision, 0.3),
    "sub_sequence": Choice(sub_sequence, 1),
    "detached": Choice(detached, 0.5),
}
