"""msvit: Vision Transformers that spend tokens where the image needs them.

    import timm, msvit
    vit = timm.create_model("vit_small_patch16_224", pretrained=True)
    model = msvit.speed_up(vit, "photos/", budget=0.6)     # measured on these images, beside the dense model
    model = msvit.convert(vit, budget=0.6)                 # with the gate that comes with msvit
    out = model(images)            # acts as out.logits; out.gate.mask (1 = fine), out.tokens.count
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from msvit.integrations.auto_classes import register_on_import

__version__ = "0.1.0"

if TYPE_CHECKING:
    from msvit import gates as gates
    from msvit import losses as losses
    from msvit.budget.distillation import distill as distill
    from msvit.budget.gate_fitting import fit_gate as fit_gate
    from msvit.budget.merge_schedules import fit_reducer as fit_reducer
    from msvit.budget.thresholds import calibrate as calibrate
    from msvit.budget.thresholds import set_budget as set_budget
    from msvit.conversion import convert as convert
    from msvit.conversion import convert_segmenter as convert_segmenter
    from msvit.fast.compile import compile as compile
    from msvit.gates import AllCoarse as AllCoarse
    from msvit.gates import AllFine as AllFine
    from msvit.gates import ContextGate as ContextGate
    from msvit.gates import DiscGate as DiscGate
    from msvit.gates import EntropyGate as EntropyGate
    from msvit.gates import Gate as Gate
    from msvit.gates import GradientGate as GradientGate
    from msvit.gates import LearnedGate as LearnedGate
    from msvit.gates import RandomGate as RandomGate
    from msvit.integrations.export import export as export
    from msvit.model import MSViT as MSViT
    from msvit.model import macs as macs
    from msvit.output import MSViTOutput as MSViTOutput
    from msvit.prediction import Prediction as Prediction
    from msvit.preprocessing import Preprocessing as Preprocessing
    from msvit.reduction import DynamicViT as DynamicViT
    from msvit.reduction import EViT as EViT
    from msvit.reduction import Reducer as Reducer
    from msvit.reduction import ToMe as ToMe
    from msvit.saving.folder import load_gate as load_gate
    from msvit.saving.folder import save_gate as save_gate
    from msvit.saving.model import load as load
    from msvit.saving.model import save as save
    from msvit.segmenter import Segmenter as Segmenter
    from msvit.speed import speed_up as speed_up
    from msvit.tokens import dense_map as dense_map
    from msvit.tokens import from_dense as from_dense
    from msvit.types import GateOutput as GateOutput
    from msvit.types import ScaleGrid as ScaleGrid
    from msvit.types import TokenBatch as TokenBatch

# Public name -> module that defines it. Loaded on first use: `import msvit` itself imports neither torch nor timm.
_HOME = {
    "gates": "",
    "losses": "",
    "compile": "fast.compile",
    **dict.fromkeys(("calibrate", "set_budget"), "budget.thresholds"),
    **dict.fromkeys(("load", "save"), "saving.model"),
    **dict.fromkeys(("load_gate", "save_gate"), "saving.folder"),
    **dict.fromkeys(("convert", "convert_segmenter"), "conversion"),
    "distill": "budget.distillation",
    "export": "integrations.export",
    "fit_gate": "budget.gate_fitting",
    **dict.fromkeys(("AllCoarse", "AllFine", "DiscGate", "EntropyGate", "Gate", "GradientGate"), "gates"),
    **dict.fromkeys(("ContextGate", "LearnedGate", "RandomGate"), "gates"),
    "fit_reducer": "budget.merge_schedules",
    **dict.fromkeys(("MSViT", "macs"), "model"),
    "MSViTOutput": "output",
    "Prediction": "prediction",
    "Preprocessing": "preprocessing",
    **dict.fromkeys(("DynamicViT", "EViT", "Reducer", "ToMe"), "reduction"),
    "Segmenter": "segmenter",
    "speed_up": "speed",
    **dict.fromkeys(("dense_map", "from_dense"), "tokens"),
    **dict.fromkeys(("GateOutput", "ScaleGrid", "TokenBatch"), "types"),
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"msvit has no {name!r}; its public names are {', '.join(sorted(_HOME))}")
    home = _HOME[name]
    value = getattr(import_module(f"msvit.{home}"), name) if home else import_module(f"msvit.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


register_on_import()
