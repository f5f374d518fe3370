"""The shapes and types in signatures are true: the definition's tests of every part pass with both checked.

A process of its own, as the check must be there before msvit is imported. Only these tests, as it takes time.
"""

import os
import subprocess
import sys
from pathlib import Path

LIBRARY = Path(__file__).parent
PARTS = ("backbones", "execution", "gates", "heads", "losses", "model", "reduction", "segmenter", "tokens", "types")
TESTS = (
    "execution/test_modes.py::test_modes_agree_with_the_definition_in_logits_and_all_gradients",
    "execution/test_budget.py",
    "reduction/test_reducers.py::test_modes_agree",
    "reduction/test_reducers.py::test_dynamicvit_distils_from_a_dense_teacher",
    "gates/test_gates.py",
    "losses/test_targets.py",
    "losses/test_batch_shaping.py::test_logits_score_as_their_probabilities_do_flattened_or_not",
    "test_budget_api.py::test_gates_without_weights_rank_cells_too",
    "test_features.py::test_a_swin_has_the_maps_of_its_stages",
    "test_features.py::test_features_after_a_reduction_follow_the_dense_map",
    "test_segmenter.py::test_all_fine_is_the_dense_segmenter",
    "test_export.py::test_graphs_give_the_numbers_of_the_model",
)


def test_what_is_passed_and_returned_has_the_annotated_shapes_and_types() -> None:
    checked = ",".join([*(f"msvit.{part}" for part in PARTS), "beartype.beartype"])
    command = [sys.executable, "-m", "pytest", "-x", "-W", "ignore", f"--jaxtyping-packages={checked}"]
    command += [str(LIBRARY / test) for test in TESTS]
    environment = {**os.environ, "PYTHONPATH": str(LIBRARY.parents[1])}
    done = subprocess.run(command, env=environment, cwd=LIBRARY.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
