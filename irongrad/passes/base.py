"""The interface of a pass: a frozen dataclass whose fields are its options, with a `run` that rewrites one graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self, TypeAlias

import torch
from torch.fx import GraphModule

from irongrad.graph.step_graph import StepGraph, Value
from irongrad.targets import Ability

# A function to measure: of tensors, with one result or several.
Candidate: TypeAlias = Callable[..., torch.Tensor | Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Measured:
    """What was measured of candidates that compute the same result. The first of them is the default.

    Attributes:
        seconds: the run time of each candidate in seconds, by name.
        faster: the candidates that are faster than the default by more than the noise, the fastest first.
        failed: why the other candidates have no time, by name: they failed to compile or to run.
    """

    seconds: Mapping[str, float]
    faster: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)


class Timer(Protocol):
    """Measures the run time of functions on the devices that a graph is compiled for, within a budget of time."""

    def expect(self, count: int) -> None:
        """Announce `count` measurements, so that the time that is left can be told."""
        ...

    def __call__(
        self, what: str, candidates: Mapping[str, Candidate], operands: Sequence[torch.Tensor]
    ) -> Measured | None:
        """Measure functions that compute the same result; the first of them is the default.

        Args:
            what: a description of the computation.
            candidates: the functions, by name.
            operands: tensors with the shapes and dtypes of the arguments.

        Returns:
            What was measured; None if the budget has run out.
        """
        ...


@dataclass(frozen=True)
class Choice:
    """A choice that was made by measurement.

    Attributes:
        what: a description of the computation.
        chosen: the name of the chosen candidate.
        seconds: the run time of each candidate in seconds, by name.
        default: the name of the candidate that is taken without a measurement.
        target: the name of the target that the choice is for; empty if it is for all.
        failed: why the other candidates have no time, by name.
    """

    what: str
    chosen: str
    seconds: Mapping[str, float]
    default: str = ""
    target: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, what: str, measured: Measured, default: str, target: str = "") -> Self:
        """The choice of the fastest candidate; of `default` if no other is faster by more than the noise."""
        chosen = next(iter(measured.faster), default)
        return cls(what, chosen, measured.seconds, default, target, measured.failed)


@dataclass(frozen=True)
class Context:
    """The place of a graph in its step, and its targets.

    Attributes:
        function: the name of the function in the step graph: `joint`, `update`, `accumulate`, `mean`, `eval`,
            `predict`, `check.<name>`, or `call` of a compiled function.
        arguments: the meaning of each placeholder. Empty inside the body of control flow.
        results: the meaning of each output. Empty inside the body of control flow.
        targets: the backends that the graph will be compiled for, such as `llvm-cpu`. A pass applies a rewrite only if
            it is correct and profitable on all of them.
        timer: measures on the targets, so that passes choose by measurement; None if they choose by cost tables.
        step: the step graph that contains the graph, as it was before any pass; None inside the body of control flow,
            and for a graph without a step.
        abilities: what code for all of the targets does faster than elsewhere.
    """

    function: str
    arguments: tuple[Value, ...] = ()
    results: tuple[Value, ...] = ()
    targets: tuple[str, ...] = ("llvm-cpu",)
    timer: Timer | None = None
    step: StepGraph | None = None
    abilities: frozenset[Ability] = frozenset()


@dataclass(frozen=True)
class PassResult:
    """The outcome of one run of a pass.

    Attributes:
        changed: whether the pass changed the graph.
        stats: counts worth showing, by name, such as `{"merged": 12}`.
        choices: the choices that the pass made by measurement.
    """

    changed: bool
    stats: Mapping[str, int] = field(default_factory=dict)
    choices: tuple[Choice, ...] = ()


class Pass(Protocol):
    """A rewrite of one functional ATen graph, in place.

    A pass is a frozen dataclass; its typed fields with defaults are the options that `--passes name{field=value}`
    sets.

    A pass may assume the invariants that `irongrad.passes.verifier` checks, and must preserve them. Placeholders and
    outputs keep their order, shapes and dtypes. All operators are functional. Every node has `meta["val"]` and the
    stack trace of the user's line; `irongrad.graph.nodes.call` gives a new node both. The manager also runs a pass on
    each body of control flow, as a graph of its own.
    """

    name: ClassVar[str]

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Rewrite `graph`, and report the changes."""
        ...


class OfAnySize:
    """Mixin of a pass that also runs on graphs with symbolic sizes, because it reads no size.

    All other passes treat sizes as numbers, so the manager does not run them on such graphs.
    """


class Lowering(ABC):
    """Mixin of a pass that lowers operators which capture keeps whole and which the importer does not accept.

    If a pipeline lacks the pass, the manager calls `lower_plainly` first.
    """

    @staticmethod
    @abstractmethod
    def lower_plainly(graph: GraphModule) -> None:
        """Rewrite these operators into a form that the importer accepts, without optimising them."""
