"""What a pass is: a frozen dataclass whose fields are its options, and a `run` that rewrites one graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch.fx import GraphModule

from irongrad.graph.step_graph import StepGraph, Value


class Timer(Protocol):
    """Measures how long functions take where a graph will run."""

    def __call__(
        self, what: str, candidates: Mapping[str, Callable[..., torch.Tensor]], operands: Sequence[torch.Tensor]
    ) -> Mapping[str, float]:
        """Seconds that each of `candidates`, functions of tensors like `operands`, takes; `what` they all compute."""
        ...


@dataclass(frozen=True)
class Choice:
    """What a pass chose by measurement.

    Attributes:
        what: what there was to compute.
        chosen: the name of what was taken.
        seconds: how long each of those took that it was chosen from, by name.
    """

    what: str
    chosen: str
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Context:
    """Where a pass is running.

    Attributes:
        function: the name of the step graph's function: `joint`, `update`, `accumulate`, `mean`, `eval`, `predict`,
            `check.<name>`, or `call` of a compiled function.
        arguments: what its placeholders stand for. Empty inside the body of control flow.
        results: what its outputs stand for. Empty inside the body of control flow.
        targets: the backends that the graph will be compiled for, such as `llvm-cpu`. A rewrite that is right or
            good on some targets only is made if it is on all of these.
        timer: measures on the targets, where it was asked for; a pass that has a choice makes it by that then.
        step: the step that the graph is of, as it was before any pass; None inside the body of control flow, and of a
            graph alone.
    """

    function: str
    arguments: tuple[Value, ...] = ()
    results: tuple[Value, ...] = ()
    targets: tuple[str, ...] = ("llvm-cpu",)
    timer: Timer | None = None
    step: StepGraph | None = None


@dataclass(frozen=True)
class PassResult:
    """What a run of a pass did.

    Attributes:
        changed: whether it changed the graph.
        stats: counts worth showing, by name, such as `{"merged": 12}`.
        choices: what it chose by measurement.
    """

    changed: bool
    stats: Mapping[str, int] = field(default_factory=dict)
    choices: tuple[Choice, ...] = ()


class Pass(Protocol):
    """A rewrite of one functional ATen graph, in place.

    A pass is a frozen dataclass; its typed fields with defaults are the options that `--passes name{field=value}`
    sets. It may assume what `irongrad.passes.verifier` checks, and has to leave it true: the same placeholders and
    outputs in the same order with the same shapes and dtypes, functional operators only, and on every node
    `meta["val"]` and the stack trace of the user's line (`irongrad.graph.nodes.call` gives a new node both). The
    manager runs it on the bodies of control flow too, each as a graph of its own.
    """

    name: ClassVar[str]

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Rewrite `graph`, and say what was done."""
        ...


class OfAnySize:
    """What a pass is besides that takes graphs of symbolic sizes too, of which it looks at no size.

    All others take a size for a number, and are not run on such graphs.
    """


class Lowering(ABC):
    """What a pass is besides, for whose sake capture keeps operators whole that the importer does not take.

    A pipeline without that pass begins with `lower_plainly`.
    """

    @staticmethod
    @abstractmethod
    def lower_plainly(graph: GraphModule) -> None:
        """Write those operators in a form that the importer takes."""
