"""Find the integer inputs that are used as indices, and their ranges.

Eager checks an index where it is used. Compiled code does not: an index out of range reads or writes other memory. So
the range is derived here from the exported graph, and each entry point checks it at the start of a call.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from irongrad.graph.flat_graph import FlatGraph
from irongrad.graph.movements import OF_ONE_TENSOR, Movement, names
from irongrad.graph.step_graph import Range
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.runtime.manifest import UNLIMITED
from irongrad.sizes.dimensions import Names, named_size, names_in_program

aten = torch.ops.aten

# Operators whose result holds only unchanged elements of their integer arguments, and constants.
_SAME_VALUES = names(OF_ONE_TENSOR | Movement.WRITE | Movement.JOIN | Movement.PAD | Movement.CAST) | {
    "repeat_interleave"
}


@dataclass(frozen=True)
class _Use:
    """An argument of an operator that is an index.

    Attributes:
        index: the argument.
        size: the size of the indexed dimension, a number or symbolic.
        from_end: whether negative indices count from the end.
        exempt: one more accepted value, or None.
    """

    index: object
    size: int | torch.SymInt
    from_end: bool = False
    exempt: int | None = None


def step_ranges(captured: CapturedStep) -> list[Range]:
    """Find the ranges of a step's inputs: the values that training, evaluation and prediction all accept."""
    dynamic, inputs = captured.step.dynamic, list(captured.step.inputs)
    found = index_ranges(captured.train, inputs, dynamic)
    if captured.eval is not None:
        found += index_ranges(captured.eval, inputs, dynamic)
    if captured.predict is not None:
        found += index_ranges(captured.predict, captured.predict_inputs, dynamic)
    merged: dict[str, Range] = {}
    for limit in found:
        merged[limit.input] = _intersect(merged.get(limit.input), limit)
    return list(merged.values())


def index_ranges(
    program: ExportedProgram, inputs: Sequence[str], dynamic: Mapping[str, Mapping[int, str]]
) -> list[Range]:
    """Find the range of each input of `program` that is used as an index, the intersection of all its uses.

    Args:
        program: an exported program.
        inputs: the names of its inputs.
        dynamic: names of dimensions, by the input's name and the dimension's position.
    """
    placeholders = dict(zip(program.graph_signature.user_inputs, inputs, strict=True))
    graph = FlatGraph(program.graph_module)
    source = {
        node: {placeholders[node.name]}
        for node in graph.nodes
        if node.op == "placeholder"
        and graph.origins(node) == [node]
        and node.name in placeholders
        and _is_integer(node)
    }
    return _ranges(graph.nodes, source, graph.origins, names_in_program(program, inputs, dynamic))


def function_ranges(graph: GraphModule, inputs: Iterable[str]) -> list[Range]:
    """Find the range of each input of a function's `graph` that is used as an index, as `index_ranges` does."""
    placeholders = (n for n in graph.graph.nodes if n.op == "placeholder")
    source = {node: {name} for node, name in zip(placeholders, inputs, strict=True) if _is_integer(node)}
    flat = FlatGraph(graph)
    return _ranges(flat.nodes, source, flat.origins, {})


def _ranges(
    nodes: Iterable[Node], source: dict[Node, set[str]], origins: Callable[[Any], list[Any]], names: Names
) -> list[Range]:
    """The ranges of inputs.

    Args:
        nodes: the nodes in order.
        source: the inputs whose values a node holds; nodes that keep values are added.
        origins: the nodes that compute a value, inside or outside a region.
        names: the symbols in sizes, as expressions of named dimensions.
    """
    found: dict[str, Range] = {}
    for node in nodes:
        if keeps_values(node):
            source[node] = set().union(*(source.get(o, ()) for n in node.all_input_nodes for o in origins(n)))
        elif isinstance(node.target, torch._ops.OpOverload):
            for use in filter(_has_elements, _uses(node)):
                for name in {name for o in origins(use.index) for name in source.get(o, ())}:
                    found[name] = _intersect(found.get(name), _range(name, use, names))
    return list(found.values())


