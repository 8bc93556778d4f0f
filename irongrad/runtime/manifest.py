"""`manifest.json`: everything that a program needs to know about an artifact, as typed records.

Written by the compiler, read by the runtime; JSON through msgspec, which checks the types on the way in.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.structure import Structure

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
INITIAL_STATE = "state.irpa"
GOLDEN = "golden.safetensors"
PORTABLE_MODULE = "step.mlirbc"

# The scope under which a .vmfb asks for its state: iree-run-module --parameters=state=FILE
SCOPE = "state"
STEPS = "irongrad/steps"
# Random numbers: their seed, and how many calls of entry points have drawn under it.
SEED = "irongrad/seed"
DRAWS = "irongrad/draws"
# The loss scale, under the names that GradScaler.state_dict has, and how often each optimizer's update was skipped.
SCALE = "scaler/scale"
GROWTH_TRACKER = "scaler/growth_tracker"
SKIPPED = "scaler/skipped"
# What `forward` of a step in pieces hands out, and `finish_step` takes: the number of the forward that is open.
TICKET = "ticket"
# The entry points that compute nothing: they hand the whole state, or the accumulated gradients, out and take it in.
OF_STATE = ("export_state", "import_state")
OF_GRADIENTS = ("export_gradients", "import_gradients")
# The dimension of the inputs of `train_steps` over which it loops.
STEPS_DIM = "K"
# What `TensorSpec.maximum` is where `limits` alone say how large a value may be.
UNLIMITED = 2**31 - 1


class Role(StrEnum):
    """What a state tensor is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    OPTIMIZER = "optimizer"
    COUNTER = "counter"
    RANDOM = "random"
    SCALER = "scaler"


@dataclass(frozen=True)
class TensorSpec:
    """An input or an output of an entry point.

    Attributes:
        name: its name.
        dtype: numpy's name of its element type, such as `float32`.
        shape: its dimensions; a string names a dimension that varies.
        minimum: the smallest value the step accepts, for class indices and the like.
        maximum: the largest.
        exempt: a value outside that range that is accepted too, such as cross_entropy's `ignore_index`.
        limits: further largest values, which vary with the sizes of a call, such as `T - 1`.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    minimum: int | None = None
    maximum: int | None = None
    exempt: int | None = None
    limits: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class HyperSpec:
    """A hyperparameter: a float64 argument of an entry point with a default.

    Attributes:
        name: its name, such as `lr`.
        default: the value it had in the user's optimizer.
    """

    name: str
    default: float


@dataclass(frozen=True)
class EntryPoint:
    """An exported function of the .vmfb.

    Attributes:
        name: the function's name.
        inputs: tensor arguments, in order.
        hypers: names of the float64 arguments that follow them; in `train_steps` each is one tensor of shape
            [K], in the others a scalar.
        outputs: results, in order.
        summary: what it does, in a sentence.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    hypers: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    summary: str

    @property
    def signature(self) -> str:
        """The readable signature, as `inspect` prints it."""
        arguments = ", ".join([*map(str, self.inputs), *(f"{h}: float64" for h in self.hypers)])
        return f"{self.name}({arguments}) -> ({', '.join(map(str, self.outputs))})"


