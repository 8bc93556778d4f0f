"""Find the arguments of operators that are indices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from irongrad.diagnostics.source_lines import line_of

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_MASKS = (torch.bool, torch.uint8)

# Operators with one index into a dimension of their first argument; negative indices are errors.
_ALONG_A_DIMENSION = frozenset(
    ["gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add", "index_copy", "index_reduce"]
)


@dataclass(frozen=True, eq=False)
class Use:
    """An argument of an operator that is an index.

    Attributes:
        node: the operator's node.
        index: the argument.
        size: the size of the indexed dimension, a number or symbolic.
        from_end: whether negative indices count from the end.
        exempt: one more accepted value, or None.
        beyond: how far behind the last place an index may be: 1 for a length, or the end of a part.
    """

    node: Node
    index: Node
    size: int | torch.SymInt
    from_end: bool = False
    exempt: int | None = None
    beyond: int = 0

    @property
    def limit(self) -> Any:
        """The number that an index must be smaller than."""
        return self.size + self.beyond


@dataclass(frozen=True, eq=False)
class Assertion(Use):
    """A condition that has to hold: as an index into a dimension of size 1, it is 0 where it holds, and 1 elsewhere.

    Attributes:
        index: the condition, with one element of any dtype.
        line: the user's line.
        says: the message of the assertion; empty for none.
    """

    line: str = ""
    says: str = ""


def assertions_of(node: Node) -> list[Assertion]:
    """Return what a node asserts."""
    if node.target is not torch.ops.aten._assert_async.msg:
        return []
    condition, message = node.args
    assert isinstance(condition, Node)
    line, separator, says = str(message).partition("\n")  # as the capture writes it
    return [Assertion(node, condition, 1, line=line if separator else line_of(node), says=says if separator else line)]


def without_assertions(nodes: Iterable[Node]) -> None:
    """Erase assertions from the graphs that hold `nodes`: guards check them."""
    for node in list(nodes):
        if assertions_of(node):
            node.graph.erase_node(node)


def uses_of(node: Node) -> list[Use]:
    """Return the arguments of `node` that are indices and have elements.

    An empty index may go into an empty tensor, which allows no index.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    return [use for use in _uses(node) if is_integer(use.index) and _has_elements(use.index)]


def is_integer(value: object) -> bool:
    """Whether a value is a node of an integer tensor."""
    found = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(found, torch.Tensor) and found.dtype in _INTEGERS


def _has_elements(index: Node) -> bool:
    return not any(isinstance(size, int) and size == 0 for size in index.meta["val"].shape)


def operator_name(node: Node) -> str:
    """The name of a node's operator, without its namespace, its overload, and the mark of a change in place."""
    packet = getattr(node.target, "_overloadpacket", None)
    name = str(getattr(packet, "__name__", ""))
    return name if name.startswith("__") else name.removesuffix("_")


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of a node by name."""
    schema = node.target._schema.arguments
    values: dict[str, Any] = {a.name: a.default_value for a in schema if a.has_default_value()}
    values.update({a.name: v for a, v in zip(schema, node.args, strict=False)})
    values.update(node.kwargs)
    return values


def size_along(node: Node, dim: int) -> int | torch.SymInt:
    """The size of a tensor along a dimension; 1 for a tensor of rank 0."""
    value = node.meta["val"]
    size: int | torch.SymInt = value.shape[dim] if value.ndim else 1
    return size


def _uses(node: Node) -> list[Use]:
    values = arguments_of(node)
    name = operator_name(node)
    if "num_weights" in values:  # the gradient of a lookup
        rows = values["num_weights"]
        return [Use(node, values["indices"], rows.meta["val"] if isinstance(rows, Node) else rows)]
    if name == "embedding_bag" or name.startswith("_embedding_bag"):
        offsets = values.get("offsets")
        weight, indices = values["weight"], values["indices"]
        found = [Use(node, indices, size_along(weight, 0))]
        if isinstance(offsets, Node):
            found.append(Use(node, offsets, indices.meta["val"].numel(), beyond=1))
        return found
    if name == "embedding":
        return [Use(node, values["indices"], size_along(values["weight"], 0))]
    if name == "cross_entropy_loss" or re.fullmatch("nll_loss(_nd|2d)?(_forward)?", name):
        scores = values["self"]
        classes = size_along(scores, 1 if scores.meta["val"].ndim > 1 else 0)
        return [Use(node, values["target"], classes, exempt=int(values["ignore_index"]))]
    if name in ("multi_margin_loss", "multilabel_margin_loss", "multilabel_margin_loss_forward"):
        exempt = -1 if name.startswith("multilabel") else None
        return [Use(node, values["target"], size_along(values["self"], -1), exempt=exempt)]
    if name in ("ctc_loss", "_ctc_loss"):
        return list(_uses_of_ctc(node, values))
    if name in _ALONG_A_DIMENSION:
        return [Use(node, values["index"], size_along(values["self"], int(values["dim"])))]
    if name == "index_fill":
        return [Use(node, values["index"], size_along(values["self"], int(values["dim"])), from_end=True)]
    if name in ("take", "put"):
        return [Use(node, values["index"], values["self"].meta["val"].numel(), from_end=True)]
    if name == "take_along_dim":
        tensor, dim = values["self"], values["dim"]
        size = tensor.meta["val"].numel() if dim is None else size_along(tensor, int(dim))
        return [Use(node, values["indices"], size, from_end=True)]
    if name == "one_hot" and int(values["num_classes"]) > 0:
        return [Use(node, values["self"], int(values["num_classes"]))]
    if name in ("index", "index_put", "_unsafe_index", "_unsafe_index_put", "_index_put_impl"):
        return list(_tensor_indices(node, values["self"], values["indices"]))
    return []


def _uses_of_ctc(node: Node, values: dict[str, Any]) -> Iterator[Use]:
    """The lengths; targets are clamped (`irongrad.operators.decompositions.loss_ctc`)."""
    scores, targets = values["log_probs"], values["targets"]
    lengths = {"input_lengths": size_along(scores, 0)}
    if targets.meta["val"].ndim > 1:
        lengths["target_lengths"] = size_along(targets, 1)
    for name, size in lengths.items():
        if isinstance(values[name], Node):
            yield Use(node, values[name], size, beyond=1)


def _tensor_indices(node: Node, tensor: Node, indices: Sequence[Node | None]) -> Iterator[Use]:
    """The uses in `tensor[indices]`; a mask indexes as many dimensions as it has."""
    dim = 0
    for index in indices:
        if index is not None and index.meta["val"].dtype in _MASKS:
            dim += index.meta["val"].ndim
            continue
        if index is not None:
            yield Use(node, index, size_along(tensor, dim), from_end=True)
        dim += 1
