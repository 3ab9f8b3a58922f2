"""Tensor parallelism: each rank of a group has slices of a model's parameters, and computes a part of its layers.

The parameters are replaced in place by plain ones of this rank's size, under the same names, and the forwards of single
modules get the collectives, so that what is put on top of a model does not see a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from distributed.core.errors import PlanError
from distributed.strategies.blocks import main_stack
from distributed.strategies.gradient_sums import sum_gradients
from distributed.strategies.layout import Cut, Layout
from distributed.strategies.paths import join, parent_of
from distributed.strategies.random_streams import RankStream
from distributed.strategies.sequence_masks import MaskMode, SequenceMasks
from distributed.strategies.tensor_attention import HeadShare
from distributed.strategies.tensor_collectives import copy_to, gather_from, reduce_from, scatter_to
from distributed.strategies.tensor_feed_forward import WidthShare, can_be_tried, find_holders
from distributed.strategies.tensor_modules import core_of, features, is_lora, is_transposed
from distributed.strategies.tensor_names import COLUMNS, Style
from distributed.strategies.tensor_region import Region
from distributed.strategies.tensor_torch_attention import TorchAttention
from distributed.strategies.tensor_trials import Cuts
from distributed.strategies.tensor_units import heads_of

_WHOLE_WIDTH = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)


class TensorParallel:
    """Slices a model, whose parameters may be on the meta device, and puts the collectives into its forwards.

    With `sequence`, activations between the cut layers of the largest stack of blocks are shards of the sequence.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        group: dist.ProcessGroup,
        styles: Mapping[str, Style],
        *,
        sequence: bool = False,
    ) -> None:
        self._module, self._group, self._styles = module, group, dict(styles)
        self._rank, self._degree = dist.get_rank(group), dist.get_world_size(group)
        self._stream = RankStream(self._rank)
        self._stack = self._shared_stack() if sequence else None
        self._sequence_dim = 1
        if self._stack is not None:
            within = module.get_submodule(self._stack).modules()
            self._sequence_dim = int(all(m.batch_first for m in within if isinstance(m, nn.MultiheadAttention)))
        self._heads = {path: heads_of(module, path, styles) for path, style in styles.items() if style == "heads"}
        self._widths = {path: self._input_width(path) for path in self._heads}
        cuts = self._find_cuts()
        self.partial = self._find_partial(set(cuts))
        shapes = {name: layout.shape(name) for name in cuts}
        self._slice(layout, cuts)
        self._install({name: (shapes[name], cut) for name, cut in cuts.items()})

    def check_streams(self, device: torch.device) -> None:
        """After a forward pass: that every cut width has ended, and random numbers are those of all ranks again."""
        if self._stream.has_begun(device):
            raise PlanError(
                "a layer that is cut by its outputs is followed by none that is cut by its inputs",
                why="so it cannot be known where the ranks' parts end, between which dropout is of each rank's own",
                do="give tensor_parallel_plan with a 'row' layer after every 'column' layer, or use 'column_gather'",
            )

    def finish_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum over the group the gradients that are only a part; once, after the last backward of a step."""
        found = [parameters[name] for name in self.partial if name in parameters]
        sum_gradients([parameter for parameter in found if parameter.requires_grad], self._group)

    def _shared_stack(self) -> str:
        stack = main_stack(self._module)
        if stack is None:
            raise PlanError(
                "sequence parallelism needs a stack of blocks",
                why=f"{type(self._module).__name__} has no list of two or more modules of one class",
                do="leave sequence_parallel out",
            )
        for name, block in self._module.get_submodule(stack).named_children():
            path = f"{stack}.{name}" if stack else name
            why = self._why_whole(path, block)
            if why:
                do = "leave sequence_parallel out"
                raise PlanError(
                    f"block {path} ({type(block).__name__}) cannot run on shards of a sequence", why=why, do=do
                )
        return stack

    def _why_whole(self, path: str, block: nn.Module) -> str:
        """Why a block needs the whole sequence; empty if only its attention does, which gets it."""
        if self._styles.get(path) == "heads":
            return "its attention, which needs the whole sequence, is not a module of its own"
        within = [style for at, style in self._styles.items() if at.startswith(f"{path}.")]
        if not {"heads", "attention"} & set(within):
            return "no attention of it has a plan, and one that sees only a shard would not be the same"
        mixing = [name for name, m in block.named_modules() if isinstance(m, _ConvNd | _BatchNorm)]
        return f"{mixing[0]} takes more than one position of the sequence together" if mixing else ""

    def _is_shared(self, path: str) -> bool:
        """Whether activations around this module are shards of a sequence."""
        return self._stack is not None and (not self._stack or path.startswith(f"{self._stack}."))

    def _input_width(self, path: str) -> int:
        core = core_of(self._module.get_submodule(self._columns_of(path)[0]))
        assert core is not None
        return features(core)[0]

    def _columns_of(self, path: str) -> list[str]:
        return [at for at, style in self._styles.items() if style in COLUMNS and parent_of(at) == path]

    def _find_cuts(self) -> dict[str, Cut]:
        """Of every parameter that is cut, by each of its names."""
        cuts: dict[str, Cut] = {}
        for path, style in self._styles.items():
            m = self._module.get_submodule(path)
            found = {f"{path}.{name}": cut for name, cut in self._cuts_of(path, m, style).items()}
            cuts.update({name: cut for name, cut in found.items() if _parameter(self._module, name) is not None})
        names: dict[int, list[str]] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for tied in names.values():
            wanted = {cuts[name] for name in tied if name in cuts}
            if len(wanted) > 1:
                raise PlanError(
                    f"{' and '.join(tied)} are one parameter, but their styles cut it in different ways",
                    do="give them styles that cut it alike, such as 'vocabulary' and 'column_gather'",
                )
            cuts.update({name: cut for name in tied for cut in wanted})
        return cuts

    def _cuts_of(self, path: str, m: nn.Module, style: Style) -> dict[str, Cut]:
        if style == "vocabulary":
            assert isinstance(m, nn.Embedding)
            return {"weight": self._cut(0, (m.num_embeddings,))}
        if isinstance(m, nn.MultiheadAttention):
            thirds = self._cut(0, (m.embed_dim,) * 3)
            single = self._cut(0, (m.embed_dim,))
            separate = {f"{x}_proj_weight": single for x in "qkv"}
            return {
                "in_proj_weight": thirds,
                "in_proj_bias": thirds,
                **separate,
                "out_proj.weight": self._cut(1, (m.embed_dim,)),
            }
        core = core_of(m)
        if core is None or style in ("heads", "partial"):
            return {}
        inputs, outputs = features(core)
        prefix = "base_layer." if is_lora(m) else ""
        adapters = list(m.lora_A) if is_lora(m) else []  # type: ignore[arg-type]
        if style == "row":
            return {
                f"{prefix}weight": self._cut(0 if is_transposed(core) else 1, (inputs,)),
                **{f"lora_A.{name}.weight": self._cut(1, (inputs,)) for name in adapters},
            }
        parts: tuple[int, ...] = (outputs,)
        if style == "fused_gate_column":
            parts = (outputs // 2,) * 2
        elif style == "fused_qkv_column":
            heads = self._heads.get(path.rpartition(".")[0])
            parts = (outputs // 3,) * 3 if heads is None else heads.parts
        return {
            f"{prefix}weight": self._cut(1 if is_transposed(core) else 0, parts),
            f"{prefix}bias": self._cut(0, parts),
            **{f"lora_B.{name}.weight": self._cut(0, parts) for name in adapters},
            **{f"lora_B.{name}.bias": self._cut(0, parts) for name in adapters},
        }

    def _cut(self, dim: int, parts: tuple[int, ...]) -> Cut:
        """This rank's share of each of the parts that lie one after the other."""
        ranges, start = [], 0
        for length in parts:
            share = length // self._degree
            ranges.append((start + self._rank * share, start + (self._rank + 1) * share))
            start += length
        return Cut(dim, tuple(ranges))

    def _find_partial(self, cut: set[str]) -> list[str]:
        """Names of whole parameters that see only a share: of a sequence, the heads or a LoRA layer's width."""
        shares = {path: style for path, style in self._styles.items() if style == "partial"}
        for path, style in self._styles.items():
            if is_lora(self._module.get_submodule(path)):
                shares[f"{path}.{'lora_B' if style == 'row' else 'lora_A'}"] = style
        return [
            name
            for name, _ in self._module.named_parameters()
            if name not in cut and (self._is_shared(name) or any(name.startswith(f"{path}.") for path in shares))
        ]

    def _slice(self, layout: Layout, cuts: Mapping[str, Cut]) -> None:
        made: dict[int, nn.Parameter] = {}
        whole = dict(self._module.named_parameters(remove_duplicate=False))
        for name, cut in cuts.items():
            parameter = whole[name]
            layout.cut(name, cut)
            if id(parameter) not in made:
                part = layout.take(name, parameter.detach())
                made[id(parameter)] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            holder, _, leaf = name.rpartition(".")
            self._module.get_submodule(holder)._parameters[leaf] = made[id(parameter)]

    def _install(self, cuts: Cuts) -> None:
        holders = find_holders(self._module, self._styles)
        for holder in dict.fromkeys(holders.values()):
            _refuse_masks_over_width(holder, self._module.get_submodule(holder))
        regions = self._make_regions(holders)
        settled: dict[Any, Any] = {}
        for path, style in self._styles.items():
            m = self._module.get_submodule(path)
            region = regions.get(path) or Region(self._group, self._dim_at(path), 1, self._stream)
            if style in COLUMNS:
                _install_column(m, region)
            elif style == "row":
                _install_row(m, region)
            elif style == "column_gather":
                _install_gathered(m, self._group)
            elif style == "vocabulary":
                _install_vocabulary(m, self._group)
            elif style == "attention":
                assert isinstance(m, nn.MultiheadAttention)
                m.forward = TorchAttention(m, region)  # type: ignore[method-assign]
            elif style == "heads":
                heads = self._heads[path]
                assert heads is not None
                own = _within(path, cuts, [at for at, holder in holders.items() if holder == path])
                m.forward = HeadShare(  # type: ignore[method-assign]
                    path, m, heads, self._widths[path], regions[self._columns_of(path)[0]], own, settled
                )
        self._install_trials(holders, regions, cuts)
        for m in self._module.modules():  # these have a fast path that reads weights as if they were whole
            if isinstance(m, nn.TransformerEncoderLayer):
                m.activation_relu_or_gelu = 0
            elif isinstance(m, nn.TransformerEncoder):
                m.use_nested_tensor = False
        if self._stack is not None:
            blocks = list(self._module.get_submodule(self._stack).children())
            for block in blocks:
                _install_masks(block, SequenceMasks(self._rank, self._sequence_dim), self._stream)
            _install_entry(blocks[0], self._sequence_dim, self._group)
            _install_exit(blocks[-1], self._sequence_dim, self._group)

    def _make_regions(self, holders: Mapping[str, str]) -> dict[str, Region]:
        """For each layer the one that it shares with the others of its holder or, if it has none, of its parent."""
        places = {path: holders.get(path, parent_of(path)) for path, s in self._styles.items() if s in COLUMNS}
        readers = Counter(places.values())
        made = {
            place: Region(self._group, self._dim_at(path), readers[place], self._stream)
            for path, place in places.items()
        }
        return {path: made[place] for path, place in (places | dict(holders)).items()}

    def _install_trials(
        self,
        holders: Mapping[str, str],
        regions: Mapping[str, Region],
        cuts: Cuts,
    ) -> None:
        """Into what holds both ends of a width, unless its heads are tried anyway."""
        tried: set[Any] = set()
        for holder in dict.fromkeys(holders.values()):
            if holder in self._heads or not can_be_tried(self._module, holder):
                continue
            layers = [path for path, at in holders.items() if at == holder]
            m = self._module.get_submodule(holder)
            m.forward = WidthShare(  # type: ignore[method-assign]
                holder,
                m,
                regions[layers[0]],
                _within(holder, cuts, layers),
                has_heads=any(parent_of(path) in self._heads for path in layers),
                tried=tried,
            )

    def _dim_at(self, path: str) -> int | None:
        return self._sequence_dim if self._is_shared(path) else None


