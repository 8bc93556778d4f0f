"""Convolutions on x86-64 CPUs, computed by kernels of our own that read the image where it is."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir
from iree.compiler.dialects import arith, flow

from irongrad.memory_model.product_tiles import Tile, window_tile_for
from irongrad.mlir.halves import rounding
from irongrad.mlir.kernels import Kernels
from irongrad.mlir.loop_code import constant
from irongrad.mlir.transposes import read_instead, unknown_sizes
from irongrad.passes.base import PassResult
from irongrad.passes.module.matmul_kernels.operands import in_blocks
from irongrad.passes.module.matmul_kernels.products import Tiles
from irongrad.passes.module.matmul_kernels.tiling import MatmulShape, ProductKernel
from irongrad.passes.module.matmul_kernels.vector_code import executable_of
from irongrad.passes.module.matmul_kernels.windows import Windows, windows_in
from irongrad.passes.module_pass import ModulePass


@dataclass(frozen=True)
class ConvolutionKernels(ModulePass):
    """Compute convolutions and weight gradients by kernels of our own, on x86-64 with AVX2 or AVX-512.

    Before:
        %r = linalg.generic (n, h + i, w + j, c) (o, c, i, j) -> (n, o, h, w) ins(%padded, %weight) ...
    After:
        %r = flow.dispatch @windows_0_...::@windows_0_...(%padded, %weight in blocks of o) : tensor<n x h x w x o>

    The weight gradient is a sum of the same kind. Readers of the result that are `linalg.generic` read it as the kernel
    writes it. For all others it is transposed. Operands that are widened from bfloat16 are multiplied as bfloat16 by
    AVX512-BF16, if they have even numbers of neighbours to add over. Of float32, a launch gives the number of images if
    it is not known. IREE compiles what is of another type or of other unknown sizes, what is smaller than a kernel is
    worth, and what has no windows: there the kernel has one tap or one position.
    """

    name: ClassVar[str] = "convolution-kernels"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        tiles = Tiles.of_module(module)
        if tiles is None:
            return PassResult(False)
        kernels = Kernels(module, executable_of, _name)
        launched: Counter[bool] = Counter()
        for windows in windows_in(module, tiles.of_halves):
            of_type = tiles.of_halves if windows.is_half else tiles.of_floats
            _launch(windows, window_tile_for(windows.product.sizes, of_type), kernels)
            launched[windows.is_half] += 1
        stats = {"convolutions": launched.total(), "of halves": launched[True], "kernels": kernels.count}
        return PassResult(bool(launched), stats)


def _name(kernel: ProductKernel, number: int) -> str:
    sizes = kernel.sizes
    rows = "D" if kernel.open else sizes.rows
    return f"windows_{number}_{sizes.batch}x{rows}x{sizes.columns}x{sizes.summands}"


def _launch(windows: Windows, tile: Tile, kernels: Kernels[ProductKernel]) -> None:
    """Compute a product of windows by a launch of its kernel."""
    product = windows.product
    operation, sizes = product.operation, product.sizes
    if windows.reads_in_order and sizes["c"] % tile.columns == 0:
        right, matrix = product.right[0], windows.right_in_place
    else:
        right, matrix = in_blocks(product, -(-sizes["c"] // tile.columns) * tile.columns, windows.summands)
    shape = MatmulShape(sizes["b"], sizes["r"], sizes["c"], sizes["k"])
    pads = matrix.elements > math.prod(product.right[0].type.shape)
    rounds = rounding(operation.results[0]) if windows.is_half else None
    kernel = ProductKernel(
        shape,
        tile,
        windows.image,
        matrix,
        False,
        multiplies_halves=windows.is_half,
        is_rounded=rounds is not None,
        pads_right=pads,
        batch_inside=windows.rows_of_image is None,
        open="" if windows.rows_of_image is None else "r",
    )
    letters = "".join(x for x in windows.rows + "bc" if x in windows.result)
    last = rounds or operation
    of_result = last.results[0].type
    of = dict(zip(windows.result, of_result.shape, strict=True))
    with last.location, ir.InsertionPoint(last):
        kind = ir.RankedTensorType.get([of[x] for x in letters], of_result.element_type)
        images = unknown_sizes(product.left[0])
        size = _unknown_rows(windows, images)
        given = [product.left[0], right, *size]
        result = flow.DispatchOp([kind], size, kernels.entry_point(kernel), given, images, images).results[0]
        read_instead(last.results[0], (result, letters), windows.result)
    for done in dict.fromkeys((last, operation)):
        done.erase()


def _unknown_rows(windows: Windows, images: list[Any]) -> list[Any]:
    """The number of rows of a product of the windows of so many images, at the current insertion point, if unknown."""
    of_image = windows.rows_of_image
    return [] if of_image is None else [arith.muli(number, constant(of_image)) for number in images]


PASS = ConvolutionKernels
