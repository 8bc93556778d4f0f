"""Keep matrix products of half-precision operands recognisable as such."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from irongrad.graph.movements import Movement, operators
from irongrad.graph.nodes import call, value_of
from irongrad.passes.base import Context, PassResult

aten, prims = torch.ops.aten, torch.ops.prims

_PRODUCTS = (aten.mm.default, aten.bmm.default)
_HALVES = (torch.bfloat16, torch.float16)
_MOVES = operators(Movement.COPY | Movement.RESHAPE | Movement.TRANSPOSE)


@dataclass(frozen=True)
class HalfProducts:
    """Widen half-precision operands directly before the product that reads them, and apply their scale to its result.

    Before:
        q = convert(a, float32) * 0.35; k = permute(convert(b, float32)); y = bmm(q, k)
    After:
        k = permute(b); y = bmm(convert(a, float32), convert(k, float32)) * 0.35

    Tensor cores have instructions for half-precision products. IREE 3.13.0 only forms one if each operand is a widening
    of a half-precision matrix and nothing more. If a transpose follows the widening, IREE writes the wide matrix to
    memory. If a scale follows it, as in PyTorch's attention, the operand is a float32 matrix.

    Holds before: the product is float32. It still accumulates in float32. Only the scale moves to its result, as in
    FlashAttention (T. Dao et al., arXiv:2205.14135). Left alone: operands with any other computation on the way. The
    pass does nothing for a CPU, where it costs more than it gains (docs/dev/measurements/2026-11-22-cloud-x86-64.md).
    """

    name: ClassVar[str] = "half-products"

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        if "llvm-cpu" in context.targets:
            return PassResult(False)
        products = sum(_rewrite(n) for n in list(graph.graph.nodes) if _is_wide_product(n))
        return PassResult(products > 0, {"products": products})


def _is_wide_product(node: Node) -> bool:
    return node.target in _PRODUCTS and value_of(node).dtype is torch.float32


def _rewrite(product: Node) -> bool:
    graph, factor, changed = product.graph, 1.0, False
    with graph.inserting_before(product):
        for index, operand in enumerate(product.all_input_nodes if len(product.all_input_nodes) == 2 else ()):
            source, moves, scale = _source(operand)
            if source is None or not (moves or scale != 1.0):
                continue
            for move in reversed(moves):
                source = call(graph, move.target, source, *move.args[1:], like=move, **move.kwargs)
            wide = call(graph, prims.convert_element_type.default, source, torch.float32, like=operand)
            product.update_arg(index, wide)
            factor, changed = factor * scale, True
    if factor != 1.0:
        with graph.inserting_after(product):
            scaled = call(graph, aten.mul.Scalar, product, factor, like=product)
        product.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    return changed


def _source(operand: Node) -> tuple[Node | None, list[Node], float]:
    """The half-precision source of `operand`, or None, and the moves and the scale on the way."""
    node, moves, scale = operand, list[Node](), 1.0
    while True:
        first = node.args[0] if node.args else None
        if not isinstance(first, Node):
            return None, moves, scale
        if node.target is prims.convert_element_type.default and value_of(first).dtype in _HALVES:
            return first, moves, scale
        if node.target in _MOVES:
            moves.append(node)
        elif node.target in (aten.mul.Scalar, aten.mul.Tensor) and isinstance(node.args[1], (int, float)):
            scale *= node.args[1]
        else:
            return None, moves, scale
        node = first


PASS = HalfProducts
