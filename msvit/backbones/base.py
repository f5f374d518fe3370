"""The base class of adapters, which run a host's own modules on tokens of mixed scale.

    layout = backbone.make_layout(gate, grid, mode)  # which tokens run
    tokens = backbone.tokenize(image, layout, mask)  # embedded tokens with positions
    tokens = backbone(tokens)                        # TokenBatch after the last block and norm
    logits = backbone.head(tokens)                   # the host's own head
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from msvit.checks import check_int
from msvit.execution import limit_tokens
from msvit.reduction import Reducer
from msvit.types import GateOutput, ScaleGrid

MAX_TABLES = 64  # tables of weights and input sizes that are kept


class Backbone(nn.Module):
    """Base class of adapters around a timm or transformers model, the host, of which nothing is changed.

    What each adapter has besides, from `serves` to `num_macs`, is described in `PlainBackbone`.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    host: Any
    modes: tuple[str, ...]  # ways to run it
    num_prefix: int = 0
    library = "timm"  # that the host is of
    is_hierarchical = False  # whether tokens are merged from stage to stage
    merge_at: int | None = None  # of a hierarchical host: the block at which coarse tokens enter

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.host = host
        for reason in self._unsupported_reasons():
            if reason:
                raise unsupported(host, reason)
        self.in_chans: int = self.host.patch_embed.proj.in_channels
        self.fine: int = self.host.patch_embed.patch_size[0]
        self._tables: dict[Any, WeightTable] = {}

    def _unsupported_reasons(self) -> list[str | None]:
        """Return why the host cannot be run on tokens of mixed scale, part by part."""
        return [unsupported_stem(self.host)]

    # Scales

    @property
    def native_patches(self) -> tuple[int, int]:
        """(hf, wf): rows and columns of patches the host was built for."""
        return tuple(self.host.patch_embed.grid_size)

    def check_reducer(self, reducer: Reducer) -> None:
        """Raise ValueError unless the reducer works with the host's tokens."""
        reducer.fit(self.host)

    @property
    def draws_positions(self) -> bool:
        """Whether positions are random in each forward now, as those of transformers' DINOv3 are in training."""
        return False

    def check_sharding(self) -> None:
        """Raise ValueError if FSDP2 shards single blocks: it gathers weights where a block's forward is called."""
        for block in self.blocks.children():
            if hasattr(type(block), "set_requires_gradient_sync"):
                raise ValueError(
                    "fully_shard was called on single blocks of the host, but these run on tokens of mixed scale and "
                    "not by their own forward; shard the whole model: fully_shard(model)"
                )

    def check_classifier(self, global_pool: str) -> None:
        """Raise ValueError unless the host's head can pool tokens of mixed scale in this way."""

    # Numbers of tokens

    def limit_tokens(self, gate: GateOutput, grid: ScaleGrid, max_tokens: int) -> GateOutput:
        """Limit the batch to `max_tokens`: if the mask needs more, low-scoring cells stay coarse."""
        min_tokens, per_cell = self._token_steps(grid)
        return limit_tokens(gate, grid, gate.mask.shape[0] * (self.num_prefix + min_tokens), per_cell, max_tokens)

    def num_fine(self, num: int, grid: ScaleGrid, name: str = "per_image", num_prefix: int = 0) -> int:
        """Return the fine cells of an image with so many tokens, of which `num_prefix` are prefix, rounded down."""
        min_tokens, per_cell = self._token_steps(grid)
        min_tokens += num_prefix
        max_tokens = min_tokens + per_cell * grid.num_cells
        if not min_tokens <= check_int(name, num) <= max_tokens:
            raise ValueError(
                f"{name} is {num}, but an image of {grid.height}x{grid.width}px has {min_tokens} tokens with "
                f"all cells coarse and {max_tokens} with all fine; pass a number between them"
            )
        return (num - min_tokens) // per_cell if per_cell else grid.num_cells

    def _token_steps(self, grid: ScaleGrid) -> tuple[int, int]:
        """Tokens of an image with all cells coarse, and how many more it has for each fine cell."""
        min_tokens, cell = (int(self.num_tokens(torch.tensor(n), grid)) for n in (0, 1))
        return min_tokens, cell - min_tokens

    def dense_macs(self, grid: ScaleGrid, reducer: Reducer | None = None, head: bool = True) -> int:
        """Return the multiply-adds of an image whose cells are all fine."""
        return int(self.num_macs(torch.ones(1, *grid.cells, dtype=torch.bool), grid, reducer, head)[0])

    # What is made of the weights

    def project(self, pixels: Tensor) -> Tensor:
        """Apply the host's patch embedding to flattened patches, (n, c p p) -> (n, d)."""
        embed = self.host.patch_embed
        return embed.norm(F.linear(pixels, embed.proj.weight.flatten(1), embed.proj.bias))

    def _cached(
        self, name: Any, sources: list[Tensor], make: Callable[[], Tensor], constant: bool = False
    ) -> Tensor:
        """A tensor computed from `sources` by `make`, cached until they change.

        On a CPU their values are compared: not every write is counted by PyTorch (`.data`, a fused optimizer, inference
        mode). On a GPU that would wait for the device, so the table is made in each call, unless it is `constant`: made
        of buffers that no training writes to, for which counted writes are enough.
        """
        if torch.compiler.is_compiling():
            return make()
        for source in sources:
            needs_grad = source.requires_grad and torch.is_grad_enabled()
            wrapped = torch._C._functorch.is_functorch_wrapped_tensor(source)  # by torch.func, for this call alone
            if needs_grad or wrapped or not (constant or source.is_cpu):
                return make()
        known = self._tables.get(name)
        if known is None or not known.is_fresh(sources):
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            with torch.inference_mode(False), torch.no_grad():
                known = self._tables[name] = WeightTable(make(), sources)
        return known.value

    def refresh(self) -> None:
        """Drop tables that were computed from weights."""
        self._tables.clear()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.refresh()  # a new device or dtype: a new table
        return super()._apply(*args, **kwargs)


