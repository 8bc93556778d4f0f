"""What only the first call of a model makes: buffers, tables and caches that later calls find.

A compiled step has no first call. So the user's objects are called once before the capture, and keep what that call
makes while the step is compiled. This needs a proof that nothing else depends on it: with other inputs, a call that
makes these and a call that finds them give the same loss and leave the same values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from irongrad.graph.eager_control_flow import eager_control_flow
from irongrad.operators.decompositions.registry import BeforeAutograd
from irongrad.pipeline.capture.modes import mode
from irongrad.pipeline.capture.step_modules import StepModule
from irongrad.step.borrow import Addition, borrowed
from irongrad.step.train_step import TrainStep, micro_batches


@contextmanager
def called_once(step: TrainStep) -> Iterator[None]:
    """While open, the step's objects hold what their first call makes, unless the results of a call depend on it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        additions = _made_by_first_call(step)
    with _applied(additions):
        yield


@contextmanager
def _applied(additions: Sequence[Addition]) -> Iterator[None]:
    for addition in additions:
        addition.apply()
    try:
        yield
    finally:
        for addition in additions:
            addition.remove()


def _made_by_first_call(step: TrainStep) -> list[Addition]:
    example = micro_batches(step.inputs, step.accumulate)[0]
    try:
        with borrowed(step) as record:
            _call(step, example)
            additions = record.additions()
        if not additions:
            return []
        others = {name: _other_values(tensor) for name, tensor in example.items()}
        with borrowed(step):
            made = _call(step, others)
        with _applied(additions), borrowed(step):
            found = _call(step, others)
    except Exception:  # the capture reports it, with the line
        return []
    return additions if _agree(made, found) else []


def _call(step: TrainStep, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss of a call in eager, and the values of the model's tensors after it."""
    module = StepModule(step)
    with mode(module.model, training=True), eager_control_flow(), BeforeAutograd(eager=True):
        loss = module(*(tensor.clone() for tensor in inputs.values()))
    tensors: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {"": loss.detach().clone()} | {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    """Other values that a call accepts, too: indices stay in range, and positive numbers positive."""
    other = tensor.flatten().roll(1).reshape(tensor.shape)
    return other * 0.75 if other.is_floating_point() else other


def _agree(made: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> bool:
    def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
        same = (one.shape, one.dtype) == (other.shape, other.dtype)
        return same and torch.allclose(one, other, rtol=1e-6, atol=1e-7, equal_nan=True)

    return made.keys() == found.keys() and all(alike(made[name], found[name]) for name in made)
