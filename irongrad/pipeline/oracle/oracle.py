"""The float64 oracle: eager PyTorch runs of the user's own step, and how far a float32 run may be from them.

The reference is eager in float64. A compiled result is right if its error is within a small factor of eager's error in
the step's own dtypes, usually float32. One eager run is one sample of rounding. If the step is badly conditioned,
another run differs from it as much as from the truth. Examples are a gradient that is zero but for rounding, an Adam
update of it, and a ReLU at its corner. So several runs are made, each with different rounding (`RoundingNoise`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from irongrad.graph.dtypes import to_numpy
from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.oracle.eager_inference import Recorder
from irongrad.pipeline.oracle.eager_run import HUGE, PLAIN, Variant, elements_of, is_finite, is_huge, run_eager
from irongrad.pipeline.oracle.rounding_noise import noise_errors_suppressed
from irongrad.runtime.golden import Golden, key_of
from irongrad.runtime.manifest import Role
from irongrad.runtime.tolerance import NOISY_RUNS, allowed_error
from irongrad.runtime.verification import largest_error

# For a step with more than LARGE elements in its state, where a run takes seconds.
MOST_LARGE_STEPS = 2  # the second starts from state that the first computed, like every later step
LARGE = 1_000_000
NOISY_RUNS_OF_HUGE_STEPS = 3


@dataclass(frozen=True)
class Values:
    """Every value of one eager run.

    Attributes:
        arrays: by golden key, as float64.
        keeps: whether the value of a golden key is kept; one that is NaN or infinite is in any case.
        is_left: whether nothing writes to the tensor of a golden key after it is recorded, so that no copy is needed.
    """

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    keeps: Callable[[str], bool] = lambda key: True
    is_left: Callable[[str], bool] = lambda key: False

    def record(self, key: str, tensor: torch.Tensor) -> None:
        """Keep `tensor`, or a copy of it."""
        if self.keeps(key) or not is_finite(tensor):
            self.arrays[key] = to_numpy(tensor.detach().to(torch.float64, copy=not self.is_left(key)))


@dataclass(frozen=True)
class Spread:
    """How far runs in the step's own dtypes are from the exact values; the values of these runs are not kept.

    Attributes:
        exact: the exact values.
        rounded: whether the exact values are themselves those of a run in the step's own dtypes.
        largest: the largest absolute difference in any run, by golden key.
        eps: the machine epsilon of the dtype of each value, by golden key; 0 for integers and booleans.
        ended: the errors that ended runs with noise, or the evaluation in one.
    """

    exact: Values
    rounded: bool = False
    largest: dict[str, float] = field(default_factory=dict)
    eps: dict[str, float] = field(default_factory=dict)
    ended: list[Exception] = field(default_factory=list)

    def record(self, key: str, tensor: torch.Tensor) -> None:
        """Compare `tensor` with its exact value, if that is kept, and keep the largest difference."""
        if key not in self.exact.arrays:
            return
        error = largest_error(to_numpy(tensor), self.exact.arrays[key])
        self.largest[key] = max(self.largest.get(key, 0.0), error)
        self.eps[key] = float(torch.finfo(tensor.dtype).eps) if tensor.is_floating_point() else 0.0

    def widened_by(self, run: Callable[[int | None], object], elements: int = 0) -> Iterator[dict[str, float]]:
        """Make the runs, and after each yield the tolerances so far, as soon as every value has been compared.

        Args:
            run: makes one run with the noise of a seed (None for no noise), and records its values.
            elements: the number of elements in the step's state, which decides whether the step is huge.

        Yields:
            The largest allowed error of each value, by golden key.
        """
        # Runs with noise come first, because their errors are larger.
        for seed in (*range(NOISY_RUNS if elements <= HUGE else NOISY_RUNS_OF_HUGE_STEPS), None):
            if seed is None:
                self._warn_of_one_run()
            with noise_errors_suppressed(seed, self.ended.append):
                run(seed)
            if self.exact.arrays.keys() <= self.largest.keys():
                yield {key: self.allowed(key) for key in self.exact.arrays}

    def _warn_of_one_run(self) -> None:
        """Say so if no run with noise has computed a value, whose tolerance is then that of one run.

        Such a tolerance is too small, so it lets no wrong value pass. But it may refuse a right one.
        """
        missing = [key for key in self.exact.arrays if key not in self.largest]
        if missing:
            error = self.ended[-1] if self.ended else None
            reason = f" ({type(error).__name__}: {str(error).partition(chr(10))[0]})" if error else ""
            warnings.warn(
                f"eager PyTorch fails before {missing[0]} if the last bits of its values change{reason}. So tolerances "
                "come from one run alone, and a right program may be refused. Keep values away from the ends of an "
                "operator's range: p.clamp(1e-6, 1 - 1e-6) before a binary cross-entropy",
                stacklevel=2,
            )

    def allowed(self, key: str) -> float:
        """Return the tolerance of a value: the largest error that is right."""
        return allowed_error(self.exact.arrays[key], self.largest[key], self.eps[key], rounded=self.rounded)


def golden_runs(
    captured: CapturedStep,
    graph: StepGraph,
    steps: int,
    check: Callable[[], None] = lambda: None,
    variant: Variant = PLAIN,
    keeps: Callable[[str], bool] | None = None,
) -> Iterator[Golden]:
    """Run the oracle, and after each run in the step's own dtypes yield its values with the tolerances so far.

    Args:
        captured: the captured step.
        graph: has the names of the values.
        steps: the most training steps in a run; a large step has fewer.
        check: called before each value is recorded; an exception from it ends the runs.
        variant: how the runs differ from the user's own training.
        keeps: which values are compared, by golden key; None for all, or for those of a huge step that its last
            training step leaves.

    Yields:
        The oracle's values, with the tolerances of all runs so far.
    """
    step = captured.step
    elements = elements_of(graph)
    steps = steps if elements <= LARGE else min(steps, MOST_LARGE_STEPS)
    # A run computes in memory of its own (`borrowed`), so the state that its last step leaves is nobody else's.
    exact = Values(keeps=keeps or partial(_is_kept, graph, steps), is_left=partial(_is_last_state, steps))
    oracle = "float64"
    checked = partial(_checked, check)
    # Gradients overflow in the step's own dtypes, so a run in these decides which updates are skipped.
    skips = None
    if step.scaler:
        skips = run_eager(captured, graph, None, steps, None, lambda key, tensor: None, None, variant)
    try:
        run_eager(captured, graph, torch.float64, steps, None, checked(exact.record), skips, variant)
    except (RuntimeError, TypeError, ValueError):
        # Code that needs float32 cannot run in float64, such as code that reads the bits of a number. Its run in its
        # own dtypes without autocast is the oracle instead.
        oracle = str(next(step.model.parameters()).dtype).removeprefix("torch.")
        plain = replace(captured, step=replace(step, precision="f32", loss_scale=step.scaler))
        run_eager(plain, graph, None, steps, None, checked(exact.record), skips, variant)
    inputs, later = ({n: to_numpy(t) for n, t in named.items()} for named in (step.examples, variant.later))
    spread = Spread(exact, rounded=oracle != "float64")
    moves = _moves(graph, exact, steps)

    def run(seed: int | None) -> None:
        # Later runs are made when a compiled step is verified.
        is_alone = not exact.arrays.keys().isdisjoint(spread.largest)
        given = captured, graph, None, steps, seed, checked(spread.record), None, variant
        run_eager(*given, is_alone=is_alone, note=spread.ended.append)

    for allowed in spread.widened_by(run, elements):
        golden = Golden(steps, oracle, inputs, exact.arrays, allowed, later=later, moves=moves)
        of_all = variant.hyper_steps is None
        yield replace(golden, hypers=variant.hypers) if of_all else replace(golden, first_hypers=variant.hypers)


def _moves(graph: StepGraph, exact: Values, steps: int) -> dict[str, float]:
    """The largest change of each parameter whose update may take a sign, after each step, by golden key."""
    found: dict[str, float] = {}
    for tensor in graph.state:
        if tensor.role is Role.PARAMETER and tensor.name in graph.gradients and not _is_linear(graph, tensor.name):
            for key in (key_of("state", step + 1, tensor.name) for step in range(steps)):
                if key in exact.arrays:
                    found[key] = largest_error(to_numpy(tensor.initial), exact.arrays[key])
    return found


def _is_linear(graph: StepGraph, parameter: str) -> bool:
    """Whether the update of a parameter is linear in its gradients, as that of SGD: its optimizer keeps no more."""
    own = (t.name.partition("/")[2].partition("/") for t in graph.state if t.name.startswith("optimizer/"))
    return {slot for slot, _, owner in own if owner == parameter} <= {"step", "momentum_buffer"}


def _is_kept(graph: StepGraph, steps: int, key: str) -> bool:
    """Whether a value is kept: of a huge step, the state between training steps is not, whose errors the last shows."""
    return not key.startswith("state/") or _is_last_state(steps, key) or not is_huge(graph)


def _is_last_state(steps: int, key: str) -> bool:
    kind, number, _ = key.split("/", 2)
    return kind == "state" and int(number) == steps


def _checked(check: Callable[[], None], record: Recorder) -> Recorder:
    def recorded(key: str, tensor: torch.Tensor) -> None:
        check()
        record(key, tensor)

    return recorded
