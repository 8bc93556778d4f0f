"""`manifest.json`: everything that a program needs to know about an artifact, as typed records.

The compiler writes it and the runtime reads it (`manifest_file.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod
from typing import Any

from irongrad.runtime.structure import Structure

FORMAT_VERSION = 3
MANIFEST = "manifest.json"
INITIAL_STATE = "state.irpa"
GOLDEN = "golden.safetensors"
# The beginning of a checkpoint of the trainable state: behind it come the outputs of `TRAIN_AND_EXPORT`, as raw bytes.
CHECKPOINT_HEADER = "checkpoint.header"
SIGNATURE = "manifest.sig"
PORTABLE_MODULE = "step.mlirbc"

# What the compiler recorded of the step: operators, kernels, passes and memory (`irongrad.analysis`).
ANALYSIS = "analysis.json.gz"

# The parameter scope in which a .vmfb looks up its state: iree-run-module --parameters=state=FILE
SCOPE = "state"
# That of the tensors in a base file.
BASE_SCOPE = "base"
STEPS = "irongrad/steps"
# The state of the random numbers: the seed, and the number of calls of entry points that have drawn under it.
SEED = "irongrad/seed"
DRAWS = "irongrad/draws"
# What the names of carried values begin with.
CARRIED = "carry"
# Loss scaling: the scale and its growth tracker, named as in GradScaler.state_dict, and how often each optimizer's
# update was skipped.
SCALE = "scaler/scale"
GROWTH_TRACKER = "scaler/growth_tracker"
SKIPPED = "scaler/skipped"
# The number of the open forward: `forward` of a step in pieces returns it, and `finish_step` takes it.
TICKET = "ticket"
# Entry points that compute nothing: they export and import the whole state, or the accumulated gradients.
OF_STATE = ("export_state", "import_state")
OF_GRADIENTS = ("export_gradients", "import_gradients")
# K training steps, and the trainable state after them, for a program that ends after each call.
TRAIN_AND_EXPORT = "train_and_export"
# Entry points whose inputs and hyperparameters are stacked over K steps.
STACKED = ("train_steps", TRAIN_AND_EXPORT)
# The entry points in which ranks exchange gradients.
EXCHANGED = frozenset({"train_step", *STACKED, "apply_step"})
# The entry points whose meaning is the same in every artifact. Others are the user's own (`TrainStep.entries`).
STANDARD = frozenset(
    (
        "train_step",
        *STACKED,
        "grad_step",
        "apply_step",
        "forward",
        "finish_step",
        "eval_step",
        "predict",
        "call",
        *OF_STATE,
        *OF_GRADIENTS,
        "reset",
        "reset_carry",
    )
)
# Names that an entry point cannot have, because the module or the command line uses them.
RESERVED = frozenset({"accumulated", "border", "joint", "update", "accumulate", "mean", "finish", "eval", "step"})
# The argument of a placed `apply_step` that is the number of accumulated gradients.
COUNT = "accumulated"
# What the names of values begin with that one segment of a placed step passes to another.
PASSED = "@"
# The input dimension over which the entry points `STACKED` loop.
STEPS_DIM = "K"
# What an artifact has after `--tune`: the forms that were measured to be the fastest, or the default forms.
TUNED, UNTUNED = "tuned", "untuned"
# What keeps an index within its tensor; see `IndexSpec.how`.
PROVED, BY_INPUT, EARLY = "proved", "checked by input", "checked early"
# The value of `TensorSpec.maximum` if only `limits` bound the input.
UNLIMITED = 2**31 - 1


class Role(StrEnum):
    """The role of a state tensor."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    OPTIMIZER = "optimizer"
    COUNTER = "counter"
    RANDOM = "random"
    SCALER = "scaler"
    CARRIED = "carried"


# The state that updates alone read. An artifact without entry points that update has none.
OF_UPDATES = (Role.OPTIMIZER, Role.SCALER)
# The state that a base file may hold, if it is frozen.
OF_BASE = (Role.PARAMETER, Role.BUFFER)


