"""Read the graphs of an ONNX file, nested ones too, as nodes and constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from irongrad.onnx.registry import DOMAINS, Node, Region, Static


class Reader:
    """Splits graphs into nodes and constants.

    Constants of a nested graph are constants of the model, like those of the outermost graph. They keep their name, or
    get one with a number if another value has that name.

    Attributes:
        initializers: the values of the initialisers, by name.
        constants: the values of the `Constant` nodes, by name.
    """

    def __init__(self, opset: int, file: str, taken: Iterable[str]) -> None:
        self.initializers: dict[str, Static] = {}
        self.constants: dict[str, Static] = {}
        self._opset, self._file = opset, file
        self._taken = set(taken)

    def nodes(self, graph: onnx.GraphProto, results: Iterable[str]) -> list[Node]:
        """Return the nodes of the outermost graph that `results` depend on."""
        self.initializers |= {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        self.constants |= {n.output[0]: _constant(n) for n in graph.node if _is_constant(n)}
        rest = enumerate((n for n in graph.node if not _is_constant(n)), start=1)
        return _needed([self._node(node, number, {}) for number, node in rest], results)

    def _node(self, node: onnx.NodeProto, number: int, renamed: Mapping[str, str]) -> Node:
        name = node.name or next((o for o in node.output if o), node.op_type)
        attributes = {a.name: self._attribute(a, number, renamed) for a in node.attribute}
        inputs, outputs = tuple(renamed.get(i, i) for i in node.input), tuple(node.output)
        return Node(node.op_type, node.domain, name, inputs, outputs, attributes, self._opset, self._file, number)

    def _attribute(self, attribute: onnx.AttributeProto, number: int, renamed: Mapping[str, str]) -> Any:
        if attribute.type == onnx.AttributeProto.GRAPH:
            return self._region(attribute.g, number, renamed)
        return _plain_attribute(attribute)

    def _region(self, graph: onnx.GraphProto, number: int, renamed: Mapping[str, str]) -> Region:
        """Convert the graph inside node `number`."""
        renamed = dict(renamed)
        for tensor in graph.initializer:
            renamed[tensor.name] = self._unused_name(tensor.name)
            self.initializers[renamed[tensor.name]] = numpy_helper.to_array(tensor)
        for node in filter(_is_constant, graph.node):
            renamed[node.output[0]] = self._unused_name(node.output[0])
            self.constants[renamed[node.output[0]]] = _constant(node)
        inputs = tuple(i.name for i in graph.input)
        outputs = tuple(renamed.get(o.name, o.name) for o in graph.output)
        nodes = _needed([self._node(n, number, renamed) for n in graph.node if not _is_constant(n)], outputs)
        return Region(inputs, tuple(nodes), outputs, _outside(inputs, nodes, outputs))

    def _unused_name(self, name: str) -> str:
        """Return a name that no other value has, and reserve it."""
        found = next(n for i in count(1) if (n := name if i == 1 else f"{name}_{i}") not in self._taken)
        self._taken.add(found)
        return found


def names_of(graph: onnx.GraphProto) -> set[str]:
    """Return the names of all values of the outermost graph."""
    tensors = [*graph.initializer, *graph.input]
    return {v.name for v in tensors} | {o for node in graph.node for o in node.output}


def _needed(nodes: Sequence[Node], results: Iterable[str]) -> list[Node]:
    """Return the nodes that `results` depend on, in order."""
    wanted, kept = set(results), []
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            wanted.update(node.reads)
            kept.append(node)
    return kept[::-1]


def _outside(inputs: Iterable[str], nodes: Iterable[Node], outputs: Iterable[str]) -> tuple[str, ...]:
    """Return the names that a graph reads but does not define."""
    defined, found = set(inputs), dict[str, None]()
    for node in nodes:
        found |= dict.fromkeys(n for n in node.reads if n not in defined)
        defined |= set(node.outputs)
    found |= dict.fromkeys(o for o in outputs if o not in defined)
    return tuple(found)


def _is_constant(node: onnx.NodeProto) -> bool:
    return bool(node.op_type == "Constant" and node.domain in DOMAINS)


def _plain_attribute(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return [_plain(v) for v in value] if isinstance(value, list) else _plain(value)


def _plain(value: Any) -> Any:
    """Return a string or number as a Python value.

    Of all decimals that round to the same float32, it takes the shortest, which is the one that someone once wrote.
    """
    if isinstance(value, float):
        return float(str(np.float32(value)))
    return value.decode() if isinstance(value, bytes) else value


def _constant(node: onnx.NodeProto) -> Static:
    (value,) = (_plain_attribute(a) for a in node.attribute)
    array = np.asarray(value)
    named = node.attribute[0].name
    dtype = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    return array.astype(dtype[named]) if named in dtype else array
