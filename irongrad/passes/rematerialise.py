"""Rematerialisation under a byte budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from irongrad.passes.base import Context, PassResult
from irongrad.passes.memory.liveness import usage
from irongrad.passes.memory.order import separate_late_sums
from irongrad.passes.memory.recompute import is_backward, is_recomputed, recompute
from irongrad.pipeline.graphs import base_name
from irongrad.runtime.errors import UserError
from irongrad.runtime.sizes import bytes_in, readable


@dataclass(frozen=True)
class Rematerialise:
    """Keep fewer forward values for the backward, and compute the others again there, so that memory suffices.

    Before:
        a = exp(x); loss = sum(a); --- backward --- g = a * 3; return (loss, g)
    After:
        a = exp(x); loss = sum(a); --- backward --- b = exp(tied x); g = b * 3; return (loss, g)

    `max_memory` is the most that the transient values of a step may take: bytes (`512MiB`), or a fraction of what they
    take without this pass (`50%`). Which values are kept is decided by an integer program (`memory/schedule.py`) on a
    model of what IREE stores (`memory/liveness.py`). A copy gives the same values, as random numbers are functions of
    counters in the graph. Runs after the other passes: merging equal nodes does not undo it, as copies read values that
    are tied to the backward (`memory/recompute.py`), but later rewrites of the forward would not reach the copies.

    Attributes:
        max_memory: the budget; empty for none.

    Raises:
        UserError: the budget is no amount of memory; or no schedule was found that fits, with the smallest that does.
    """

    name: ClassVar[str] = "rematerialise"

    max_memory: str = ""

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
        return fit(graph, self.max_memory)


def fit(graph: GraphModule, max_memory: str) -> PassResult:
    """Make the backward of `graph` keep what fits into `max_memory`."""
    from irongrad.passes.memory.schedule import cheapest, everything_saved, problem_of, smallest  # scipy: 0.5 s

    unlimited = usage(graph.graph).total
    budget = bytes_in(max_memory, unlimited)
    separated = separate_late_sums(graph.graph)
    problem = problem_of(graph.graph)
    full = everything_saved(problem)
    plan = cheapest(problem, budget) or smallest(problem)  # the search for the first may miss what the other finds
    if plan.total > budget:
        raise UserError(
            f"--max-memory {max_memory}: the transient values of a step cannot be made to fit into "
            f"{readable(budget)}. The smallest budget that can be met is {readable(plan.total)}, of "
            f"{readable(unlimited)} without one. Give that or more, or take a smaller batch"
        )
    copies = recompute(graph.graph, plan.saved) if plan.total < full.total else {}
    graph.graph.eliminate_dead_code()
    stats = {"recomputed": len(copies), "bytes before": unlimited, "bytes": plan.total}
    return PassResult(bool(copies) or separated > 0, stats)


PASS = Rematerialise
