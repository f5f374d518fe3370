"""The output of a converted model: a record that stands for its logits wherever a tensor is expected."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_map

from msvit.checks import check_kind, is_traced, shown
from msvit.types import GateOutput, TokenBatch


@dataclass(frozen=True, repr=False, eq=False)
class MSViTOutput:
    """The output of a converted model: logits, the gate's decisions, and the tokens after the last norm.

        F.cross_entropy(out, label); out.argmax(1); out[0]; torch.stack([out, out])      # of out.logits

    It stands for its logits in functions of torch, in operators and indices, and in attributes and methods of a tensor
    that it has not itself. `dtype` is not among them: accelerate takes what has one for a tensor, and would make the
    output of a model in 16 bits its logits in 32.
    """

    logits: Any  # a tensor: what the host's head gives; None of a transformers model without a pooled output
    gate: GateOutput
    tokens: TokenBatch

    def __post_init__(self) -> None:
        check_kind("gate", self.gate, GateOutput, "a GateOutput")
        check_kind("tokens", self.tokens, TokenBatch, "a TokenBatch")

    def __repr__(self) -> str:
        logits = self.logits
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else None if logits is None else shown(logits)
        return f"MSViTOutput(logits={shape}, tokens={shown_tokens(self.tokens)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_as_logits, (args, kwargs or {}), is_leaf=lambda value: isinstance(value, MSViTOutput))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the logits, but no private ones: pickle and copy would ask the tensor for its own."""
        if name.startswith("_") or name in ("logits", "gate", "tokens", "dtype"):
            remedy = "; use out.logits.dtype" if name == "dtype" else ""
            raise AttributeError(f"a MSViTOutput has no attribute {name!r}{remedy}")
        if self.logits is None:
            raise AttributeError(f"a MSViTOutput has no attribute {name!r}, and {NO_LOGITS}")
        return getattr(self.logits, name)


def shown_tokens(tokens: TokenBatch) -> str:
    """Return the number of tokens of the first image, and of all its patches."""
    layout = tokens.layout
    first = "?" if layout.token.is_meta or is_traced() else int(layout.count[0])
    return f"[{first}{', ...' if layout.batch > 1 else ''}] of {layout.grid.num_patches}"


NO_LOGITS = "there are no logits, as the host pools nothing; use out.tokens, or the map msvit.dense_map(out.tokens)"
OPERATORS = (
    "getitem iter len array neg abs invert float int eq ne lt le gt ge add radd sub rsub mul rmul truediv rtruediv "
    "floordiv rfloordiv mod pow rpow matmul rmatmul and or xor"
)


def _as_logits(value: Any) -> Any:
    if not isinstance(value, MSViTOutput):
        return value
    if value.logits is None:
        raise TypeError(f"a MSViTOutput was given for a tensor, but {NO_LOGITS}")
    return value.logits


def _of_logits(name: str) -> Callable[..., Any]:
    def call(output: MSViTOutput, *args: Any, **kwargs: Any) -> Any:
        return getattr(_as_logits(output), name)(*args, **kwargs)

    return call


for _name in OPERATORS.split():  # Python looks for these in the class alone
    setattr(MSViTOutput, f"__{_name}__", _of_logits(f"__{_name}__"))


def _leaves(output: MSViTOutput) -> tuple[list[Any], None]:
    gate, tokens = output.gate, output.tokens
    decisions = gate.logits, gate.fine_prob, gate.sample, gate.mask
    return [output.logits, *decisions, tokens.x, tokens.layout, *tokens.kept], None


def _from_leaves(leaves: Iterable[Any], context: None) -> MSViTOutput:
    logits, *parts = leaves
    return MSViTOutput(logits, GateOutput(*parts[:4]), TokenBatch(parts[4], parts[5], tuple(parts[6:])))


register_pytree_node(MSViTOutput, _leaves, _from_leaves)  # FSDP2 of torch 2.11 finds the tensors of pytrees only
