"""Stack scalars before elementwise operations instead of after them, as for the norms of all gradients.

IREE 3.13.0 puts neighbouring scalar operations into one dispatch, however many values the dispatch reads and writes. A
dispatch with more than 32 bindings fails when it is called ("binding count 53 > 32"). One operation on a vector is
also cheaper to run.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten


def stack_scalars_first(graph: GraphModule) -> None:
    """Rewrite stack([f(a), f(b), ...]) of rank-0 values to f(stack([a, b, ...])), for elementwise f of one tensor.

    Changes `graph` in place.
    """
    stacks = graph.graph.find_nodes(op="call_function", target=aten.stack.default)
    for node in stacks:
        while node is not None:
            node = _sink(graph.graph, node)
    if stacks:
        graph.graph.eliminate_dead_code()


def _sink(graph: Graph, stack: Node) -> Node | None:
    """Move the operation that computes each operand of `stack` behind the stack.

    Returns the new stack; None if different operations compute the operands.
    """
    operands: list[Node] = stack.args[0]
    first = operands[0]
    if not all(_is_scalar_map(o) and _key(o) == _key(first) for o in operands):
        return None
    sources = [o.args[0] for o in operands]
    with graph.inserting_before(stack):
        before = graph.call_function(aten.stack.default, (sources,))
        after = graph.call_function(first.target, (before, *first.args[1:]), first.kwargs)
    before.meta = {**stack.meta, "val": sources[0].meta["val"].new_empty(len(operands))}
    after.meta = dict(stack.meta)
    stack.replace_all_uses_with(after)
    graph.erase_node(stack)
    return before


def _is_scalar_map(node: Node) -> bool:
    """Whether `node` is an elementwise function of one rank-0 tensor and constants."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.pointwise in node.target.tags
        and len(node.all_input_nodes) == 1
        and node.args[0] is node.all_input_nodes[0]
        and node.meta["val"].ndim == 0
        and node.args[0].meta["val"].ndim == 0
    )


def _key(node: Node) -> tuple[object, ...]:
    return node.target, node.args[1:], node.kwargs, node.args[0].meta["val"].dtype
