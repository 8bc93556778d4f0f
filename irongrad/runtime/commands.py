"""iree-run-module command lines for an artifact's entry points, with neither Python nor IronGrad in them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from irongrad.runtime.manifest import INITIAL_STATE, SCOPE, EntryPoint, Manifest, TensorSpec

_ELEMENT_TYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "i8",
    "bool": "i1",
}

# What a varying dimension is in a command that someone pastes: three steps for train_steps.
_EXAMPLE_SIZE = 3


def run_module(
    manifest: Manifest,
    directory: Path,
    entry: str,
    *,
    inputs: Mapping[str, Path] | None = None,
    hypers: Mapping[str, float] | None = None,
    state: Path | None = None,
    target: str | None = None,
    device: str | None = None,
    outputs: Mapping[str, Path] | None = None,
) -> list[str]:
    """Build the argument list that runs `entry` with iree-run-module.

    Args:
        manifest: of the artifact.
        directory: the artifact.
        entry: an entry point's name.
        inputs: .npy files by input name; an input without one is filled with its smallest valid value.
        hypers: values by name; the defaults otherwise.
        state: a checkpoint or parameter file; the artifact's initial state otherwise.
        target: the target's name; the first otherwise.
        device: an IREE device URI; the target's own otherwise.
        outputs: .npy files to write, by output name; outputs are printed where none is given.

    Raises:
        KeyError: no such entry point.
    """
    point = manifest.entry_point(entry)
    if point is None:
        raise KeyError(entry)
    chosen = next(t for t in manifest.targets if target in (None, t.name))
    command = [
        "iree-run-module",
        f"--device={device or chosen.device}",
        f"--module={directory / chosen.file}",
        f"--parameters={SCOPE}={state or directory / INITIAL_STATE}",
        f"--function={entry}",
    ]
    command += [f"--input={_input(spec, inputs or {})}" for spec in point.inputs]
    command += [f"--input={_hyper(point, name, manifest, hypers or {})}" for name in point.hypers]
    if outputs:
        command += [f"--output=@{outputs[s.name]}" if s.name in outputs else "--output=-" for s in point.outputs]
    return command


def command_line(manifest: Manifest, directory: Path, entry: str) -> str:
    """A ready-to-paste command line for `entry`, with placeholder inputs."""
    return shlex.join(run_module(manifest, directory, entry))


def _input(spec: TensorSpec, files: Mapping[str, Path]) -> str:
    if spec.name in files:
        return f"@{files[spec.name]}"
    dims = "".join(f"{_EXAMPLE_SIZE if isinstance(d, str) else d}x" for d in spec.shape)
    return f"{dims}{_ELEMENT_TYPES[spec.dtype]}={spec.minimum or 0}"


def _hyper(entry: EntryPoint, name: str, manifest: Manifest, values: Mapping[str, float]) -> str:
    default = next(h.default for h in manifest.hypers if h.name == name)
    value = repr(float(values.get(name, default)))
    return f"{_EXAMPLE_SIZE}xf64={value}" if entry.name == "train_steps" else value
