"""Write the model of an artifact as an adapter of PEFT, a state dict of PyTorch, or a folder of transformers.

The names of the tensors and the configurations were recorded when the step was compiled.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import safetensors.numpy

from irongrad.runtime import checkpoint as checkpoints
from irongrad.runtime.adapters import CONFIG, WEIGHTS, specs_by_name
from irongrad.runtime.atomic_files import atomic_write
from irongrad.runtime.checkpoint import BASE
from irongrad.runtime.errors import UserError
from irongrad.runtime.initial_state import state_of
from irongrad.runtime.manifest import LayoutSpec, Manifest
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.safetensors_file import metadata

FORMS = ("peft", "torch", "huggingface")

# What the model must be, by the form that it lacks.
_NEEDS = {
    "peft": "one active adapter of PEFT, whose tensors are parameters of the model",
    "torch": "one PyTorch model",
    "huggingface": "one transformers model, without an adapter of PEFT in it and not quantised",
}


def export(
    directory: Path, form: str, output: Path, checkpoint: Path | None = None, base: Path | None = None
) -> list[Path]:
    """Write the model of the artifact in `directory` in another tool's form.

    Args:
        directory: the artifact.
        form: one of `FORMS`.
        output: a file for `torch`, and a folder for the others.
        checkpoint: the state to take; the artifact's initial state by default.
        base: the artifact's base file, if not where it was when the artifact was compiled.

    Returns:
        The files that were written. The tensors have the values of the checkpoint, to the bit.

    Raises:
        ArtifactError: the artifact or the checkpoint is missing, damaged or of another model.
        UserError: the model has no such form, or the form would lose something that training changes.
        OSError: a file cannot be written.
    """
    manifest = read_manifest(directory)
    layout = manifest.layouts.get(form)
    if layout is None:
        has = ", ".join(manifest.layouts) or "none: it has several steps, or comes from no PyTorch model"
        raise UserError(f"--to {form} needs {_NEEDS[form]}, and that of {directory} is not; the forms it has: {has}")
    _refuse_lost(manifest, layout, form)
    state = state_of(manifest, directory, base)
    if checkpoint is not None:
        state |= checkpoints.read(checkpoint, manifest)
    specs = specs_by_name(manifest)
    arrays = {n: np.asarray(state[specs[t].name], order="C") for n, t in layout.tensors.items()}
    match form:
        case "torch":
            return [_written(output, safetensors.numpy.save(arrays, metadata=_PYTORCH))]
        case "huggingface":
            weights = safetensors.numpy.save(arrays, metadata=_PYTORCH)
            return [_written(output / "model.safetensors", weights), _config(output / "config.json", layout)]
        case _:
            about = metadata(arrays.items(), {BASE: manifest.base})
            weights = safetensors.numpy.save(arrays, metadata=about)
            return [_written(output / WEIGHTS, weights), _config(output / CONFIG, layout)]


# How transformers asks whose tensors a file has. The safetensors library writes two keys in any order, so there is one.
_PYTORCH = {"format": "pt"}


def _refuse_lost(manifest: Manifest, layout: LayoutSpec, form: str) -> None:
    """Refuse a form that lacks a tensor which training changes, or that has one which the artifact lacks."""
    specs = specs_by_name(manifest)
    if absent := [name for name in layout.tensors.values() if name not in specs]:
        raise UserError(f"--to {form}: the artifact has no {', '.join(absent[:4])}, because no entry point reads it")
    kept = {specs[name].name for name in layout.tensors.values()}
    whole = manifest.layouts["torch"].tensors.values()
    changed = [name for name in whole if name in specs and not specs[name].frozen and specs[name].name not in kept]
    if changed:
        raise UserError(
            f"--to {form} would lose {', '.join(changed[:4])}, which training changes; --to torch writes all"
        )


def _written(path: Path, data: bytes) -> Path:
    atomic_write(path, data)
    return path


def _config(path: Path, layout: LayoutSpec) -> Path:
    return _written(path, (json.dumps(layout.config, indent=2, sort_keys=True) + "\n").encode())
