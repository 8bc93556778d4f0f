"""What IREE 3.13.0 runs at the same time.

The values of a wave are all in memory until its last step is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from irongrad.memory_model.kernel_steps import Step


def waves_of(steps: Sequence[Step]) -> dict[Step, int]:
    """Divide `steps` into waves: from the last on, each joins the wave after it unless a step in there needs it.

    `partitionRegionConcurrencyReference` of IREE (compiler/src/iree/compiler/Dialect/Stream/Analysis/Partitioning/
    ReferencePartitioning.cpp), where it favors the least memory.

    Args:
        steps: in the order in which they run.

    Returns:
        The number of its wave, by step, in the order of `steps`.
    """
    from_end: dict[Step, int] = {}
    wave = 0
    needed: set[Step] = set()
    for step in reversed(steps):
        if step in needed:
            wave += 1
            needed = set()
        from_end[step] = wave
        needed |= step.needs
    return {step: wave - from_end[step] for step in steps}
