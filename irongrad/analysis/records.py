"""The record of a compilation that every artifact carries: `analysis.json.gz`.

The compiler writes it once, and every report reads it: `irongrad analyze`, `profile` and `report`. It has no times, so
the same step still compiles to the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

FORMAT_VERSION = 1

SEPARATOR = "|"

# Between the name of a function of the step graph and the bucket that a version of it is for.
BUCKET = "@"


@dataclass(frozen=True)
class Source:
    """Where a computation comes from.

    Attributes:
        function: the function of the step graph, such as `joint`, `update`, `eval` or `predict@T64`; empty if a launch
            runs for several buckets.
        phase: `forward`, `backward`, `update`, `evaluation`, `check`, or the name of another function.
        operator: the operator, such as `aten.mm.default`.
        module: the path of the module whose `forward` called it, as in `named_modules()`; `(model)` for the model
            itself, `(loss)` for a loss that is a module, and empty outside of both.
        line: the user's line, as `net.py:12`; empty if unknown.
    """

    function: str
    phase: str
    operator: str
    module: str
    line: str

    @property
    def base(self) -> str:
        """The name of the function without its bucket."""
        return self.function.partition(BUCKET)[0]

    @property
    def bucket(self) -> str:
        """The bucket of the function, as `T64`; empty if it has only one version."""
        return self.function.partition(BUCKET)[2]

    def spelled(self) -> str:
        """The source as the name of a location in a module of MLIR."""
        return SEPARATOR.join((self.function, self.phase, self.operator, self.line, self.module))

    @classmethod
    def of(cls, spelled: str) -> Source | None:
        """The source that `spelled` names; None if it names none."""
        parts = spelled.split(SEPARATOR, 4)
        if len(parts) != len(fields(cls)):
            return None
        function, phase, operator, line, module = parts
        return cls(function, phase, operator, module, line)


@dataclass(frozen=True)
class Operator:
    """An operator of the step as it was captured, before any pass.

    Attributes:
        name: its name in the dumped graph; unique in its function.
        source: the index of its `Source` in `Analysis.sources`.
        dtype: numpy's name of its result's element type.
        shape: the dimensions of its result at the example's sizes; empty if one depends on data.
        flops: floating-point operations by PyTorch's own formulas (`torch.utils.flop_counter`), so 0 for other
            operators than products and convolutions. Of one execution. None if a size depends on data.
        elements: the number of elements that it computes, in one execution.
        read: the bytes of its operands, in one execution.
        written: the bytes of its results, in one execution.
        times: how often it executes, which is more than once in a loop.
        inputs: the names of the operators that it reads, through views.
    """

    name: str
    source: int
    dtype: str
    shape: tuple[int, ...]
    flops: int | None
    elements: int
    read: int
    written: int
    times: int
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """A kernel of a target.

    Attributes:
        name: the name of its function in the .vmfb, with which a profile names it.
        operations: arithmetic operations of one launch, with all elementwise code; None if a size is unknown.
        sources: the indices in `TargetRecord.sources` of what it computes, in program order. If several launches share
            the kernel, those of one of them.
    """

    name: str
    operations: int | None
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel, in program order.

    Attributes:
        function: the function of the module that launches it: an entry point, or one that entry points call.
        kernel: the index of the kernel in its target; None for a copy of a part of a tensor.
        source: the index in `TargetRecord.sources` of the operator that gave the kernel its form. If that is unknown, a
            source that has only the function; None if that is unknown, too.
        read: the bytes of the tensors that it reads.
        written: the bytes of the tensors that it writes.
        times: how often it runs in one call of the function.
        intermediates: how many tensors a kernel writes that are neither new state nor results of the function.
        intermediate_bytes: the bytes of these tensors.
    """

    function: str
    kernel: int | None
    source: int | None
    read: int
    written: int
    times: int
    intermediates: int = 0
    intermediate_bytes: int = 0


@dataclass(frozen=True)
class Judged:
    """How far a value was from the oracle when the target was verified.

    Attributes:
        entry_point: the entry point that computed it.
        key: the key of the value, such as `state/1/head.weight` (`irongrad.runtime.golden.key_of`).
        error: the largest absolute error of its elements.
        allowed: the largest error that is right.
        elements: the number of compared elements.
    """

    entry_point: str
    key: str
    error: float
    allowed: float
    elements: int


@dataclass(frozen=True)
class TargetRecord:
    """What a target executes.

    Attributes:
        sources: the sources that its kernels and launches name by their index.
        kernels: its kernels.
        launches: all launches of its functions.
        calls: for each function, the functions that it calls, each as often as it does.
        other_sizes: as in `Analysis`.
        judged: the values that have a bound, at the example's inputs; empty if the target could not be verified.
    """

    sources: tuple[Source, ...]
    kernels: tuple[Kernel, ...]
    launches: tuple[Launch, ...]
    calls: dict[str, tuple[str, ...]]
    other_sizes: tuple[str, ...] = ()
    judged: tuple[Judged, ...] = ()


@dataclass(frozen=True)
class PassChange:
    """What a pass over the step graph changed in one function.

    Attributes:
        name: the pass.
        function: the function.
        before: the number of nodes before the pass.
        after: the number of nodes after it.
        counts: the pass's own counts, such as `{"merged": 12}`.
    """

    name: str
    function: str
    before: int
    after: int
    counts: dict[str, int]


@dataclass(frozen=True)
class Buffer:
    """A value in memory.

    Attributes:
        name: the value's name in the dumped graph.
        source: the index in `Analysis.sources` of the operator that computes it.
        dtype: numpy's name of its element type.
        shape: its dimensions.
        bytes: the size of its buffer, with padding.
        start: the first moment at which it is live.
        end: the last moment at which it is live.
        recomputed: whether it is computed again in the backward, instead of kept.
    """

    name: str
    source: int
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    start: int
    end: int
    recomputed: bool


@dataclass(frozen=True)
class Timeline:
    """The memory of one function over its schedule, as the compiler planned it.

    Attributes:
        function: the function of the step graph.
        kernels: the names of the values whose kernels run at each moment.
        buffers: the values in memory, without state, inputs and results.
        peak: the largest sum of live bytes.
        allocated: the bytes that the plan allocates for them.
    """

    function: str
    kernels: tuple[tuple[str, ...], ...]
    buffers: tuple[Buffer, ...]
    peak: int
    allocated: int


@dataclass(frozen=True)
class Analysis:
    """The record of a compilation.

    Attributes:
        format_version: the version of this format.
        sources: the sources that operators and buffers name by their index.
        lines: the text of each of the user's lines, by its place, such as `net.py:12`.
        chains: for each entry point, the functions of the step graph that one step of it runs, each as often as it
            does.
        operators: the operators of the captured step, function by function.
        passes: what each pass over the step graph changed, in order.
        timelines: the memory of each function of static sizes.
        targets: what each target executes, by name.
        other_sizes: the functions that the example's call does not run, because another bucket has its sizes.
    """

    format_version: int
    sources: tuple[Source, ...] = ()
    lines: dict[str, str] = field(default_factory=dict)
    chains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    operators: tuple[Operator, ...] = ()
    passes: tuple[PassChange, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    targets: dict[str, TargetRecord] = field(default_factory=dict)
    other_sizes: tuple[str, ...] = ()
