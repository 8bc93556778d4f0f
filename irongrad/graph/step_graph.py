"""The data between the stages after differentiation: functional FX graphs over named state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch.fx import GraphModule

from irongrad.analysis.records import BUCKET
from irongrad.runtime.manifest import DRAWS, SEED, IndexSpec, Role, steps_of
from irongrad.sizes.buckets import Bucket
from irongrad.sizes.limits import Limits
from irongrad.sizes.symbols import has_symbols


@dataclass(frozen=True)
class Relied:
    """What steps rely on of the values that a state tensor had at capture.

    Attributes:
        line: the user's line that does, without its file's folders; empty for values that only the program has.
        bounds: the least and the largest value; None if all values have to stay as they were.
        kept: whether the function that relies on the bounds changes the tensor within them.
    """

    line: str = ""
    bounds: tuple[float, float] | None = None
    kept: bool = False


def relied_by_both(one: Relied | None, other: Relied | None) -> Relied | None:
    """What is relied on if both are: what no step may change, if either is, and what both bounds allow."""
    if one is None or other is None:
        return one or other
    if one.bounds is None or other.bounds is None:
        return one if one.bounds is None else other
    bounds = max(one.bounds[0], other.bounds[0]), min(one.bounds[1], other.bounds[1])
    return replace(other if one.kept else one, bounds=bounds, kept=one.kept and other.kept)


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the state.

    Attributes:
        name: its key in checkpoints: PyTorch's own name for a parameter or buffer, `optimizer/<key>/<parameter>` for
            optimizer state, `irongrad/steps` for the step count, `irongrad/seed` and `irongrad/draws` for random
            numbers.
        role: its role in the step.
        initial: its value before the first step, on the CPU.
        aliases: other names of the same tensor in the model (tied weights).
        frozen: whether no function of any step changes it; known once all functions are (`with_frozen_state`).
        base_name: its name in a file that other artifacts share, so that no entry point changes it either; empty if it
            lies in the artifact.
        persistent: whether PyTorch's `state_dict` holds it.
        relied: what the steps rely on of its values at capture; None if they may be any.
    """

    name: str
    role: Role
    initial: torch.Tensor
    aliases: tuple[str, ...] = ()
    frozen: bool = False
    base_name: str = ""
    persistent: bool = True
    relied: Relied | None = None

    @property
    def in_base(self) -> bool:
        """Whether it lies in a file that other artifacts share."""
        return bool(self.base_name)


@dataclass(frozen=True)
class Value:
    """The meaning of an argument or a result of a function.

    Attributes:
        kind: one of the kinds below.
        name: the name of the state tensor, input, hyperparameter, parameter, dimension, pack, saved value or output.

    Kinds:

    * `state` is read from, or stored to, the state tensor of that name.
    * `input` is an input of the step.
    * `hyper` is a hyperparameter: float64 of rank 0.
    * `gradient` and `accumulator` belong to the parameter of that name.
    * `count` is the number of accumulated gradients: float64.
    * `size` is the size of a named dimension in a call: int64 of rank 0.
    * `pack` is a `Pack`.
    * `saved` is passed from the first piece of a step to the second.
    * `shared` is a number that `update` computes for the updates of all shards.
    * `output` is an output of the step.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Pack:
    """Tensors that are stored, or passed on, one after the other in a single tensor of rank 1.

    Attributes:
        name: its name.
        starts: the position at which each tensor begins. The tensors are state or gradients of one dtype; there may be
            gaps.
        size: the number of elements of the whole pack.
    """

    name: str
    starts: Mapping[Value, int]
    size: int

    @property
    def holds_state(self) -> bool:
        """Whether its tensors are state, and not gradients."""
        return all(member.kind == "state" for member in self.starts)


@dataclass(frozen=True)
class Shard:
    """A part of the optimizer's state that one rank holds and updates for all.

    Attributes:
        function: the name of the function that updates it, and the parameters whose state it is.
        state: the names of its tensors.
    """

    function: str
    state: tuple[str, ...]


@dataclass(frozen=True)
class Function:
    """A functional ATen graph: no mutation and no constants of more than a few elements.

    Only sizes may be symbols (`of_any_size`).

    Attributes:
        graph: the graph; its placeholders are `arguments` and its outputs are `results`, in order.
        arguments: the meaning of each placeholder.
        results: the meaning of each output.
    """

    graph: GraphModule
    arguments: tuple[Value, ...]
    results: tuple[Value, ...]

    @property
    def of_any_size(self) -> bool:
        """Whether sizes of the function's tensors are symbols."""
        return any(has_symbols(n.meta.get("val")) for n in self.graph.graph.nodes)

    def example(self, index: int) -> torch.Tensor:
        """Return the fake tensor of the placeholder at `index`."""
        return next(islice(self.graph.graph.nodes, index, None)).meta["val"]  # placeholders come first

    @property
    def order_of_results(self) -> dict[Value, int]:
        """The position of each result in the order of computation."""
        places = {node: i for i, node in enumerate(self.graph.graph.nodes)}
        return {v: places[n] for v, n in zip(self.results, self.graph.graph.output_node().args[0], strict=True)}

    def results_like(self) -> list[torch.Tensor]:
        """Return the fake tensors of the results."""
        return [n.meta["val"] for n in self.graph.graph.output_node().args[0]]


