"""Writes into the windows of `Tensor.unfold` and of `Tensor.as_strided`.

Functionalization replaces a write into a view by a new tensor. For `unfold`, torch 2.13 computes that tensor with the
backward of unfold, which leaves zeros between the windows. So a written unfold becomes `as_strided`, whose inverse
keeps what lies between. An as_strided of another view cannot be inverted ("encountered a mutation on a view chain of
length 2, where view 1 was an as_strided() call").
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from irongrad.diagnostics.source_lines import line_of
from irongrad.graph.flat_graph import FlatGraph
from irongrad.graph.movements import OF_ONE_TENSOR, operators
from irongrad.runtime.errors import CaptureError

aten = torch.ops.aten

_WINDOWS = frozenset({aten.unfold.default, aten.as_strided.default})


def as_strided_where_written(program: ExportedProgram) -> None:
    """Replace each `unfold` that is written into, itself or through other views, by `as_strided`.

    Raises:
        CaptureError: the windows are those of a view or of a tensor whose sizes vary, or they overlap; names the lines
            of the write and of the windows.
    """
    graph = FlatGraph(program.graph_module)
    windows: dict[object, set[Node]] = {}
    written: dict[Node, Node] = {}
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or not node.args:
            continue
        of_first = set().union(*(windows.get(o, set()) for o in graph.origins(node.args[0])))
        if node.target in _WINDOWS:
            of_first |= {node}
        if _may_be_view(node) or node.target._schema.is_mutable:
            windows[node] = of_first
        if node.target._schema.is_mutable:
            written |= dict.fromkeys(of_first, node)
    for window, write in written.items():
        if not all(map(_is_whole, graph.origins(window.args[0]))) or not _is_known(window) or _overlaps(window):
            raise CaptureError(_refusal(window, write))
        if window.target is aten.unfold.default:
            view = window.meta["val"]
            window.target = aten.as_strided.default
            window.args = (window.args[0], list(view.shape), list(view.stride()), 0)


def _may_be_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (
        node.target.is_view or node.target in operators(OF_ONE_TENSOR)
    )


def _is_whole(node: object) -> bool:
    """Whether a node is a tensor with memory of its own, all of it in order."""
    if not isinstance(node, Node) or _may_be_view(node):
        return False
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor) and value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
    )


def _is_known(window: Node) -> bool:
    view = window.meta["val"]
    return all(isinstance(size, int) for size in (*view.shape, *view.stride()))


def _overlaps(window: Node) -> bool:
    """Whether windows share elements: a write then depends on the order in which eager writes them."""
    if window.target is not aten.unfold.default:
        return False
    _, dim, size, step = window.args
    assert isinstance(size, int)
    assert isinstance(step, int)
    return size > step and window.meta["val"].shape[dim] > 1


def _refusal(window: Node, write: Node) -> str:
    name = str(window.target).split(".")[1]
    return (
        f"{line_of(write)}\n  {write.target} writes in place into the windows of {name} ({line_of(window)}): they "
        "overlap, or the tensor is itself a view or has sizes that vary. Take the windows of a copy of fixed sizes, "
        "x.clone(), or write into slices, x[..., start:end]"
    )
