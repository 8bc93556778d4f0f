"""Matrix products: zeros in place of the padding that a sum runs over."""

from __future__ import annotations

from irongrad.padding.layout import Dim, solid, unified
from irongrad.padding.padded import Padded
from irongrad.padding.registry import Call, NoRule, aten, rule


def _contracted(call: Call, a: str, b: str) -> dict[str, object]:
    """Both operands with zeros along the dimension that is summed over: the last of `a`, the last but one of `b`."""
    x, y = call[a], call[b]
    inner = max(y.ndim - 2, 0)
    same = unified(x.layout[-1], y.layout[inner])
    if same is None:
        raise NoRule("sums over a dimension whose padding differs between its operands")
    x = Padded(x.tensor, (*x.layout[:-1], same))
    y = Padded(y.tensor, (*y.layout[:inner], same, *y.layout[inner + 1 :]))
    return {a: call.padding.fill(x, 0, -1), b: call.padding.fill(y, 0, inner)}


def _product(call: Call, a: str, b: str) -> tuple[Dim, ...]:
    x, y = call[a], call[b]
    batch = (unified(x.layout[0], y.layout[0]),) if x.ndim == 3 else ()
    if None in batch:
        raise NoRule("multiplies batches whose padding differs")
    rows = [x.layout[-2]] if x.ndim > 1 else []
    columns = [y.layout[-1]] if y.ndim > 1 else []
    return tuple(solid(d) for d in (*batch, *rows, *columns) if d is not None)


@rule(aten.mm.default, aten.bmm.default)
def _mm(call: Call) -> Padded:
    return Padded(call.run(**_contracted(call, "self", "mat2")), _product(call, "self", "mat2"))


@rule(aten.mv.default)
def _mv(call: Call) -> Padded:
    return Padded(call.run(**_contracted(call, "self", "vec")), _product(call, "self", "vec"))


@rule(aten.dot.default)
def _dot(call: Call) -> Padded:
    return Padded(call.run(**_contracted(call, "self", "tensor")), ())


@rule(aten.addmm.default)
def _addmm(call: Call) -> Padded:
    return Padded(call.run(**_contracted(call, "mat1", "mat2")), _product(call, "mat1", "mat2"))


@rule(aten.baddbmm.default)
def _baddbmm(call: Call) -> Padded:
    return Padded(call.run(**_contracted(call, "batch1", "batch2")), _product(call, "batch1", "batch2"))
