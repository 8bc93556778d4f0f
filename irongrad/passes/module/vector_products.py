"""Compute products of matrices and vectors where their operands are stored.

Each element of the matrix is multiplied once, so a copy of it takes longer than the product. With data tiling IREE
3.13.0 copies it into tiles, and it transposes it before. A transpose to rows of 8 numbers runs at 1 GB/s for each core.
docs/dev/measurements/2026-11-30-xeon.md has figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from iree.compiler import ir
from iree.compiler.dialects import arith

from irongrad.mlir.barriers import hold
from irongrad.mlir.contractions import is_sum_of_products
from irongrad.mlir.letters import copied_by, dimensions_in, is_zero
from irongrad.mlir.linalg import GENERIC, PRODUCTS
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModuleContext, ModulePass

# Multiplications of the smallest product that is worth it, and the most summands of one whose summands are no
# neighbours in the matrix. IREE computes longer ones summand by summand, and reads a result again for each.
_LEAST, _FEW = 1 << 19, 32

# What is assumed of a size that is known at run time alone.
_ASSUMED = 1024


@dataclass(frozen=True)
class VectorProducts(ModulePass):
    """Write products of matrices and vectors as sums that IREE neither packs nor transposes for.

    Before:
        %t = linalg.generic (transpose) ins(%x); %r = linalg.batch_matmul ins(%v, %t) outs(%zeros)  // of one row
    After:
        %r = linalg.generic (sum over k of v[b, r, k] * x[k, b, c] * 1) ins(%v, %x, %one) outs(%zeros)

    IREE packs for a sum of products of two tensors only, so a third operand keeps it from doing so: a 1 behind a
    barrier. tests/passes/module/test_vector_products.py tells when IREE packs for no such product.

    Left alone: small products, other elements than float32, sums that fuse-elementwise made of unknown sizes, and sums
    of more than 32 products whose summands are no neighbours in the matrix.
    """

    name: ClassVar[str] = "vector-products"

    def applies(self, context: ModuleContext) -> bool:
        """With data tiling; without it IREE packs nothing."""
        return context.data_tiling

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        found = [_vector_product(op) for op in inside(module.operation) if op.name in PRODUCTS or op.name == GENERIC]
        products = [product for product in found if product is not None]
        for product in products:
            _write(product)
        return PassResult(bool(products), {"products": len(products)})


@dataclass(frozen=True)
class _Product:
    """A product of a matrix and a vector, or a batch of them.

    Attributes:
        operation: the operation that computes it.
        operands: its two operands, read where they are stored.
        maps: for each of them the loop of each dimension, and at last those of the result.
        loops: the number of loops.
    """

    operation: Any
    operands: tuple[Any, Any]
    maps: tuple[tuple[int, ...], ...]
    loops: int

    @property
    def sizes(self) -> Mapping[int, int]:
        """The size of each loop, or an assumed one."""
        pairs = zip(self.operands, self.maps, strict=False)
        found = {loop: size for value, of in pairs for loop, size in zip(of, value.type.shape, strict=True)}
        return {loop: size if size >= 0 else _ASSUMED for loop, size in found.items()}


def _vector_product(operation: Any) -> _Product | None:
    """The product that an operation computes, if the pass writes it; None otherwise."""
    adds = is_sum_of_products(operation) if operation.name == GENERIC else _is_product_of_floats(operation)
    if not adds:
        return None
    maps = [m.value for m in operation.attributes["indexing_maps"]]
    operands, read = zip(*map(_where_stored, list(operation.operands)[:2], maps[:2]), strict=True)
    loops = [dimensions_in(of) for of in (*read, maps[2])]
    if any(-1 in of for of in loops):
        return None
    product = _Product(operation, operands, tuple(map(tuple, loops)), maps[2].n_dims)
    return product if _is_worth_it(product) else None


def _is_product_of_floats(operation: Any) -> bool:
    """Whether a product multiplies float32, and adds to zero."""
    kinds = [value.type for value in operation.operands]
    return all(str(kind.element_type) == "f32" for kind in kinds) and is_zero(operation.operands[2])


def _where_stored(value: Any, read: Any) -> tuple[Any, Any]:
    """What `value` is a transposed or broadcast copy of, and the map that reads it as `read` reads `value`."""
    source = copied_by(value)
    if source is None:
        return value, read
    of_source, of_value = [m.value for m in value.owner.attributes["indexing_maps"]]
    if -1 in dimensions_in(of_source) or of_value != ir.AffineMap.get_identity(of_value.n_dims):
        return value, read
    stored = [read.results[dimension] for dimension in dimensions_in(of_source)]
    return source, ir.AffineMap.get(read.n_dims, 0, stored)


def _is_worth_it(product: _Product) -> bool:
    """Whether one operand is a vector, and IREE reads the other one well where it is stored."""
    sizes = product.sizes
    left, right, result = product.maps
    if len(sizes) != product.loops:
        return False  # both operands are shared by all of a loop
    of_one = [prod(sizes[x] for x in result if x not in other) for other in (right, left)]
    if min(of_one) > 1 or prod(sizes.values()) < _LEAST:
        return False
    matrix = left if of_one[0] > 1 else right
    inner = next((x for x in reversed(matrix) if sizes[x] > 1), None)
    return inner not in result or prod(size for x, size in sizes.items() if x not in result) <= _FEW


def _write(product: _Product) -> None:
    """Replace the operation of a product by one of three operands."""
    old = product.operation
    kind, scalar = old.results[0].type, ir.RankedTensorType.get([], ir.F32Type.get())
    result = product.maps[2]
    with old.location, ir.InsertionPoint(old):
        ones = ir.DenseElementsAttr.get_splat(scalar, ir.FloatAttr.get_f32(1.0))
        one = hold(ir.Operation.create("arith.constant", [scalar], [], {"value": ones}).result, ir.InsertionPoint(old))
        maps = [*product.maps[:2], (), result]
        kinds = ["parallel" if loop in result else "reduction" for loop in range(product.loops)]
        new = ir.Operation.create(
            GENERIC,
            [kind],
            [*product.operands, one, old.operands[2]],
            {
                "indexing_maps": ir.ArrayAttr.get([_map(product.loops, of) for of in maps]),
                "iterator_types": ir.ArrayAttr.get([ir.Attribute.parse(f"#linalg.iterator_type<{k}>") for k in kinds]),
                "operandSegmentSizes": ir.DenseI32ArrayAttr.get([3, 1]),
            },
            regions=1,
        )
        body = new.regions[0].blocks.append(*[ir.F32Type.get()] * 4)
    with old.location, ir.InsertionPoint(body):
        x, y, factor, total = body.arguments
        ir.Operation.create("linalg.yield", [], [arith.addf(total, arith.mulf(arith.mulf(x, y), factor))])
    old.results[0].replace_all_uses_with(new.result)
    old.erase()


def _map(loops: int, of: Sequence[int]) -> ir.AffineMapAttr:
    return ir.AffineMapAttr.get(ir.AffineMap.get(loops, 0, [ir.AffineDimExpr.get(loop) for loop in of]))


PASS = VectorProducts