@dataclass(frozen=True)
class StateSpec:
    """A tensor of the state.

    Attributes:
        name: its key in a checkpoint.
        dtype: numpy's name of its element type.
        shape: its dimensions.
        role: what it is.
        aliases: further keys under which a checkpoint holds the same tensor (tied weights).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Certificate:
    """The outcome of a verification against the float64 oracle.

    Attributes:
        device: the IREE device it ran on, such as `local-task`.
        steps: how many training steps were compared.
        worst: the largest error found, as a fraction of what was allowed; at most 1.
        tensor: where that was.
        oracle: the dtype of the eager run that was compared with.
        name: what the device's driver calls it; empty for the CPU that compiled.
        driver: the driver with its version; empty for a CPU.
        versions: of IronGrad and of IREE's runtime, where `irongrad verify` signed it.
        date: when that was, in UTC.
    """

    device: str
    steps: int
    worst: float
    tensor: str
    oracle: str
    name: str = ""
    driver: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""


@dataclass(frozen=True)
class TargetSpec:
    """One compiled file.

    Attributes:
        name: the target, such as `llvm-cpu`.
        file: the .vmfb's file name.
        device: the IREE device that runs it unless another is asked for.
        flags: what iree-compile was called with.
        architecture: the CPU architecture it is for (`x86_64`), empty where that does not apply.
        features: the CPU features it needs, in LLVM's names.
        certificate: how it was verified when it was compiled; None where it could not run there.
        subgroup: how many lanes of a GPU the code takes to run in step; 0 where it does not matter.
        verified: what `irongrad verify` signed, one a device.
        transients: the most bytes of intermediate values at once, by entry point, that the compiler allocates.
        compiler: the version of IREE that compiled it.
        asked: what `--target` said.
    """

    name: str
    file: str
    device: str
    flags: tuple[str, ...]
    architecture: str = ""
    features: tuple[str, ...] = ()
    certificate: Certificate | None = None
    transients: dict[str, int] = field(default_factory=dict)
    compiler: str = ""
    asked: str = ""
    subgroup: int = 0
    verified: tuple[Certificate, ...] = ()


@dataclass(frozen=True)
class ForwardValue:
    """A value of the forward pass that takes memory.

    Attributes:
        name: its name in the dumped graph.
        operator: what computes it.
        dtype: numpy's name of its element type.
        shape: its dimensions.
        bytes: its size.
        decision: `saved` for the backward, `recomputed` there, or `discarded`, as the backward needs it no more.
        line: the user's line it comes from.
    """

    name: str
    operator: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    decision: str
    line: str


@dataclass(frozen=True)
class MemorySpec:
    """The memory of a training step, as the compiler planned it.

    Attributes:
        budget: what was asked for, such as `512MiB` or `50%`; empty for no limit.
        predicted: bytes of intermediate values at once, by entry point.
        values: those of the forward pass, in order.
        limits: the most bytes of them that the compiler was let allocate, by entry point that has a budget.
    """

    budget: str
    predicted: dict[str, int]
    values: tuple[ForwardValue, ...]
    limits: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FileSpec:
    """A file of the artifact, with what it must hash to.

    Attributes:
        sha256: in hexadecimal.
        size: in bytes.
    """

    sha256: str
    size: int


@dataclass(frozen=True)
class FunctionSpec:
    """How a compiled function (`ig.compile_function`) is called; its entry point is `call`.

    Attributes:
        arguments: the structure of its positional arguments, a tuple.
        result: the structure of what it returns.
    """

    arguments: Structure
    result: Structure


@dataclass(frozen=True)
class ChoiceSpec:
    """What was chosen by measurement on the compiling machine.

    Attributes:
        what: what there was to compute.
        chosen: the name of the form that was taken.
        seconds: how long each form took, by name.
    """

    what: str
    chosen: str
    seconds: dict[str, float]


@dataclass(frozen=True)
class ConstraintSpec:
    """A relation of the sizes of a call.

    Attributes:
        text: the relation.
        refusal: what the refusal of other sizes says.
        broken: sizes that are refused for it, by dimension; empty where none are known.
    """

    text: str
    refusal: str
    broken: dict[str, int]


@dataclass(frozen=True)
class Manifest:
    """An artifact's manifest.

    Attributes:
        format_version: of the artifact's layout.
        entry_points: the functions of every .vmfb.
        hypers: run-time hyperparameters with their defaults.
        fixed: hyperparameters that are compiled in, with their values.
        state: all state tensors.
        gradients: names of the parameters that are trained, in the order of `export_gradients`.
        buckets: sizes by dimension name, the bucket with the fewest elements first; empty for a step of fixed shapes.
        sizes: the smallest and the largest size of every named dimension; None where there is no largest.
        constraints: what else has to hold of sizes.
        targets: one compiled file each.
        versions: of Python and the packages that made it.
        files: hashes by file name.
        function: how it is called, where it is a compiled function and no training step.
        seed: that of the random numbers in the initial state, or a compiled function's default; None where nothing is
            drawn.
        precision: `f32`, or the dtype of autocast, `bf16` or `f16`, in which the model runs.
        memory: the plan of a training step's memory.
        passes: what ran on the step graph, in the syntax of `--passes`.
        route: how it became linalg, `linalg` or `stablehlo`.
        tuned: what was chosen by measurement.
    """

    format_version: int
    entry_points: tuple[EntryPoint, ...]
    hypers: tuple[HyperSpec, ...]
    fixed: dict[str, float]
    state: tuple[StateSpec, ...]
    gradients: tuple[str, ...]
    targets: tuple[TargetSpec, ...]
    versions: dict[str, str]
    buckets: tuple[dict[str, int], ...] = ()
    sizes: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    constraints: tuple[ConstraintSpec, ...] = ()
    files: dict[str, FileSpec] = field(default_factory=dict)
    function: FunctionSpec | None = None
    seed: int | None = None
    precision: str = "f32"
    memory: MemorySpec | None = None
    passes: tuple[str, ...] = ()
    route: str = "linalg"
    tuned: tuple[ChoiceSpec, ...] = ()

    def entry_point(self, name: str) -> EntryPoint | None:
        """The entry point called `name`, or None."""
        return next((e for e in self.entry_points if e.name == name), None)


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Write `manifest` into `directory` as indented JSON."""
    (directory / MANIFEST).write_bytes(encoded(manifest))


def encoded(manifest: Manifest) -> bytes:
    """`manifest` as the file has it."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of the artifact in `directory`.

    Raises:
        ArtifactError: there is none, or it is damaged, or of another format version.
    """
    path = directory / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(
            f"{directory} is not an IronGrad artifact: it has no {MANIFEST}. Make one with 'irongrad compile "
            f"FILE:FUNCTION -o {directory}'"
        ) from None
    try:
        version = msgspec.json.decode(data).get("format_version")
    except (msgspec.DecodeError, AttributeError) as error:
        raise ArtifactError(f"{path} is damaged: {error}. Copy or compile the artifact again") from None
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{path} has format version {version}; this IronGrad reads version {FORMAT_VERSION}. Compile the step "
            "again, or install the IronGrad that made it"
        )
    try:
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.ValidationError as error:
        raise ArtifactError(f"{path} is damaged: {error}. Copy or compile the artifact again") from None


def file_spec(path: Path) -> FileSpec:
    """Hash the file at `path`."""
    with path.open("rb") as file:
        return FileSpec(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)
