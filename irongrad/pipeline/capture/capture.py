"""TrainStep -> CapturedStep: torch.export of the model with its loss, for training and for evaluation.

torch.export in its non-strict mode runs the model's own Python once on fake tensors (docs.pytorch.org,
"torch.export"). So it cannot express a control-flow decision on a tensor's value, or a side effect on a Python object.
Capture detects both and reports the user's line.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._dynamo.exc import UncapturedHigherOrderOpError
from torch.export import ExportedProgram

from irongrad.diagnostics import capture_errors, source_lines
from irongrad.graph.derivatives import track_inputs
from irongrad.graph.eager_control_flow import eager_control_flow
from irongrad.operators.decompositions.registry import BeforeAutograd
from irongrad.pipeline.capture import autograd_functions, hooks, side_effects
from irongrad.pipeline.capture.changed_memory import set_refused
from irongrad.pipeline.capture.cumulative_averages import cumulative_averages
from irongrad.pipeline.capture.derivatives import evaluated, recorded_derivatives
from irongrad.pipeline.capture.eager_runs import run_twice
from irongrad.pipeline.capture.einsum_paths import einsum_paths
from irongrad.pipeline.capture.function_transforms import expand_transforms
from irongrad.pipeline.capture.hyper_reads import hyper_reads_refused
from irongrad.pipeline.capture.known_values import KnownValues, StateUse
from irongrad.pipeline.capture.modes import exportable_modes, in_evaluation, mode, without_fast_path
from irongrad.pipeline.capture.module_casts import casts_refused
from irongrad.pipeline.capture.names import refuse_names
from irongrad.pipeline.capture.plain_operators import plain_operators
from irongrad.pipeline.capture.program_checks import (
    check_loss,
    check_names,
    check_used,
    check_values,
    refuse_undrawable,
    used_inputs,
)
from irongrad.pipeline.capture.recurrent_layers import recurrent_layers
from irongrad.pipeline.capture.shared_memory import refuse_shared_memory
from irongrad.pipeline.capture.size_decisions import kept_decisions
from irongrad.pipeline.capture.size_multiples import declared_multiples, needed_multiples
from irongrad.pipeline.capture.sparse import refuse_sparse
from irongrad.pipeline.capture.step_modules import (
    EntryModule,
    OutputsModule,
    PiecesModule,
    PredictModule,
    ReportingModule,
    StepModule,
    is_carried,
    name_of,
)
from irongrad.pipeline.capture.sync_batch_norm import Synchronised, synchronised_batch_norm
from irongrad.pipeline.capture.tensor_types import eager_types
from irongrad.pipeline.capture.without_value_reads import ValueFree
from irongrad.pipeline.capture.written_windows import as_strided_where_written
from irongrad.runtime.errors import CaptureError, UserError
from irongrad.runtime.manifest import of_entry
from irongrad.sizes.dimensions import dims_of, fixed, specialised, symbolic
from irongrad.step.borrow import borrowed, roots_of, unchanged
from irongrad.step.call import Call
from irongrad.step.train_step import INFERENCE, TrainStep, call_of, micro_batches


@dataclass(frozen=True)
class Inference:
    """A program in evaluation mode, which an entry point of its own runs.

    Attributes:
        program: the exported program.
        inputs: the names of its inputs, in order, as in `TrainStep.examples`.
        outputs: the names of its results, in order.
    """

    program: ExportedProgram
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class CapturedStep:
    """The exported programs of one training step.

    Attributes:
        step: the user's step; its model holds the initial values.
        call: which inputs go to the model and which to the loss.
        train: the inputs of a micro-batch -> loss, in training mode, with buffer mutations.
        inference: the programs in evaluation mode that were requested, by entry point. `eval` computes the loss, and
            the values beside it. `predict` computes the model's outputs; it is missing if the loss is the only one.
            Among its inputs may be a label from which the model computes its own loss, although no result depends on
            it.
        output_names: names of the model's outputs, in order.
        value_names: names of the values that the loss function returns beside the loss; `train` returns them after the
            loss.
        relied: for each buffer on whose values a Python decision or number of the programs relies, by its name in the
            state, the user's line: they may not change.
    """

    step: TrainStep
    call: Call
    train: ExportedProgram
    inference: Mapping[str, Inference]
    output_names: tuple[str, ...]
    value_names: tuple[str, ...] = ()
    relied: Mapping[str, str] = field(default_factory=dict)

    @property
    def programs(self) -> list[ExportedProgram]:
        """The programs that were exported."""
        return [self.train, *(made.program for made in self.inference.values())]


@without_fast_path()
def capture(
    step: TrainStep, inference: Collection[str] | None = None, synchronised: Synchronised = Synchronised.NONE
) -> CapturedStep:
    """Export the step's forward for training, evaluation and prediction, and its further entry points.

    Args:
        step: the step.
        inference: which of `eval`, `predict` and the step's own entries to export; None for all.
        synchronised: which batch normalisations take the statistics of all ranks' batches.

    Raises:
        CaptureError: a data-dependent branch, a side effect, an unused input, or a loss that is not a floating-point
            scalar; names the user's file and line.
        UnsupportedOpError: the step draws random numbers that a compiled step cannot draw.
    """
    inference = (*INFERENCE, *step.own_entries) if inference is None else inference
    hooks.refuse_hooks(step)
    refuse_names(step.model)
    module = ReportingModule(step)
    refuse_sparse(module, step.inputs)
    _refuse_scripts(step)
    found = run_twice(step, module, inference)
    captured = _captured(step, inference, found.names, synchronised)
    if found.failure is not None:
        raise found.failure
    if found.changes is not None:
        raise found.changes
    return captured


def _refuse_scripts(step: TrainStep) -> None:
    """Refuse a model with a part that runs no Python."""
    for path, module in step.model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{source_lines.where(step.model)}: {path or 'the model'} is a {type(module).__name__}, which "
                "torch.jit.script or torch.jit.trace made. Use the module from which it was made"
            )


def _captured(
    step: TrainStep, inference: Collection[str], names: tuple[str, ...], synchronised: Synchronised
) -> CapturedStep:
    """Export the step; if a call of it changes attributes, once more while these are watched."""
    try:
        # A refused forward leaves behind what it has set.
        with unchanged(roots_of(step)), hyper_reads_refused(step.optimizers):
            return _capture(step, inference, names, synchronised, watches=False)
    except side_effects.ChangedAttributeError as error:
        changed = CaptureError(str(error))
    try:
        with unchanged(roots_of(step)), hyper_reads_refused(step.optimizers):
            return _capture(step, inference, names, synchronised, watches=True)
    except UserError as error:
        if isinstance(error.__cause__, UncapturedHigherOrderOpError):  # Dynamo does not trace what watches attributes
            raise changed from None
        raise


def _capture(
    step: TrainStep,
    inference: Collection[str],
    names: tuple[str, ...],
    synchronised: Synchronised,
    *,
    watches: bool,
) -> CapturedStep:
    check_names(names, step)
    module = ReportingModule(step) if names else StepModule(step)
    training = PiecesModule(step) if step.between else module
    values = tuple(step.inputs.values())
    micro = tuple(micro_batches(step.inputs, step.accumulate)[0].values())
    dynamic = _dynamic(step, step.inputs)
    use = StateUse(module.untrained, watches=watches)
    with mode(module.model, training=True), synchronised_batch_norm(synchronised):
        multiples = declared_multiples(step)
        train = export(training, micro, dynamic, multiples, use)
        if more := needed_multiples(train, step):
            multiples |= more
            train = export(training, micro, dynamic, multiples, use)
    refuse_shared_memory(step, training, train)
    check_loss(train, step)
    check_values(train, step, names)
    check_used(train, step)
    with in_evaluation(step):
        made: dict[str, Inference] = {}
        if "eval" in inference:
            evaluation = export(module, values, dynamic, multiples, use)
            made["eval"] = Inference(evaluation, tuple(step.inputs), ("loss", *names))
        outputs: tuple[str, ...] = ()
        if "predict" in inference or step.between:  # a step in pieces takes the names of the model's outputs from it
            predict = _predict(module, step, multiples, use)
            outputs = predict.outputs if predict is not None else ()
            made |= {"predict": predict} if predict is not None else {}
        made |= {n: _entry(module, step, n, multiples, use) for n in step.own_entries if n in inference}
    for (_, name), line in use.dropped.items():
        warnings.warn(f"{line}: the compiled step does not set self.{name}, which no call reads", stacklevel=2)
    relied = {name_of(path): line for path, line in use.relied.items()}
    return CapturedStep(step, call_of(step), train, made, outputs, names, relied)


@contextmanager
def _traceable_library() -> Iterator[None]:
    """While open, PyTorch's own functions keep no value and no size of the example."""
    with plain_operators(), recurrent_layers(), cumulative_averages(), einsum_paths():
        yield


