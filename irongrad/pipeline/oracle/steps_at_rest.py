"""What eager does where nothing may move: at a learning rate of zero, and with gradients of zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.oracle.eager_run import Variant, elements_of, is_finite, run_eager
from irongrad.pipeline.oracle.expected_values import Expected
from irongrad.pipeline.oracle.oracle import LARGE
from irongrad.runtime.golden import Golden, Resting, key_of
from irongrad.runtime.manifest import Role
from irongrad.step.hyperparameters import Hyper, hyperparameters
from irongrad.step.optimizer_slots import is_foreign
from irongrad.step.train_step import TrainStep

# Keys of parameter groups that must be zero for nothing to move.
_MOVES = ("lr", "weight_decay")

# The gradients of a large step, whose own take seconds. At a learning rate of zero no optimizer moves a parameter for
# the value of its gradient.
_GRADIENT = 2.0**-10


def with_rest(captured: CapturedStep, graph: StepGraph, own: Expected, check: Callable[[], None]) -> Expected:
    """Add what eager does at rest."""
    at_rest = resting(captured, graph, check)
    if at_rest is not None and elements_of(graph) > LARGE:
        at_rest = replace(at_rest, unbounded=(*at_rest.unbounded, *_unbounded(graph, own.golden)))
    return own.renamed(lambda golden: replace(golden, resting=at_rest))


def _unbounded(graph: StepGraph, golden: Golden) -> Iterator[str]:
    """The state that is NaN or infinite after any of the golden steps."""
    for name in (tensor.name for tensor in graph.state):
        keys = [key for step in range(1, golden.steps + 1) if (key := key_of("state", step, name)) in golden.expected]
        if not all(is_bounded(golden, key) for key in keys):
            yield name


def is_bounded(golden: Golden, key: str) -> bool:
    """Whether a value is neither NaN nor infinite in any run of eager."""
    return bool(np.isfinite(golden.expected[key]).all() and np.isfinite(golden.allowed[key]))


def resting(captured: CapturedStep, graph: StepGraph, check: Callable[[], None] = lambda: None) -> Resting | None:
    """What eager does where nothing may move, in the step's own dtypes; None if eager does not survive it.

    The first step has no gradients and no learning rate, the second no gradients; then one step trains, and the last
    has no learning rate. A large step trains with gradients that nobody computes.
    """
    hypers = still(captured.step, graph)
    gradient = _GRADIENT if elements_of(graph) > LARGE else None
    variant = Variant(hypers, frozenset({0, 3}), zero_steps=frozenset({0, 1}), gradient=gradient)
    names = {key_of("state", k, t.name): (k, t.name) for t in graph.state for k in range(1, 5)}
    parameters = {t.name: t.initial for t in graph.state if t.role is Role.PARAMETER}
    # What an optimizer of another package does at rest may depend on the steps before, which these runs do not take.
    is_known = not any(map(is_foreign, captured.step.optimizers))
    moving: dict[str, None] = {} if is_known else dict.fromkeys(parameters)
    unbounded: dict[str, None] = {}

    def record(key: str, tensor: torch.Tensor) -> None:
        check()
        if key not in names:
            return
        number, name = names[key]
        if name in parameters:
            if number in (1, 4) and not torch.equal(parameters[name], tensor):
                moving[name] = None
            parameters[name] = tensor.clone()
        if not is_finite(tensor):
            unbounded[name] = None

    try:
        run_eager(captured, graph, None, 4, None, record, None, variant, infers=False)
    except Exception:  # an optimizer may divide by its learning rate
        check()  # the error may be its own
        return None
    return Resting(hypers, tuple(moving), tuple(unbounded))


def still(step: TrainStep, graph: StepGraph) -> dict[str, float]:
    """The hyperparameters at which a step moves no parameter."""
    return {h.name: 0.0 for h in free_hypers(step, graph) if h.key in _MOVES}


def free_hypers(step: TrainStep, graph: StepGraph) -> list[Hyper]:
    """The hyperparameters of the optimizers that are inputs of the compiled step."""
    return [h for h in hyperparameters(step.optimizers) if h.name in graph.hypers]
