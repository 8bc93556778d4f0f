"""Export an artifact that only predicts: no optimizer state, no backward, and on request no adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from irongrad.frontends.trained_step import TrainedStep
from irongrad.pipeline.driver import compile
from irongrad.runtime.golden import read_golden
from irongrad.runtime.manifest import golden_file
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.scratch import held_directory
from irongrad.runtime.staging import check_output, publish


def export_inference(trained: TrainedStep, output: Path, targets: Sequence[str] = ()) -> bool:
    """Compile `predict` and the step's own entries over the trained model, and verify them.

    Args:
        trained: the step, and where its state is.
        output: the directory of the new artifact.
        targets: what to compile for; the targets of the artifact that was trained by default.

    Returns:
        Whether the predictions were compared with those of that artifact; see `TrainedStep.check`.

    Raises:
        ArtifactError: as `TrainedStep.loaded`.
        UserError: as `TrainedStep.loaded`; or the output cannot hold an artifact.
        VerificationError: the new artifact predicts something else than eager float64, or than the old artifact.
    """
    check_output(output)
    step = trained.loaded()
    asked = list(targets) or [t.asked for t in read_manifest(trained.directory).targets]
    with held_directory(output, ".export") as scratch:
        made = compile(step, scratch / "net", asked, entry_points=["predict", *step.own_entries]).directory
        compared = trained.check(read_golden(made / golden_file("")))
        publish(made, output)
    return compared