def sizes_like(value: torch.Tensor, like: torch.Tensor) -> list[int]:
    """The shape of `like`, with the sizes of `value` for its symbolic sizes."""
    return [b if isinstance(b, int) else a for a, b in zip(value.shape, like.shape, strict=True)]


def with_frozen_state(graphs: Mapping[str, StepGraph]) -> dict[str, StepGraph]:
    """Mark the state that no function of any of these graphs, over one state, changes.

    A seed is not frozen: `Session.seed` replaces it, and a run resumes with the one that it began with. The
    steps rely on the values of frozen state that no `state_dict` holds: no checkpoint of another program may replace
    them.
    """
    written = {v.name for g in graphs.values() for f in g.functions.values() for v in f.results if v.kind == "state"}

    def marked(tensor: StateTensor) -> StateTensor:
        frozen = tensor.name not in written and tensor.role is not Role.RANDOM
        held = frozen and (tensor.role is Role.CONSTANT or not tensor.persistent)
        return replace(tensor, frozen=frozen, relied=tensor.relied or (Relied() if held else None))

    return {name: replace(graph, state=tuple(map(marked, graph.state))) for name, graph in graphs.items()}


def specialised_name(name: str, bucket: Bucket | None) -> str:
    """Return the name of a function's version for one bucket, or for any size if `bucket` is None."""
    if bucket is None:
        return f"{name}{BUCKET}any"
    return f"{name}{BUCKET}{'.'.join(f'{dim}{size}' for dim, size in bucket.items())}"


def base_name(name: str) -> str:
    """Return the name of a function without its bucket."""
    return name.partition(BUCKET)[0]


