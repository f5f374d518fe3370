"""Images by address: a captured kernel reads the batch of each replay where that lies, without a copy of it.

`address` is an int64 on the device. Where one is given, `image` only says what the images are: shape, strides, dtype.
"""

from typing import no_type_check

import triton
import triton.language as tl

from msvit.types import ALIGNED_BYTES

ALIGNED = tl.constexpr(ALIGNED_BYTES)


@triton.jit
@no_type_check
def _image_at(image, address):
    if address is None:
        return image
    else:
        return tl.multiple_of(tl.load(address).to(image.dtype), ALIGNED)
