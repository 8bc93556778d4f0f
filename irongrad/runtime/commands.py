"""iree-run-module command lines that run an artifact's entry points without Python or IronGrad."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from irongrad.runtime.errors import UserError
from irongrad.runtime.golden import Golden
from irongrad.runtime.manifest import (
    BASE_SCOPE,
    CHECKPOINT_HEADER,
    INITIAL_STATE,
    SCOPE,
    STEPS_DIM,
    EntryPoint,
    Manifest,
    TensorSpec,
)
from irongrad.runtime.stacks import WORKER_STACK

_ELEMENT_TYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "i64",
    "uint32": "i32",
    "uint16": "i16",
    "uint8": "i8",
    "bool": "i1",
}

# The size of a varying dimension in a command for pasting, unless an example is known; `train_steps` runs three steps.
EXAMPLE_SIZE = 3


def run_module(
    manifest: Manifest,
    directory: Path,
    entry: str,
    *,
    inputs: Mapping[str, Path | str] | None = None,
    hypers: Mapping[str, float | Sequence[float]] | None = None,
    state: Path | None = None,
    base: Path | None = None,
    target: str | None = None,
    device: str | None = None,
    outputs: Mapping[str, Path] | None = None,
    size: int = EXAMPLE_SIZE,
    sizes: Mapping[str, int] | None = None,
) -> list[str]:
    """Build the argument list that runs `entry` with iree-run-module.

    Args:
        manifest: the artifact's manifest.
        directory: the artifact's directory.
        entry: the name of an entry point; of several steps, with the step's name before a dot.
        inputs: by name, a file (see `file_value`) or a value in iree-run-module's notation. All other inputs are filled
            with their smallest valid value.
        hypers: hyperparameter values by name, for `train_steps` perhaps one for each step; all others take their
            defaults.
        state: a checkpoint or parameter file; the artifact's initial state by default. It may lack what is frozen.
        base: the base file; where it was when the artifact was compiled by default.
        target: the name of the target; the first target by default.
        device: an IREE device URI; the target's own by default.
        outputs: .npy files to write, by output name; an output without a file is printed.
        size: the size of varying dimensions; for `train_steps`, the number of steps.
        sizes: the sizes of varying dimensions that have another, by name.

    Raises:
        KeyError: there is no entry point `entry`.
        UserError: the artifact is compiled with `place`.
    """
    if manifest.placement is not None:
        raise UserError(
            "the artifact is compiled with place: its parts run one after the other on several devices, and "
            "iree-run-module calls one module. Run it from Python, or by irongrad"
        )
    point = manifest.exported(entry)
    if point is None:
        raise KeyError(entry)
    view = manifest.of_step(point.step) if point.step in manifest.steps else manifest
    chosen = next(t for t in manifest.targets if target in (None, t.name))
    uri = device or chosen.device
    command = [
        "iree-run-module",
        f"--device={uri}",
        *([WORKER_STACK] if uri.startswith("local-task") else []),
        f"--module={directory / chosen.file}",
        # Without preloading, IREE 3.13.0 reads the file while the process runs. Then local-task hangs at exit (once in
        # 25 runs of an entry point without results).
        "--parameter_mode=preload",
        *(f"--parameters={scope}={file}" for scope, file in _states(manifest, directory, state, base)),
        f"--function={point.symbol}",
    ]
    specs = [_sized(spec, sizes or {}) for spec in point.inputs]
    command += [f"--input={_input(spec, inputs or {}, size)}" for spec in specs]
    command += [f"--input={_hyper(point, name, view, hypers or {}, size)}" for name in point.hypers]
    if outputs:
        command += [f"--output=@{outputs[s.name]}" if s.name in outputs else "--output=-" for s in point.outputs]
    return command


def _states(manifest: Manifest, directory: Path, state: Path | None, base: Path | None) -> list[tuple[str, Path]]:
    """The files of the state, each with its scope: iree-run-module takes a tensor from the first that has it."""
    spec = manifest.base_file
    shared = [] if spec is None else [(BASE_SCOPE, base or directory / spec.path)]
    own = [] if state is not None and not manifest.base else [(SCOPE, directory / INITIAL_STATE)]
    return [*shared, *([] if state is None else [(SCOPE, state)]), *own]


def command_line(
    manifest: Manifest, directory: Path, entry: str, base: Path | None = None, golden: Golden | None = None
) -> str:
    """Return a ready-to-paste command line for `entry`, with placeholder inputs of the sizes of `golden`."""
    sizes = {} if golden is None else _example_sizes(manifest, entry, golden)
    return shlex.join(run_module(manifest, directory, entry, base=base, sizes=sizes))


def _example_sizes(manifest: Manifest, entry: str, golden: Golden) -> dict[str, int]:
    """The sizes of the varying dimensions in the example's inputs, by name: the step accepts them together."""
    point = manifest.exported(entry)
    assert point is not None
    keys = {point.key(spec.name): spec.shape for spec in point.inputs}
    known = [(keys[key], value.shape) for key, value in golden.inputs.items() if key in keys]
    # The example lacks the first dimension of stacked inputs.
    pairs = (pair for named, own in known for pair in zip(reversed(named), reversed(own), strict=False))
    return {name: size for name, size in pairs if isinstance(name, str)}


