"""Rematerialisation under a memory budget."""

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
from irongrad.passes.recompute import is_backward, is_recomputed, recompute
from irongrad.runtime.byte_sizes import bytes_in


@dataclass(frozen=True)
class Rematerialise:
    """Keep fewer forward values for the backward, and recompute the others there, to fit a memory budget.

    Before:
        a = exp(x); loss = sum(a); --- backward --- g = a * 3; return (loss, g)
    After:
        a = exp(x); loss = sum(a); --- backward --- b = exp(tied x); g = b * 3; return (loss, g)

    `max_memory` limits the transient values of a step. It is a size in bytes (`512MiB`), or a fraction of the
    prediction without this pass (`50%`). An integer program (`rematerialise/schedule.py`) decides which values are
    kept, on a model of what IREE stores (`memory_model/liveness.py`). If no plan fits, the pass takes the smallest one
    it found. The compiler checks whether IREE's own allocations fit (`pipeline/memory_budget.py`).

    A copy computes the same value as its original, because random numbers are functions of counters in the graph. The
    pass runs after the others. Merging equal nodes does not undo it, because copies read values that are tied to the
    backward (`passes/recompute.py`). But later rewrites of the forward would not reach the copies.

    Attributes:
        max_memory: the budget; empty for none.
        ratio: the bytes that IREE allocates for each predicted byte; infinite selects the smallest plan. 0
            recomputes nothing, unless the prediction is more than twice the budget.

    Raises:
        UserError: `max_memory` is not an amount of memory.
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
        is_step = base_name(context.function) == "joint" and context.results  # bodies of control flow have no results
        if not self.max_memory or not is_step or any(is_recomputed(n, self.name) for n in nodes):
            return PassResult(False)
        if not any(map(is_backward, nodes)):
            return PassResult(False)
        return fit(graph, self.max_memory, self.ratio, context)


# IREE allocates 0.68 to 0.99 of the prediction for steps of LSTMs, GRUs and RNNs.
_UNPLANNED = 0.5


def fit(graph: GraphModule, max_memory: str, ratio: float, context: Context) -> PassResult:
    """Rewrite `graph` so that its backward keeps only what fits into `max_memory`."""
    from irongrad.passes.graph.rematerialise.schedule import (  # scipy takes 0.5 s to import
        cheapest,
        everything_saved,
        problem_of,
        smallest,
    )

    packed = packs(context.targets)
    found = handovers(context.step) if context.step is not None else ()
    unlimited = usage(graph.graph, _kept(graph, context, found), packed=packed).total
    budget = bytes_in(max_memory, unlimited)
    if ratio == 0 and budget >= _UNPLANNED * unlimited:
        return PassResult(False, {"recomputed": 0, "bytes before": unlimited, "budget": budget, "bytes": unlimited})
    separated = separate_late_sums(graph.graph)
    problem = problem_of(graph.graph, _kept(graph, context, found), packed=packed)
    full = everything_saved(problem)
    # `cheapest` may miss a plan that `smallest` finds.
    plan = cheapest(problem, int(budget / (ratio or 1.0))) or smallest(problem)
    copies = recompute(graph.graph, plan.saved, packed=packed, by=Rematerialise.name) if plan.total < full.total else {}
    graph.graph.eliminate_dead_code()
    stats = {"recomputed": len(copies), "bytes before": unlimited, "budget": budget, "bytes": plan.total}
    return PassResult(bool(copies) or separated > 0, stats)


def _kept(graph: GraphModule, context: Context, found: Collection[Handover]) -> list[HandedOn]:
    return handed_on(graph.graph, context.arguments, context.results, found) if found else []


PASS = Rematerialise
