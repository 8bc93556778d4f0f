"""What the route over StableHLO needs of a graph: operators that torch-mlir 20261001 lowers to it.

All of the examples' are, but for a shift by a number (`x >> 3`), which random bits are made of.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch.fx import GraphModule

from irongrad.graph.nodes import call, value_of
from irongrad.graph.nodes import replace as replace_node
from irongrad.graph.step_graph import StepGraph

aten = torch.ops.aten


def for_stablehlo(graph: StepGraph) -> StepGraph:
    """The same functions in operators that have a lowering to StableHLO; `graph` stays as it is."""
    functions = {n: replace(f, graph=copy.deepcopy(f.graph)) for n, f in graph.functions.items()}
    for function in functions.values():
        _shift_by_tensors(function.graph)
    return replace(graph, functions=functions)


def _shift_by_tensors(module: GraphModule) -> None:
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten.__rshift__.Scalar):
        value, count = node.args
        shape = list(value_of(node).shape)
        with graph.inserting_before(node):
            counts = call(graph, aten.full.default, shape, count, like=node, dtype=value_of(node).dtype)
            replace_node(node, call(graph, aten.bitwise_right_shift.Tensor, value, counts, like=node))
