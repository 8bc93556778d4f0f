"""The steps that IREE 3.13.0 runs at the same time, as waves.

All values of a wave stay in memory until its last step is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from irongrad.memory_model.kernel_steps import Step


def waves_of(steps: Sequence[Step]) -> dict[Step, int]:
    """Divide `steps` into waves of steps that run at the same time.

    The steps are visited from the last to the first. Each joins the wave after it, unless a step of that wave needs it.
    This is `partitionRegionConcurrencyReference` of IREE (compiler/src/iree/compiler/Dialect/Stream/Analysis/
    Partitioning/ReferencePartitioning.cpp), when it favors the least memory.

    Args:
        steps: in the order in which they run.

    Returns:
        The number of each step's wave, in the order of `steps`.
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
