"""The same model, faster where it runs.

    fast = msvit.accelerate(model)     # same call, same output record, same weights
    out = fast(images)                 # on a GPU in training too
"""

import warnings
from typing import Any

from torch import nn

from msvit.acceleration.base import with_same_weights
from msvit.checks import check_flag, check_kind, shown
from msvit.model import MSViT
from msvit.segmenter import Segmenter


def accelerate(model: nn.Module, *, compile: bool | str = True, graphs: bool = True) -> Any:
    """A model with the same call, output and weights, faster on the device where the model is now.

    On a GPU (`compile`, `graphs`) everything after the gate is compiled once and replayed as CUDA graphs, for inference
    and training; the first calls take seconds, and forward hooks inside are not called. `compile="blocks"` compiles one
    block for all of a ViT, and for other models of the same shape too, which is done sooner; with a reducer it is
    always so. `graphs=False` needs less memory. On a CPU the weights are packed once for the matrix product, for
    inference. The model stays as it is. Of a Segmenter it is the encoder that gets faster.
    """
    if compile != "blocks" and not isinstance(compile, bool):
        raise ValueError(f'compile is {shown(compile)}, but must be True, False or "blocks"')
    check_flag("graphs", graphs)
    check_kind("model", model, MSViT | Segmenter, "a converted model; call msvit.convert first")
    if isinstance(model, Segmenter):
        encoder = accelerate(model.encoder, compile=compile, graphs=graphs)
        return Segmenter(encoder, with_same_weights(model.decoder)).train(encoder.training)
    if next(model.parameters()).is_cuda:
        from msvit.acceleration.cuda import CudaMSViT

        return CudaMSViT(model, compile=compile, graphs=graphs)
    from msvit.acceleration.cpu import CpuMSViT

    fast = CpuMSViT(model)
    if not fast.packed_layers():
        warnings.warn(f"msvit.accelerate changes nothing here: {fast.why_not()}", stacklevel=2)
    return fast
