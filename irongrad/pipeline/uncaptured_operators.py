"""Find all refusals of a step that cannot be captured, by running it.

A run with the example inputs takes the branches that these inputs lead to. So it shows the refusals in forward,
backward and update that the user would meet next, after fixing the one at which capture stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch.func import functional_call, functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Target
from torch.fx.traceback import preserve_node_meta

from irongrad.diagnostics import advice, capture_errors, source_lines
from irongrad.diagnostics.refusals import Refusal, gathered, refusal_of, refuse
from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.operators.decompositions.registry import BeforeAutograd
from irongrad.operators.legalize.complex_numbers import in_reals
from irongrad.operators.legalize.legality import refusals
from irongrad.operators.legalize.random_state import trace
from irongrad.operators.legalize.retrace import Portable, interpret_eager, traced
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.capture.modes import mode
from irongrad.pipeline.capture.plain_operators import plain_operators
from irongrad.pipeline.capture.recurrent_layers import recurrent_layers
from irongrad.pipeline.capture.step_modules import StepModule, name_of
from irongrad.pipeline.capture.without_value_reads import ValueFree
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.pipeline.optimizer.update import add_optimizer
from irongrad.runtime.errors import UnsupportedOpError
from irongrad.step.train_step import TrainStep, micro_batches

aten = torch.ops.aten

_BY_VALUE = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
_INDEXING = frozenset({aten.index.Tensor, aten.index_put.default, aten.index_put_.default})


def probed(step: TrainStep) -> tuple[StepGraph, list[Refusal]]:
    """Trace the functions of `step` as far as possible; return them with everything that cannot be compiled."""
    functions: dict[str, Function] = {}
    with gathered() as found, suppress(Exception):  # capture has already reported an error that ends a run
        functions["joint"] = _joint(step)
    with gathered() as more, suppress(Exception):
        functions["update"] = _update(step)
    graph = StepGraph((), (), step.inputs, {}, functions=functions)
    return graph, [*found, *more, *refusals(graph)]


def _joint(step: TrainStep) -> Function:
    """Trace the forward and the backward by one run."""
    module = StepModule(step)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    inputs = micro_batches(step.inputs, step.accumulate)[0]
    arguments = [*(Value("state", name_of(n)) for n in state), *(Value("input", n) for n in inputs)]

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        """The loss, and the gradients of the parameters that it reaches."""
        given = zip(state.items(), values[: len(state)], strict=True)
        own = {n: v.detach().requires_grad_(t.requires_grad) for (n, t), v in given}
        with torch.enable_grad():
            loss: torch.Tensor = functional_call(module, own, values[len(state) :])
            setup_stacktrace_preservation_hooks([loss.grad_fn] if loss.grad_fn is not None else [])
            wanted = [t for t in own.values() if t.requires_grad]
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        return [loss.detach(), *(g.detach() for g in gradients if g is not None)]

    examples = [t.detach().clone() for t in (*state.values(), *inputs.values())]
    with mode(module.model, training=True):
        graph = _run(run, examples)

    def again(*values: torch.Tensor) -> list[torch.Tensor]:
        copies = [v.clone() for v in values]  # a model may write into its buffers
        return list(_WithoutValues(graph).run(*copies, enable_io_processing=False))

    whole = traced(functionalize(again), examples, {})
    real = in_reals(whole)
    count = len(real.graph.output_node().args[0])
    results = [Value("output", f"result{i}") for i in range(count)]
    return trace(lambda *v: list(interpret_eager(real, v)), examples, arguments, results)


def _run(run: Any, examples: Sequence[torch.Tensor]) -> GraphModule:
    """Trace a run on tensors with values; each operator has the user's line."""
    with ExitStack() as stack:
        stack.enter_context(source_lines.quiet_export())
        for layer in (plain_operators(), recurrent_layers(), BeforeAutograd(), ValueFree()):
            stack.enter_context(layer)
        # Under anomaly detection autograd's nodes keep the stack traces of the forward operators that traced_run them.
        for keeper in (source_lines.user_frames(), source_lines.forward_frames(), preserve_node_meta()):
            stack.enter_context(keeper)
        stack.enter_context(torch.autograd.detect_anomaly(check_nan=False))
        traced_run = make_fx(run, tracing_mode="real", record_stack_traces=True, _error_on_data_dependent_ops=False)
        return traced_run(*examples)


class _WithoutValues(Portable):
    """Runs a traced graph on fake tensors.

    It refuses an operator that depends on values, or that has no shape without them, and continues with a stand-in.
    """

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator."""
        line = source_lines.line_of(self.node)
        if target is aten._local_scalar_dense.default:
            reason, _, way_out = capture_errors.DECISION.partition(". ")
            refuse([Refusal("", line, reason, way_out)])
        elif _depends_on_values(self.node):
            way_out = advice.known(str(target)) or advice.KEEP_SHAPE
            refuse([Refusal(str(target), line, advice.reason(self.node.target), way_out)])
        else:
            try:
                return super().call_function(target, args, kwargs)
            except RuntimeError as error:  # a custom operator without a fake implementation
                if not (said := advice.refused_at_capture(error)):
                    raise
                refuse([refusal_of(UnsupportedOpError(said), line)])
        return self.stand_in(self.node.meta.get("val"))


def _depends_on_values(node: Node) -> bool:
    """Whether the shape of the result of `node`, or a number that it returns, depends on values."""
    if not isinstance(node.target, torch._ops.OpOverload) or not _BY_VALUE & set(node.target.tags):
        return False
    if node.target not in _INDEXING:
        return True
    masks = [n for n in node.all_input_nodes[1:] if n.meta["val"].dtype in (torch.bool, torch.uint8)]
    return node.target is aten.index.Tensor and bool(masks)


class _Parameters(nn.Module):
    """A model with the parameters of another, which all get a gradient; the update needs nothing else of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.held = nn.ParameterList([p for p in model.parameters() if p.requires_grad])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() + torch.stack([p.abs().sum().to(x.dtype) for p in self.held]).sum()


def _update(step: TrainStep) -> Function:
    """Trace the optimizer's update."""
    alone = TrainStep(_Parameters(step.model), lambda y: y, step.optimizer, {"x": torch.zeros(())})
    settings = {n: getattr(step, n) for n in ("clip_grad_norm", "clip_grad_value")}
    joint = differentiate(capture(replace(alone, **settings), ()))
    return add_optimizer(joint).functions["update"]
