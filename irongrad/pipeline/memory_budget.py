"""Holding a budget of memory by what IREE allocates, and not by what was predicted alone.

A plan is made by a prediction that may be some percent too low. IREE's own figure is known before any kernel is
compiled; where it is over the budget, the step is planned again for a prediction that is less by as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from irongrad.passes import Pass, PassRecord
from irongrad.passes.graph.rematerialise import Rematerialise
from irongrad.runtime.byte_sizes import readable
from irongrad.runtime.errors import UserError

# Plans, the last of which is the smallest that is found.
ROUNDS = 4


class OverBudgetError(Exception):
    """IREE allocates more than the budget.

    Attributes:
        allocated: the most bytes that an entry point does.
    """

    def __init__(self, allocated: int) -> None:
        super().__init__(f"{allocated} bytes are more than the budget")
        self.allocated = allocated


@dataclass(frozen=True)
class Budget:
    """The most that a step may take, and what its plan is predicted to take; the most of any bucket.

    Attributes:
        asked: what was asked for, in the user's words.
        limit: bytes that IREE may allocate.
        unlimited: predicted bytes without a plan.
        planned: predicted bytes with it.
        is_smallest: whether no smaller plan was found, in any bucket.
    """

    asked: str
    limit: int
    unlimited: int
    planned: int
    is_smallest: bool


def asked_budget(passes: Iterable[Pass]) -> Rematerialise | None:
    """The pass that plans for a budget; None where there is none."""
    return next((p for p in passes if isinstance(p, Rematerialise) and p.max_memory), None)


def budget_of(passes: Iterable[Pass], records: Iterable[PassRecord]) -> Budget | None:
    """What came of the budget that `passes` ask for, as `records` tell; None where nothing had to be planned."""
    asked = asked_budget(passes)
    plans = [r.stats for r in records if "budget" in r.stats]
    if asked is None or not plans:
        return None
    limit, unlimited, planned = (max(p[what] for p in plans) for what in ("budget", "bytes before", "bytes"))
    return Budget(
        asked.max_memory, limit, unlimited, planned, all(p["bytes"] * asked.ratio > p["budget"] for p in plans)
    )


def check_limits(limits: Mapping[str, int], transients: Mapping[str, int]) -> None:
    """Compare what IREE allocates with what it may.

    Args:
        limits: bytes by entry point; those that are not in it take what they take.
        transients: bytes by entry point.

    Raises:
        OverBudgetError: it is more.
    """
    over = [allocated for name, allocated in transients.items() if allocated > limits.get(name, allocated)]
    if over:
        raise OverBudgetError(max(over))


def tightened(passes: Sequence[Pass], budget: Budget | None, reached: Sequence[int]) -> tuple[Pass, ...]:
    """The passes that plan for less than `passes`, by as much as IREE allocates more than they predicted.

    Args:
        passes: what ran.
        budget: what came of it.
        reached: the bytes that IREE allocated for each plan so far, the last for that of `passes`.

    Raises:
        UserError: no plan is smaller; with the least that was reached.
    """
    assert budget is not None
    if budget.is_smallest:
        raise UserError(
            f"--max-memory {budget.asked}: the transient values of a step cannot be made to fit into "
            f"{readable(budget.limit)}. The smallest that was reached is {readable(min(reached))}, of "
            f"{readable(budget.unlimited)} predicted without a budget. Give that or more, or take a smaller batch"
        )
    ratio = math.inf if len(reached) == ROUNDS - 1 else reached[-1] / budget.planned
    return tuple(replace(p, ratio=ratio) if isinstance(p, Rematerialise) else p for p in passes)
