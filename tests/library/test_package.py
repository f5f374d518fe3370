"""The public names, and that importing does nothing."""

import subprocess
import sys

import msvit

PUBLIC = {
    "AllCoarse", "AllFine", "ContextGate", "DiscGate", "DynamicViT", "EViT", "EntropyGate", "Gate", "GateOutput",
    "GradientGate", "LearnedGate", "MSViT", "MSViTOutput", "RandomGate", "Reducer", "ScaleGrid", "ToMe", "TokenBatch",
    "__version__", "calibrate", "compile", "convert", "dense_map", "distill", "export", "fit_gate", "from_dense",
    "gates", "load", "load_gate", "losses", "macs", "save", "save_gate", "Segmenter", "convert_segmenter", "Prediction",
    "Preprocessing", "set_budget",
}  # fmt: skip


def test_the_public_names_are_these_and_exist() -> None:
    assert set(msvit.__all__) == PUBLIC
    assert all(getattr(msvit, name) is not None for name in PUBLIC)
    assert {"L0", "BatchShaping", "FlatBatchShaping", "GeneralizedBatchShaping"} <= set(msvit.losses.__all__)
    assert {"relaxed_bernoulli_cdf", "normal_cdf"} <= set(msvit.losses.__all__)


def test_names_stay_what_they_are_whatever_is_imported_first_and_optional_packages_are_not_needed() -> None:
    code = (
        "import sys; names = 'scipy', 'transformers', 'peft', 'onnx', 'onnxscript', 'onnxruntime'"
        "; sys.modules.update(dict.fromkeys(names))"  # None: cannot be imported
        "; import msvit.checkpoint, msvit; msvit.load; msvit.losses.BatchShaping"
        "; assert callable(msvit.convert) and callable(msvit.macs) and callable(msvit.export)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_is_cheap_and_silent() -> None:
    code = "import sys, msvit; print([name for name in ('torch', 'timm', 'scipy', 'typer') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "msvit", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == f"msvit {msvit.__version__}"
