"""Graphs inside graphs (*regions*): the branches of cond, and the bodies of while_loop, scan and map."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import sympy
import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.variables import SymNodeVariable
from torch._guards import SLoc
from torch._higher_order_ops import utils
from torch._higher_order_ops.cond import _merge_output
from torch._higher_order_ops.utils import prepare_fw_with_masks_all_requires_grad
from torch._higher_order_ops.while_loop import WhileLoopAutogradOp
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from irongrad.diagnostics.source_lines import line_of
from irongrad.runtime.errors import InternalError, UnsupportedOpError
from irongrad.sizes.dimensions import Decision, is_condition

control = torch.ops.higher_order

SUPPORTED = frozenset({control.cond, control.while_loop, control.scan, control.map_impl})

_PLAIN_DECISION = SymNodeVariable.evaluate_expr
_BACKWARD_OF_WHILE_LOOP = WhileLoopAutogradOp.backward


class _OneOrMore(ShapeEnv):
    """The sizes of a body that Dynamo traces, which may be one.

    Dynamo takes a size for two or more, and after the trace of a body it checks so on the sizes of the call. That would
    make two or more a condition of the program. A decision of the body's own code remains one (`_decided`).
    """

    def _default_value_range(self, do_not_specialize_zero_one: bool = False) -> ValueRanges[Any]:
        return ValueRanges(1, int_oo)

    def produce_guards_verbose(self, *args: Any, **kwargs: Any) -> Any:
        self.guards[:] = filter(is_condition, self.guards)
        return super().produce_guards_verbose(*args, **kwargs)


def _decided(variable: SymNodeVariable, output_graph: Any = None) -> Any:
    """Evaluate a test in the Python code of a body, and keep the answer as a guard; PyTorch keeps some only."""
    answer, node = _PLAIN_DECISION(variable, output_graph), variable.sym_num.node
    if isinstance(answer, bool):
        true = node.expr if answer else sympy.Not(node.expr)
        node.shape_env.guards.append(Decision(true, SLoc(None, None), size_oblivious=False))
    return answer


@contextmanager
def aliases_allowed() -> Iterator[None]:
    """While open, a region may get one tensor, or views of it, in several places, and may return its arguments.

    PyTorch refuses both, because a write to one alias would change the others. Here, regions that write to their
    arguments are refused anyway, with or without aliases. Where PyTorch does not refuse, torch 2.13 is wrong for a scan
    that starts with one tensor in two places. It traces the body with one fake tensor for both, and takes either for
    the other (`clone_input` clones no fake tensor).

    Strides do not matter either: see `_metadata`. Each region is traced for its own sizes. Otherwise Dynamo takes a
    size that differs from an earlier trace, even of another model, as dynamic, and refuses a fixed size next to it.
    """
    check = utils.has_potential_input_alias_or_mutation

    def writes(*args: Any, **kwargs: Any) -> tuple[bool, bool]:
        return False, check(*args, **kwargs)[1]

    with (
        dynamo_config.patch(automatic_dynamic_shapes=False),
        mock.patch.object(utils, "has_potential_input_alias_or_mutation", writes),
        mock.patch("torch._dynamo.utils.clone_input", torch.clone),
        mock.patch("torch._dynamo.output_graph.ShapeEnv", _OneOrMore),
        mock.patch.object(SymNodeVariable, "evaluate_expr", _decided),
        mock.patch.object(sys.modules[_merge_output.__module__], "_merge_output", _merged),
        mock.patch.object(utils, "_extract_tensor_metadata", _metadata),
        mock.patch(
            "torch._dynamo.output_graph.SubgraphTracer.has_aliasing", return_value=SimpleNamespace(has_aliasing=False)
        ),
        mock.patch.object(utils, "prepare_fw_with_masks_all_requires_grad", _with_every_gradient),
        mock.patch.object(WhileLoopAutogradOp, "backward", staticmethod(_while_loop_backward)),
    ):
        yield


def _with_every_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, and a mask of the results for which the backward gets a gradient: all tensors, including integers.

    torch 2.13 leaves integers out of the mask although their gradients are passed. It then fails with "outs_to_grad
    length != tangents length".
    """
    masked = prepare_fw_with_masks_all_requires_grad(function)

    def run(*values: Any) -> tuple[Any, Any]:
        results, _ = masked(*values)
        return results, [isinstance(r, torch.Tensor) for r in results]

    return run


