"""msvit.compile: a faster version of a converted model, with the same call, output and weights."""

from typing import Any

from torch import nn

from msvit.checks import check_flag, check_kind, shown, warn
from msvit.fast.base import with_same_weights
from msvit.model import MSViT, inner_msvit
from msvit.segmenter import Segmenter


def compile(
    model: nn.Module, *, inductor: bool | str = True, graphs: bool = True, dtype: str | None = None
) -> Any:
    """Return a model with the same call, output and weights that is faster on the device where the model is now.

    On a GPU everything after the gate is compiled once by torch.compile (`inductor`) and replayed as CUDA graphs
    (`graphs`), in inference and training; the first calls take seconds, and forward hooks inside are not called.
    `inductor="blocks"` compiles one block for all blocks of a ViT, and for other models of the same shape, which takes
    less time; with a reducer it is always so. `graphs=False` needs less memory. On a CPU the weights are packed once
    for the matrix product, for inference. The model itself stays as it is. Of a Segmenter the encoder gets faster.

    For inference call it under `torch.inference_mode()` or `no_grad()`, in eval mode: where gradients are on and some
    weight wants one, a backward is captured, too, and the faster encoder of inference in 16 bits is not used.

    `dtype="fp8"` runs most linear layers of timm's usual ViT in FP8, with scales per token and output channel: for
    inference of a model in bfloat16, on a GPU of compute capability 8.9 or newer. It keeps a copy of their weights.
    """
    if inductor != "blocks" and not isinstance(inductor, bool):
        raise ValueError(f'inductor is {shown(inductor)}, but must be True, False or "blocks"')
    check_flag("graphs", graphs)
    if dtype not in (None, "fp8"):
        raise ValueError(f'dtype is {shown(dtype)}, but must be None (that of the weights) or "fp8"')
    options: dict[str, Any] = {"inductor": inductor, "graphs": graphs, "dtype": dtype}
    if (inner := inner_msvit(model)) is not None:
        wrapper: Any = model
        return wrapper.around(compile(inner, **options))
    check_kind("model", model, MSViT | Segmenter, "a converted model; call msvit.convert first")
    if isinstance(model, Segmenter):
        encoder = compile(model.encoder, **options)
        segmenter = Segmenter(encoder, with_same_weights(model.decoder)).train(encoder.training)
        segmenter.take_metadata(model)
        return segmenter
    if next(model.parameters()).is_cuda or dtype == "fp8":  # which raises elsewhere
        from msvit.fast.cuda import CudaMSViT

        return CudaMSViT(model, **options)
    from msvit.fast.cpu import CpuMSViT

    fast = CpuMSViT(model)
    if not fast.packed_layers():
        warn(f"msvit.compile changes nothing here: {fast.unsupported_reason()}")
    return fast