def keeps_values(node: Node) -> bool:
    """Whether a node holds only elements of its integer arguments, and constants."""
    packet = getattr(node.target, "_overloadpacket", None)
    return node.target is operator.getitem or getattr(packet, "__name__", "") in _SAME_VALUES


def _is_integer(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)


def _has_elements(use: _Use) -> bool:
    """Whether the index has elements; an empty index may go into an empty tensor, which allows no index."""
    shape = use.index.meta["val"].shape if isinstance(use.index, Node) else ()
    return not any(isinstance(size, int) and size == 0 for size in shape)


def _intersect(a: Range | None, b: Range) -> Range:
    if a is None:
        return b
    exempt = a.exempt if a.exempt == b.exempt else None
    limits = tuple(dict.fromkeys((*a.limits, *b.limits)))
    return Range(a.input, max(a.minimum, b.minimum), min(a.maximum, b.maximum), exempt, limits)


def _range(name: str, use: _Use, names: Names) -> Range:
    """The range of an input with one use.

    If the size varies, so does a lower bound below zero. The range then starts at zero instead.
    """
    size = named_size(use.size, names)
    if isinstance(size, int):
        return Range(name, -size if use.from_end else 0, size - 1, use.exempt)
    return Range(name, 0, UNLIMITED, use.exempt, (size - 1,))


def _size(node: torch.fx.Node, dim: int) -> int | torch.SymInt:
    value = node.meta["val"]
    size: int | torch.SymInt = value.shape[dim] if value.ndim else 1
    return size


def _arguments(node: torch.fx.Node) -> dict[str, object]:
    schema = node.target._schema.arguments
    values: dict[str, object] = {a.name: a.default_value for a in schema if a.has_default_value()}
    values.update({a.name: v for a, v in zip(schema, node.args, strict=False)})
    values.update(node.kwargs)
    return values


def _uses(node: torch.fx.Node) -> list[_Use]:
    """The arguments of `node` that are indices."""
    values: dict[str, Any] = _arguments(node)
    name = str(node.target._overloadpacket).removeprefix("aten.").rstrip("_")
    if name in ("embedding", "embedding_bag"):
        return [_Use(values["indices"], _size(values["weight"], 0))]
    if name == "cross_entropy_loss" or re.fullmatch("nll_loss(_nd|2d)?(_forward)?", name):
        scores = values["self"]
        classes = _size(scores, 1 if scores.meta["val"].ndim > 1 else 0)
        return [_Use(values["target"], classes, exempt=int(values["ignore_index"]))]
    if name == "multi_margin_loss":
        return [_Use(values["target"], _size(values["self"], -1))]
    if name in ("gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add", "index_copy"):
        return [_Use(values["index"], _size(values["self"], int(values["dim"])))]
    if name == "index_fill":
        return [_Use(values["index"], _size(values["self"], int(values["dim"])), from_end=True)]
    if name in ("take", "put"):
        return [_Use(values["index"], values["self"].meta["val"].numel(), from_end=True)]
    if name == "take_along_dim" and values["dim"] is not None:
        return [_Use(values["indices"], _size(values["self"], int(values["dim"])), from_end=True)]
    if name == "one_hot" and int(values["num_classes"]) > 0:
        return [_Use(values["self"], int(values["num_classes"]))]
    if name in ("index", "index_put"):
        return list(_tensor_indices(values["self"], values["indices"]))
    return []


def _tensor_indices(tensor: torch.fx.Node, indices: Sequence[torch.fx.Node | None]) -> Iterator[_Use]:
    """The uses in `tensor[indices]`; a mask indexes as many dimensions as it has."""
    dim = 0
    for index in indices:
        if index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8):
            dim += index.meta["val"].ndim
            continue
        if index is not None:
            yield _Use(index, _size(tensor, dim), from_end=True)
        dim += 1