def export(
    module: nn.Module,
    values: tuple[torch.Tensor, ...],
    dynamic: Sequence[Mapping[int, str]] = (),
    multiples: Mapping[str, int] | None = None,
    use: StateUse | None = None,
) -> ExportedProgram:
    """Export `module` with torch.export, and check that it is a function of its inputs, its buffers and a seed.

    Args:
        module: takes tensors like `values`.
        values: an example of its inputs.
        dynamic: for each input, the names of its dimensions that stay symbols; empty for fixed sizes.
        multiples: for some of these dimensions, a number that divides the size.
        use: what the programs of the step do with its state; that of `module` is added.

    Raises:
        CaptureError: `module` is not such a function.
        UnsupportedOpError: `module` draws random numbers that a compiled step cannot draw.
    """
    use = use if use is not None else StateUse()
    known = KnownValues(module, use)
    try:
        with (
            _traceable_library(),
            source_lines.quiet_export(),
            source_lines.user_frames(),
            side_effects.refused(module, use),
            side_effects.assignments_as_updates(module),
            side_effects.backward_refused(),
            BeforeAutograd(),
            autograd_functions.kept(),
            hooks.refused_in_forward(),
            set_refused(),
            casts_refused(),
            exportable_modes(),
            eager_types(),
            known.of_buffers(module),
            ValueFree(module, known),
            kept_decisions(),
            recorded_derivatives(module),
        ):
            program = torch.export.export(
                module, tuple(v.detach() for v in values), dynamic_shapes=symbolic(dynamic, multiples), strict=False
            )
    except UserError:
        raise
    except Exception as error:
        if names := specialised(str(error), dynamic):
            raise CaptureError(f"{source_lines.where(getattr(module, 'model', module))}\n  {fixed(names)}") from error
        raise capture_errors.capture_error(error, getattr(module, "model", module)) from error
    expand_transforms(program)
    track_inputs(program)
    side_effects.check_graph(program, use.untrained)
    use.note_written(side_effects.written_state(program))
    as_strided_where_written(program)
    refuse_undrawable(program.graph_module)
    return program


