"""TrainStep -> CapturedStep: torch.export of the model with its loss, for training and for evaluation.

torch.export in its non-strict mode runs the model's own Python once on fake tensors (docs.pytorch.org,
"torch.export"). So it cannot express a control-flow decision on a tensor's value, or a side effect on a Python object.
Capture detects both and reports the user's line.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from torch import nn
from torch._dynamo.exc import UncapturedHigherOrderOpError
from torch._library import simple_registry
from torch._library.effects import EffectHolder
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from irongrad.diagnostics import capture_errors, source_lines
from irongrad.graph.eager_control_flow import eager_control_flow
from irongrad.graph.flat_graph import FlatGraph, is_inlined, regions_of
from irongrad.graph.subgraphs import aliases_allowed
from irongrad.operators.decompositions.registry import BeforeAutograd
from irongrad.operators.random import Draws, draws, is_random, undrawable
from irongrad.pipeline.capture import autograd_functions, hooks, repeatable, side_effects
from irongrad.pipeline.capture.cumulative_averages import cumulative_averages
from irongrad.pipeline.capture.known_values import KnownValues, StateUse
from irongrad.pipeline.capture.output_names import flatten_outputs, loss_of
from irongrad.pipeline.capture.recurrent_layers import eager_lstm, recurrent_layers
from irongrad.pipeline.capture.selected_rows import refuse_selected
from irongrad.pipeline.capture.shared_memory import refuse_shared_memory
from irongrad.pipeline.capture.size_decisions import kept_decisions
from irongrad.pipeline.capture.size_multiples import declared_multiples, needed_multiples
from irongrad.pipeline.capture.sparse import refuse_sparse
from irongrad.pipeline.capture.without_value_reads import ValueFree
from irongrad.pipeline.capture.written_windows import as_strided_where_written
from irongrad.runtime.errors import CaptureError, UnsupportedOpError, UserError
from irongrad.sizes.dimensions import dims_of, fixed, specialised, symbolic
from irongrad.step.borrow import borrowed, unchanged
from irongrad.step.train_step import INFERENCE, Call, TrainStep, call_of, micro_batches

MODEL_PREFIX = "model."


@dataclass(frozen=True)
class CapturedStep:
    """The exported programs of one training step.

    Attributes:
        step: the user's step; its model holds the initial values.
        call: which inputs go to the model and which to the loss.
        train: the inputs of a micro-batch -> loss, in training mode, with buffer mutations.
        eval: inputs -> loss, in evaluation mode; None if it was not requested.
        predict: model inputs -> the model's outputs, in evaluation mode; None if it was not requested, or if the loss
            is the model's only output.
        predict_inputs: the inputs of `predict`, in order. A label from which the model computes its own loss is among
            them, although no result of `predict` depends on it.
        output_names: names of the results of `predict`, in order.
    """

    step: TrainStep
    call: Call
    train: ExportedProgram
    eval: ExportedProgram | None
    predict: ExportedProgram | None
    predict_inputs: tuple[str, ...]
    output_names: tuple[str, ...]

    @property
    def programs(self) -> list[ExportedProgram]:
        """The programs that were exported."""
        return [p for p in (self.train, self.eval, self.predict) if p is not None]


class StepModule(nn.Module):
    """The model and its loss as one module that takes positional inputs, in the order of `TrainStep.inputs`.

    Attributes:
        untrained: the paths of parameters that no optimizer updates.
    """

    def __init__(self, step: TrainStep) -> None:
        super().__init__()
        self.model = step.model
        self._loss = step.loss if not isinstance(step.loss, nn.Module) else None
        if isinstance(step.loss, nn.Module):
            self.loss = step.loss
        self._inside = step.loss is None
        self._call = call_of(step)
        self._names = tuple(step.inputs)
        self.autocast = step.autocast
        trained = set(map(id, step.trained))
        named = self.named_parameters(remove_duplicate=False)
        self.untrained = frozenset(path for path, p in named if id(p) not in trained)

    def outputs(self, inputs: dict[str, torch.Tensor]) -> object:
        """Call the model with its own inputs, and return its output."""
        call = self._call
        keyword = {n: inputs[n] for n in call.keyword if n in inputs}
        return self.model(*(inputs[n] for n in call.positional), **keyword)

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar tensor."""
        with self.autocast():
            return self._evaluate(*values)

    def _evaluate(self, *values: torch.Tensor) -> torch.Tensor:
        inputs = dict(zip(self._names, values, strict=True))
        return self.loss_of(self.outputs(inputs), inputs)

    def loss_of(self, output: object, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute the loss from the model's output.

        Raises:
            CaptureError: the loss is not a tensor.
        """
        if self._inside:
            return _scalar(loss_of(output))
        function = self._loss if self._loss is not None else self.loss
        loss = function(output, *(inputs[n] for n in self._call.targets))
        if not isinstance(loss, torch.Tensor):
            raise CaptureError(
                f"{source_lines.where(function)}: the loss is a {type(loss).__name__}, not a tensor. Return a scalar "
                "tensor alone, such as loss.mean()"
            )
        return _scalar(loss)


def _scalar(loss: torch.Tensor) -> torch.Tensor:
    """The loss without dimensions of size 1: eager differentiates any loss of one element."""
    return loss.reshape(()) if loss.ndim and all(size == 1 for size in loss.shape) else loss


class PiecesModule(StepModule):
    """The step module of a step in two pieces: returns the loss and the model's outputs, which Python reads."""

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the loss and the model's output tensors, detached."""
        loss, outputs = self.named(*values)
        return (loss, *outputs.values())

    def named(self, *values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, and the model's detached output tensors by name."""
        inputs = dict(zip(self._names, values, strict=True))
        with self.autocast():
            output = self.outputs(inputs)
            refuse_selected(output)
            outputs = {name: tensor.detach() for name, tensor in flatten_outputs(output).items()}
            return self.loss_of(output, inputs), outputs


class PredictModule(nn.Module):
    """The model alone: returns its outputs as a flat tuple of tensors, without a loss that it computes itself."""

    def __init__(self, module: StepModule, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = module.model
        self._module = (module,)  # the tuple hides its parameters from nn.Module, which would register them again
        self._names = names

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the model's output tensors in the order of `output_names`."""
        return tuple(self.named(*values).values())

    def named(self, *values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the model's output tensors by name."""
        module = self._module[0]
        with module.autocast():
            outputs = flatten_outputs(module.outputs(dict(zip(self._names, values, strict=True))))
        refuse_selected(outputs)
        if module._inside:
            outputs.pop("loss", None)
        return outputs


@contextmanager
def mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """While open, `module` is in training or evaluation mode; on exit, each submodule gets its own mode back.

    A module that is already in training mode keeps its submodules' modes. So a BatchNorm that the user froze with
    `.eval()` stays frozen in the training graph.
    """
    before = [(m, m.training) for m in module.modules()]
    if not training or not module.training:
        with mock.patch.object(nn.Module, "train", _set_mode):
            _set_mode_of(module, training)
    try:
        yield
    finally:
        for submodule, was in before:
            submodule.training = was


def _set_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    """Do what `nn.Module.train` does, but leave out a submodule's method of that name that does something else."""
    module.training = mode
    for child in module.children():
        _set_mode_of(child, mode)
    return module


def _set_mode_of(module: nn.Module, mode: bool) -> None:
    parameters = list(inspect.signature(module.train).parameters.values())
    takes_mode = bool(parameters) and (parameters[0].name == "mode" or isinstance(parameters[0].default, bool))
    others = [p for p in parameters[1:] if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if takes_mode and not others:
        module.train(mode)
    else:
        _set_mode(module, mode)


@contextmanager
def plain_operators() -> Iterator[None]:
    """While open, attention and recurrent layers run as plain operators, not as fused kernels of this machine's CPU.

    Only the plain operators decompose into operators that have a backward and that every target compiles.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mkldnn.flags warns about Intel GPUs on exit
        with (
            sdpa_kernel([SDPBackend.MATH]),
            torch.backends.mkldnn.flags(enabled=False),
            torch.backends.nnpack.flags(enabled=False),  # PyTorch chooses it by batch size, which adds a guard
            mock.patch("torch.nn.modules.transformer._detect_is_causal_mask", _is_said_to_be_causal),
            # AOTAutograd would order these checks with tokens: further arguments and results of the graph. A compiled
            # step raises no error, so their order is irrelevant.
            mock.patch.object(_errors_of_linalg(), "_effect", None),
            aliases_allowed(),
            _inactive_dropouts_are_their_arguments(),
        ):
            yield


@contextmanager
def _inactive_dropouts_are_their_arguments() -> Iterator[None]:
    """While open, a dropout that drops nothing returns its argument itself when it is traced, as it does in eager.

    torch 2.13's decomposition in Python returns a copy, so that a write into the result does not reach the argument.
    """
    operator = torch.ops.aten.dropout.default
    before = dict(operator.py_kernels)

    def kernel(key: torch._C.DispatchKey) -> Callable[..., torch.Tensor]:
        def dropout(input: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
            result: torch.Tensor = before[key](input, p, train) if train and p else input
            return result

        return dropout

    operator.py_kernels.update({key: kernel(key) for key in before})
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        operator.py_kernels.update(before)
        operator._dispatch_cache.clear()


def _errors_of_linalg() -> EffectHolder:
    """Return torch 2.13's record that the error check of a factorisation has an effect, because it raises."""
    return simple_registry.singleton.find("aten::_linalg_check_errors").effect


def _is_said_to_be_causal(mask: object, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Tell from the flag alone whether a mask is causal.

    nn.Transformer reads the mask's values for this. For a causal mask it takes a faster kernel with the same result.
    """
    return is_causal is True


def capture(step: TrainStep, inference: Collection[str] = INFERENCE) -> CapturedStep:
    """Export the step's forward for training, evaluation and prediction.

    Args:
        step: the step.
        inference: which of `eval` and `predict` to export.

    Raises:
        CaptureError: a data-dependent branch, a side effect, an unused input, or a loss that is not a floating-point
            scalar; names the user's file and line.
        UnsupportedOpError: the step draws random numbers that a compiled step cannot draw.
    """
    hooks.refuse_hooks(step)
    module = StepModule(step)
    refuse_sparse(module, step.inputs)
    _check_repeatable(step, module, inference)
    try:
        with unchanged((step.model, step.loss)):  # a refused forward leaves behind what it has set
            return _capture(step, inference, watches=False)
    except side_effects.ChangedAttributeError as error:
        changed = CaptureError(str(error))
    try:
        with unchanged((step.model, step.loss)):
            return _capture(step, inference, watches=True)
    except UserError as error:
        if isinstance(error.__cause__, UncapturedHigherOrderOpError):  # Dynamo does not trace what watches attributes
            raise changed from None
        raise


def _capture(step: TrainStep, inference: Collection[str], *, watches: bool) -> CapturedStep:
    module = StepModule(step)
    training = PiecesModule(step) if step.between else module
    values = tuple(step.inputs.values())
    micro = tuple(micro_batches(step.inputs, step.accumulate)[0].values())
    dynamic = _dynamic(step, step.inputs)
    use = StateUse(module.untrained, watches=watches)
    with mode(module.model, training=True):
        multiples = declared_multiples(step)
        train = export(training, micro, dynamic, multiples, use)
        if more := needed_multiples(train, step):
            multiples |= more
            train = export(training, micro, dynamic, multiples, use)
    refuse_shared_memory(step, training, train)
    _check_loss(train, step)
    _check_used(train, step)
    with mode(module.model, training=False):
        evaluation = export(module, values, dynamic, multiples, use) if "eval" in inference else None
        # A step in pieces takes the names of the model's outputs from this export.
        predicted = (
            _export_predict(module, step, multiples, use) if "predict" in inference or step.between else (None, (), ())
        )
    for (_, name), line in use.dropped.items():
        warnings.warn(f"{line}: the compiled step does not set self.{name}, which no call reads", stacklevel=2)
    return CapturedStep(step, call_of(step), train, evaluation, *predicted)


def _check_repeatable(step: TrainStep, module: StepModule, inference: Collection[str]) -> None:
    """Refuse a step whose training or evaluation changes from run to run; eager's refusals are left to the export."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(is_lazy(t) for t in tensors):  # a run would make another module of a lazy one
        return
    twice = sum(t.numel() for t in tensors) <= repeatable.LARGE

    def train(record: repeatable.Recorder) -> None:
        for optimizer in step.optimizers:
            optimizer.zero_grad(set_to_none=True)
        values = [t.clone() for t in micro_batches(step.inputs, step.accumulate)[0].values()]
        with Draws(step.seed, 0), mode(module.model, training=True), BeforeAutograd(eager=True):
            loss = module(*values)
            record(loss)
            if not twice:
                return
            loss.backward()
        for parameter in module.parameters():
            if parameter.grad is not None:
                record(parameter.grad)
        for optimizer in step.optimizers:
            optimizer.step()

    def evaluate(record: repeatable.Recorder) -> None:
        with torch.no_grad(), Draws(step.seed, 0), mode(module.model, training=False):
            record(module(*(t.clone() for t in step.inputs.values())))

    programs = {"the training step": train} | ({"the evaluation": evaluate} if inference else {})
    for what, run in programs.items():
        program = repeatable.Program(
            what, step.model, partial(borrowed, step), eager_control_flow()(eager_lstm()(run)), twice
        )
        repeatable.refuse_unrepeatable(program)


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
            plain_operators(),
            recurrent_layers(),
            cumulative_averages(),
            source_lines.quiet_export(),
            source_lines.user_frames(),
            side_effects.refused(module, use),
            side_effects.assignments_as_updates(module),
            side_effects.backward_refused(),
            BeforeAutograd(),
            autograd_functions.kept(),
            hooks.refused_in_forward(),
            known.of_buffers(module),
            ValueFree(module, known),
            kept_decisions(),
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
    side_effects.check_graph(program, use.untrained)
    use.note_written(side_effects.written_state(program))
    as_strided_where_written(program)
    _refuse_undrawable(program.graph_module)
    return program


def _dynamic(step: TrainStep, inputs: Iterable[str]) -> list[Mapping[int, str]]:
    return dims_of(inputs, step.dynamic) if step.dynamic else []


def _export_predict(
    module: StepModule, step: TrainStep, multiples: Mapping[str, int], use: StateUse
) -> tuple[ExportedProgram | None, tuple[str, ...], tuple[str, ...]]:
    call = call_of(step)
    names = tuple(n for n in step.inputs if n in call.positional + call.keyword)
    values = tuple(step.inputs[n] for n in names)
    probe = PredictModule(module, names)
    with torch.no_grad(), plain_operators(), eager_control_flow():
        try:
            outputs = _run_untouched(step, probe, values)
        except IndexError as error:  # tracing does not notice it, because it knows no values
            raise capture_errors.capture_error(error, step.model) from error
    if not outputs:
        return None, (), ()
    program = export(probe, values, _dynamic(step, names), multiples, use)
    return program, names, outputs


def _run_untouched(step: TrainStep, probe: PredictModule, values: tuple[torch.Tensor, ...]) -> tuple[str, ...]:
    """The names of the outputs; the run leaves the model unchanged, which may write into its buffers even in eval."""
    with borrowed(step):
        return tuple(probe.named(*(v.clone() for v in values)))


def _used_inputs(program: ExportedProgram) -> list[bool]:
    by_name = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    return [bool(by_name[name].users) for name in program.graph_signature.user_inputs if isinstance(name, str)]


def loss_node(program: ExportedProgram) -> torch.fx.Node:
    """Return the node of `CapturedStep.train` or `.eval` that computes the loss."""
    node = next(n for n in program.graph.output_node().args[0] if n.name == program.graph_signature.user_outputs[0])
    return FlatGraph(program.graph_module).origins(node)[-1]


def _check_loss(program: ExportedProgram, step: TrainStep) -> None:
    node = loss_node(program)
    value = node.meta["val"]
    if value.shape == () and value.dtype.is_floating_point:
        return
    place = source_lines.line_of(node, otherwise=source_lines.where(step.loss if step.loss is not None else step.model))
    inside = (
        "" if step.loss is not None else " TrainStep.loss is None, so the model's own output is taken for the loss."
    )
    raise CaptureError(
        f"{place}\n  the loss has shape {tuple(value.shape)} and dtype {value.dtype}; it must be a floating-point "
        f"scalar.{inside} Reduce it in the loss function: return loss.mean() or loss.sum()"
    )


def _check_used(program: ExportedProgram, step: TrainStep) -> None:
    for name, used in zip(step.inputs, _used_inputs(program), strict=True):
        if not used:
            raise CaptureError(
                f"{source_lines.where(step.model)}: input {name!r} is not used by the model or the loss. Remove it "
                "from TrainStep.inputs, or list the inputs that the model takes in TrainStep.model_inputs if it went "
                "to the wrong place"
            )


def _refuse_undrawable(graph: GraphModule, *, once: bool = True) -> None:
    """Refuse an operator that draws random numbers which a compiled step cannot draw.

    Args:
        graph: the graph, with its regions.
        once: whether the graph runs once a step. A draw is identified by the number of its call, which is the same in
            every iteration of a loop.

    Raises:
        UnsupportedOpError: names the first such operator, with the user's line.
    """
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            for region in regions_of(graph, node):
                _refuse_undrawable(region, once=once and is_inlined(node))
            continue
        reason = None
        if is_random(node.target):
            reason = undrawable(node.target, node.kwargs.get("generator"))
        if reason is None and not once and draws(node.target):
            reason = "draws random numbers in a branch or a loop. Draw them before it, and hand them in"
        if reason is not None:
            raise UnsupportedOpError(f"{source_lines.line_of(node)}: {node.target} {reason}")


def name_of(path: str) -> str:
    """Return the state name for an attribute path of `StepModule`: the model's own name."""
    return path.removeprefix(MODEL_PREFIX)
