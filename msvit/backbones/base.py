"""What an adapter gives: a host's patch embedding, positions, blocks and head, for tokens of mixed scale."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed, resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

from msvit.backbones.blocks import Reduce, block_macs, block_trouble, run_block
from msvit.backbones.refuse import cannot
from msvit.heads.classify import classify, head_macs, head_trouble
from msvit.reduction import Reducer
from msvit.tokens import coarse_positions
from msvit.types import ScaleGrid, TokenBatch


def acts_as(host: nn.Module, kind: type[nn.Module]) -> bool:
    """Is the host of this class, or of one that changes nothing an adapter replaces or relies on?"""
    methods = ("forward", "forward_features", "_pos_embed", "pool")
    same = (getattr(type(host), name, None) is getattr(kind, name, None) for name in methods)
    return isinstance(host, kind) and all(same)


MAX_TABLES = 32  # input sizes whose tables are kept


class Backbone(nn.Module):
    """Runs the host's own modules on a TokenBatch. Weights are the host's; nothing of the host is changed."""

    host: Any

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.host = host
        for trouble in (self._stem_trouble(), *map(block_trouble, self.host.blocks), head_trouble(self.host)):
            if trouble:
                raise cannot(host, trouble)
        self.num_prefix: int = self.host.num_prefix_tokens
        self.in_chans: int = self.host.patch_embed.proj.in_channels
        self.fine: int = self.host.patch_embed.patch_size[0]
        self._tables: dict[tuple[str, ScaleGrid], tuple[Any, Tensor]] = {}  # one for each input size

    @classmethod
    def serves(cls, host: nn.Module) -> bool:
        raise TypeError(f"{cls.__name__} has no serves")

    @property
    def native_patches(self) -> tuple[int, int]:
        """(hf, wf) the host was built for."""
        return tuple(self.host.patch_embed.grid_size)

    @property
    def head_dims(self) -> set[int]:
        """Numbers in a head of attention, of the blocks and of a pooling head."""
        dims = {block.attn.proj.in_features // block.attn.num_heads for block in self.host.blocks}
        pool = getattr(self.host, "attn_pool", None)
        return dims if pool is None else dims | {pool.kv.out_features // 2 // pool.num_heads}

    def prefix(self) -> list[Tensor]:
        """The host's prefix tokens, (1, n, d) each, in its order."""
        raise TypeError(f"{type(self).__name__} has no prefix")

    def rotary(self, grid: ScaleGrid) -> Tensor | None:
        """(ids, 2 head_dim) sine and cosine of each token's place, or None."""
        return None

    def project(self, pixels: Tensor) -> Tensor:
        """The host's patch embedding on flattened patches, (n, c p p) -> (n, d)."""
        embed = self.host.patch_embed
        return embed.norm(F.linear(pixels, embed.proj.weight.flatten(1), embed.proj.bias))

    def start(self, grid: ScaleGrid) -> Tensor:
        """(ids, d): prefix tokens, positions of cells, positions of patches. Cached while nothing trains."""
        sources = [p for p in (self.host.pos_embed, *self.prefix()) if p is not None]
        return self._cached("start", grid, sources, lambda: self._start(grid))

    def _start(self, grid: ScaleGrid) -> Tensor:
        like = self.host.patch_embed.proj.weight
        prefix = [token[0] for token in self.prefix()] or [like.new_zeros(0, like.shape[0])]
        if self.host.pos_embed is None:
            return torch.cat([*prefix, like.new_zeros(grid.num_ids, like.shape[0])])
        shared = 0 if self.host.no_embed_class else self.num_prefix  # prefix tokens with positions of their own
        old, new = list(self.native_patches), list(grid.patches)
        table = resample_abs_pos_embed(self.host.pos_embed, new_size=new, old_size=old, num_prefix_tokens=shared)[0]
        own, fine = table[:shared], table[shared:]
        first = torch.cat(prefix)
        return torch.cat([first + own if shared else first, coarse_positions(fine, grid), fine])

    def _cached(self, name: str, grid: ScaleGrid, sources: list[Tensor], make: Callable[[], Tensor]) -> Tensor:
        if torch.compiler.is_compiling():
            return make()
        if torch.is_grad_enabled() and any(s.requires_grad for s in sources):
            self._tables.clear()  # the weights are about to change, and not every optimizer says so in _version
            return make()
        versions = (None if s.is_inference() else s._version for s in sources)
        state = tuple((s.data_ptr(), v, s.dtype, s.device) for s, v in zip(sources, versions, strict=True))
        known = self._tables.get((name, grid))
        if known is None or known[0] != state:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            with torch.inference_mode(False), torch.no_grad():
                known = self._tables[name, grid] = (state, make())
        return known[1]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._tables.clear()  # a new device or dtype: a new table
        return super()._apply(*args, **kwargs)

    def train(self, mode: bool = True) -> "Backbone":
        self._tables.clear()  # whoever trained the host may have written to its weights in any way
        return super().train(mode)

    def forward(
        self, tokens: TokenBatch, rotary: Tensor | None = None, reducer: Reducer | None = None
    ) -> TokenBatch:
        """`rotary` is the table of that name, where it was made beforehand."""
        host, start = self.host, tokens.layout
        rotary = self.rotary(start.grid) if rotary is None else rotary  # (ids, 2 head_dim)
        tokens = tokens.with_x(host.norm_pre(host.pos_drop(tokens.x)))
        tokens = tokens if reducer is None else reducer.begin(tokens)
        layout, turn = None, None
        for index, block in enumerate(host.blocks):
            tokens = tokens if reducer is None else reducer.before(index, tokens, start)
            if rotary is not None and tokens.layout is not layout:
                layout, turn = tokens.layout, rotary[tokens.layout.token]  # (slots, 2 head_dim)
            reduce = None if reducer is None else partial(reducer.between, index, start)
            tokens = self._run(block, tokens, turn, reduce)
        return tokens.with_x(host.norm(tokens.x))

    def _run(self, block: nn.Module, tokens: TokenBatch, turn: Tensor | None, reduce: Reduce | None) -> TokenBatch:
        if self.host.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(run_block, block, tokens, turn, reduce, use_reentrant=False)
        return run_block(block, tokens, turn, reduce)

    def head(self, tokens: TokenBatch) -> Tensor:
        """The host's own head on these tokens."""
        return classify(self.host, tokens)

    def num_macs(self, count: Tensor, reducer: Reducer | None = None, head: bool = True) -> Tensor:
        """Multiply-adds of embedding, blocks and (if asked) head for images of `count` tokens, prefix not counted."""
        now, prefix = count, self.num_prefix
        macs = count * self.host.patch_embed.proj.weight.numel()
        for index, block in enumerate(self.host.blocks):
            left = now if reducer is None else reducer.left(index, now, count)
            seen = left if reducer is not None and reducer.acts_before else now  # by attention
            macs = macs + block_macs(block, seen + prefix, left + prefix)
            if reducer is not None:
                macs = macs + reducer.num_macs(index, now, prefix)
            now = left
        return macs + head_macs(self.host, now + prefix) if head else macs

    def _stem_trouble(self) -> str | None:
        embed = self.host.patch_embed
        if type(embed) is not PatchEmbed:
            return f"its stem is a {type(embed).__name__}; a convolutional stem mixes neighbouring patches"
        if type(embed.proj) is not nn.Conv2d and not is_parametrized(embed.proj):
            return f"its patch embedding is a {type(embed.proj).__name__}, which may do more than its weights say"
        if embed.patch_size[0] != embed.patch_size[1] or embed.proj.kernel_size != embed.proj.stride:
            return f"its patches are {embed.proj.kernel_size} with stride {embed.proj.stride}, not square and disjoint"
        if getattr(self.host.patch_drop, "prob", 0):
            return f"patch dropout ({self.host.patch_drop.prob}) removes tokens; build it with patch_drop_rate=0"
        for name, module in self.host.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                return f"batch normalisation ({name}) mixes images"
        return None
