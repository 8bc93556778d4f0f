"""Time several ways to run a step in turn, so that a change in the machine's speed falls on all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import irongrad as ig


def compiled(step: ig.TrainStep, directory: Path, disabled: Sequence[str] = (), **choices: Any) -> Callable[[], object]:
    """A function that takes one step, compiled into `directory` without the `disabled` passes; `choices` are others."""
    import irongrad as ig
    import irongrad.runtime

    ig.compile(step, directory, entry_points=("train_step",), disable_passes=disabled, cache=False, **choices)
    session = irongrad.runtime.load(directory)
    inputs = {n: v.numpy() for n, v in step.inputs.items()}
    return lambda: session.train_step(**inputs)


def medians(runs: Mapping[str, Callable[[], object]], rounds: int, steps: int) -> dict[str, float]:
    """The milliseconds of one step, by way: the medians of `rounds` rounds, before which one is not counted.

    Args:
        runs: by way, a function that takes one step.
        rounds: how many rounds.
        steps: how many steps in a row. The first call of IronGrad may return when the loss is there, before the update.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(steps):
                run()
            times[name].append(1e3 * (time.perf_counter() - start) / steps)
    return {name: statistics.median(found[1:]) for name, found in times.items()}
