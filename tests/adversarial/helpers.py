"""The text of the classes and functions that drawn models and losses are made with."""

from __future__ import annotations

HELPERS: dict[str, str] = {
    "NormReLU": '''
class NormReLU(nn.BatchNorm1d):
    """A subclass that does more than its base."""

    def forward(self, x):
        return super().forward(x).relu() + 0.1 * x
''',
    "Norm2dTanh": """
class Norm2dTanh(nn.BatchNorm2d):
    def forward(self, x):
        return torch.tanh(super().forward(x))
""",
    "Cube": """
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2
""",
    "StraightThrough": """
class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5
""",
    "Doubled": '''
class Doubled(nn.Module):
    """A parametrization without inverse."""

    def forward(self, weight):
        return 2 * torch.tanh(weight)
''',
    "Symmetric": """
class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT
""",
    "Remembering": '''
class Remembering(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.told = {"version": 3, "names": ["a", "b"]}

    def get_extra_state(self):
        return self.told

    def set_extra_state(self, state):
        self.told = state

    def forward(self, x):
        return x * self.scale
''',
    "Mlp": """
class Mlp(nn.Module):
    def __init__(self, width, hidden, bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))
""",
    "Gated": """
class Gated(nn.Module):
    def __init__(self, width, hidden, bias=True):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate_proj, self.up_proj = nn.Linear(width, hidden, bias=bias), nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
""",
    "Attention": """
class Attention(nn.Module):
    def __init__(self, width, heads, bias=True):
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias)
        self.v_proj, self.o_proj = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))
""",
    "Block": """
class Block(nn.Module):
    def __init__(self, width, heads, hidden, bias=True):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, bias)
        self.fc1, self.fc2 = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
""",
    "Plain": """
class Plain(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))
""",
    "Ring": '''
class Ring(Sampler):
    """An order of its own, another in each epoch where it is told the epoch."""

    def __init__(self, length, step):
        self.length, self.step, self.epoch = length, step, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(self.epoch + index * self.step) % self.length for index in range(self.length)])

    def __len__(self):
        return self.length
''',
    "Coin": '''
class Coin(Sampler):
    """Draws with Python's generator."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter([random.randrange(self.length) for _ in range(self.length)])

    def __len__(self):
        return self.length
''',
    "Stream": """
class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter([self.data[index] for index in range(len(self.data))])
""",
    "Rows": '''
class Rows(Dataset):
    """Samples that are dicts."""

    def __init__(self, **columns):
        self.columns = columns

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}

    def __len__(self):
        return len(next(iter(self.columns.values())))
''',
    "Nested": '''
class Nested(Dataset):
    """Samples of a dict of inputs and a target."""

    def __init__(self, target, **columns):
        self.target, self.columns = target, columns

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}, self.target[index]

    def __len__(self):
        return len(self.target)
''',
    "CountingLoss": '''
class CountingLoss(nn.Module):
    """A warm-up that counts in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, outputs, target):
        if self.training and torch.is_grad_enabled():
            self.calls += 1
        return F.mse_loss(outputs, target) * torch.clamp(self.calls / 4, max=1.0)
''',
}
NEEDS = {"Block": ("Attention",)}  # helpers that a helper uses
