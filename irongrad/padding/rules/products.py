"""Padding rules of matrix products: zeros in place of padding along the reduction dimension."""

from __future__ import annotations

from irongrad.padding.layout import Dim, broadcast, solid, unified
from irongrad.padding.padded import Padded
from irongrad.padding.registry import Call, NoRule, aten, rule


def _contracted(call: Call, a: str, b: str) -> dict[str, object]:
    """Both operands with zeros for padding along the reduction dimension: the last of `a`, the last but one of `b`."""
    x, y = call[a], call[b]
    inner = max(y.ndim - 2, 0)
    same = unified(x.layout[-1], y.layout[inner])
    if same is None:
        same = solid(x.layout[-1])
        y = call.padding.aligned(y, inner, same)
    x = x.named((*x.layout[:-1], same))
    y = y.named((*y.layout[:inner], same, *y.layout[inner + 1 :]))
    return {a: call.padding.fill(x, 0, -1), b: call.padding.fill(y, 0, inner)}


def _product_layout(call: Call, a: str, b: str) -> tuple[Dim, ...]:
    x, y = call[a], call[b]
    batch = (unified(x.layout[0], y.layout[0]),) if x.ndim == 3 else ()
    if None in batch:
        raise NoRule("multiplies batches whose padding differs")
    rows = [x.layout[-2]] if x.ndim > 1 else []
    columns = [y.layout[-1]] if y.ndim > 1 else []
    return tuple(solid(d) for d in (*batch, *rows, *columns) if d is not None)


@rule(aten.mm.default, aten.bmm.default)
def _mm(call: Call) -> Padded:
    return Padded(call.run(**_contracted(call, "self", "mat2")), _product_layout(call, "self", "mat2"))


@rule(aten.mv.default)
def _mv(call: Call) -> Padded:
    return Padded(call.run(**_contracted(call, "self", "vec")), _product_layout(call, "self", "vec"))


@rule(aten.dot.default)
def _dot(call: Call) -> Padded:
    return Padded(call.run(**_contracted(call, "self", "tensor")), ())


@rule(aten.addmm.default)
def _addmm(call: Call) -> Padded:
    return Padded(call.run(**_contracted(call, "mat1", "mat2")), _product_layout(call, "mat1", "mat2"))


@rule(aten.baddbmm.default)
def _baddbmm(call: Call) -> Padded:
    return Padded(call.run(**_contracted(call, "batch1", "batch2")), _product_layout(call, "batch1", "batch2"))


def _check_features(call: Call) -> None:
    if call["x1"].padded(-1):
        raise NoRule("measures distances between vectors that contain padding")


@rule(aten._cdist_forward.default)
def _distances(call: Call) -> Padded:
    _check_features(call)
    x, y = call["x1"], call["x2"]
    batch = broadcast([x.layout[:-2], y.layout[:-2]])
    if batch is None:
        raise NoRule("measures distances in batches whose padding differs")
    return Padded(call.run(**call.zeros("x1", "x2")), tuple(map(solid, (*batch, x.layout[-2], y.layout[-2]))))


@rule(aten._cdist_backward.default)
def _distances_backward(call: Call) -> Padded:
    _check_features(call)
    layout = (*call["x1"].layout[:-1], call["x2"].layout[-2])
    call.like("grad", layout)
    call.like("cdist", layout)
    return Padded(call.run(**call.zeros("grad", "x1", "x2", "cdist")), tuple(map(solid, call["x1"].layout)))
