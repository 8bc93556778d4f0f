"""Calls in an exported graph that differentiate: those of `torch.autograd.grad`, and of `torch.func`.

torch.export records operators above autograd, so it sees neither what the autograd engine computes nor, in torch 2.13,
the levels of `torch.func.grad`. These calls stand in the graph for them. A tracer below autograd that interprets the
graph runs them, and records the operators of the derivative.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch._ops import HigherOrderOperator
from torch.autograd.graph import _engine_run_backward
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from irongrad.graph.flat_graph import regions_of


class Call(HigherOrderOperator):
    """A function that may stand in an exported graph: torch.export lets operators alone be called there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(f"irongrad_{function.__name__.strip('_')}")
        self._function = function
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        return self._function(*args, **kwargs)


@Call
def tracked(tensor: Tensor) -> Tensor:
    """Return `tensor` itself if autograd follows it, and an alias of it that autograd follows otherwise."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


@Call
def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor | None], create_graph: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `outputs` by `inputs`, as `torch.autograd.grad` does; None for an input without one.

    Args:
        outputs: the tensors to differentiate.
        inputs: the tensors to differentiate by.
        weights: the gradient of each output.
        create_graph: whether the gradients can be differentiated.
    """
    found: tuple[Tensor | None, ...] = _engine_run_backward(
        tuple(outputs), tuple(weights), True, create_graph, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


@Call
def follow(tensor: Tensor) -> Tensor:
    """Make the innermost level of `torch.func.grad` follow `tensor`, and return it."""
    with enable_inplace_requires_grad(True):
        return tensor.requires_grad_()


# The calls by which `torch.func` opens a level, closes it, and moves tensors into and out of it, by torch 2.13's names.
_OPEN = ("_grad_increment_nesting", "_vmap_increment_nesting", "_jvp_increment_nesting")
_CLOSE = ("_grad_decrement_nesting", "_vmap_decrement_nesting", "_jvp_decrement_nesting")
_UNWRAP = ("_remove_batch_dim", "_unwrap_for_grad")
_MOVE = ("_add_batch_dim", "_wrap_for_grad", *_UNWRAP)
LEVEL_CALLS = {
    **{name: Call(getattr(_functorch, name)) for name in (*_OPEN, *_CLOSE, *_MOVE)},
    **{name: Call(getattr(torch._C, name)) for name in ("_enter_dual_level", "_exit_dual_level")},
    **{name: Call(getattr(torch._VF, name)) for name in ("_make_dual", "_unpack_dual")},
    "_set_tensor_requires_grad": follow,
}
SET_GRADIENTS = Call(torch._C._set_grad_enabled)
OPEN = frozenset(LEVEL_CALLS[name] for name in _OPEN)
CLOSE = frozenset(LEVEL_CALLS[name] for name in _CLOSE)
UNWRAP = frozenset(LEVEL_CALLS[name] for name in _UNWRAP)


def transforms(nodes: Sequence[Node]) -> list[range]:
    """Return where transforms of `torch.func` lie among `nodes`, with calls of the functions that `vjp` returns."""
    found: list[range] = []
    inside: dict[Node, int] = {}
    depth = 0
    for place, node in enumerate(nodes):
        if node.target in OPEN and not depth:
            found.append(range(place, place))
        depth += (node.target in OPEN) - (node.target in CLOSE)
        # A function that torch.func.vjp returns differentiates tensors of a level that is closed.
        reads = node.target in (gradients, operator.getitem)
        late = [inside[i] for i in node.all_input_nodes if i in inside] if reads and not depth else []
        if late:
            del found[min(late) + 1 :]
        if late or depth or node.target in CLOSE:
            found[-1] = range(found[-1].start, place + 1)
        if (late and node.target is gradients) or (depth and node.target not in UNWRAP):
            inside[node] = len(found) - 1
    return found


def differentiates(graph: GraphModule) -> bool:
    """Whether `graph`, or a region of it, has autograd follow a tensor."""
    return any(
        node.target in (tracked, gradients) or any(map(differentiates, regions_of(graph, node)))
        for node in graph.graph.nodes
    )


@contextmanager
def renamed_outputs(program: ExportedProgram) -> Iterator[None]:
    """While open, the signature of `program` follows when another node takes the place of an output."""
    with program.graph_module._set_replace_hook(program.graph_signature.get_replace_hook()):
        yield


def with_gradients(program: ExportedProgram) -> ExportedProgram:
    """Return a program that enables gradients itself, if it differentiates: `run_decompositions` disables them."""
    if not differentiates(program.graph_module):
        return program
    outputs = [replace(spec, arg=copy.copy(spec.arg)) for spec in program.graph_signature.output_specs]
    program = program._update(_copied(program.graph_module), replace(program.graph_signature, output_specs=outputs))
    graph = program.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    output = graph.output_node()
    with graph.inserting_before(first):
        graph.call_function(torch._C._set_grad_enabled, (True,)).meta["val"] = None
    with renamed_outputs(program), graph.inserting_before(output):
        for node in output.all_input_nodes:
            detached = graph.call_function(torch.ops.aten.detach.default, (node,))
            detached.meta = dict(node.meta)
            node.replace_all_uses_with(detached, lambda user: user is output)
        graph.call_function(torch._C._set_grad_enabled, (False,)).meta["val"] = None
    program.graph_module.recompile()
    return program


def _copied(graph: GraphModule) -> GraphModule:
    """A copy of `graph` with nodes of its own, over the same regions and tensors."""
    nodes: dict[Node, Node] = {}
    made = Graph()
    results = made.graph_copy(graph.graph, nodes)
    made.output(results).meta = dict(graph.graph.output_node().meta)
    made.set_codegen(graph.graph._codegen)
    result = GraphModule(graph, made)
    result.meta = dict(graph.meta)
    return result


def track_inputs(program: ExportedProgram) -> None:
    """Make autograd follow every tensor by which `program` differentiates, wherever the program runs."""
    with renamed_outputs(program):
        _track_inputs(program.graph_module)


def _track_inputs(graph: GraphModule) -> None:
    for node in list(graph.graph.nodes):
        for region in regions_of(graph, node):
            _track_inputs(region)
        if node.target is not gradients:
            continue
        for tensor in node.args[1]:
            if tensor.target is tracked:
                continue
            last = _last_placeholder(graph) if tensor.op == "placeholder" else tensor
            with graph.graph.inserting_after(last):
                same = graph.graph.call_function(tracked, (tensor,))
            same.meta = dict(tensor.meta)
            tensor.replace_all_uses_with(same, delete_user_cb=lambda user, same=same: user is not same)
    graph.recompile()


def _last_placeholder(graph: GraphModule) -> Node:
    return [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