@dataclass(frozen=True)
class TensorSpec:
    """An input or an output of an entry point.

    Attributes:
        name: its name.
        dtype: numpy's name of its element type, such as `float32`.
        shape: its dimensions; a string names a dimension that varies.
        minimum: the smallest value that the step accepts, for class indices and the like; None for no range.
        maximum: the largest value that the step accepts; None for no range.
        exempt: a value outside the range that is accepted too, such as cross_entropy's `ignore_index`.
        limits: further upper bounds, which depend on the sizes of a call, such as `T - 1`.
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
        default: its value in the user's optimizer.
    """

    name: str
    default: float


def golden_file(step: str) -> str:
    """The name of the file of a step's golden values; of those of the only step, or of all in turn, if it is empty."""
    return f"golden.{step}.safetensors" if step else GOLDEN


def steps_of(step: str) -> str:
    """The name of the state tensor that counts the updates of a named step; of the only step if the name is empty."""
    return f"{STEPS}/{step}" if step else STEPS


def of_entry(entry: str, name: str) -> str:
    """The name of an input of a user's entry point beside the inputs of the step and of other entry points."""
    return f"{entry}.{name}"


@dataclass(frozen=True)
class EntryPoint:
    """An exported function of the .vmfb.

    Attributes:
        name: the function's name.
        inputs: tensor arguments, in order.
        hypers: names of the float64 arguments after the inputs. In the entry points `STACKED` each is a tensor of shape
            [K], in all others a scalar.
        outputs: results, in order.
        summary: one sentence about what the function does.
        step: the name of the step that it belongs to, among several over one state; empty otherwise.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    hypers: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    summary: str
    step: str = ""

    @property
    def symbol(self) -> str:
        """The name of the exported function, as iree-run-module takes it."""
        return f"{self.step}.{self.name}" if self.step else self.name

    def key(self, name: str) -> str:
        """The name of an input beside those of all other entry points: an entry of the user's has inputs of its own."""
        return name if self.name in STANDARD else of_entry(self.name, name)

    @property
    def is_stacked(self) -> bool:
        """Whether its arguments are stacked over K steps."""
        return self.name in STACKED

    @property
    def is_inference(self) -> bool:
        """Whether it returns outputs of the model, in evaluation mode: `predict`, and the user's own entry points."""
        return self.name == "predict" or self.name not in STANDARD

    @property
    def signature(self) -> str:
        """The signature as `irongrad inspect` prints it."""
        arguments = ", ".join([*map(str, self.inputs), *(f"{h}: float64" for h in self.hypers)])
        return f"{self.symbol}({arguments}) -> ({', '.join(map(str, self.outputs))})"


@dataclass(frozen=True)
class StateSpec:
    """A tensor of the state.

    Attributes:
        name: its key in a checkpoint.
        dtype: numpy's name of its element type.
        shape: its dimensions.
        role: its role.
        aliases: further keys of the same tensor in a checkpoint (tied weights).
        frozen: whether no step changes it. A checkpoint of the trainable state leaves it out.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    aliases: tuple[str, ...] = ()
    frozen: bool = False

    @property
    def model_names(self) -> tuple[str, ...]:
        """Its name, and those under which `model.state_dict()` has it, too."""
        return (self.name, *(self.aliases if self.role in (Role.PARAMETER, Role.BUFFER) else ()))


@dataclass(frozen=True)
class ReliedSpec:
    """What a step relies on of the values that a state tensor had when the step was captured.

    Attributes:
        line: the user's line that relies on it; empty for values that only the program has, and no `state_dict`.
        values: the values as text, of many the first; empty if they may change within bounds.
        sha256: the hash of their bytes; empty if they may change within bounds.
        bounds: the least and the largest value that the state may have; None if no value may change.
    """

    line: str
    values: str = ""
    sha256: str = ""
    bounds: tuple[int | float, int | float] | None = None


def trained_state(state: Iterable[StateSpec]) -> tuple[StateSpec, ...]:
    """The state that training changes, in the order of `TRAIN_AND_EXPORT`: the counters of steps are the first."""
    return tuple(sorted((s for s in state if not s.frozen), key=lambda s: s.role is not Role.COUNTER))


@dataclass(frozen=True)
class Certificate:
    """The outcome of a verification against the float64 oracle.

    Attributes:
        device: the IREE device that ran the target, such as `local-task`.
        steps: the number of training steps that were compared.
        worst: the largest error, as a fraction of its tolerance; at most 1.
        tensor: the value with the largest error.
        oracle: the dtype of the eager reference run.
        name: the device's name as its driver reports it; empty for the CPU that compiled the target.
        driver: the driver with its version; empty for a CPU.
        versions: the versions of IronGrad and of IREE's runtime, if `irongrad verify` signed the certificate.
        date: when `irongrad verify` signed the certificate, in UTC.
        unjudged: the values that cannot be judged, because their tolerance is as large as they are.
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
    unjudged: tuple[str, ...] = ()


