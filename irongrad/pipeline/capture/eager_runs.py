"""The eager runs of a step that show whether it changes from run to run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.parameter import is_lazy

from irongrad.diagnostics import capture_errors
from irongrad.diagnostics.refusals import MOST
from irongrad.diagnostics.source_lines import where
from irongrad.graph.eager_control_flow import eager_control_flow
from irongrad.operators.decompositions.registry import BeforeAutograd
from irongrad.operators.random import Draws
from irongrad.pipeline.capture import hooks, repeatable
from irongrad.pipeline.capture.derivatives import evaluated
from irongrad.pipeline.capture.modes import in_evaluation, mode
from irongrad.pipeline.capture.module_casts import casts_refused
from irongrad.pipeline.capture.recurrent_layers import eager_lstm
from irongrad.pipeline.capture.repeatable import Kind, Recorder
from irongrad.pipeline.capture.step_modules import EntryModule, ReportingModule
from irongrad.runtime.errors import CaptureError, IronGradError
from irongrad.step.borrow import Record, borrowed
from irongrad.step.train_step import INFERENCE, TrainStep, micro_batches


@dataclass
class Found:
    """What eager runs tell about a step.

    Attributes:
        changes: the refusal of a step that changes a Python value and depends on it, if the export does not refuse it.
        failure: the refusal of a step whose first run fails, or has a loss that is NaN, if the export does not refuse
            it: a trace knows no values, and does not compare all dtypes.
        names: the names of the values that the loss function returns beside the loss.
        runs: how often the forward has run.
    """

    changes: CaptureError | None = None
    failure: CaptureError | None = None
    names: tuple[str, ...] = ()
    runs: int = 0


def run_twice(step: TrainStep, module: ReportingModule, inference: Collection[str]) -> Found:
    """Refuse a step whose training or evaluation changes from run to run; eager's refusals are left to the export.

    Args:
        step: the step.
        module: its model and its loss.
        inference: which of `eval`, `predict` and the step's entries are compiled; evaluation runs for the first two.

    Raises:
        CaptureError: two runs differ, or a hook on a node of autograd was found.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if any(is_lazy(t) for t in tensors):  # a run would make another module of a lazy one
        return Found()
    found = Found()
    runs = _EagerRuns(step, module, found, updates=sum(t.numel() for t in tensors) <= repeatable.LARGE)
    found.changes = repeatable.refuse_unrepeatable(runs.program("the training step", runs.train, runs.gradients))
    runs.nodes.refuse()
    if {*INFERENCE} & {*inference}:
        repeatable.refuse_unrepeatable(runs.program("the evaluation", runs.evaluate))
    for name in (n for n in step.own_entries if n in inference):
        repeatable.refuse_unrepeatable(runs.program(f"the entry {name!r}", partial(runs.call, name)))
    return found


