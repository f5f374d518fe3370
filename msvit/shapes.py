"""Shapes in signatures: jaxtyping's types where it is installed (`msvit[lab]`), otherwise the array types alone.

    def forward(self, image: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]: ...
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Integer, Shaped
else:
    try:
        from jaxtyping import Bool, Float, Int, Integer, Shaped
    except ModuleNotFoundError:

        class Shaped:
            """`Shaped[Tensor, "b n d"]` is `Tensor`."""

            def __class_getitem__(cls, array_and_shape: tuple[type, str]) -> Any:
                return array_and_shape[0]

        Bool = Float = Int = Integer = Shaped

__all__ = ["Bool", "Float", "Int", "Integer", "Shaped"]
