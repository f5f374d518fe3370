"""`msvit.compile` and the Triton kernels: the same model by other operations."""
