"""Loops over time steps, as kernels of our own on x86-64 CPUs.

IREE 3.13.0 launches a kernel for each product, for each group of elementwise operations and for each copy of an
iteration. A step of an LSTM of 256 units over 64 characters launches 3,000 kernels. Here each layer is one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from iree.compiler import ir
from iree.compiler.dialects import flow

from irongrad.memory_model.product_tiles import Tile, vector_width
from irongrad.mlir.device import cpu_of
from irongrad.mlir.kernels import Kernels
from irongrad.mlir.letters import lettered_source
from irongrad.mlir.transposes import size_along, unknown_sizes
from irongrad.mlir.walk import BOUNDS, inside
from irongrad.passes.base import PassResult
from irongrad.passes.module.matmul_kernels.loop_body import LoopBody, body_of
from irongrad.passes.module.matmul_kernels.loop_kernel import LoopKernel, LoopProduct
from irongrad.passes.module.matmul_kernels.loop_tiles import division_of, has_pairs, pairs_of, tile_of, width_of
from irongrad.passes.module.matmul_kernels.loop_writer import executable_of
from irongrad.passes.module.matmul_kernels.operands import as_it_is, in_blocks, in_pairs
from irongrad.passes.module.matmul_kernels.packed_weights import packed_weight
from irongrad.passes.module.matmul_kernels.products import Product, Tiles, dimensions_of, widened
from irongrad.passes.module_pass import ModuleContext, ModulePass

# The most tensors of a kernel: IREE 3.13.0 loads no kernel of over 32.
_MOST_TENSORS = 30


@dataclass(frozen=True)
class LoopKernels(ModulePass):
    """Compute loops over time steps by kernels of our own, on x86-64 with AVX2 or AVX-512.

    Before:
        %r:3 = scf.for %t = %c0 to %c64 step %c1 iter_args(...) { linalg.matmul; linalg.generic; tensor.insert_slice }
    After:
        %r:5 = flow.dispatch @loop_0::@loop_0(...)

    A launch gives the numbers of iterations and of rows that are not known. IREE compiles all other loops: those over a
    batch of one row, whose dimension IREE has removed by then, and those that do anything else than products with fixed
    matrices and elementwise code.
    """

    name: ClassVar[str] = "loop-kernels"

    def applies(self, context: ModuleContext) -> bool:
        """With data tiling, as the kernels of products."""
        return context.data_tiling

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        cpu = cpu_of(module)
        if (width := vector_width(*cpu)) is None:
            return PassResult(False)
        tiles = Tiles.of(cpu[1]).of_halves
        bodies = [body for op in inside(module.operation) if op.name == "scf.for" and (body := body_of(op))]
        kernels = Kernels(module, executable_of, _name, by_code=True)
        launched = 0
        for body in bodies:
            kernel = _kernel(body, width, tiles)
            if kernel is not None:
                _launch(kernel, kernels)
                launched += 1
        return PassResult(launched > 0, {"loops": launched, "kernels": kernels.count})


def _name(kernel: LoopKernel, number: int) -> str:
    trips, batch = ("D" if size is None else size for size in (kernel.body.trips, kernel.body.batch))
    return f"loop_{number}_{trips}x{batch}"


def _kernel(body: LoopBody, most: int, half_tiles: Sequence[Tile]) -> LoopKernel | None:
    """The kernel of a loop; None if there is none, or if it has many tensors.

    Args:
        body: the loop.
        most: the most numbers of a vector.
        half_tiles: the CPU's tiles for products of bfloat16.
    """
    products = [p for operation in body.products if (p := _product_of(operation, body))]
    if len(products) < len(body.products):
        return None
    columns = [p.sizes["c"] for p in products]
    if (width := width_of(columns, most)) is None:
        return None
    unpacked = tuple(LoopProduct(p, *as_it_is(p.right, "c", p), _has_pairs(p, width, half_tiles)) for p in products)
    has_amx = any(tile.is_amx for tile in half_tiles)
    division = division_of(body.batch, unpacked, width, is_amx=has_amx)
    kernel = LoopKernel(body, unpacked, *division, width, has_amx)
    return kernel if kernel.tensors <= _MOST_TENSORS else None


def _has_pairs(product: Product, width: int, half_tiles: Sequence[Tile]) -> bool:
    sizes = product.sizes
    return bool(half_tiles) and product.multiplies_halves and has_pairs(sizes["c"], sizes["k"], width)


def _product_of(operation: Any, body: LoopBody) -> Product | None:
    """A product of an iteration; None if it is none of the batch's rows with a fixed matrix of the same type."""
    lettered = dimensions_of(operation, "r")
    if lettered is None or lettered[1][::2] != ["rk", "rc"]:
        return None
    left, right = list(operation.operands)[:2]
    right = lettered_source(right, lettered[1][1])
    types = [str(value.type.element_type) for value in (left, right[0])]
    if not body.is_outside(right[0]) or types not in (["f32", "f32"], ["bf16", "bf16"]):
        return None
    if types[1] == "f32" and packed_weight(right[0]) is not None:
        return None
    return Product(operation, lettered[0], (left, "rk"), right)


def _packed(product: LoopProduct, kernel: LoopKernel) -> LoopProduct:
    """A product with its right operand in pairs, or as float32, in column blocks if these are read faster.

    Blocks are of whole vectors.
    """
    if product.is_in_pairs:
        right, layout = in_pairs(product.of, pairs_of(max(kernel.counts), is_amx=kernel.has_amx))
        return replace(product, right=right, layout=layout)
    product = _wide(product)
    if not product.of.has_blocks_of_columns:
        return product
    columns = product.columns
    if columns % kernel.width:
        tiles = [tile_of(count, columns, kernel.width).columns for count in kernel.counts]
        columns = max(-(-columns // tile) * tile for tile in tiles)
    right, layout = in_blocks(product.of, columns)
    return replace(product, right=right, layout=layout)


def _wide(product: LoopProduct) -> LoopProduct:
    """A product with its right operand as float32, widened before the loop if it is not."""
    of = replace(product.of, right=widened(product.of.right, product.operation))
    return replace(product, of=of, right=of.right[0])


def _launch(kernel: LoopKernel, kernels: Kernels[LoopKernel]) -> None:
    """Replace a loop by a launch of its kernel; equal kernels share one."""
    kernel = replace(kernel, products=tuple(_packed(p, kernel) for p in kernel.products))
    loop = kernel.body.loop
    with loop.location, ir.InsertionPoint(loop):
        given = [*kernel.read, *(p.right for p in kernel.products)]
        rows = [] if kernel.body.rows is None else [size_along(kernel.body.rows, 0)]
        sizes = rows if kernel.body.size is None else [kernel.body.size, *rows]
        of_given = [size for value in given for size in unknown_sizes(value)]
        of_made = [size for value in list(loop.operands)[BOUNDS:] for size in unknown_sizes(value)]
        of_made += rows * (len(kernel.made) - len(loop.results))
        made = flow.DispatchOp(
            kernel.made, sizes, kernels.entry_point(kernel), [*given, *sizes], of_given, of_made
        ).results
    for old, new in zip(loop.results, made, strict=False):
        old.replace_all_uses_with(new)
    loop.erase()


PASS = LoopKernels
