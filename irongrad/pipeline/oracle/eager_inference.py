"""Evaluate and predict with the user's own model in eager PyTorch, and record every value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

import torch

from irongrad.graph.step_graph import StepGraph
from irongrad.operators.random import Draws
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.capture.derivatives import evaluated
from irongrad.pipeline.capture.modes import in_evaluation
from irongrad.pipeline.capture.output_names import flatten_outputs
from irongrad.pipeline.capture.step_modules import EntryModule, PredictModule, ReportingModule
from irongrad.runtime.golden import key_of
from irongrad.step.borrow import borrowed
from irongrad.step.train_step import TrainStep

T = TypeVar("T")

# Takes a loss, gradient, state tensor or prediction, with its golden key. Later steps may write to the tensor.
Recorder = Callable[[str, torch.Tensor], None]


def draws_of(graph: StepGraph, number: int) -> AbstractContextManager[object]:
    """While open, draw the random numbers of call `number` of a compiled step; does nothing if the step draws none."""
    return Draws(graph.seed, number) if graph.seed is not None else nullcontext()


class _KeepingModule(ReportingModule):
    """The step module that keeps what the model returned, so that prediction need not run the model again.

    Attributes:
        kept: copies of the outputs by name, as the loss or the end of the run may change the tensors themselves.
    """

    def __init__(self, step: TrainStep) -> None:
        super().__init__(step)
        self.kept: dict[str, torch.Tensor] = {}

    def outputs(self, inputs: dict[str, torch.Tensor]) -> object:
        """Call the model with its own inputs, and keep its output."""
        output = super().outputs(inputs)
        self.kept = _copied(flatten_outputs(output))
        return output


def _copied(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in values.items()}


def record_inference(
    captured: CapturedStep,
    graph: StepGraph,
    inputs: dict[str, torch.Tensor],
    noise: AbstractContextManager[object],
    record: Recorder,
    step: int,
) -> None:
    """Record evaluation, prediction and the user's entries, under the number of the step that has their inputs.

    A forward may write into buffers even in evaluation mode.
    """
    module, predict = _KeepingModule(captured.step), captured.inference.get("predict")

    def run(function: Callable[..., T], names: Iterable[str]) -> T:
        with borrowed(captured.step), draws_of(graph, 0), noise, in_evaluation(captured.step):
            return function(*(inputs[n].clone() for n in names))

    def evaluation(*values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, named = module.named(*values)
        return loss, _copied(named)

    if "eval" in captured.inference:
        loss, values = evaluated(lambda: run(evaluation, captured.step.inputs))
        record(key_of("eval", step), loss)
        for name, value in values.items():
            record(key_of("eval", step, name), value)
    if predict is not None:
        if not module.kept:
            probe = PredictModule(module, predict.inputs)
            evaluated(lambda: run(probe.named, predict.inputs))
        outputs, module.kept = module.kept, {}
        for name in predict.outputs:
            record(key_of("predict", step, name), outputs[name])
    for entry in (n for n in captured.step.own_entries if n in captured.inference):
        made, own = captured.inference[entry], EntryModule(module, entry, captured.step.own_entries[entry])
        outputs = evaluated(partial(run, lambda *v, own=own: _copied(own.named(*v)), made.inputs))
        for name in made.outputs:
            record(key_of(entry, step, name), outputs[name])
