"""A step's model with the state of an artifact, and what it must predict: for exports that need the model's code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.front import front, plainly
from irongrad.pipeline.oracle.expected_values import Expected
from irongrad.pipeline.oracle.oracle import golden_runs
from irongrad.quantisation.modules import QuantizedEmbedding, QuantizedLinear
from irongrad.runtime import checkpoint as checkpoints
from irongrad.runtime.arrays import Array
from irongrad.runtime.devices import is_local
from irongrad.runtime.errors import UserError, VerificationError
from irongrad.runtime.golden import Golden, key_of
from irongrad.runtime.initial_state import state_of
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.scratch import scratch_directory
from irongrad.runtime.session import load
from irongrad.runtime.verification import largest_error
from irongrad.step.checkpoint import load_checkpoint
from irongrad.step.layouts import outermost
from irongrad.step.train_step import TrainStep


@dataclass(frozen=True)
class TrainedStep:
    """A step, and the state that an artifact which was compiled from it came to.

    Attributes:
        step: the step; its objects get the state.
        source: where it comes from, for messages.
        directory: the artifact.
        checkpoint: the state to take; the artifact's initial state by default.
        merge: whether to add the adapters of PEFT to the weights that they change.
        base: the artifact's base file, if not where it was when the artifact was compiled.
    """

    step: TrainStep
    source: str
    directory: Path
    checkpoint: Path | None = None
    merge: bool = False
    base: Path | None = None

    def loaded(self) -> TrainStep:
        """Load the state; return the step with it, without adapters if they are to be merged.

        Raises:
            ArtifactError: the artifact or the checkpoint is missing, damaged, or of another model.
            UserError: the artifact has several steps, or comes from no PyTorch model; or there is no adapter to merge.
        """
        manifest = read_manifest(self.directory)
        if "torch" not in manifest.layouts:
            raise UserError(
                f"{self.directory} has several steps, or comes from no PyTorch model; this export needs one model"
            )
        state = state_of(manifest, self.directory, self.base)
        if self.checkpoint is not None:
            state |= checkpoints.read(self.checkpoint, manifest)
        with scratch_directory() as scratch:
            whole = scratch / "whole.safetensors"
            checkpoints.write(whole, state, manifest, finite=True)
            load_checkpoint(whole, self.step)
        return _merged(self.step) if self.merge else self.step

    def check(self, golden: Golden) -> bool:
        """Compare the predictions of the artifact with those of the step's model.

        Returns:
            Whether they were compared: the artifact has `predict`, and a target that runs on this machine.

        Raises:
            VerificationError: they differ, so the code has changed since the artifact was compiled.
        """
        manifest = read_manifest(self.directory)
        alternatives = manifest.targets if manifest.placement is None else ()
        target = next((t.name for t in alternatives if is_local(t.device)), None)
        entry = manifest.entry_point("predict")
        if target is None or entry is None:
            return False
        with load(self.directory, target=target, checkpoint=self.checkpoint, base=self.base) as session:
            outputs = session.call("predict", golden.inputs_of(entry))
        if wrong := differences(golden, {s.name: a for s, a in zip(entry.outputs, outputs, strict=True)}):
            raise VerificationError(
                f"the model of {self.source} predicts something else than {self.directory}, so nothing was written: "
                f"{wrong}. Was its code changed since the artifact was compiled?"
            )
        return True


def _merged(step: TrainStep) -> TrainStep:
    """The step with the adapters of PEFT added to the weights that they change; its model changes in place."""
    adapters = outermost(step.model, "peft", "PeftModel")
    if not adapters:
        raise UserError("--merge adds an adapter of PEFT to the weights, and the model has none: leave it out")
    for path, model in adapters:
        _refuse_quantised(path, model)
        try:
            model.merge_and_unload(safe_merge=True)
        except (AttributeError, ValueError, NotImplementedError) as error:
            raise UserError(f"PEFT cannot merge the adapter of {path or 'the model'}: {error}") from None
    if not any(p.requires_grad for p in step.model.parameters()):  # a step trains something, whatever is exported
        step.model.requires_grad_()
    trained = [p for p in step.model.parameters() if p.requires_grad]
    return replace(step, optimizer=torch.optim.SGD(trained), after_step=None)


def _refuse_quantised(path: str, model: torch.nn.Module) -> None:
    """Refuse a layer that PEFT would merge into: a quantised one computes its weight, so the sum would be lost.

    Raises:
        UserError: names the layer.
    """
    for name, module in model.named_modules():
        if isinstance(getattr(module, "base_layer", None), QuantizedLinear | QuantizedEmbedding):
            raise UserError(
                f"PEFT cannot merge the adapter of {path or 'the model'}: {name} is quantised. Leave --merge out"
            )


def expected_predictions(step: TrainStep) -> Golden:
    """Return what the model predicts for the step's examples in float64, and how far float32 may be from it.

    Raises:
        CaptureError: the step cannot be captured.
    """
    captured = capture(step, ("predict",))
    return Expected(golden_runs(captured, front(captured, plainly), 0)).widest()


def differences(golden: Golden, found: Mapping[str, Array]) -> str:
    """Describe where predictions are further from the expected ones than rounding explains; empty if nowhere."""
    keys = {key_of("predict", 0, name): value for name, value in found.items()}
    errors = {key: largest_error(keys[key], golden.expected[key]) for key in golden.expected if key in keys}
    wrong = {key: error for key, error in errors.items() if not error <= golden.allowed[key]}
    return ", ".join(f"{key}: error {error:.3g}, allowed {golden.allowed[key]:.3g}" for key, error in wrong.items())
