"""Tensor parallelism: each rank of a group has slices of a model's parameters, and computes a part of its layers.

The parameters are replaced in place by plain ones of this rank's size, under the same names, and the forwards of single
modules get the collectives, so that wrappers of the model need no change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distributed.core.errors import PlanError
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import BatchNormBase, ConvBase
from distributed.strategies.gradient_sums import sum_gradients
from distributed.strategies.model.blocks import main_stack
from distributed.strategies.model.paths import join, parent_of
from distributed.strategies.model.random_streams import RankStream
from distributed.strategies.model.sequence_masks import SequenceMasks
from distributed.strategies.placement import Cut, Layout
from distributed.strategies.tensor.attention import HeadShare
from distributed.strategies.tensor.feed_forward import WidthShare, can_be_tried, find_holders
from distributed.strategies.tensor.forwards import (
    install_column,
    install_entry,
    install_exit,
    install_gathered,
    install_masks,
    install_row,
    install_vocabulary,
    patch,
)
from distributed.strategies.tensor.modules import core_of, features, is_lora, is_transposed
from distributed.strategies.tensor.names import COLUMNS, Style
from distributed.strategies.tensor.region import Region
from distributed.strategies.tensor.torch_attention import TorchAttention
from distributed.strategies.tensor.trials import Cuts
from distributed.strategies.tensor.units import heads_of

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
        session: Session,
        *,
        sequence: bool = False,
    ) -> None:
        self._module, self._group, self._styles, self._session = module, group, dict(styles), session
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
        """Check after a forward pass that every cut width has ended, and that the random stream is the shared one."""
        if self._stream.has_begun(device):
            raise PlanError(
                "a layer that is cut by its outputs is followed by none that is cut by its inputs",
                why="each rank has its own dropout within the cut width, and where that ends cannot be known",
                do="give tensor_parallel_plan with a 'row' layer after every 'column' layer, or use 'column_gather'",
            )

    def finish_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """All-reduce partial gradients over the group, once, after the last backward of a step."""
        found = [parameters[name] for name in self.partial if name in parameters]
        trained = [parameter for parameter in found if parameter.requires_grad]
        sum_gradients("gradients over tensor ranks", trained, self._session, self._group)

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
            why = self._reason_for_whole_sequence(path, block)
            if why:
                do = "leave sequence_parallel out"
                raise PlanError(
                    f"block {path} ({type(block).__name__}) cannot run on shards of a sequence", why=why, do=do
                )
        return stack

    def _reason_for_whole_sequence(self, path: str, block: nn.Module) -> str:
        """Why a block needs the whole sequence; empty if only its attention does, for which it is gathered."""
        if self._styles.get(path) == "heads":
            return "its attention needs the whole sequence, and is not a separate module"
        within = [style for at, style in self._styles.items() if at.startswith(f"{path}.")]
        if not {"heads", "attention"} & set(within):
            return "no attention in it has a plan, and over a shard of the sequence its result would differ"
        mixing = [name for name, m in block.named_modules() if isinstance(m, ConvBase | BatchNormBase)]
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
        """The cuts of all parameters, by each of their names."""
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
        """This rank's ranges in a dimension of several concatenated parts."""
        ranges, start = [], 0
        for length in parts:
            share = length // self._degree
            ranges.append((start + self._rank * share, start + (self._rank + 1) * share))
            start += length
        return Cut(dim, tuple(ranges))

    def _find_partial(self, cut: set[str]) -> list[str]:
        """The names of whole parameters with partial gradients: of a shard of a sequence, heads or a LoRA width."""
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
            region = regions.get(path) or Region(self._session, self._group, self._dim_at(path), 1, self._stream)
            if style in COLUMNS:
                install_column(m, region)
            elif style == "row":
                install_row(m, region)
            elif style == "column_gather":
                install_gathered(m, self._group)
            elif style == "vocabulary":
                install_vocabulary(m, self._group)
            elif style == "attention":
                assert isinstance(m, nn.MultiheadAttention)
                patch(m, TorchAttention(m, region), compiles=False)
            elif style == "heads":
                heads = self._heads[path]
                assert heads is not None
                own = _within(path, cuts, [at for at, holder in holders.items() if holder == path])
                share = HeadShare(
                    path,
                    m,
                    heads=heads,
                    width=self._widths[path],
                    region=regions[self._columns_of(path)[0]],
                    cuts=own,
                    settled=settled,
                )
                patch(m, share, compiles=True)
        self._install_trials(holders, regions, cuts)
        for m in self._module.modules():  # these have a fast path that reads weights as if they were whole
            if isinstance(m, nn.TransformerEncoderLayer):
                m.activation_relu_or_gelu = 0
            elif isinstance(m, nn.TransformerEncoder):
                m.use_nested_tensor = False
        if self._stack is not None:
            blocks = list(self._module.get_submodule(self._stack).children())
            for block in blocks:
                install_masks(block, SequenceMasks(self._rank, self._sequence_dim), self._stream)
            install_entry(blocks[0], self._sequence_dim, self._group)
            install_exit(blocks[-1], self._sequence_dim, self._group)

    def _make_regions(self, holders: Mapping[str, str]) -> dict[str, Region]:
        """The region of each layer, shared with the other layers of its holder or, without a holder, of its parent."""
        places = {path: holders.get(path, parent_of(path)) for path, s in self._styles.items() if s in COLUMNS}
        readers = Counter(places.values())
        made = {
            place: Region(self._session, self._group, self._dim_at(path), readers[place], self._stream)
            for path, place in places.items()
        }
        return {path: made[place] for path, place in (places | dict(holders)).items()}

    def _install_trials(
        self,
        holders: Mapping[str, str],
        regions: Mapping[str, Region],
        cuts: Cuts,
    ) -> None:
        """Patch the modules that hold both ends of a width, unless the trial of their heads covers it."""
        tried: set[Any] = set()
        for holder in dict.fromkeys(holders.values()):
            if holder in self._heads or not can_be_tried(self._module, holder):
                continue
            layers = [path for path, at in holders.items() if at == holder]
            m = self._module.get_submodule(holder)
            share = WidthShare(
                holder,
                m,
                regions[layers[0]],
                _within(holder, cuts, layers),
                has_heads=any(parent_of(path) in self._heads for path in layers),
                tried=tried,
            )
            patch(m, share, compiles=True)

    def _dim_at(self, path: str) -> int | None:
        return self._sequence_dim if self._is_shared(path) else None


def _refuse_masks_over_width(path: str, m: nn.Module) -> None:
    """Refuse dropout of whole channels within a cut width, where each rank draws its own mask."""
    for name, child in m.named_modules():
        if isinstance(child, _WHOLE_WIDTH) and child.p > 0:
            raise PlanError(
                f"{join(path, name)} ({type(child).__name__}) drops whole channels, in a module whose width is cut",
                why="within the cut width each rank draws numbers of its own, and such a mask may have to be the same",
                do="use nn.Dropout there, or give tensor_parallel_plan without the layers of this module",
            )


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    holder, _, leaf = name.rpartition(".")
    return module.get_submodule(holder)._parameters.get(leaf)


def _within(holder: str, cuts: Cuts, layers: Iterable[str]) -> Cuts:
    """The cuts of some layers' parameters, by their names within the module that holds them."""
    chosen = tuple(f"{path}." for path in layers)
    return {name[len(join(holder, "")) :]: cut for name, cut in cuts.items() if name.startswith(chosen)}
