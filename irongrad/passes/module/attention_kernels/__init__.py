"""Attention on x86-64 CPUs, computed by kernels of our own.

IREE 3.13.0 computes a softmax between two products by six kernels or more, each of which reads and writes all scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir
from iree.compiler.dialects import flow

from irongrad.memory_model.product_tiles import ARCHITECTURE, TILES
from irongrad.mlir.constants import Constants
from irongrad.mlir.device import cpu_of
from irongrad.mlir.linalg import RESHAPES, producer_of
from irongrad.mlir.transposes import Lettered, copied, split, summed
from irongrad.mlir.walk import inside, text_of
from irongrad.passes.base import PassResult
from irongrad.passes.module.attention_kernels.hidden import Bound, bound_of
from irongrad.passes.module.attention_kernels.kernel import (
    AttentionKernel,
    Operand,
    ReaderProduct,
    ScoresProduct,
    strides_of,
)
from irongrad.passes.module.attention_kernels.region import (
    Region,
    late_readers,
    regions_in,
    without_leaks,
    without_overlaps,
)
from irongrad.passes.module.attention_kernels.softmax import in_parts, is_of_rows
from irongrad.passes.module.attention_kernels.writer import executable_of
from irongrad.passes.module_pass import ModuleContext, ModulePass

# The most tensors of a kernel: IREE 3.13.0 loads no kernel of over 32.
_MOST_TENSORS = 30


# What is erased with its last reader.
_ERASED = RESHAPES | {"linalg.fill", "tensor.empty", "arith.constant"}

# The most columns of scores with which keys are read as they are, and the columns of a block of keys otherwise.
_NEAR, _BLOCK = 128, 64


@dataclass(frozen=True)
class AttentionKernels(ModulePass):
    """Compute the softmax of a product, and its gradient, where their readers need them, by kernels of our own.

    Before:
        %s = linalg.batch_matmul(%q, %k); %m = max(%s); %e = exp(%s - %m); %p = %e / sum(%e)
        %o = linalg.batch_matmul(%p, %v)
    After:
        %o:3 = flow.dispatch @attention_0::@attention_0(%q, %k, %v)     # and the largest score and the sum of each row

    A kernel computes few rows of scores at a time, in memory of one thread. The gradient computes the scores again.

    IREE computes all others: scores that something else reads, such as attention weights that a model returns, those of
    unknown sizes, of one matrix, or of so many columns that a thread has no room for four rows, and such as are
    computed by anything else than products, elementwise code, sums, maxima and minima of rows.
    """

    name: ClassVar[str] = "attention-kernels"

    def applies(self, context: ModuleContext) -> bool:
        """With data tiling, as the kernels of products."""
        return context.data_tiling

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        architecture, features = cpu_of(module)
        tiles = next((found for feature, found in TILES.items() if feature in features), None)
        if architecture != ARCHITECTURE or tiles is None:
            return PassResult(False)
        blocks = dict.fromkeys(op.block for op in inside(module.operation) if op.name == "linalg.batch_matmul")
        executables: dict[str, str] = {}
        launched = 0
        for block in blocks:
            launched += _replace(block, tiles[0].width, module, executables)
        return PassResult(launched > 0, {"launches": launched, "kernels": len(executables)})


def _replace(block: Any, width: int, module: ir.Module, executables: dict[str, str]) -> int:
    """Replace the attention of a block by launches of kernels; return how many there are."""
    softmaxes = {op.operation: in_parts(op.operation) for op in list(block) if is_of_rows(op.operation)}
    places = {op.operation: i for i, op in enumerate(block)}
    found = without_leaks(without_overlaps(regions_in(block, places), places), softmaxes)
    possible = [r for r in found if late_readers(r, places) is not None]
    possible = [r for r in possible if _is_possible(_kernel(r, found, width, in_place=True))]
    regions = without_leaks(possible, softmaxes)
    constants = Constants(module)
    kernels = [_kernel(region, regions, width, bound_of(region, constants)) for region in regions]
    new: dict[Any, Any] = {}
    for kernel in kernels:
        _launch(kernel, places, module, executables, new)
    for old, value in new.items():
        old.replace_all_uses_with(value)
    done = {op for region in regions for op in region.operations}
    left = {softmax: parts for softmax, parts in softmaxes.items() if parts[-1] not in done}
    _erase(done | (softmaxes.keys() - left.keys()))
    _put_back(left)
    return len(kernels)


def _put_back(softmaxes: dict[Any, list[Any]]) -> None:
    """Have the readers of a softmax read it again, in place of its parts."""
    for softmax, parts in softmaxes.items():
        parts[-1].results[0].replace_all_uses_with(softmax.results[0])
        _erase(set(parts))


def _erase(operations: set[Any]) -> None:
    """Erase operations that nothing reads, with the reshapes, constants and empty tensors that they alone read."""
    while unused := [op for op in operations if not any(list(r.uses) for r in op.results)]:
        for operation in unused:
            operations.remove(operation)
            operands = {v.owner.operation for v in operation.operands if producer_of(v) in _ERASED}
            operation.erase()
            operations.update(operands)


def _is_possible(kernel: AttentionKernel) -> bool:
    """Whether a kernel can be compiled and loaded."""
    tensors = len(kernel.read) + len(kernel.made)
    return kernel.is_possible and tensors <= _MOST_TENSORS


def _kernel(
    region: Region, regions: Sequence[Region], width: int, bound: Bound | None = None, *, in_place: bool = False
) -> AttentionKernel:
    """The kernel of a region; operands that it cannot read are copied, unless it is made to be looked at only."""

    def readable(operand: Lettered, columns: str, operation: Any) -> Operand:
        if in_place or operand[1].endswith(columns):
            return Operand.of(operand)
        order = operand[1].replace(columns, "") + columns
        with operation.location, ir.InsertionPoint(operation):
            return Operand.of((copied(operand, order), order))

    def in_blocks(operand: Lettered, operation: Any) -> Operand:
        value, letters = operand
        columns = math.gcd(region.sizes.columns, _BLOCK)
        if in_place or columns % (2 * width) or region.sizes.columns <= _NEAR:
            return readable(operand, "c", operation)
        order = "b" * ("b" in letters) + "ndc"
        with operation.location, ir.InsertionPoint(operation):
            pieces = split(value, letters.index("c"), columns), letters.replace("c", "nc")
            packed = copied(pieces, order)
        return Operand(packed, strides_of(order, packed.type.shape) | {"d": columns}, columns)

    products = {}
    for matrix, scores in region.products.items():
        value, letters = scores.left
        summands = value.type.shape[letters.index("d")]
        right = in_blocks(scores.right, scores.operation)
        products[matrix] = ScoresProduct(Operand.of(scores.left), right, summands)
    readers = []
    for reader in region.readers:
        value, letters = reader.other
        in_any_order = reader.result == "bdc"
        other = Operand.of(reader.other) if in_any_order else readable(reader.other, "d", reader.operation)
        readers.append(ReaderProduct(reader, other, value.type.shape[letters.index("d")]))
    return AttentionKernel(region, products, tuple(readers), region.written(regions), bound, width)


def _launch(
    kernel: AttentionKernel,
    places: dict[Any, int],
    module: ir.Module,
    executables: dict[str, str],
    new: dict[Any, Any],
) -> None:
    """Launch a kernel in place of a region; equal kernels share one.

    Args:
        kernel: the kernel.
        places: the places of all operations; those that need a result too early are moved.
        module: gets the kernel.
        executables: the names of kernels, by their text.
        new: the results that replace others; those of the launch are added.
    """
    last = max(kernel.region.operations, key=places.__getitem__)
    with ir.Location.unknown(module.context):
        executable = executable_of(kernel, "attention")
        text = text_of(executable)
        if text not in executables:
            sizes = kernel.region.sizes
            name = f"attention_{len(executables)}_{sizes.batch}x{sizes.rows}x{sizes.columns}"
            executables[text] = name
            ir.InsertionPoint.at_block_begin(module.body).insert(executable_of(kernel, name))
        executable.erase()
    entry_point = ir.ArrayAttr.get([ir.SymbolRefAttr.get([executables[text]] * 2)])
    with last.location, ir.InsertionPoint(last):
        given = [new.get(value, value) for value in kernel.read]
        made = list(flow.DispatchOp(kernel.made, [], entry_point, given, [], []).results)
        for i, reader in enumerate(kernel.readers):
            if len(made[i].type.shape) > len(reader.of.result):
                made[i] = summed((made[i], "p" + reader.of.result), reader.of.result)
    for operation in reversed(late_readers(kernel.region, places) or []):
        operation.move_after(last)
    results = [*(r.of.operation.results[0] for r in kernel.readers), *kernel.written]
    new.update(zip(results, made, strict=True))


PASS = AttentionKernels