@dataclass(frozen=True)
class _EagerRuns:
    """What of a step runs eagerly, in the loop that a user would write.

    Attributes:
        step: the step.
        module: its model and its loss.
        found: gets the names of values beside the loss.
        updates: whether the backward and the update run too, or the forward alone.
        nodes: collects the hooks on nodes of autograd.
    """

    step: TrainStep
    module: ReportingModule
    found: Found
    updates: bool
    nodes: hooks.NodeHooks = field(default_factory=hooks.NodeHooks)

    def program(
        self, what: str, run: Callable[[Recorder], None], again: Callable[[Recorder], None] | None = None
    ) -> repeatable.Program:
        """A run of the step, with the operators that the compiled step stands for."""

        def lend(in_place: bool) -> AbstractContextManager[Record]:
            return borrowed(self.step, in_place=in_place)

        plainly = casts_refused()(eager_control_flow()(eager_lstm()(run)))
        plainly_again = casts_refused()(eager_control_flow()(eager_lstm()(again))) if again is not None else None
        return repeatable.Program(what, self.step.model, lend, plainly, self.updates, plainly_again)

    def train(self, record: Recorder) -> None:
        """Loss and gradients of a step, its update, and the loss of the next step."""
        self.gradients(record)
        if self.updates:
            for optimizer in self.step.optimizers:
                optimizer.step()
            for after in self.step.after:
                after.run(self.step.model, {}, self.step.modules.values())
            with self._training():
                record(self._loss(record, Kind.LATER), Kind.LATER)

    def gradients(self, record: Recorder) -> None:
        """Loss and gradients of a step; without updates the loss alone."""
        self.module.zero_grad(set_to_none=True)  # also of parameters that no optimizer holds
        for optimizer in self.step.optimizers:
            optimizer.zero_grad(set_to_none=True)
        with self._training():
            with self.nodes.watched(), self._first_noted():
                loss = self._loss(record, Kind.RESULT)
            self._note_nan(loss)
            record(loss, Kind.LOSS)
            if not self.updates:
                return
            loss.backward()
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                record(parameter.grad, Kind.GRADIENT)

    def evaluate(self, record: Recorder) -> None:
        """The loss in evaluation mode."""

        def evaluation() -> torch.Tensor:
            with Draws(self.step.seed, 0), in_evaluation(self.step):
                return self.module.named(*(t.clone() for t in self.step.inputs.values()))[0]

        record(evaluated(evaluation), Kind.LOSS)

    def call(self, name: str, record: Recorder) -> None:
        """The outputs of an entry."""
        entry = self.step.own_entries[name]
        probe = EntryModule(self.module, name, entry)

        def run() -> dict[str, torch.Tensor]:
            with Draws(self.step.seed, 0), in_evaluation(self.step):
                return probe.named(*(t.clone() for t in entry.inputs.values()))

        for value in evaluated(run).values():
            record(value, Kind.RESULT)

    @contextmanager
    def _first_noted(self) -> Iterator[None]:
        """While open, the first run of the forward notes its failure. The second one stands for another process."""
        self.found.runs += 1
        try:
            yield
        except (IndexError, RuntimeError) as error:
            if self.found.runs == 1 and not isinstance(error, IronGradError):
                self.found.failure = capture_errors.eager_error(error, self.step.model)
            raise

    def _note_nan(self, loss: torch.Tensor) -> None:
        """Note a first loss that is NaN: every comparison with it holds. In float16 a loss scale skips such a step."""
        if self.found.runs == 1 and self.step.precision != "f16" and loss.isnan().any():
            self.found.failure = CaptureError(
                f"{where(self.step.model)}: the loss is NaN on the example inputs, with which nothing can be "
                f"verified. {_source_of_nan(self.step)}"
            )

    @contextmanager
    def _training(self) -> Iterator[None]:
        with Draws(self.step.seed, 0), mode(self.module.model, training=True), BeforeAutograd(eager=True):
            yield

    def _loss(self, record: Recorder, beside: Kind) -> torch.Tensor:
        """The loss of a micro-batch, with the values beside it recorded as of the kind `beside`.

        Buffers that the forward assigns anew are the module's own again.
        """
        held = [(m._buffers, dict(m._buffers)) for m in self.module.modules()]
        micro = micro_batches(self.step.inputs, self.step.accumulate)[0]
        try:
            loss, values = self.module.named(*(t.clone() for t in micro.values()))
            self.found.names = tuple(values)
            for value in values.values():
                record(value, beside)
            return loss
        finally:
            for buffers, before in held:
                buffers.update(before)


def _source_of_nan(step: TrainStep) -> str:
    """Where the NaN of a loss comes from, as a sentence."""
    inputs = [f"input {name!r}" for name, tensor in step.inputs.items() if tensor.isnan().any()]
    tensors = (*step.model.named_parameters(), *step.model.named_buffers())
    state = [f"{name!r} of the model" for name, tensor in tensors if tensor.isnan().any()]
    if found := [*inputs, *state]:
        return f"NaN is in {', '.join(found[:MOST])}"
    return (
        "Look for a division by zero, a logarithm of zero, or a mean over nothing, such as labels that are all ignored"
    )