class Recorder:
    """Collector of the outputs of blocks, which ends the run after the last one of interest if `stop_early`."""

    def __init__(self, indices: Sequence[int], stop_early: bool) -> None:
        self.indices, self.stop_early = frozenset(indices), stop_early
        self.taken: list[Any] = []

    def __call__(self, index: int, value: Any) -> bool:
        """Record the output of block `index` if wanted, and return whether to stop after it."""
        if index in self.indices:
            self.taken.append(value)
        return self.stop_early and index == max(self.indices)


class WeightTable:
    """A tensor and the state of the weights it was made of: on a CPU their values, else how often they were written."""

    def __init__(self, value: Tensor, sources: list[Tensor]) -> None:
        self.value = value
        self.sources = [s.detach().clone() if s.is_cpu else s for s in sources]
        self.versions = list(map(version, sources))

    def is_fresh(self, sources: list[Tensor]) -> bool:
        """Return whether the table was made of these sources as they are now."""
        for kept, current, num_writes in zip(self.sources, sources, self.versions, strict=True):
            if current.is_cpu:
                if kept.dtype is not current.dtype or kept.device != current.device or not torch.equal(kept, current):
                    return False
            elif kept is not current or num_writes != version(current):
                return False
        return True


def version(tensor: Tensor) -> int:
    """Return how many writes PyTorch has counted; inference tensors have no count."""
    return 0 if tensor.is_inference() else tensor._version


def keeps_forward_of(host: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether the host is of this class, or of one that changes nothing an adapter replaces or relies on."""
    methods = ("forward", "forward_features", "_pos_embed", "pool")
    same = (getattr(type(host), name, None) is getattr(kind, name, None) for name in methods)
    return isinstance(host, kind) and all(same)


def unsupported_stem(host: Any) -> str | None:
    """Return why the host's stem mixes patches or images, or None."""
    embed = host.patch_embed
    if type(embed) is not PatchEmbed:
        return f"its stem is a {type(embed).__name__}; a convolutional stem mixes neighbouring patches"
    if reason := unsupported_projection(embed):
        return reason
    for name, module in host.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"batch normalisation ({name}) mixes images"
    return None


def unsupported_projection(embed: Any) -> str | None:
    """Return why patches cannot be embedded one by one, or None."""
    if type(embed.proj) is not nn.Conv2d and not is_parametrized(embed.proj):
        return f"its patch embedding is a {type(embed.proj).__name__}, whose forward may use more than its weights"
    if embed.patch_size[0] != embed.patch_size[1] or embed.proj.kernel_size != embed.proj.stride:
        return f"its patches are {embed.proj.kernel_size} with stride {embed.proj.stride}, not square and disjoint"
    return None


def unsupported(host: nn.Module, part: str) -> ValueError:
    """Return the error for a host that cannot be converted because of this part."""
    return ValueError(
        f"{type(host).__name__} of {type(host).__module__} cannot be converted: {part}. Hosts that can are timm's "
        f"VisionTransformer (ViT, DeiT, DeiT III, CLIP, SigLIP, DINOv2), Eva (EVA-02, DINOv3), Swin and SwinV2, with "
        f"square patches, and ViT, DeiT, Dinov2, Dinov2WithRegisters, DINOv3ViT, CLIP and Siglip of transformers"
    )


def refusal(host: nn.Module) -> ValueError:
    """Return the error that names what makes an unknown host unfit for tokens of mixed scale."""
    if not isinstance(host, nn.Module):
        return ValueError(
            f"the host is a {type(host).__name__}, not a model; pass what timm.create_model returns, "
            f"or a model of transformers"
        )
    for name in ("_orig_mod", "module"):  # of torch.compile, DataParallel and the like
        if isinstance(getattr(host, name, None), nn.Module):
            return ValueError(f"the host is wrapped in a {type(host).__name__}; pass the model inside: host.{name}")
    for name, _ in [*host.named_parameters(), *host.named_buffers()]:
        if "relative_position" in name or "rel_pos" in name:
            return unsupported(host, f"relative position bias ({name}) ties attention to a regular grid")
    for name, module in host.named_modules():
        if getattr(module, "rel_pos", None) is not None:
            return unsupported(host, f"relative position bias ({name}.rel_pos) ties attention to a regular grid")
        if getattr(module, "window_size", None):
            where = name or type(host).__name__
            return unsupported(host, f"its attention in windows ({where}) is of an unsupported kind")
    for name, module in host.named_modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size != module.stride:
            return unsupported(host, f"its convolutional stem ({name}) mixes neighbouring patches")
    return unsupported(host, "its forward is not one that is supported")
