"""Which integer inputs are used as indices, and so must lie in a range.

Eager checks an index where it is used. Compiled code does not: an index out of range reads or writes somewhere
else. So the range is found here, from the exported graph, and checked at the entry of every call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram

aten = torch.ops.aten

# Operators through which every element of the result is an element of the first argument.
_SAME_VALUES = frozenset(
    str(p)
    for p in (
        aten.view,
        aten.reshape,
        aten.flatten,
        aten.unflatten,
        aten.transpose,
        aten.permute,
        aten.t,
        aten.unsqueeze,
        aten.squeeze,
        aten.slice,
        aten.select,
        aten.expand,
        aten.clone,
        aten.contiguous,
        aten.alias,
        aten.detach,
        aten.to,
        aten._to_copy,
        aten.lift_fresh_copy,
        aten._assert_tensor_metadata,
    )
)


@dataclass(frozen=True)
class Range:
    """The values that an integer input may have.

    Attributes:
        input: its name.
        minimum: the smallest, inclusive.
        maximum: the largest, inclusive.
        exempt: one more value that is accepted (`ignore_index`), or None.
    """

    input: str
    minimum: int
    maximum: int
    exempt: int | None = None


def index_ranges(program: ExportedProgram, inputs: Iterable[str]) -> list[Range]:
    """Find the range of each input of `program` that is used as an index, the intersection of all its uses."""
    placeholders = dict(zip(program.graph_signature.user_inputs, inputs, strict=True))
    source: dict[torch.fx.Node, str] = {}
    found: dict[str, Range] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in placeholders and _is_integer(node):
            source[node] = placeholders[node.name]
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if str(node.target._overloadpacket) in _SAME_VALUES and node.args and node.args[0] in source:
            if _is_integer(node):
                source[node] = source[node.args[0]]  # type: ignore[index]
            continue
        for index, low, high, exempt in _uses(node):
            if index in source:
                name = source[index]
                found[name] = _intersect(found.get(name), Range(name, low, high, exempt))
    return list(found.values())


def _is_integer(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)


def _intersect(a: Range | None, b: Range) -> Range:
    if a is None:
        return b
    exempt = a.exempt if a.exempt == b.exempt else None
    return Range(a.input, max(a.minimum, b.minimum), min(a.maximum, b.maximum), exempt)


def _size(node: torch.fx.Node, dim: int) -> int:
    value = node.meta["val"]
    return int(value.shape[dim]) if value.ndim else 1


def _arguments(node: torch.fx.Node) -> dict[str, object]:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    values: dict[str, object] = {a.name: a.default_value for a in schema if a.has_default_value()}
    values.update({a.name: v for a, v in zip(schema, node.args, strict=False)})
    values.update(node.kwargs)
    return values


def _uses(node: torch.fx.Node) -> list[tuple[torch.fx.Node, int, int, int | None]]:
    """(index node, minimum, maximum, exempt) for every argument of `node` that is an index."""
    values = _arguments(node)
    packet = node.target._overloadpacket  # type: ignore[union-attr]
    if packet is aten.embedding:
        return [(values["indices"], 0, _size(values["weight"], 0) - 1, None)]  # type: ignore[arg-type,list-item]
    if packet in (aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss_nd, aten.nll_loss2d):
        scores: torch.fx.Node = values["self"]  # type: ignore[assignment]
        classes = _size(scores, 1 if scores.meta["val"].ndim > 1 else 0)
        return [(values["target"], 0, classes - 1, int(values["ignore_index"]))]  # type: ignore[list-item,call-overload]
    if packet in (aten.gather, aten.scatter, aten.scatter_add, aten.scatter_reduce):
        size = _size(values["self"], int(values["dim"]))  # type: ignore[arg-type,call-overload]
        return [(values["index"], 0, size - 1, None)]  # type: ignore[list-item]
    if packet in (aten.index_select, aten.index_add, aten.index_copy):
        size = _size(values["self"], int(values["dim"]))  # type: ignore[arg-type,call-overload]
        return [(values["index"], 0, size - 1, None)]  # type: ignore[list-item]
    if packet is aten.one_hot and int(values["num_classes"]) > 0:  # type: ignore[call-overload]
        return [(values["self"], 0, int(values["num_classes"]) - 1, None)]  # type: ignore[list-item,call-overload]
    if packet in (aten.index, aten.index_put):
        indices: list[torch.fx.Node | None] = values["indices"]  # type: ignore[assignment]
        sized = [(i, _size(values["self"], d)) for d, i in enumerate(indices) if i is not None]  # type: ignore[arg-type]
        return [(i, -size, size - 1, None) for i, size in sized]
    return []
