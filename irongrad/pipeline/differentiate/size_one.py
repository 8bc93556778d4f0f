"""Try a captured program with a dimension of size one, on shapes alone.

torch.export takes every size for two or more. So it knows that `x[:2]` has two rows, without a guard. With a single row
the graph would be wrong: such a dimension has to be two or more in every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from irongrad.diagnostics.source_lines import quiet_export
from irongrad.pipeline.differentiate.specialise import Program, padded_shape
from irongrad.sizes.dimensions import Names
from irongrad.sizes.expressions import Sizes, symbol
from irongrad.sizes.open import name_of

aten = torch.ops.aten

# The graph keeps a named dimension of size one, although these operators drop it.
_SQUEEZES = frozenset({aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze_copy.default})
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _WrongSizeError(Exception):
    """A node has other sizes than the graph states, or does not run."""


def two_or_more(program: Program, dimension: str) -> list[Any]:
    """The condition that `dimension` is at least two, if the graph of `program` is wrong where it is one."""
    examples = zip(program.arguments, program.examples, strict=True)
    dims = [program.dynamic.get(a.name, {}) if a.kind == "input" else {} for a, _ in examples]
    bound = {name_of(s) for size in program.derived.values() for s in size.free_symbols} | program.derived.keys()
    sizes = {n: e.shape[d] for e, names in zip(program.examples, dims, strict=True) for d, n in names.items()}
    if dimension in bound or dimension not in sizes:
        return []
    at_one = {**sizes, dimension: 1}

    def interpret(graph: GraphModule, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return _run(graph, values, program.names, at_one)

    # PyTorch logs a traceback for an operator that does not run, which is an answer here.
    with quiet_export(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        values = [
            torch.empty(padded_shape(e.shape, names, at_one), dtype=e.dtype)
            for e, names in zip(program.examples, dims, strict=True)
        ]
        try:
            program.run(interpret, *values)
        except Exception:  # between graphs, PyTorch's functions raise what they like, and a size of one is refused
            return [sympy.Ge(symbol(dimension), 2)]
    return []


def _run(
    graph: GraphModule, values: Sequence[torch.Tensor], names: Names, at: dict[str, int]
) -> Sequence[torch.Tensor]:
    """Run the nodes of a graph, each on arguments of the sizes that the graph states."""
    units = {s for size in names.values() for s in size.free_symbols if s.name != name_of(s)}
    sizes = Sizes(at, {name: torch.tensor(size) for name, size in at.items()}, units)
    found: dict[Node, Any] = {}
    given = iter(values)

    def number(value: Any) -> Any:
        if not isinstance(value, _SYMBOLIC):
            return value
        return sizes.bucket(sympy.sympify(value.node.expr).xreplace(dict(names)))

    def stated(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty([number(s) for s in value.shape], dtype=value.dtype)
        if isinstance(value, list | tuple):
            return [stated(v) for v in value]
        return number(value)

    for node in graph.graph.nodes:
        if node.op == "placeholder":
            found[node] = next(given)
        elif node.op == "get_attr":
            found[node] = getattr(graph, str(node.target), None)
        elif node.op == "call_function":
            found[node] = stated(node.meta.get("val"))
            _check(node, map_arg((node.args, node.kwargs), found.__getitem__), found[node])
    outputs: Sequence[torch.Tensor] = map_arg(graph.graph.output_node().args[0], found.__getitem__)
    return outputs


def _check(node: Node, arguments: Any, stated: Any) -> None:
    """Run one operator, and compare the sizes of its results with those that the graph states."""
    if not isinstance(node.target, OpOverload) or isinstance(node.target, HigherOrderOperator):
        return
    if node.target in _SQUEEZES or not isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
        return
    try:
        made = node.target(*arguments[0], **arguments[1])
    except Exception as error:  # a kernel or a shape function raises what it likes
        raise _WrongSizeError from error
    for result, expected in zip(tree_leaves(made), tree_leaves(stated), strict=True):
        if isinstance(expected, torch.Tensor) and tuple(result.shape) != tuple(expected.shape):
            raise _WrongSizeError
