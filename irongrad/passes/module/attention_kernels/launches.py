"""Launches of kernels in place of the attention of a block of operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from iree.compiler import ir
from iree.compiler.dialects import arith, flow

from irongrad.mlir.constants import Constants
from irongrad.mlir.halves import is_widened
from irongrad.mlir.kernels import Kernels
from irongrad.mlir.linalg import RESHAPES, producer_of
from irongrad.mlir.loop_code import number
from irongrad.mlir.transposes import Lettered, copied, size_along, split, summed
from irongrad.passes.module.attention_kernels.hidden import columns_seen
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

# The most tensors of a kernel: IREE 3.13.0 loads no kernel of over 32.
_MOST_TENSORS = 30

# What is erased with its last reader.
_ERASED = RESHAPES | {"linalg.fill", "tensor.empty", "arith.constant"}

# The most columns of scores with which keys are read as they are, and the columns of a block of keys otherwise.
_NEAR, _BLOCK = 128, 64


class Launches:
    """The kernels of a module, and their launches."""

    def __init__(self, module: ir.Module, width: int, has_amx: bool) -> None:
        """Begin without kernels.

        Args:
            module: gets the kernels at its beginning.
            width: the number of elements in a vector.
            has_amx: whether the CPU multiplies bfloat16 by AMX.
        """
        self._width, self._has_amx = width, has_amx
        self._constants = Constants(module)
        self._kernels = Kernels(module, executable_of, _name, by_code=True)

    @property
    def kernels(self) -> int:
        """How many kernels there are."""
        return self._kernels.count

    def replace(self, block: Any) -> int:
        """Replace the attention of a block by launches of kernels; return how many there are."""
        softmaxes = {op.operation: in_parts(op.operation) for op in list(block) if is_of_rows(op.operation)}
        places = {op.operation: i for i, op in enumerate(block)}
        found = without_leaks(without_overlaps(regions_in(block, places), places), softmaxes)
        seen = {region: columns_seen(region, self._constants) for region in found}
        possible = [r for r in found if self._is_possible(r, found, seen[r]) and late_readers(r, places) is not None]
        regions = without_leaks(possible, softmaxes)
        kernels = [
            _kernel(r, regions, self._width, hides=seen[r] is not None, before=_last(r, places)) for r in regions
        ]
        new: dict[Any, Any] = {}
        for kernel in kernels:
            self._launch(kernel, seen[kernel.region], places, new)
        for old, value in new.items():
            old.replace_all_uses_with(value)
        done = {op for region in regions for op in region.operations}
        left = {softmax: parts for softmax, parts in softmaxes.items() if parts[-1] not in done}
        _erase(done | (softmaxes.keys() - left.keys()))
        _put_back(left)
        return len(kernels)

    def _is_possible(self, region: Region, regions: Sequence[Region], seen: int | None) -> bool:
        """Whether a region has a kernel that IREE loads, and that is faster than IREE's kernels."""
        kernel = _kernel(region, regions, self._width)
        tensors = len(kernel.read) + 1 + len(kernel.made)
        by_amx = self._has_amx and seen is None and any(map(is_widened, region.operands))
        gives_batch = region.sizes.batch is not None or _with_open_batch(kernel) is not None
        return kernel.is_possible and gives_batch and tensors <= _MOST_TENSORS and not by_amx

    def _launch(
        self, kernel: AttentionKernel, columns: int | None, places: dict[Any, int], new: dict[Any, Any]
    ) -> None:
        """Launch a kernel in place of a region; equal kernels share one.

        Args:
            kernel: the kernel.
            columns: how many columns of the first row count; None if all do.
            places: the places of all operations; those that need a result too early are moved.
            new: the results that replace others; those of the launch are added.
        """
        last = _last(kernel.region, places)
        with last.location, ir.InsertionPoint(last):
            given = [new.get(value, value) for value in kernel.read]
            given += [] if columns is None else [_numbers(columns, kernel.region.sizes.columns)]
            size = _open_batch(kernel)
            of_given = [size_along(v, 0) for v in given if not v.type.has_static_shape]
            of_made = [_outer(kind, i >= len(kernel.readers), *size) for i, kind in enumerate(kernel.made) if size]
            entry_point = self._kernels.entry_point(kernel)
            launch = flow.DispatchOp(kernel.made, size, entry_point, [*given, *size], of_given, of_made)
            made = list(launch.results)
            for i, reader in enumerate(kernel.readers):
                if len(made[i].type.shape) > len(reader.letters):
                    made[i] = summed((made[i], "p" + reader.letters), reader.letters)
                if reader.letters != reader.of.result:
                    made[i] = copied((made[i], reader.letters), reader.of.result)
        for operation in reversed(late_readers(kernel.region, places) or []):
            operation.move_after(last)
        results = [*(r.of.operation.results[0] for r in kernel.readers), *kernel.written]
        new.update(zip(results, made, strict=True))


def _open_batch(kernel: AttentionKernel) -> list[Any]:
    """The number of matrices, at the current insertion point, if it is known at run time alone."""
    return [] if kernel.region.sizes.batch is not None else [size_along(_with_open_batch(kernel), 0)]


def _with_open_batch(kernel: AttentionKernel) -> Any | None:
    """The first operand of a product whose number of matrices is known at run time alone."""
    return next((o.value for o in kernel.operands if not o.value.type.has_static_shape), None)


def _outer(kind: Any, is_of_rows: bool, batch: Any) -> Any:
    """The first size of a result, given the number of matrices; other dimensions may belong to the batch, too."""
    inner = math.prod(kind.shape[1:-1]) if is_of_rows else 1
    return batch if inner == 1 else number(ir.AffineExpr.get_floor_div(ir.AffineExpr.get_dim(0), inner), batch)


def _name(kernel: AttentionKernel, count: int) -> str:
    sizes = kernel.region.sizes
    batch = "D" if sizes.batch is None else sizes.batch
    return f"attention_{count}_{batch}x{sizes.rows}x{sizes.columns}"


def _last(region: Region, places: dict[Any, int]) -> Any:
    """The last operation of a region, before which its kernel is launched."""
    return max(region.operations, key=places.__getitem__)


def _kernel(
    region: Region, regions: Sequence[Region], width: int, *, hides: bool = False, before: Any | None = None
) -> AttentionKernel:
    """The kernel of a region; operands that it cannot read are copied before the operation `before`.

    They may be results of another kernel that is launched behind the product that reads them. Without `before`, the
    kernel is made to be looked at only.
    """

    def readable(operand: Lettered, columns: str, operation: Any) -> Operand:
        if before is None or operand[1].endswith(columns):
            return Operand.of(operand)
        order = operand[1].replace(columns, "") + columns
        with operation.location, ir.InsertionPoint(before):
            return Operand.of((copied(operand, order), order))

    def in_blocks(operand: Lettered, operation: Any) -> Operand:
        value, letters = operand
        columns = math.gcd(region.sizes.columns, _BLOCK)
        if before is None or columns % (2 * width) or region.sizes.columns <= _NEAR:
            return readable(operand, "c", operation)
        order = "b" * ("b" in letters) + "ndc"
        with operation.location, ir.InsertionPoint(before):
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
    return AttentionKernel(region, products, tuple(readers), region.written(regions), hides, width)


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


def _numbers(*values: int) -> Any:
    """A constant tensor of unlike integers. IREE 3.13.0 fills one of equal integers anew in each step."""
    kind = ir.RankedTensorType.get([len(values)], ir.IntegerType.get_signless(32))
    return arith.constant(kind, ir.DenseElementsAttr.get(np.array(values, np.int32), type=kind))
