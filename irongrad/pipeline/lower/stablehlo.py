"""Rewrites for the route over StableHLO: operators that torch-mlir 20261001 cannot lower to StableHLO are replaced.

Of the operators in the examples, only a shift by a number (`x >> 3`) lacks a lowering. Random bits are made with it.
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
    """A copy of `graph` whose operators all have a lowering to StableHLO."""
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