@dataclass(frozen=True)
class StepGraph:
    """All functions of a training step, over one state.

    Attributes:
        state: all state tensors, in the order of the checkpoint.
        gradients: names of the parameters that get a gradient and are updated, in order.
        inputs: the example inputs, by name.
        hypers: the run-time hyperparameters and their defaults.
        fixed: the hyperparameters that the graph was specialised on, with their values.
        functions: `joint` (forward and backward), or `forward` and `finish` in its place
            (`irongrad.pipeline.optimizer.split_step`). `update` (the optimizer), `accumulate` and `mean` (of
            gradients), and `eval`. `predict`, unless the model's only output is its loss. `step` of an imported step,
            `call` of a compiled function. `update.<number>` of each shard
            (`irongrad.pipeline.optimizer.sharded_update`). `check.<name>` for functions that take or compute indices.
            `irongrad.pipeline.assemble.interface` says which of them an entry point runs.
        accumulate: the number of micro-batches that `joint` runs on in turn; the other functions take whole batches.
        precision: the precision of forward and backward, as in `TrainStep.precision`.
        packs: the tensors that are stored, or passed on, together.
        buckets: the sizes, by named dimension, that `joint`, `eval` and `predict` are specialised for, the bucket with
            the fewest elements first. The functions under those plain names are those of the last bucket; see
            `in_bucket`. Without buckets they take any size, if `dynamic` names dimensions.
        dynamic: the names of dimensions, by the input's name and the dimension's position.
        bucket_limits: the sizes that a call may have in every bucket; the buckets' own sizes limit it further.
        limits: the sizes that functions of any size accept; None if there are no such functions.
        output_sizes: for each function in evaluation mode, the sizes of each result, as numbers and expressions of
            named dimensions.
        entries: the user's own entry points, each with the names of its inputs among `inputs`, in order.
        bucket_bytes: the most bytes of a bucket of gradients that ranks exchange; 0 if the step runs on one rank alone.
        shards: the shards of the optimizer's state that ranks divide among them; empty if every rank holds it whole.
        name: the name of the step among several over one state (`irongrad.Steps`); empty for a step of its own.
        ranges: the ranges of integer inputs that are indices.
        computed: the ranges of indices that `check.<name>` computes; `Range.input` is the name of its result.
        indices: a record of every index, and of what keeps it within its tensor.
    """

    state: tuple[StateTensor, ...]
    gradients: tuple[str, ...]
    inputs: Mapping[str, torch.Tensor]
    hypers: Mapping[str, float]
    fixed: Mapping[str, float] = field(default_factory=dict)
    functions: Mapping[str, Function] = field(default_factory=dict)
    accumulate: int = 1
    precision: str = "f32"
    packs: tuple[Pack, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    bucket_limits: Limits = field(default_factory=Limits)
    limits: Limits | None = None
    output_sizes: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    entries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bucket_bytes: int = 0
    shards: tuple[Shard, ...] = ()
    name: str = ""
    ranges: tuple[Range, ...] = ()
    computed: tuple[Range, ...] = ()
    indices: tuple[IndexSpec, ...] = ()

    @property
    def prefix(self) -> str:
        """What the names of the step's functions and counters begin with in a module of several steps."""
        return f"{self.name}." if self.name else ""

    @property
    def counter(self) -> str:
        """The name of the state tensor that counts the step's updates."""
        return steps_of(self.name)

    @property
    def value_limits(self) -> dict[str, tuple[Any, ...]]:
        """For inputs and computed indices that must be smaller than dynamic sizes: the largest values, as expressions.

        The symbols of the expressions are the named dimensions.
        """
        return {r.input: r.limits for r in (*self.ranges, *self.computed) if r.limits}

    @property
    def forms(self) -> tuple[Bucket | None, ...]:
        """The buckets, in the order in which they are tried, then None if there are functions of any size."""
        return (*self.buckets, *((None,) if self.limits is not None else ()))

    def is_sized(self, name: str) -> bool:
        """Whether the function `name` takes the sizes of a call: padded to a bucket, or any size."""
        function = self.functions.get(name)
        if function is None or not self.forms:
            return False
        return any(a.kind == "size" for a in function.arguments) or function.of_any_size

    def in_bucket(self, name: str, bucket: Bucket | None) -> str:
        """Return the name of the version of function `name` for `bucket`; `name` itself if it has only one version."""
        specialised = specialised_name(name, bucket)
        return specialised if specialised in self.functions else name

    @property
    def seed(self) -> int | None:
        """The initial seed of the random numbers; None if the step draws none."""
        if SEED in self.inputs:
            return int(self.inputs[SEED])
        return next((int(t.initial) for t in self.state if t.name == SEED), None)

    @property
    def trains_at_random(self) -> bool:
        """Whether forward or backward draws random numbers; evaluation or an entry may draw in a step that does not."""
        trains = ("joint", "forward", "finish")
        drawing = [name for name, function in self.functions.items() if Value("state", DRAWS) in function.results]
        return any(base_name(name) in trains for name in drawing)

    def tensor(self, name: str) -> StateTensor:
        """Return the state tensor called `name`."""
        return next(t for t in self.state if t.name == name)


@dataclass(frozen=True)
class Range:
    """The values that an integer input, or an index computed from inputs, may have.

    Attributes:
        input: the input's name, or the name of the check's result.
        minimum: the smallest value, inclusive.
        maximum: the largest value, inclusive.
        exempt: one more value that is accepted (`ignore_index`), or None.
        limits: further largest values, as expressions of named dimensions.
        place: for a computed index, the user's line and the operator; for an assertion, the line.
        says: for an assertion, its message, or what stands for it.
    """

    input: str
    minimum: int
    maximum: int
    exempt: int | None = None
    limits: tuple[Any, ...] = ()
    place: str = ""
    says: str = ""
