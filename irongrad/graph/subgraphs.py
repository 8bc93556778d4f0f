"""Graphs inside graphs: the branches of cond, the bodies of while_loop, scan and map."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._dynamo import config as dynamo_config
from torch._higher_order_ops import utils
from torch._higher_order_ops.cond import _merge_output
from torch._higher_order_ops.utils import prepare_fw_with_masks_all_requires_grad
from torch._higher_order_ops.while_loop import WhileLoopAutogradOp
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from irongrad.diagnostics.source_lines import line_of
from irongrad.runtime.errors import InternalError, UnsupportedOpError

control = torch.ops.higher_order

SUPPORTED = frozenset({control.cond, control.while_loop, control.scan, control.map_impl})

_BACKWARD_OF_WHILE_LOOP = WhileLoopAutogradOp.backward


@contextmanager
def aliases_allowed() -> Iterator[None]:
    """While open, a region may get one tensor, or views of it, in several places, and may return what it got.

    PyTorch refuses that, lest a write to one of them changes the others; a region that writes to what it gets is
    refused with or without aliases. Where it does not refuse, torch 2.13 traces the body of a scan that starts with
    one tensor in two places on one fake tensor, and takes either for the other (`clone_input` clones no fake tensor).

    Nor do strides matter: see `_metadata`. And each region is traced for its own sizes: Dynamo takes one that differs
    from an earlier trace's, of another model, for one that varies, and refuses what is fixed beside it.
    """
    check = utils.has_potential_input_alias_or_mutation

    def writes(*args: Any, **kwargs: Any) -> tuple[bool, bool]:
        return False, check(*args, **kwargs)[1]

    with (
        dynamo_config.patch(automatic_dynamic_shapes=False),
        mock.patch.object(utils, "has_potential_input_alias_or_mutation", writes),
        mock.patch("torch._dynamo.utils.clone_input", torch.clone),
        mock.patch.object(sys.modules[_merge_output.__module__], "_merge_output", _merged),
        mock.patch.object(utils, "_extract_tensor_metadata", _metadata),
        mock.patch(
            "torch._dynamo.output_graph.SubgraphTracer.has_aliasing", return_value=SimpleNamespace(has_aliasing=False)
        ),
        mock.patch.object(utils, "prepare_fw_with_masks_all_requires_grad", _with_every_gradient),
        mock.patch.object(WhileLoopAutogradOp, "backward", staticmethod(_of_while_loop)),
    ):
        yield


def _with_every_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, and of which of its results a backward is given a gradient: of all, also of integers.

    torch 2.13 leaves out those of integers, which it is given, and ends with "outs_to_grad length != tangents length".
    """
    masked = prepare_fw_with_masks_all_requires_grad(function)

    def run(*values: Any) -> tuple[Any, Any]:
        results, _ = masked(*values)
        return results, [isinstance(r, torch.Tensor) for r in results]

    return run


def _of_while_loop(ctx: Any, *gradients: Any) -> Any:
    """The backward of while_loop, which is given no gradients of integers; `_check` refuses it by name."""
    with mock.patch.object(utils, "prepare_fw_with_masks_all_requires_grad", prepare_fw_with_masks_all_requires_grad):
        return _BACKWARD_OF_WHILE_LOOP(ctx, *gradients)


def _metadata(tensor: torch.Tensor, **kwargs: Any) -> Any:
    """What results of both branches, or of all iterations, have in common; not their strides.

    torch 2.13 refuses those that are stored in different orders. Here all tensors are arrays.
    """
    return _extract_tensor_metadata(tensor.contiguous(), **kwargs)


def _merged(true: Any, false: Any, mode: FakeTensorMode) -> Any:
    """A result of a cond, without strides, as `_metadata` has none."""
    return _merge_output(*(t.contiguous() if isinstance(t, torch.Tensor) else t for t in (true, false)), mode)


def simplified(graph: GraphModule, passes: Sequence[Callable[[GraphModule], None]]) -> GraphModule:
    """`graph` and all its regions without dead code, after `passes`.

    A node without a stack trace, as those of a backward have, gets that of the operator whose region it is in.

    Raises:
        UnsupportedOpError: a region's operator that cannot be compiled.
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
    return _make_graph_module(graph, graph.graph)  # without the regions of what was dead


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
                f"{line_of(node)}: the region of {node.target} takes the tensor {name} from around it; it has to be "
                "among the inputs"
            )


def check_control_flow(graph: GraphModule) -> None:
    """Refuse operators of control flow that cannot be compiled.

    Raises:
        UnsupportedOpError: the first of them, with the user's line.
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
