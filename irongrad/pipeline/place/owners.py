"""Which part of a placed model computes a node, and which holds a tensor of the state.

A node belongs to the part whose path is the longest that its module's path begins with; a node of the backward has the
path of the forward node that it differentiates. What no path names runs where its largest operand is, and a module that
no path names as its first node does. What depends on inputs, hyperparameters, constants and the counters alone is
*free*: each part computes it for itself. Parameters and buffers that no path names are held where they are first used.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from irongrad.graph.sources import MODEL, module_of
from irongrad.graph.step_graph import Function, StateTensor, StepGraph, Value
from irongrad.memory_model.kernel_roles import bytes_of
from irongrad.pipeline.place.parts import Part
from irongrad.runtime.manifest import Role

_COUNTED = (Role.COUNTER, Role.RANDOM)


class Ownership:
    """Finds the owners of nodes and of state, function by function; what one function decides holds for the next.

    Attributes:
        state: the number of the part of each state tensor that one part holds, as far as it is decided.
    """

    def __init__(self, parts: Sequence[Part], graph: StepGraph) -> None:
        self._paths = {path: number for number, part in enumerate(parts) for path in part.paths}
        self._tensors = {t.name: t for t in graph.state}
        self._parameters = sorted((t.name for t in graph.state if t.role is Role.PARAMETER), key=len, reverse=True)
        self._unnamed: dict[str, int] = {}
        self.state: dict[str, int] = {}
        for tensor in graph.state:
            named = [number for name in (tensor.name, *tensor.aliases) if (number := self._named(name)) is not None]
            if named and tensor.role is not Role.OPTIMIZER:
                self.state[tensor.name] = named[0]

    def of(self, function: Function) -> dict[Node, int]:
        """The number of the part of each node of `function` that is not free, and decide on the state that it reads."""
        placeholders = dict(zip(function.graph.graph.find_nodes(op="placeholder"), function.arguments, strict=True))
        positions = {node: number for number, node in enumerate(function.graph.graph.nodes)}
        found: dict[Node, int] = {}
        waiting: dict[Node, None] = {}
        for node in function.graph.graph.nodes:
            number = (
                self._of_argument(placeholders[node]) if node in placeholders else self._of_node(node, found, positions)
            )
            if number is not None:
                found[node] = number
            elif (node in placeholders and self._is_undecided(placeholders[node])) or any(
                n in waiting for n in node.all_input_nodes
            ):
                waiting[node] = None
        for node in reversed(waiting):  # as its first user, which is further back in the graph
            found[node] = next((found[user] for user in node.users if user in found), 0)
        for node, value in placeholders.items():
            if value.kind == "state" and node in found:
                self.state.setdefault(value.name, found[node])
        return {node: number for node, number in found.items() if node.op != "output"}

    def holder(self, tensor: StateTensor) -> int | None:
        """The number of the part that holds a tensor; None if all parts do."""
        if is_replicated(tensor):
            return None
        return self.of_state(tensor.name) or 0

    def of_state(self, name: str) -> int | None:
        """The number of the part that holds the tensor `name`, or the gradient of it; None if it is undecided."""
        tensor = self._tensors[name]
        if tensor.role is Role.OPTIMIZER:
            parameter = next((p for p in self._parameters if name.endswith(f"/{p}")), None)
            if parameter is not None and parameter in self.state:
                return self.state[parameter]
        return self.state.get(name)

    def _of_argument(self, value: Value) -> int | None:
        if value.kind not in ("state", "accumulator") or is_replicated(self._tensors[value.name]):
            return None
        return self.of_state(value.name)

    def _is_undecided(self, value: Value) -> bool:
        return value.kind in ("state", "accumulator") and not is_replicated(self._tensors[value.name])

    def _of_node(self, node: Node, found: Mapping[Node, int], positions: Mapping[Node, int]) -> int | None:
        if node.op != "call_function":
            return None
        operands = [n for n in node.all_input_nodes if n in found]
        if node.target is operator.getitem:
            return found.get(node.all_input_nodes[0])
        path = module_of(node)
        named = self._named(path)
        if named is not None or not operands:
            return named
        # Of equal ones the last: a residual, or its gradient, is added where the branch around it ends.
        largest = found[max(operands, key=lambda operand: (_size(operand), positions[operand]))]
        return self._unnamed.setdefault(path, largest) if path not in ("", MODEL) else largest

    def _named(self, path: str) -> int | None:
        while path:
            if path in self._paths:
                return self._paths[path]
            path = path.rpartition(".")[0]
        return None


def is_replicated(tensor: StateTensor) -> bool:
    """Whether every part holds a tensor: numbers that a step counts up, such as Adam's step."""
    return tensor.role in _COUNTED or (tensor.role is Role.OPTIMIZER and tensor.initial.ndim == 0)


def _size(node: Node) -> int:
    return bytes_of(node) if isinstance(node.meta.get("val"), torch.Tensor) else 0