def _sized(spec: TensorSpec, sizes: Mapping[str, int]) -> TensorSpec:
    return replace(spec, shape=tuple(sizes.get(d, d) if isinstance(d, str) else d for d in spec.shape))


def training_script(manifest: Manifest, directory: Path, entry: str, base: Path | None = None) -> str:
    """Return shell functions that train from file to file: each process ends, and a checkpoint keeps the state.

    Args:
        manifest: the artifact's manifest.
        directory: the artifact's directory.
        entry: the symbol of an entry point `TRAIN_AND_EXPORT`.
        base: the base file; where it was when the artifact was compiled by default.
    """
    point = manifest.exported(entry)
    assert point is not None
    losses = [s for s in point.outputs if s.shape[:1] == (STEPS_DIM,)]
    files = {s.name: Path(f"$1.{s.name}.{'bin' if s.dtype == 'bfloat16' else 'npy'}") for s in point.inputs}
    written = {s.name: Path(f"$1.{s.name}.npy") for s in losses}
    state = len(point.outputs) - len(losses)
    command = run_module(manifest, directory, entry, inputs=files, outputs=written, base=base)[:-state]
    options = [_in_shell(part) for part in command]
    first = next(i for i, part in enumerate(options) if part.startswith(f"--parameters={SCOPE}="))
    options.insert(first, f"${{trained:+--parameters={SCOPE}=$trained}}")
    lines = " \\\n        ".join([*options, f"$(printf -- '--output=+next.bin %.0s' $(seq {state}))"])
    header = directory / CHECKPOINT_HEADER
    count = f"od -An -t d8 -j {header.stat().st_size} -N 8 trained.safetensors"
    return f"""\
K={EXAMPLE_SIZE}  # how many steps a file of data holds
# train DATA: K steps on {", ".join(str(file).replace("$1", "DATA") for file in files.values())}
train() {{
    trained=$(ls trained.safetensors 2>/dev/null)
    cp {shlex.quote(str(header))} next.bin &&
    {lines} &&
    sync next.bin && mv next.bin trained.safetensors
}}
# steps: how many steps trained.safetensors has behind it
steps() {{ if [ -e trained.safetensors ]; then {count}; else echo 0; fi; }}"""


def _in_shell(part: str) -> str:
    """An argument of iree-run-module for a shell, in which `$1` is the data, and `$K` the number of steps."""
    stacked = f"--input={EXAMPLE_SIZE}x"
    variable = f"--input=${{K}}x{part.removeprefix(stacked)}" if part.startswith(stacked) else part
    return f'"{variable}"' if "$" in variable else shlex.quote(part)


def file_value(spec: TensorSpec, file: Path, size: int = EXAMPLE_SIZE) -> str:
    """Return how a flag of iree-run-module names the tensor in `file`: a .npy file, or raw bytes with their type."""
    return f"@{file}" if file.suffix == ".npy" else f"{_type(spec, size)}=@{file}"


def filled_value(spec: TensorSpec, value: int, size: int = EXAMPLE_SIZE) -> str:
    """Return how a flag of iree-run-module writes a tensor filled with `value`; a bool tensor can only be false."""
    # iree-run-module spreads a single number over the tensor. Booleans it reads as hexadecimal bytes, one for each
    # element.
    return _type(spec, size) if spec.dtype == "bool" else f"{_type(spec, size)}={value}"


def _type(spec: TensorSpec, size: int) -> str:
    dims = "".join(f"{size if isinstance(d, str) else d}x" for d in spec.shape)
    return f"{dims}{_ELEMENT_TYPES[spec.dtype]}"


def _input(spec: TensorSpec, inputs: Mapping[str, Path | str], size: int) -> str:
    value = inputs.get(spec.name)
    if value is None:
        return filled_value(spec, spec.minimum or 0, size)
    return value if isinstance(value, str) else file_value(spec, value, size)


def _hyper(
    entry: EntryPoint, name: str, manifest: Manifest, values: Mapping[str, float | Sequence[float]], size: int
) -> str:
    default = next(h.default for h in manifest.hypers if h.name == name)
    given = values.get(name, default)
    value = repr(float(given)) if isinstance(given, float | int) else " ".join(repr(float(v)) for v in given)
    return f"{size}xf64={value}" if entry.is_stacked else value
