"""The float64 oracle: eager PyTorch runs of the user's own step, and how far a float32 run may be from it.

A compiled result is right when its error against eager float64 is within a small factor of the error of eager in
the step's own dtypes, float32 as a rule. One such run is one sample of rounding; where the step is badly
conditioned (a gradient that is zero but for rounding, an Adam update of it, a ReLU at its corner) others would
differ from it as much as from the truth. So several are run, each with other rounding (`RoundingNoise`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from irongrad.graph.dtypes import to_numpy
from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.oracle.eager_float64 import eager_float64
from irongrad.pipeline.oracle.eager_run import Recorder, run_eager
from irongrad.runtime.golden import Golden
from irongrad.runtime.tolerance import NOISY_RUNS, allowed_error
from irongrad.runtime.verification import largest_error

# Of a step with more elements in its state than LARGE, where a run takes seconds.
NOISY_RUNS_OF_LARGE_STEPS = 3
MOST_LARGE_STEPS = 2  # the second begins with a state that the first has made, as every later one does
LARGE = 1_000_000


@dataclass(frozen=True)
class Values:
    """Every value of one eager run.

    Attributes:
        arrays: by golden key, as float64.
    """

    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def record(self, key: str, tensor: torch.Tensor) -> None:
        """Keep `tensor`, which nothing may write to any more."""
        self.arrays[key] = tensor.detach().cpu().to(torch.float64).numpy()


@dataclass(frozen=True)
class Spread:
    """How far runs in the step's own dtypes are from the exact values; nothing of the runs themselves is kept.

    Attributes:
        exact: the exact values.
        largest: the largest absolute difference of any run, by golden key.
        eps: the machine epsilon of the dtype in which each value is computed; 0 for integers and booleans.
    """

    exact: Values
    largest: dict[str, float] = field(default_factory=dict)
    eps: dict[str, float] = field(default_factory=dict)

    def record(self, key: str, tensor: torch.Tensor) -> None:
        """Compare `tensor` with its exact value."""
        error = largest_error(to_numpy(tensor), self.exact.arrays[key])
        self.largest[key] = max(self.largest.get(key, 0.0), error)
        self.eps[key] = float(torch.finfo(tensor.dtype).eps) if tensor.is_floating_point() else 0.0

    def widened_by(self, run: Callable[[int | None], object], elements: int = 0) -> Iterator[dict[str, float]]:
        """After each of the runs, what they allow so far of every value, once each was compared.

        Args:
            run: makes one run with the noise of a seed, or without where that is None, and records its values.
            elements: how many the step's state has, by which it is known to be large.
        """
        # Those with noise first: their errors are larger.
        for seed in (*range(NOISY_RUNS if elements <= LARGE else NOISY_RUNS_OF_LARGE_STEPS), None):
            with _as_far_as_noise_allows(seed):
                run(seed)
            if self.exact.arrays.keys() <= self.largest.keys():
                yield {key: self.allowed(key) for key in self.exact.arrays}

    def allowed(self, key: str) -> float:
        """The largest error of a compiled value that is right."""
        return allowed_error(self.exact.arrays[key], self.largest[key], self.eps[key])


def golden_runs(
    captured: CapturedStep, graph: StepGraph, steps: int, check: Callable[[], None] = lambda: None
) -> Iterator[Golden]:
    """Run the oracle; then, after each of the runs in the step's own dtypes, the values with what the runs allow.

    Args:
        captured: the step.
        graph: names the values.
        steps: how many training steps a run is, at most; fewer of a large one.
        check: called before each value is recorded; what it raises ends the runs.
    """
    step = captured.step
    elements = sum(t.initial.numel() for t in graph.state)
    steps = steps if elements <= LARGE else min(steps, MOST_LARGE_STEPS)
    exact, oracle = Values(), "float64"
    checked = partial(_checked, check)
    # Values overflow in the step's own dtypes, so a run in these says which updates are skipped.
    skips = run_eager(captured, graph, None, steps, None, lambda key, tensor: None) if step.scaler else None
    try:
        with eager_float64():
            run_eager(captured, graph, torch.float64, steps, None, checked(exact.record), skips)
    except RuntimeError:
        # A model with float32 constants in its code cannot run in float64; its own run stands in, without autocast.
        oracle = str(next(step.model.parameters()).dtype).removeprefix("torch.")
        plain = replace(captured, step=replace(step, precision="f32", loss_scale=step.scaler))
        run_eager(plain, graph, None, steps, None, checked(exact.record), skips)
    inputs = {n: to_numpy(t) for n, t in step.inputs.items()}
    spread = Spread(exact)

    def run(seed: int | None) -> None:
        run_eager(captured, graph, None, steps, seed, checked(spread.record))

    for allowed in spread.widened_by(run, elements):
        yield Golden(steps, oracle, inputs, exact.arrays, allowed)


def _checked(check: Callable[[], None], record: Recorder) -> Recorder:
    def recorded(key: str, tensor: torch.Tensor) -> None:
        check()
        record(key, tensor)

    return recorded


@contextmanager
def _as_far_as_noise_allows(seed: int | None) -> Iterator[None]:
    """End a run with noise, one that has a seed, where an operator does not take what it makes of its arguments.

    Binary cross-entropy refuses a probability of 1 and a unit in the last place, a quantile the place behind the last.
    """
    with suppress(*(() if seed is None else (RuntimeError, IndexError, ValueError))):
        yield
