"""A step's model with the state of an artifact, and what it must predict: for exports that need the model's code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.front import front, plainly
from irongrad.pipeline.oracle.expected_values import Expected
from irongrad.pipeline.oracle.oracle import golden_runs
from irongrad.runtime import checkpoint as checkpoints
from irongrad.runtime.arrays import Array
from irongrad.runtime.devices import is_local
from irongrad.runtime.errors import UserError, VerificationError
from irongrad.runtime.golden import Golden, key_of
from irongrad.runtime.initial_state import state_of
from irongrad.runtime.manifest import Manifest
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.scratch import scratch_directory
from irongrad.runtime.session import load
from irongrad.runtime.verification import largest_error
from irongrad.step.checkpoint import load_checkpoint
from irongrad.step.layouts import outermost
from irongrad.step.train_step import TrainStep


def load_trained(step: TrainStep, directory: Path, checkpoint: Path | None) -> None:
    """Give the objects of a step the state of the artifact that was compiled from it.

    Args:
        step: the step.
        directory: the artifact.
        checkpoint: the state to take; the artifact's initial state by default.

    Raises:
        ArtifactError: the artifact or the checkpoint is missing, damaged, or of another model.
        UserError: the artifact has several steps, or comes from no PyTorch model.
    """
    manifest = read_manifest(directory)
    if "torch" not in manifest.layouts:
        raise UserError(f"{directory} has several steps, or comes from no PyTorch model; this export needs one model")
    state = state_of(manifest, directory)
    if checkpoint is not None:
        state |= checkpoints.read(checkpoint, manifest)
    with scratch_directory() as scratch:
        whole = scratch / "whole.safetensors"
        checkpoints.write(whole, state, manifest, finite=True)
        load_checkpoint(whole, step)


def merged(step: TrainStep) -> TrainStep:
    """Return the step with the adapters of PEFT added to the weights that they change; its model changes in place.

    Raises:
        UserError: the model has no adapter, or one that PEFT cannot merge.
    """
    adapters = outermost(step.model, "peft", "PeftModel")
    if not adapters:
        raise UserError("--merge adds an adapter of PEFT to the weights, and the model has none: leave it out")
    for path, model in adapters:
        try:
            model.merge_and_unload(safe_merge=True)
        except (AttributeError, ValueError, NotImplementedError) as error:
            raise UserError(f"PEFT cannot merge the adapter of {path or 'the model'}: {error}") from None
    if not any(p.requires_grad for p in step.model.parameters()):  # a step trains something, whatever is exported
        step.model.requires_grad_()
    trained = [p for p in step.model.parameters() if p.requires_grad]
    return replace(step, optimizer=torch.optim.SGD(trained), after_step=None)


def expected_predictions(step: TrainStep) -> Golden:
    """Return what the model predicts for the step's examples in float64, and how far float32 may be from it.

    Raises:
        CaptureError: the step cannot be captured.
    """
    captured = capture(step, ("predict",))
    return Expected(golden_runs(captured, front(captured, plainly), 0)).widest()


def check_artifact(directory: Path, checkpoint: Path | None, golden: Golden, source: str) -> bool:
    """Compare the predictions of an artifact with those of the model in `source`.

    Returns:
        Whether they were compared: the artifact has `predict`, and a target that runs on this machine.

    Raises:
        VerificationError: they differ, so the code has changed since the artifact was compiled.
    """
    manifest = read_manifest(directory)
    target = next((t.name for t in manifest.targets if is_local(t.device)), None)
    if target is None or manifest.entry_point("predict") is None:
        return False
    with load(directory, target=target, checkpoint=checkpoint) as session:
        found = predictions(session.call("predict", golden.inputs_of(session.entry("predict"))), manifest)
    if wrong := differences(golden, found):
        raise VerificationError(
            f"the model of {source} predicts something else than {directory}, so nothing was written: {wrong}. Was its "
            "code changed since the artifact was compiled?"
        )
    return True


def predictions(outputs: Any, manifest: Manifest) -> dict[str, Array]:
    """Return the outputs of `predict` by name."""
    entry = manifest.entry_point("predict")
    assert entry is not None
    return dict(zip([s.name for s in entry.outputs], outputs, strict=True))


def differences(golden: Golden, found: Mapping[str, Array]) -> str:
    """Describe where predictions are further from the expected ones than rounding explains; empty if nowhere."""
    keys = {key_of("predict", 0, name): value for name, value in found.items()}
    errors = {key: largest_error(keys[key], golden.expected[key]) for key in golden.expected if key in keys}
    wrong = {key: error for key, error in errors.items() if not error <= golden.allowed[key]}
    return ", ".join(f"{key}: error {error:.3g}, allowed {golden.allowed[key]:.3g}" for key, error in wrong.items())