@dataclass(frozen=True)
class TargetSpec:
    """One compiled file.

    Attributes:
        name: the target, such as `llvm-cpu`.
        file: the .vmfb's file name.
        device: the IREE device that runs it by default.
        flags: the flags of iree-compile.
        architecture: the CPU architecture of the code, such as `x86_64`; empty for code that is not for a CPU.
        features: the CPU features that the code needs, by LLVM's names.
        certificate: its verification on the compiling machine; None if it could not run there.
        subgroup: the subgroup size that the code relies on, in lanes of a GPU; 0 if it relies on none.
        verified: the certificates that `irongrad verify` signed, one per device.
        transients: the peak bytes of intermediate values that the compiler allocates, by entry point.
        compiler: the version of IREE that compiled it.
        asked: the text of `--target`.
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
        operator: the operator that computes it.
        dtype: numpy's name of its element type.
        shape: its dimensions.
        bytes: its size in bytes.
        decision: `saved` for the backward, `recomputed` in the backward, or `discarded` if the backward does not need
            it.
        line: the user's line that it comes from.
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
        budget: the memory budget that was asked for, such as `512MiB` or `50%`; empty for no limit.
        predicted: the predicted peak bytes of intermediate values, by entry point.
        values: the values of the forward pass, in order.
        limits: the most bytes of intermediate values that the compiler may allocate, by entry point that has a budget.
    """

    budget: str
    predicted: dict[str, int]
    values: tuple[ForwardValue, ...]
    limits: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FileSpec:
    """The expected hash and size of a file of the artifact.

    Attributes:
        sha256: the hash in hexadecimal.
        size: the size in bytes.
    """

    sha256: str
    size: int


