"""A chain of functions of a step graph as one function."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.fx import Graph, GraphModule, Node

from irongrad.graph.sources import keep_phase
from irongrad.graph.step_graph import Function, StepGraph, Value


def chained(chain: Sequence[str], graph: StepGraph) -> Function:
    """The function that calls those of `chain` in turn, each on the results of those before; gradients stay inside."""
    functions = {name: graph.functions[name] for name in chain}
    root, whole = nn.Module(), Graph()
    values = _arguments(list(functions.values()), whole)
    arguments, results = tuple(values), dict[Value, Node]()
    for number, (name, function) in enumerate(functions.items()):
        made = _copied(name, function, values, whole, root, f"body{number}_")
        values |= made
        results |= {result: node for result, node in made.items() if result.kind != "gradient"}
    whole.output([*results.values()])
    return Function(GraphModule(root, whole), arguments, tuple(results))


def _arguments(functions: Sequence[Function], graph: Graph) -> dict[Value, Node]:
    """A placeholder for each value that a function takes and none before it gives."""
    taken: dict[Value, Node] = {}
    given: set[Value] = set()
    for function in functions:
        for number, value in enumerate(function.arguments):
            if value not in taken and value not in given:
                taken[value] = graph.placeholder(f"argument{len(taken)}")
                taken[value].meta = {"val": function.example(number)}
        given |= {*function.results}
    return taken


def _copied(
    name: str, function: Function, values: dict[Value, Node], graph: Graph, root: nn.Module, prefix: str
) -> dict[Value, Node]:
    """Copy the nodes of the function `name` behind those of `graph`, and its bodies into `root`; return its results."""
    nodes = function.graph.graph
    new = dict(zip(nodes.find_nodes(op="placeholder"), (values[a] for a in function.arguments), strict=True))
    for node in nodes.nodes:
        if node.op == "get_attr":
            own = prefix + str(node.target).replace(".", "_")
            setattr(root, own, function.graph.get_submodule(str(node.target)))
            new[node] = graph.get_attr(own)
            new[node].meta = dict(node.meta)
        elif node.op == "call_function":
            new[node] = graph.node_copy(node, new.__getitem__)
            keep_phase(name, new[node])
    return {result: new[node] for result, node in zip(function.results, nodes.output_node().args[0], strict=True)}
