"""Export an artifact that only predicts: no optimizer state, no backward, and on request no adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from irongrad.frontends.trained_step import check_artifact, load_trained, merged
from irongrad.pipeline.driver import compile
from irongrad.runtime.golden import read_golden
from irongrad.runtime.manifest import golden_file
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.scratch import held_directory
from irongrad.runtime.staging import check_output, publish
from irongrad.step.train_step import TrainStep


def export_inference(
    step: TrainStep,
    source: str,
    directory: Path,
    output: Path,
    checkpoint: Path | None = None,
    *,
    merge: bool = False,
    targets: Sequence[str] = (),
) -> bool:
    """Compile `predict` and the step's own entries over the trained model, and verify them.

    Args:
        step: the step from which the artifact was compiled; its objects get the trained state.
        source: where it comes from, for messages.
        directory: the artifact.
        output: the directory of the new artifact.
        checkpoint: the state to take; the artifact's initial state by default.
        merge: whether to add the adapters of PEFT to the weights that they change.
        targets: what to compile for; the artifact's targets by default.

    Returns:
        Whether the predictions were compared with those of the artifact in `directory`; see `check_artifact`.

    Raises:
        ArtifactError: the artifact or the checkpoint is missing, damaged, or of another model.
        UserError: the step has no single model, or no adapter to merge.
        VerificationError: the new artifact predicts something else than eager float64, or than the old artifact.
    """
    check_output(output)
    load_trained(step, directory, checkpoint)
    step = merged(step) if merge else step
    asked = list(targets) or [t.asked for t in read_manifest(directory).targets]
    with held_directory(output, ".export") as scratch:
        made = compile(step, scratch / "net", asked, entry_points=["predict", *step.own_entries]).directory
        compared = check_artifact(directory, checkpoint, read_golden(made / golden_file("")), source)
        publish(made, output)
    return compared