def _dynamic(step: TrainStep, inputs: Iterable[str]) -> list[Mapping[int, str]]:
    return dims_of(inputs, step.dynamic) if step.dynamic else []


def _entry(module: StepModule, step: TrainStep, name: str, multiples: Mapping[str, int], use: StateUse) -> Inference:
    """Export an entry of the user's.

    Raises:
        CaptureError: it returns no tensor, changes the state, or does not use an input.
    """
    entry = step.own_entries[name]
    inputs, values = tuple(of_entry(name, n) for n in entry.inputs), tuple(entry.inputs.values())
    probe = EntryModule(module, name, entry)
    place = f"{source_lines.where(entry.function)}: the entry {name!r}"
    outputs = _output_names(step, probe, values)
    program = export(probe, values, _dynamic(step, inputs), multiples, use)
    for path, line in side_effects.written_lines(program).items():
        if is_carried(path):
            continue
        raise CaptureError(
            f"{line}\n  the entry {name!r} changes {name_of(path)!r}, and an entry leaves the state as it is. "
            "Change it in the step, or return the new value"
        )
    for input_name, used in zip(entry.inputs, used_inputs(program), strict=True):
        if not used:
            raise CaptureError(f"{place} does not use its input {input_name!r}; remove it from entries[{name!r}]")
    return Inference(program, inputs, outputs)


def _predict(module: StepModule, step: TrainStep, multiples: Mapping[str, int], use: StateUse) -> Inference | None:
    """Export the model's outputs; None if it has none beside its loss, or if the model takes a carried value."""
    call = call_of(step)
    of_model = call.positional + call.keyword
    if any(name in of_model for name in step.carry):
        return None
    names = tuple(n for n in step.inputs if n in of_model)
    values = tuple(step.inputs[n] for n in names)
    probe = PredictModule(module, names)
    outputs = _output_names(step, probe, values)
    if not outputs:
        return None
    return Inference(export(probe, values, _dynamic(step, names), multiples, use), names, outputs)


def _output_names(step: TrainStep, probe: OutputsModule, values: tuple[torch.Tensor, ...]) -> tuple[str, ...]:
    """The names of the outputs; the run leaves the model unchanged, which may write into its buffers even in eval."""

    def run() -> tuple[str, ...]:
        with borrowed(step):
            return tuple(probe.named(*(v.clone() for v in values)))

    with plain_operators(), eager_control_flow():
        try:
            return evaluated(run)
        except (IndexError, RuntimeError) as error:  # tracing knows no values, and does not compare all dtypes
            if isinstance(error, UserError):
                raise
            raise capture_errors.capture_error(error, step.model) from error