def _refuse_masks_over_width(path: str, m: nn.Module) -> None:
    """A mask that is the same over a width that is cut cannot be told from others within it."""
    for name, child in m.named_modules():
        if isinstance(child, _WHOLE_WIDTH) and child.p > 0:
            raise PlanError(
                f"{join(path, name)} ({type(child).__name__}) drops whole channels, in a module whose width is cut",
                why="within the cut width each rank draws numbers of its own, and such a mask may have to be the same",
                do="use nn.Dropout there, or give tensor_parallel_plan without the layers of this module",
            )


def _install_column(m: nn.Module, region: Region) -> None:
    forward = _forward_of(m, with_bias=True)
    drops_input = is_lora(m)  # all of which each rank has

    def column(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not m.training:
            return forward(region.enter(x), *args, **kwargs)
        if drops_input:
            region.stream.end(x.device)
        output = forward(region.enter(x), *args, **kwargs)
        region.stream.begin(x.device)
        return output

    m.forward = column  # type: ignore[method-assign]


def _install_row(m: nn.Module, region: Region) -> None:
    core = core_of(m)
    assert core is not None
    forward = _forward_of(m, with_bias=False)  # it is added once, to the sum

    def row(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        part = forward(x, *args, **kwargs)
        region.stream.end(x.device)
        total = region.leave(part)
        bias: Any = core.bias
        return total if bias is None else total + bias.to(total.dtype)

    m.forward = row  # type: ignore[method-assign]


def _install_gathered(m: nn.Module, group: dist.ProcessGroup) -> None:
    forward = _forward_of(m, with_bias=True)

    def column(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return gather_from(forward(copy_to(x, group), *args, **kwargs), -1, group)

    m.forward = column  # type: ignore[method-assign]


def _forward_of(m: nn.Module, *, with_bias: bool) -> Callable[..., Any]:
    """The forward of a linear layer, or of a LoRA layer around it, by the sizes of the weights that it then has."""
    core = core_of(m)
    assert core is not None
    is_turned = is_transposed(core)
    if with_bias and not is_turned:
        return m.forward

    def multiply(x: torch.Tensor) -> torch.Tensor:
        weight: Any = core.weight
        bias: Any = core.bias
        return F.linear(x, weight.t() if is_turned else weight, bias if with_bias else None)

    if core is m:
        return multiply
    core.forward = multiply  # type: ignore[method-assign]
    return m.forward


def _install_vocabulary(m: nn.Module, group: dist.ProcessGroup) -> None:
    assert isinstance(m, nn.Embedding)
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    rows = m.num_embeddings // (last + 1)
    padding = None if m.padding_idx is None or m.padding_idx // rows != rank else m.padding_idx % rows

    def embed(ids: torch.Tensor) -> torch.Tensor:
        here = ids - rank * rows
        # what no rank has is out of range on the first or the last
        elsewhere = ((here < 0) & (rank > 0)) | ((here >= rows) & (rank < last))
        found = F.embedding(here.masked_fill(elsewhere, 0), m.weight, padding)
        return reduce_from(found.masked_fill(elsewhere.unsqueeze(-1), 0), group)

    m.forward = embed  # type: ignore[method-assign,assignment]


def _install_entry(block: nn.Module, dim: int, group: dist.ProcessGroup) -> None:
    """The first block of a stack takes this rank's shard of the sequence."""
    forward: Callable[..., Any] = block.forward
    degree = dist.get_world_size(group)

    def enter(*args: Any, **kwargs: Any) -> Any:
        whole = _hidden_in((*args, *kwargs.values()))
        if whole is None:
            raise PlanError(
                f"the first block ({type(block).__name__}) has no sequence to share out",
                why="none of its arguments is a tensor of at least three dimensions",
                do="leave sequence_parallel out",
            )
        if whole.shape[dim] % degree:
            raise PlanError(
                f"a sequence of {whole.shape[dim]} does not divide by a tensor-parallel degree of {degree}",
                why="with sequence_parallel each rank has an equal shard of it",
                do=f"pad sequences to a multiple of {degree}, or leave sequence_parallel out",
            )
        shard = scatter_to(whole, dim, group)
        return forward(
            *(shard if x is whole else x for x in args),
            **{name: shard if x is whole else x for name, x in kwargs.items()},
        )

    block.forward = enter  # type: ignore[method-assign]


def _install_masks(block: nn.Module, masks: SequenceMasks, stream: RankStream) -> None:
    """What a block draws for the positions of its shard is of this rank's own; within a cut width, all is."""
    forward: Callable[..., Any] = block.forward

    def draw(*args: Any, **kwargs: Any) -> Any:
        hidden = _hidden_in((*args, *kwargs.values()))
        if not block.training or hidden is None:
            return forward(*args, **kwargs)
        with masks.running(hidden, stream), MaskMode(masks):
            return forward(*args, **kwargs)

    block.forward = draw  # type: ignore[method-assign]


def _hidden_in(values: Iterable[Any]) -> torch.Tensor | None:
    """The first that can be a sequence."""
    found = (x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 2)
    return next(found, None)


def _install_exit(block: nn.Module, dim: int, group: dist.ProcessGroup) -> None:
    """The last block of a stack gives the whole sequence."""
    forward: Callable[..., Any] = block.forward

    def leave(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if isinstance(output, tuple):
            return (gather_from(output[0], dim, group), *output[1:])
        return gather_from(output, dim, group)

    block.forward = leave  # type: ignore[method-assign]


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    holder, _, leaf = name.rpartition(".")
    return module.get_submodule(holder)._parameters.get(leaf)


def _within(holder: str, cuts: Cuts, layers: Iterable[str]) -> Cuts:
    """The cuts of some layers' parameters, by their names within what holds them."""
    chosen = tuple(f"{path}." for path in layers)
    return {name[len(join(holder, "")) :]: cut for name, cut in cuts.items() if name.startswith(chosen)}
