"""Rematerialisation under a byte budget."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from irongrad.graph.step_graph import base_name
from irongrad.memory_model.early_updates import HandedOn, handed_on
from irongrad.memory_model.liveness import usage
from irongrad.memory_model.packed_operands import packs
from irongrad.memory_model.values_between_functions import Handover, handovers
from irongrad.passes.base import Context, PassResult
from irongrad.passes.graph.rematerialise.order import separate_late_sums
from irongrad.passes.graph.rematerialise.recompute import is_backward, is_recomputed, recompute
from irongrad.runtime.byte_sizes import bytes_in


@dataclass(frozen=True)
class Rematerialise:
    """Keep fewer forward values for the backward, and compute the others again there, so that memory suffices.

    Before:
        a = exp(x); loss = sum(a); --- backward --- g = a * 3; return (loss, g)
    After:
        a = exp(x); loss = sum(a); --- backward --- b = exp(tied x); g = b * 3; return (loss, g)

    `max_memory` is the most that the transient values of a step may take: bytes (`512MiB`), or a fraction of what they
    are predicted to take without this pass (`50%`). Which values are kept is decided by an integer program
    (`memory/schedule.py`) on a model of what IREE stores (`memory/liveness.py`). Where no plan was found that fits, it
    is the smallest that was: whether IREE's own allocations fit is for the compiler to see
    (`pipeline/memory_budget.py`).

    A copy gives the same values, as random numbers are functions of counters in the graph. Runs after the other passes:
    merging equal nodes does not undo it, as copies read values that are tied to the backward (`memory/recompute.py`),
    but later rewrites of the forward would not reach the copies.

    Attributes:
        max_memory: the budget; empty for none.
        ratio: how many bytes IREE allocates for each that is predicted; infinite for the smallest plan.

    Raises:
        UserError: the budget is no amount of memory.
    """

    name: ClassVar[str] = "rematerialise"

    max_memory: str = ""
    ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.max_memory:
            bytes_in(self.max_memory, whole=0)

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        nodes = graph.graph.nodes
        is_step = base_name(context.function) == "joint" and context.results  # and no body of its control flow
        if not self.max_memory or not is_step or any(map(is_recomputed, nodes)):
            return PassResult(False)
        if not any(map(is_backward, nodes)):
            return PassResult(False)
        return fit(graph, self.max_memory, self.ratio, context)


def fit(graph: GraphModule, max_memory: str, ratio: float, context: Context) -> PassResult:
    """Make the backward of `graph` keep what fits into `max_memory`."""
    from irongrad.passes.graph.rematerialise.schedule import (  # scipy: 0.5 s
        cheapest,
        everything_saved,
        problem_of,
        smallest,
    )

    packed = packs(context.targets)
    found = handovers(context.step) if context.step is not None else ()
    unlimited = usage(graph.graph, _kept(graph, context, found), packed=packed).total
    budget = bytes_in(max_memory, unlimited)
    separated = separate_late_sums(graph.graph)
    problem = problem_of(graph.graph, _kept(graph, context, found), packed=packed)
    full = everything_saved(problem)
    # The search for the first may miss what the other finds.
    plan = cheapest(problem, int(budget / ratio)) or smallest(problem)
    copies = recompute(graph.graph, plan.saved, packed=packed) if plan.total < full.total else {}
    graph.graph.eliminate_dead_code()
    stats = {"recomputed": len(copies), "bytes before": unlimited, "budget": budget, "bytes": plan.total}
    return PassResult(bool(copies) or separated > 0, stats)


def _kept(graph: GraphModule, context: Context, found: Collection[Handover]) -> list[HandedOn]:
    return handed_on(graph.graph, context.arguments, context.results, found) if found else []


PASS = Rematerialise
