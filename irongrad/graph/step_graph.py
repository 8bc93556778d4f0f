"""What flows between the stages after differentiation: functional FX graphs over named state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.fx import GraphModule

from irongrad.runtime.manifest import SEED, Role
from irongrad.sizes.buckets import Bucket
from irongrad.sizes.limits import Limits
from irongrad.sizes.symbols import has_symbols


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the state.

    Attributes:
        name: its key in checkpoints; PyTorch's own name for a parameter or buffer,
            `optimizer/<key>/<parameter>` for optimizer state, `irongrad/steps` for the step count, `irongrad/seed` and
            `irongrad/draws` for random numbers.
        role: what it is.
        initial: its value before the first step, on the CPU.
        aliases: other names of the same tensor in the model (tied weights).
    """

    name: str
    role: Role
    initial: torch.Tensor
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Value:
    """What an argument or a result of a function is.

    Attributes:
        kind: `state` (read from, or stored to, the tensor of that name), `input`, `hyper` (a float64
            hyperparameter, as a rank-0 tensor), `gradient` or `accumulator` (of the parameter of that name),
            `count` (how many gradients were accumulated, float64), `size` (of a named dimension in
            a call, int64 of rank 0), `pack`, `saved` (by the first piece of a step for the second) or `output`.
        name: the state's, input's, hyperparameter's, pack's, saved value's or output's name.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Pack:
    """Tensors that are stored, or handed on, one after the other as one of rank 1.

    Attributes:
        name: its name.
        starts: where each tensor begins, state or gradients of one dtype; there may be gaps.
        size: the elements of the whole.
    """

    name: str
    starts: Mapping[Value, int]
    size: int


@dataclass(frozen=True)
class Function:
    """A functional ATen graph: no mutation, no constants over a few elements, no symbols but in sizes (`of_any_size`).

    Attributes:
        graph: the graph; its placeholders are `arguments` and its outputs `results`, in order.
        arguments: what each placeholder stands for.
        results: what each output stands for.
    """

    graph: GraphModule
    arguments: tuple[Value, ...]
    results: tuple[Value, ...]

    @property
    def of_any_size(self) -> bool:
        """Whether sizes of its tensors are symbols."""
        return any(has_symbols(n.meta.get("val")) for n in self.graph.graph.nodes)

    def example(self, index: int) -> torch.Tensor:
        """The fake tensor of the placeholder at `index`."""
        return next(islice(self.graph.graph.nodes, index, None)).meta["val"]  # placeholders come first

    def results_like(self) -> list[torch.Tensor]:
        """The fake tensors of the results."""
        return [n.meta["val"] for n in self.graph.graph.output_node().args[0]]


def specialised_name(name: str, bucket: Bucket | None) -> str:
    """The name of a function at the sizes of one of several buckets, or beside them for any size."""
    if bucket is None:
        return f"{name}@any"
    return f"{name}@{'.'.join(f'{dim}{size}' for dim, size in bucket.items())}"


def base_name(name: str) -> str:
    """The name of a function without that of its bucket."""
    return name.partition("@")[0]


@dataclass(frozen=True)
class StepGraph:
    """Every function of a training step over one state.

    Attributes:
        state: all of it, in the order of the checkpoint. gradients: names of the parameters that get a gradient and are
        updated, in order. inputs: the example inputs by name. hypers: run-time hyperparameters and their defaults.
        fixed: hyperparameters that the graph was specialised on, with their values. functions: `joint` (forward and
        backward), or `forward` and `finish` in its place (`irongrad.pipeline.optimizer.split_step`),
            `update` (the optimizer), `accumulate` and `mean` (of gradients), `eval` and, unless the model has no output
            but its loss, `predict`; `step` of an imported step, `call` of a compiled function; with `check.<name>` for
            those whose inputs have a range. `irongrad.pipeline.assemble.interface` says which an entry point runs.
        accumulate: how many micro-batches `joint` runs on in turn; the other functions take whole batches.
        precision: of forward and backward, as in `TrainStep.precision`.
        packs: what is stored, or handed on, together.
        buckets: the sizes by named dimension that `joint`, `eval` and `predict` are made for, the bucket with the
            fewest elements first. The functions under those names are of the last bucket; see `in_bucket`. Without
            buckets they are of any size, where `dynamic` names dimensions.
        dynamic: names of dimensions by the input's name and position.
        bucket_limits: the sizes that a call may have whatever its form; the buckets' own sizes limit it further.
        limits: the sizes that functions of any size take; None where there are no such functions.
        output_sizes: the sizes of each result of `predict`, as numbers and expressions of named dimensions.
        value_limits: of inputs whose values have to be smaller than sizes that vary, the largest ones, expressions of
            named dimensions.
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
    output_sizes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    value_limits: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def forms(self) -> tuple[Bucket | None, ...]:
        """The buckets, in the order in which they are tried, and None for the functions of any size."""
        return (*self.buckets, *((None,) if self.limits is not None else ()))

    def in_bucket(self, name: str, bucket: Bucket | None) -> str:
        """The name of the function called `name` at the sizes of `bucket`; `name` itself where it has one form."""
        specialised = specialised_name(name, bucket)
        return specialised if specialised in self.functions else name

    @property
    def seed(self) -> int | None:
        """The initial seed of the random numbers; None where nothing is drawn."""
        if SEED in self.inputs:
            return int(self.inputs[SEED])
        return next((int(t.initial) for t in self.state if t.name == SEED), None)

    def tensor(self, name: str) -> StateTensor:
        """The state tensor called `name`."""
        return next(t for t in self.state if t.name == name)


@dataclass(frozen=True)
class Range:
    """The values that an integer input may have.

    Attributes:
        input: its name.
        minimum: the smallest, inclusive.
        maximum: the largest, inclusive.
        exempt: one more value that is accepted (`ignore_index`), or None.
        limits: further largest values, expressions of named dimensions.
    """

    input: str
    minimum: int
    maximum: int
    exempt: int | None = None
    limits: tuple[Any, ...] = ()