@dataclass(frozen=True)
class BaseSpec:
    """The file of the frozen parameters and buffers, which several artifacts share.

    Attributes:
        path: its path from the artifact's directory, with `/` between the parts.
        sha256: its hash in hexadecimal.
        size: its size in bytes.
        tensors: the names of the tensors in it, by their names in `state`.
    """

    path: str
    sha256: str
    size: int
    tensors: dict[str, str]

    @property
    def format(self) -> str:
        """IREE's name of its format, which iree-run-module tells by the end of its name."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class FunctionSpec:
    """The signature of a compiled function (`ig.compile_function`); its entry point is `call`.

    Attributes:
        arguments: the structure of its positional arguments, a tuple.
        result: the structure of its return value.
    """

    arguments: Structure
    result: Structure


@dataclass(frozen=True)
class IndexSpec:
    """An index that a step uses.

    Attributes:
        line: the user's line.
        operator: the operator that takes the index, such as `embedding`.
        range: the values that the index may have.
        how: `proved` by the compiler; `checked by input`, if it holds elements of inputs that have a range; or
            `checked early`, if each call computes it before anything else.
    """

    line: str
    operator: str
    range: str
    how: str


@dataclass(frozen=True)
class ChoiceSpec:
    """A choice that was made by measurement on the compiling machine.

    Attributes:
        what: the computation that the choice is about.
        chosen: the name of the chosen form.
        seconds: the time of each form, by name.
        default: the name of the form that is taken without a measurement; empty if the artifact does not say.
        target: the name of the target that the choice is for; empty if it is for all.
        failed: why other forms have no time, by name: they failed to compile or to run.
    """

    what: str
    chosen: str
    seconds: dict[str, float]
    default: str = ""
    target: str = ""
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepTimes:
    """A whole step with the chosen forms beside the same step with the default forms, measured in rounds in turn.

    Attributes:
        tuned: the seconds of a step with the chosen forms, in the fastest round.
        untuned: those of a step with the default forms.
        ratio: the median of the tuned time divided by the untuned time of the same round.
        bound: an upper bound of that median, which is right in 99 of 100 cases.
    """

    tuned: float
    untuned: float
    ratio: float
    bound: float


@dataclass(frozen=True)
class TuningSpec:
    """What `--tune` measured.

    Attributes:
        budget: how long it could measure, in seconds.
        measured: the number of computations whose forms have times.
        left_out: the number of computations for which no time was left; they have their default forms.
        step: the times of a whole step with and without the chosen forms; None if these are the default ones.
        kept: which of the two steps the artifact has: `tuned` or `untuned`.
    """

    budget: int
    measured: int
    left_out: int
    step: StepTimes | None = None
    kept: str = UNTUNED


@dataclass(frozen=True)
class ConstraintSpec:
    """A relation that the sizes of a call must satisfy.

    Attributes:
        text: the relation.
        refusal: the error message for sizes that break it.
        broken: example sizes that are refused for this relation, by dimension name; empty if none are known.
    """

    text: str
    refusal: str
    broken: dict[str, int]


@dataclass(frozen=True)
class LayoutSpec:
    """A form in which other tools read the model: the names of its tensors there, and the form's configuration.

    Attributes:
        tensors: the names of the model's tensors (those of `state`, or their aliases) by the names in the form's file.
        config: the contents of the form's JSON file, as its own library writes it; empty for a plain state dict.
    """

    tensors: dict[str, str]
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepSpec:
    """One of several steps over one state; its fields are those of `Manifest`."""

    entry_points: tuple[EntryPoint, ...]
    hypers: tuple[HyperSpec, ...]
    fixed: dict[str, float]
    gradients: tuple[str, ...]
    buckets: tuple[dict[str, int], ...] = ()
    sizes: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    constraints: tuple[ConstraintSpec, ...] = ()
    precision: str = "f32"
    indices: tuple[IndexSpec, ...] = ()


@dataclass(frozen=True)
class PartSpec:
    """A part of a model on a device of its own.

    Attributes:
        name: the paths of its modules, joined by `+`.
        target: the name of its target.
        state: the names of the state tensors that it holds; several parts hold counters and seeds.
        gradients: the names of its trained parameters.
    """

    name: str
    target: str
    state: tuple[str, ...]
    gradients: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """A call of an entry point of a part's module.

    Attributes:
        part: the name of the part.
        entry: its entry point. An input has the name of an input of the step, or of an output of an earlier call.
        stores: the names of the state tensors that it changes, without accumulated gradients.
    """

    part: str
    entry: EntryPoint
    stores: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlacementSpec:
    """Where the parts of a step run (`irongrad.compile(place=…)`).

    Attributes:
        parts: the parts. Each has a target of its own, and all of them are loaded together.
        programs: for each entry point that computes, the calls that it consists of, in order.
    """

    parts: tuple[PartSpec, ...]
    programs: dict[str, tuple[Call, ...]]


@dataclass(frozen=True)
class Manifest:
    """An artifact's manifest.

    Attributes:
        format_version: the version of the artifact's layout.
        entry_points: the functions that every .vmfb exports; of a step in parts, those that its parts compute together.
        hypers: run-time hyperparameters with their defaults.
        fixed: hyperparameters that are compiled in, with their values.
        state: all state tensors.
        gradients: the names of the trained parameters, in the order of `export_gradients`.
        buckets: sizes by dimension name, the bucket with the fewest elements first; empty for a step of fixed shapes.
        sizes: the smallest and the largest size of every named dimension; None if there is no largest.
        constraints: further relations that sizes must satisfy.
        targets: the compiled files, one per target.
        versions: the versions of Python and of the packages that made the artifact.
        files: sizes and hashes by file name.
        function: the signature of a compiled function; None for a training step.
        seed: the seed of the random numbers in the initial state, or the default seed of a compiled function. None if
            no random numbers are drawn.
        precision: `f32`, or the autocast dtype in which the model runs, `bf16` or `f16`.
        memory: the memory plan of a training step.
        passes: the passes that ran on the step graph, in the syntax of `--passes`.
        route: the lowering of the step graph to linalg, `linalg` or `stablehlo`.
        tuned: the choices that were made by measurement.
        tuning: what was measured for these choices; None if nothing was to be measured.
        indices: every index that the step uses, and what keeps it within its tensor.
        base: the sha256 of the frozen parameters and buffers, on which checkpoints of the trainable state rely; empty
            if there are none.
        base_file: the file beside the artifact that holds these, or most of them; None if the artifact itself does.
        layouts: the forms in which `irongrad export` writes the model, by name: `torch`, and where the model has them
            `huggingface` and `peft`. None for several steps, and for steps that come from no PyTorch model.
        steps: the steps of an artifact of several (`irongrad.Steps`), by name. The fields that a `StepSpec` has, too,
            then have what concerns the state of all: `entry_points` those of the whole state.
        exchange: the bytes of each bucket that ranks exchange in a step, in order, by the name of the step; the name of
            a step of its own is empty. Empty for an artifact that runs on one rank alone.
        statistics: the bytes of each exchange of BatchNorm's statistics in a step's forward and backward, in order, by
            the name of the step. Empty if every rank normalises by its own.
        shards: the names of the tensors in each shard of the optimizer's state, which ranks divide among them; empty if
            every rank holds that state whole.
        placement: the parts of a step on several devices; None if each target has the whole step.
        relied: the state on whose values at capture a step relies, by name.
        digest: the sha256 of the manifest's file, with zeros in the place of the digest. The manifest holds the hash of
            every other file, so this is the identity of the artifact.
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
    tuning: TuningSpec | None = None
    indices: tuple[IndexSpec, ...] = ()
    base: str = ""
    base_file: BaseSpec | None = None
    layouts: dict[str, LayoutSpec] = field(default_factory=dict)
    steps: dict[str, StepSpec] = field(default_factory=dict)
    exchange: dict[str, tuple[int, ...]] = field(default_factory=dict)
    statistics: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shards: tuple[tuple[str, ...], ...] = ()
    placement: PlacementSpec | None = None
    relied: dict[str, ReliedSpec] = field(default_factory=dict)
    digest: str = ""

    @property
    def all_entry_points(self) -> tuple[EntryPoint, ...]:
        """The functions that every .vmfb exports, of all steps."""
        return (*self.entry_points, *(e for spec in self.steps.values() for e in spec.entry_points))

    def of_step(self, name: str) -> Manifest:
        """The manifest of one of several steps, as if it were alone.

        Raises:
            KeyError: there is no such step.
        """
        spec = self.steps[name]
        return replace(
            self,
            entry_points=(*spec.entry_points, *self.entry_points),
            hypers=spec.hypers,
            fixed=spec.fixed,
            gradients=spec.gradients,
            buckets=spec.buckets,
            sizes=spec.sizes,
            constraints=spec.constraints,
            precision=spec.precision,
            indices=spec.indices,
            steps={},
        )

    @property
    def golden_files(self) -> dict[str, str]:
        """The files of golden values: of each step by its name, and under an empty name of the only step, or of all."""
        files = {name: golden_file(name) for name in (*self.steps, "")}
        return {name: file for name, file in files.items() if file in self.files}

    @property
    def frozen(self) -> frozenset[str]:
        """The names of the state that no step changes, with their aliases."""
        return frozenset(key for s in self.state if s.frozen for key in (s.name, *s.aliases))

    @property
    def in_base(self) -> tuple[StateSpec, ...]:
        """The state that lies in the base file; no entry point exports, imports or resets it."""
        return tuple(s for s in self.state if self.base_file is not None and s.name in self.base_file.tensors)

    @property
    def is_mostly_frozen(self) -> bool:
        """Whether over half of the model's parameters are frozen, by their elements."""
        sizes = [(prod(s.shape), s.frozen) for s in self.state if s.role is Role.PARAMETER]
        return 2 * sum(size for size, frozen in sizes if frozen) > sum(size for size, _ in sizes)

    def exported(self, symbol: str) -> EntryPoint | None:
        """Return the entry point whose exported function is `symbol`, of any step; or None."""
        return next((e for e in self.all_entry_points if e.symbol == symbol), None)

    def entry_point(self, name: str) -> EntryPoint | None:
        """Return the entry point called `name`, or None."""
        return next((e for e in self.entry_points if e.name == name), None)
