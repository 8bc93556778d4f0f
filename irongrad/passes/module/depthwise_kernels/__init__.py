"""Depthwise convolutions on x86-64 CPUs, computed by kernels of our own.

IREE 3.13.0 has no fast code for a `linalg.generic` that filters each channel separately. Written as a sum over the taps
of a kernel, elementwise code reads a slice of the image for each, and the gradients write one. ConvNeXt's kernels have
49 taps. The kernels here are those of `filter_code.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir
from iree.compiler.dialects import flow

from irongrad.memory_model.product_tiles import ARCHITECTURE, TILES
from irongrad.mlir.device import cpu_of
from irongrad.mlir.halves import is_half, rounding
from irongrad.mlir.kernels import Kernels
from irongrad.mlir.transposes import Lettered, copied, read_instead, summed
from irongrad.passes.base import PassResult
from irongrad.passes.module.depthwise_kernels.filter_code import FilterKernel, executable_of
from irongrad.passes.module.depthwise_kernels.filters import Filter, filters_in
from irongrad.passes.module_pass import ModulePass

# Positions that are computed at once, by the number of registers: their sums stay in these.
_AT_ONCE, _AT_ONCE_OF_FEW = 8, 4

_WIDTHS = (16, 8, 4)


@dataclass(frozen=True)
class DepthwiseKernels(ModulePass):
    """Compute depthwise convolutions and their weight gradients by kernels of our own, on x86-64 with AVX2 or AVX-512.

    Before:
        %r = linalg.generic (n, h + i, w + j, c) (c, i, j) -> (n, c, h, w) ins(%padded, %weight) ...
    After:
        %r = flow.dispatch @filter_0_...::@filter_0_...(%image, %weight as [i, j, c]) : tensor<n x h x w x c>

    Readers of the result that are `linalg.generic` read it channels-last. For all others it is transposed. A kernel
    widens operands of bfloat16 as it reads them, and rounds its sums where nothing else reads them. IREE compiles what
    has fewer than four channels, other types, or unknown sizes.
    """

    name: ClassVar[str] = "depthwise-kernels"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        architecture, features = cpu_of(module)
        vectors = next((tiles[0].width for f, tiles in TILES.items() if f in features), 0)
        if architecture != ARCHITECTURE or not vectors:
            return PassResult(False)
        kernels = Kernels(module, executable_of, _name)
        found: Counter[bool] = Counter()
        for one in filters_in(module):
            if one.shape.channels < _WIDTHS[-1]:
                continue
            width = next(w for w in _WIDTHS if w <= min(vectors, one.shape.channels))
            at_once = _AT_ONCE if vectors == _WIDTHS[0] else _AT_ONCE_OF_FEW
            rounds = None if one.shape.adds_images else rounding(one.operation.results[0])
            halves = is_half(one.image[0]), is_half(one.other[0]), rounds is not None
            kernel = FilterKernel(one.shape, width, at_once, halves)
            _launch(one, kernel, rounds or one.operation, kernels)
            found[any(halves)] += 1
        stats = {"filters": found.total(), "of halves": found[True], "kernels": kernels.count}
        return PassResult(bool(found), stats)


def _name(kernel: FilterKernel, number: int) -> str:
    rows, columns = kernel.shape.rows, kernel.shape.columns
    sizes = f"{kernel.shape.batch}x{rows.results}x{columns.results}x{kernel.shape.channels}"
    return f"filter_{number}_{sizes}_{rows.others}x{columns.others}"


def _launch(found: Filter, kernel: FilterKernel, last: Any, kernels: Kernels[FilterKernel]) -> None:
    """Compute a depthwise convolution, with its rounding, or a weight gradient by a launch of `kernel`.

    Args:
        found: what is computed.
        kernel: its kernel.
        last: the operation that rounds what `found` computes; that of `found` without one.
        kernels: the kernels of the module.
    """
    adds, result = kernel.shape.adds_images, last.results[0]
    with last.location, ir.InsertionPoint(last):
        image, other = _ordered(found.image, "nyxc"), _ordered(found.other, "nijc")
        letters = "phwc" if adds else "".join(x for x in "nhwc" if x in found.letters)
        shape = kernel.result if adds else [size for x, size in zip("nhwc", kernel.result, strict=True) if x in letters]
        kind = ir.RankedTensorType.get(shape, result.type.element_type)
        new = flow.DispatchOp([kind], [], kernels.entry_point(kernel), [image, other], [], []).results[0]
        if adds:
            letters = "".join(x for x in "hwc" if x in found.letters)
            new = summed(_without_units(new, letters), letters)
        read_instead(result, (new, letters), found.letters)
    for done in dict.fromkeys((last, found.operation)):
        done.erase()


def _ordered(operand: Lettered, order: str) -> Any:
    """An operand with its dimensions in `order`, in which letters may be missing."""
    value, letters = operand
    wanted = "".join(x for x in order if x in letters)
    return value if letters == wanted else copied(operand, wanted)


def _without_units(parts: Any, letters: str) -> Lettered:
    """The sums of all parts, [p, h, w, c], without the dimensions of size one that `letters` lack."""
    missing = [d for d, x in enumerate("phwc") if x not in "p" + letters]
    if not missing:
        return parts, "p" + letters
    groups: list[list[int]] = []
    for d in range(4):
        groups = [*groups[:-1], [*groups[-1], d]] if d in missing else [*groups, [d]]
    number = ir.IntegerType.get_signless(64)
    reassociation = [ir.ArrayAttr.get([ir.IntegerAttr.get(number, d) for d in group]) for group in groups]
    shape = [size for d, size in enumerate(parts.type.shape) if d not in missing]
    kind = ir.RankedTensorType.get(shape, parts.type.element_type)
    attributes = {"reassociation": ir.ArrayAttr.get(reassociation)}
    return ir.Operation.create("tensor.collapse_shape", [kind], [parts], attributes).result, "p" + letters


PASS = DepthwiseKernels
