"""Enforce a memory budget on IREE's allocations, not only on the prediction.

A plan relies on a prediction that may be some percent too low. IREE's own figure is known before any kernel is
compiled. If it exceeds the budget, the step is planned again for a prediction that is lower by the same ratio.

The prediction may also be too high: a kernel for a whole loop (`loop-kernels`) keeps values in memory of its own, and a
plan that recomputes them may take more. So a step with loops is tried without a plan first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace

from irongrad.graph.step_graph import StepGraph
from irongrad.memory_model.kernel_roles import SEQUENCES
from irongrad.passes import Pass, PassRecord
from irongrad.passes.graph.rematerialise import Rematerialise
from irongrad.runtime.byte_sizes import readable
from irongrad.runtime.errors import UserError

# The most plans; the last of them is the smallest that can be found.
ROUNDS = 4


class OverBudgetError(Exception):
    """IREE allocates more than the budget.

    Attributes:
        allocated: the most bytes that an entry point allocates.
    """

    def __init__(self, allocated: int) -> None:
        super().__init__(f"{allocated} bytes are more than the budget")
        self.allocated = allocated


@dataclass(frozen=True)
class Budget:
    """A step's memory budget and the prediction for its plan; with buckets, the largest values of any bucket.

    Attributes:
        asked: the budget as the user wrote it.
        limit: the bytes that IREE may allocate.
        unlimited: the predicted bytes without a plan.
        planned: the predicted bytes with the plan.
        is_smallest: whether no smaller plan was found, in any bucket.
    """

    asked: str
    limit: int
    unlimited: int
    planned: int
    is_smallest: bool


def asked_budget(passes: Iterable[Pass]) -> Rematerialise | None:
    """The pass that enforces a budget; None if there is no budget."""
    return next((p for p in passes if isinstance(p, Rematerialise) and p.max_memory), None)


def check_budget(steps: Sized, passes: Iterable[Pass]) -> None:
    """Refuse a budget for several steps over one state.

    Raises:
        UserError: there is one.
    """
    if len(steps) > 1 and asked_budget(passes) is not None:
        raise UserError("max_memory plans one step, and these are several over one state: leave it out")


def budget_of(passes: Iterable[Pass], records: Iterable[PassRecord]) -> Budget | None:
    """The budget of `passes` and the plan for it in `records`; None if nothing had to be planned."""
    asked = asked_budget(passes)
    plans = [r.stats for r in records if "budget" in r.stats]
    if asked is None or not plans:
        return None
    limit, unlimited, planned = (max(p[what] for p in plans) for what in ("budget", "bytes before", "bytes"))
    return Budget(
        asked.max_memory, limit, unlimited, planned, all(p["bytes"] * asked.ratio > p["budget"] for p in plans)
    )


def check_limits(limits: Mapping[str, int], transients: Mapping[str, int]) -> None:
    """Compare IREE's allocations with their limits.

    Args:
        limits: the most bytes, by entry point; other entry points have no limit.
        transients: the bytes that IREE allocates, by entry point.

    Raises:
        OverBudgetError: an entry point exceeds its limit.
    """
    over = [allocated for name, allocated in transients.items() if allocated > limits.get(name, allocated)]
    if over:
        raise OverBudgetError(max(over))


def begun(passes: Sequence[Pass], graphs: Iterable[StepGraph]) -> tuple[Pass, ...]:
    """Make `passes` plan nothing at first, if a step has loops and its budget is not far below the prediction."""
    nodes = (n for graph in graphs for f in graph.functions.values() for n in f.graph.graph.nodes)
    has_loops = asked_budget(passes) is not None and any(n.target in SEQUENCES for n in nodes)
    return _at_ratio(passes, 0.0) if has_loops else tuple(passes)


def tightened(passes: Sequence[Pass], budget: Budget | None, reached: Sequence[int]) -> tuple[Pass, ...]:
    """Make `passes` plan for less memory, by the ratio of IREE's allocation to their prediction.

    Args:
        passes: the passes that ran.
        budget: the budget, and their plan for it.
        reached: the bytes that IREE allocated for each plan so far; the last belongs to `passes`.

    Raises:
        UserError: no plan is smaller; the message has the least memory that was reached.
    """
    assert budget is not None
    if budget.is_smallest:
        raise UserError(
            f"--max-memory {budget.asked}: the transient values of a step cannot be made to fit into "
            f"{readable(budget.limit)}. The smallest that was reached is {readable(min(reached))}, of "
            f"{readable(budget.unlimited)} predicted without a budget. Give that or more, or take a smaller batch"
        )
    return _at_ratio(passes, math.inf if len(reached) == ROUNDS - 1 else reached[-1] / budget.planned)


def _at_ratio(passes: Sequence[Pass], ratio: float) -> tuple[Pass, ...]:
    return tuple(replace(p, ratio=ratio) if isinstance(p, Rematerialise) else p for p in passes)
