"""The same model, faster where it runs.

    fast = msvit.accelerate(model)     # same call, same output record, same weights
    out = fast(images)                 # on a GPU in training too
"""

from torch import nn

from msvit.model import MSViT


def accelerate(model: nn.Module, *, compile: bool = True, graphs: bool = True) -> MSViT:
    """A model with the same call, output and weights, faster on the device where the model is now.

    On a GPU (`compile`, `graphs`) everything after the gate is compiled once and replayed as CUDA graphs, for inference
    and training; the first calls take seconds, and forward hooks inside are not called. `graphs=False` needs less
    memory. On a CPU the weights are packed once for the matrix product, for inference. The model stays as it is.
    """
    if next(model.parameters()).is_cuda:
        from msvit.acceleration.cuda import CudaMSViT

        return CudaMSViT(model, compile=compile, graphs=graphs)
    from msvit.acceleration.cpu import CpuMSViT

    return CpuMSViT(model)
