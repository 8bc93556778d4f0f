"""The submissions to a device into which loops and branches divide a graph.

A value that is computed in one submission, and read in another or by a loop or a branch, is an allocation of its own
(`passes/module/allocate_apart.py`). All other values share one allocation, which lives as long as the submission.
"""

from __future__ import annotations

from collections.abc import Sequence

from irongrad.memory_model.kernel_roles import bodies_of, is_control
from irongrad.memory_model.kernel_steps import Step
from irongrad.memory_model.written_views import is_in_place


def _is_apart(step: Step) -> bool:
    """Whether a step is a loop or a branch, which belongs to no submission."""
    return step.kernel is not None and is_control(step.kernel)


def _allocates(step: Step) -> bool:
    """Whether a loop or a branch allocates a buffer that it writes part by part: IREE moves no step across it."""
    assert step.kernel is not None
    nodes = (node for body in bodies_of(step.kernel) for node in body.nodes)
    return any(is_in_place(node) or is_control(node) for node in nodes)


def submissions_of(steps: Sequence[Step]) -> list[list[Step]]:
    """Divide `steps` into submissions, loops and branches, in the order in which they run.

    Each loop or branch stands alone. Every other step is in the last submission that is not after a reader of its
    results (`partitionStreamableOpsReference` of IREE 3.13.0,
    compiler/src/iree/compiler/Dialect/Stream/Analysis/Partitioning/ReferencePartitioning.cpp). Steps before a loop or a
    branch that allocates are always submitted before it.

    Args:
        steps: in the order in which they are listed.
    """
    parts: list[list[Step]] = [[]]  # in reverse order; those with even indices are submissions
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
