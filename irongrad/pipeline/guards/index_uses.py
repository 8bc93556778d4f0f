"""Find the arguments of operators that are indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from irongrad.diagnostics.source_lines import line_of

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_MASKS = (torch.bool, torch.uint8)


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
    found = _USES.get(operator_name(node))
    return list(found(node, arguments_of(node))) if found is not None else []


def _lookup(node: Node, values: dict[str, Any]) -> Iterator[Use]:
    yield Use(node, values["indices"], size_along(values["weight"], 0))


def _gradient_of_lookup(node: Node, values: dict[str, Any]) -> Iterator[Use]:
    rows = values["num_weights"]
    yield Use(node, values["indices"], rows.meta["val"] if isinstance(rows, Node) else rows)


def _bags(node: Node, values: dict[str, Any]) -> Iterator[Use]:
    indices = values["indices"]
    yield Use(node, indices, size_along(values["weight"], 0))
    yield Use(node, values["offsets"], indices.meta["val"].numel(), beyond=1)


def _classes(node: Node, values: dict[str, Any]) -> Iterator[Use]:
    scores = values["self"]
    classes = size_along(scores, 1 if scores.meta["val"].ndim > 1 else 0)
    yield Use(node, values["target"], classes, exempt=int(values["ignore_index"]))


def _margins(node: Node, values: dict[str, Any]) -> Iterator[Use]:
    exempt = -1 if operator_name(node).startswith("multilabel") else None
    yield Use(node, values["target"], size_along(values["self"], -1), exempt=exempt)


def _along(node: Node, values: dict[str, Any]) -> Iterator[Use]:
    yield Use(node, values["index"], size_along(values["self"], int(values["dim"])))


def _filled(node: Node, values: dict[str, Any]) -> Iterator[Use]:
    yield Use(node, values["index"], size_along(values["self"], int(values["dim"])), from_end=True)


def _in_flat(node: Node, values: dict[str, Any]) -> Iterator[Use]:
    yield Use(node, values["index"], values["self"].meta["val"].numel(), from_end=True)


def _taken(node: Node, values: dict[str, Any]) -> Iterator[Use]:
    tensor, dim = values["self"], values["dim"]
    size = tensor.meta["val"].numel() if dim is None else size_along(tensor, int(dim))
    yield Use(node, values["indices"], size, from_end=True)


def _one_hot(node: Node, values: dict[str, Any]) -> Iterator[Use]:
    if int(values["num_classes"]) > 0:
        yield Use(node, values["self"], int(values["num_classes"]))


def _unpooled(node: Node, values: dict[str, Any]) -> Iterator[Use]:
    sizes = [size.meta["val"] if isinstance(size, Node) else size for size in values["output_size"]]
    yield Use(node, values["indices"], math.prod(sizes))


def _sorter(node: Node, values: dict[str, Any]) -> Iterator[Use]:
    yield Use(node, values["sorter"], size_along(values["sorted_sequence"], -1))


def _tensor_indices(node: Node, values: dict[str, Any]) -> Iterator[Use]:
    """The uses in `tensor[indices]`; a mask indexes as many dimensions as it has."""
    dim = 0
    for index in values["indices"]:
        if index is not None and index.meta["val"].dtype in _MASKS:
            dim += index.meta["val"].ndim
            continue
        if index is not None:
            yield Use(node, index, size_along(values["self"], dim), from_end=True)
        dim += 1


def _lengths_of_ctc(node: Node, values: dict[str, Any]) -> Iterator[Use]:
    """The lengths; targets are clamped (`irongrad.operators.decompositions.loss_ctc`)."""
    scores, targets = values["log_probs"], values["targets"]
    lengths = {"input_lengths": size_along(scores, 0)}
    if targets.meta["val"].ndim > 1:
        lengths["target_lengths"] = size_along(targets, 1)
    for name, size in lengths.items():
        if isinstance(values[name], Node):
            yield Use(node, values[name], size, beyond=1)


# What finds the indices among an operator's arguments, and the names of such operators.
_OF_OPERATORS: dict[Callable[[Node, dict[str, Any]], Iterator[Use]], str] = {
    _lookup: "embedding",
    _gradient_of_lookup: """
        embedding_backward embedding_dense_backward embedding_sparse_backward _embedding_bag_backward
        _embedding_bag_dense_backward _embedding_bag_sparse_backward""",
    _bags: "embedding_bag _embedding_bag _embedding_bag_forward_only _embedding_bag_per_sample_weights_backward",
    _classes: "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward",
    _margins: "multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward",
    _lengths_of_ctc: "ctc_loss _ctc_loss",
    _along: "gather scatter scatter_add scatter_reduce index_select index_add index_copy index_reduce",
    _filled: "index_fill",
    _in_flat: "take put",
    _taken: "take_along_dim",
    _one_hot: "one_hot",
    _unpooled: "max_unpool2d max_unpool3d",
    _sorter: "searchsorted",
    _tensor_indices: "index index_put _unsafe_index _unsafe_index_put _index_put_impl",
}
_USES = {name: found for found, names in _OF_OPERATORS.items() for name in names.split()}
