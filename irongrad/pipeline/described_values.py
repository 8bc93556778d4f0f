"""Describe Python values and exported graphs as nested tuples; different values have a different `repr`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

import sympy
import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from irongrad.diagnostics.portable_paths import portable
from irongrad.diagnostics.source_lines import is_user_file
from irongrad.runtime.installed import PACKAGE
from irongrad.sizes.dimensions import is_condition, symbolic_inputs
from irongrad.sizes.symbols import environment_of

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n\s+(.*))?')
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type(...))
# Types whose values are identified by their names.
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, OpOverload, HigherOrderOperator, torch.SymInt)


class UnknownValueError(Exception):
    """A value that cannot be distinguished from other values of its type."""


def described(value: Any) -> Any:
    """Describe `value` as a tuple: a tensor by its contents, a fake tensor by its type.

    Raises:
        UnknownValueError: the value is or contains something else than numbers, text, choices, tensors and
            containers of them.
    """
    if isinstance(value, Node):
        return ("node", value.name)
    if isinstance(value, FakeTensor):
        return ("fake", *_layout(value))
    if isinstance(value, torch.Tensor):
        return ("tensor", *_layout(value), _sha256(value))
    if isinstance(value, _NAMED):
        return (type(value).__name__, str(value))
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, Mapping):
        return (type(value).__name__, tuple((described(k), described(v)) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(map(described, value)))
    if isinstance(value, Enum) and type(value).__module__.startswith(f"{PACKAGE.name}."):  # the sources define it
        return (type(value).__qualname__, value.name)
    if isinstance(value, slice):
        return ("slice", *map(described, (value.start, value.stop, value.step)))
    raise UnknownValueError(type(value).__qualname__)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.layout is not torch.strided:
        raise UnknownValueError(str(tensor.layout))
    return (str(tensor.dtype), *map(str, (tuple(tensor.shape), tensor.stride(), tensor.device)), tensor.requires_grad)


def _sha256(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def described_program(program: ExportedProgram) -> Any:
    """Describe an exported program without its parameters' values: its graph, signature, constants and sizes."""
    signature, constants = str(program.graph_signature), described(program.constants)
    return (described_graph(program.graph_module), signature, constants, _sizes(program))


def _sizes(program: ExportedProgram) -> Any:
    """Describe the symbols of dynamic sizes: their ranges, their guards, and the sizes that replace them."""
    ranges = tuple((str(s), str(r.lower), str(r.upper)) for s, r in program.range_constraints.items())
    environment = environment_of(symbolic_inputs(program))
    if environment is None:
        return ranges
    guards = tuple((sympy.srepr(g.expr), is_condition(g)) for g in environment.guards)
    equal = tuple((str(s), sympy.srepr(size)) for s, size in environment.replacements.items())
    return (ranges, guards, equal)


def described_graph(graph: GraphModule) -> Any:
    """Describe a graph: its nodes with their origins, its regions, and the tensors that it holds."""
    return tuple(_node(graph, n) for n in graph.graph.nodes)


def _node(graph: GraphModule, node: Node) -> Any:
    target = _attribute(graph, str(node.target)) if node.op == "get_attr" else _target(node.target)
    operands = described(node.args), described(node.kwargs)
    return (node.name, node.op, target, *operands, described(node.meta.get("val")), _origin(node))


def _attribute(graph: GraphModule, path: str) -> Any:
    value: Any = graph
    for part in path.split("."):
        value = getattr(value, part)
    return described_graph(value) if isinstance(value, GraphModule) else described(value)


def _target(target: Any) -> str:
    return target if isinstance(target, str) else f"{getattr(target, '__module__', '')}.{target}"


def _origin(node: Node) -> Any:
    """The user's code behind a node, which the artifact names in locations and in its memory plan."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or node.stack_trace or "")
    layers = (node.meta.get("nn_module_stack") or {}).values()
    return (
        tuple((portable(path), is_user_file(path), *rest) for path, *rest in frames),
        tuple((path, kind if isinstance(kind, str) else kind.__qualname__) for path, kind in layers),
    )
