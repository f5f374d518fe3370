"""Gates: which cells deserve fine tokens.

    gate = LearnedGate(coarse=32)             # trained with the model; starts with every cell fine
    gate = ContextGate(coarse=32)             # sees the surroundings of a cell; for the loss attention
    gate = DiscGate(coarse=32, share=0.3)     # fine in the centre
    gate = EntropyGate(coarse=32, share=0.3)  # fine where the grey levels vary most
    gate(image).mask                          # (b, hc, wc), 1 = fine
    gate.for_normalization(mean, std)         # the same weights, for images of another normalisation

A gate of your own is a `Gate` with a `forward`; to save it with a model, add its class to `GATES`.
"""

from msvit.gates.base import Gate, Normalization
from msvit.gates.context import ContextGate
from msvit.gates.fixed import AllCoarse, AllFine, DiscGate, RandomGate
from msvit.gates.learned import LearnedGate
from msvit.gates.logits import LogitGate
from msvit.gates.saliency import EntropyGate, GradientGate

GATES: dict[str, type[Gate]] = {
    "learned": LearnedGate,
    "context": ContextGate,
    "disc": DiscGate,
    "all-fine": AllFine,
    "all-coarse": AllCoarse,
    "random": RandomGate,
    "entropy": EntropyGate,
    "gradient": GradientGate,
}

__all__ = [
    "GATES", "AllCoarse", "AllFine", "ContextGate", "DiscGate", "EntropyGate", "Gate", "GradientGate", "LearnedGate",
    "LogitGate", "Normalization", "RandomGate",
]  # fmt: skip
