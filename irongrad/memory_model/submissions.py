"""What IREE submits to a device at once, where loops and branches lie between.

What is computed in one submission and read in another, or by a loop or a branch, is an allocation of its own
(`passes/module/place_transients.py`); all else has places in one allocation, which is there as long as the submission.
"""

from __future__ import annotations

from collections.abc import Sequence

from irongrad.memory_model.kernel_roles import bodies_of, is_control
from irongrad.memory_model.kernel_steps import Step
from irongrad.memory_model.written_views import is_in_place


def _is_apart(step: Step) -> bool:
    """Whether a step is a loop or a branch, which is no part of a submission."""
    return step.kernel is not None and is_control(step.kernel)


def _allocates(step: Step) -> bool:
    """Whether a loop or a branch allocates what it then writes piece by piece: IREE moves nothing across that."""
    assert step.kernel is not None
    nodes = (node for body in bodies_of(step.kernel) for node in body.nodes)
    return any(is_in_place(node) or is_control(node) for node in nodes)


def submissions_of(steps: Sequence[Step]) -> list[list[Step]]:
    """Divide `steps` into submissions, and loops and branches, each alone; in the order in which they run.

    Each step is in the last submission before all that reads its results (`partitionStreamableOpsReference` of IREE
    3.13.0, compiler/src/iree/compiler/Dialect/Stream/Analysis/Partitioning/ReferencePartitioning.cpp). What is listed
    before a loop or a branch that allocates is submitted before it in any case.

    Args:
        steps: in the order in which they are listed.
    """
    parts: list[list[Step]] = [[]]  # from the last on: those with even numbers are submissions
    needed_in: dict[Step, int] = {}
    last = 0
    for step in reversed(steps):
        if _is_apart(step):
            at = len(parts)
            parts += [[], []]
            if _allocates(step):
                last = at + 1
        else:
            reader = needed_in.get(step, 0)
            at = max(last, reader + reader % 2)
        parts[at].append(step)
        for needed in step.needs:
            needed_in[needed] = max(needed_in.get(needed, 0), at)
    return [part[::-1] for part in reversed(parts) if part]