def _while_loop_backward(ctx: Any, *gradients: Any) -> Any:
    """Run the backward of while_loop, which gets no gradients of integers; `_check` refuses it by name."""
    with mock.patch.object(utils, "prepare_fw_with_masks_all_requires_grad", prepare_fw_with_masks_all_requires_grad):
        return _BACKWARD_OF_WHILE_LOOP(ctx, *gradients)


def _metadata(tensor: torch.Tensor, **kwargs: Any) -> Any:
    """The metadata that must agree between both branches, or between all iterations: all but strides.

    torch 2.13 refuses results that are stored in different orders. Here all tensors are contiguous.
    """
    return _extract_tensor_metadata(tensor.contiguous(), **kwargs)


def _merged(true: Any, false: Any, mode: FakeTensorMode) -> Any:
    """A result of a cond, without strides, as in `_metadata`."""
    return _merge_output(*(t.contiguous() if isinstance(t, torch.Tensor) else t for t in (true, false)), mode)


def simplified(graph: GraphModule, passes: Sequence[Callable[[GraphModule], None]]) -> GraphModule:
    """Apply `passes` to `graph` and all its regions, and drop dead code.

    A node without a stack trace, such as a node of a backward, gets that of the operator whose region it is in.

    Raises:
        UnsupportedOpError: a region has an operator that cannot be compiled.
    """
    for node in graph.graph.nodes:
        if not isinstance(node.target, HigherOrderOperator):
            continue
        _check(node)
        for argument in node.args:
            region = getattr(graph, str(argument.target), None) if isinstance(argument, Node) else None
            if isinstance(region, GraphModule):
                _check_closed(region, node)
                _inherit_trace(region.graph, node)
                setattr(graph, str(argument.target), simplified(region, passes))
    for transform in passes:
        transform(graph)
    graph.graph.eliminate_dead_code()
    return _make_graph_module(graph, graph.graph)  # drops the regions of dead nodes


def has_while_loop(graph: GraphModule) -> bool:
    """Whether there is a `while_loop` in `graph` or in one of its regions."""
    regions = [m.graph for m in graph.modules() if isinstance(m, GraphModule)]
    return any(n.target is control.while_loop for g in regions for n in g.nodes)


def _inherit_trace(graph: Graph, node: Node) -> None:
    trace = node.meta.get("stack_trace")
    for inner in graph.nodes:
        if trace and not inner.meta.get("stack_trace"):
            inner.meta["stack_trace"] = trace


def _check_closed(region: GraphModule, node: Node) -> None:
    for name, value in region.named_buffers(recurse=False):
        if isinstance(value, FakeTensor):
            raise InternalError(
                f"{line_of(node)}: the region of {node.target} reads the tensor {name} from outside it; it has to be "
                "among the inputs"
            )


def check_control_flow(graph: GraphModule) -> None:
    """Refuse operators of control flow that cannot be compiled.

    Raises:
        UnsupportedOpError: there is such an operator; names the first, with the user's line.
    """
    for node in graph.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            _check(node)


def _check(node: Node) -> None:
    if node.target is control.while_loop_stack_output:
        raise UnsupportedOpError(
            f"{line_of(node)}: while_loop: a gradient needs the values of all iterations, whose number is not known at "
            "compile time. Use torch._higher_order_ops.scan over a fixed number of iterations, or detach what it is "
            "computed from"
        )
    if node.target not in SUPPORTED:
        raise UnsupportedOpError(f"{line_of(node)}: {node.target} cannot be compiled")
    for value in node.meta["val"]:
        if not isinstance(value, torch.Tensor) or free_unbacked_symbols(value):
            raise UnsupportedOpError(
                f"{line_of(node)}: {node.target}: a result is a number, or its shape is not known at compile time. "
                "Return tensors, of the same shapes from both branches and from every iteration"
            )
