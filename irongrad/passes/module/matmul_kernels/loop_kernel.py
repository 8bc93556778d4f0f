"""A loop over time steps as one kernel: one thread runs all steps for some of the rows of a batch.

Between two steps no thread waits for another, nothing is launched, and the rows stay in the caches of one core. The
idea is that of persistent recurrent networks (G. Diamos et al., "Persistent RNNs: Stashing Recurrent Weights On-Chip",
ICML 2016).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from iree.compiler import ir

from irongrad.mlir.walk import BOUNDS
from irongrad.passes.module.matmul_kernels.loop_body import LoopBody, Piece, pieces_of
from irongrad.passes.module.matmul_kernels.loop_steps import Step
from irongrad.passes.module.matmul_kernels.products import Product
from irongrad.passes.module.matmul_kernels.tiling import Matrix

# By how many rows the work is divided if their number is known at run time alone.
ASSUMED_ROWS = 64


@dataclass(frozen=True, eq=False)
class LoopProduct:
    """A product of an iteration.

    Attributes:
        of: the product.
        right: the right operand, as the kernel reads it.
        layout: the layout of the right operand.
        is_in_pairs: whether both operands are bfloat16, the right one in panels of pairs. Others are float32.
    """

    of: Product
    right: Any
    layout: Matrix
    is_in_pairs: bool = False

    @property
    def operation(self) -> Any:
        """The operation."""
        return self.of.operation

    @property
    def summands(self) -> int:
        """The size of the reduction dimension."""
        return self.of.sizes["k"]

    @property
    def columns(self) -> int:
        """The columns of the result."""
        return self.of.sizes["c"]

    @property
    def bytes_of_number(self) -> int:
        """The bytes of a number of the right operand."""
        return 2 if self.is_in_pairs else 4

    @property
    def left(self) -> tuple[Piece, ...]:
        """The parts of the left operand."""
        return tuple(pieces_of(self.operation.operands[0]))


@dataclass(frozen=True, eq=False)
class Store:
    """A piece that an iteration stores.

    Attributes:
        stage: how many products have to be there before: the store is behind the products of the stages before.
        piece: the values.
        buffer: the key of the memory.
        width: the columns of a row of the memory.
        step: the row of a stack; None for memory that each iteration overwrites.
    """

    stage: int
    piece: Piece
    buffer: Any
    width: int
    step: Step | None


@dataclass(frozen=True, eq=False)
class LoopKernel:
    """A loop as a kernel.

    Attributes:
        body: the loop.
        products: its products, in order.
        strips: into how many strips the rows of the batch are divided; of an unknown number, so many would be.
        together: how many strips a thread computes at a time; if several, all have equally many rows.
        width: the number of elements in a vector.
        has_amx: whether AMX multiplies pairs.
    """

    body: LoopBody
    products: tuple[LoopProduct, ...]
    strips: int
    together: int
    width: int
    has_amx: bool

    @property
    def division(self) -> tuple[int, int]:
        """The rows of a strip, and how many strips, the first ones, have one more."""
        return divmod(self.body.batch or ASSUMED_ROWS, self.strips)

    @property
    def counts(self) -> tuple[int, ...]:
        """The different numbers of rows of a strip: one, or two that differ by a row.

        Of an unknown number of rows, those that are left over are strips of one row.
        """
        rows, larger = self.division
        if self.body.batch is None:
            return tuple(sorted({1, rows}))
        return (rows, rows + 1) if larger else (rows,)

    @property
    def sizes(self) -> int:
        """How many sizes a launch gives: the number of iterations and that of rows, unless they are known."""
        return (self.body.trips, self.body.batch).count(None)

    @cached_property
    def read(self) -> list[Any]:
        """The tensors that the kernel reads, without right operands: each initial value, and every value read."""
        first = [self.body.loop.operands[BOUNDS + c.place] for c in self.body.carries]
        found: dict[Any, None] = {}
        for leaf in (leaf for store in self.stores for leaf in self.body.leaves(store.piece.values)):
            row = self.body.row_of_stack(leaf)
            if row is not None or self.body.is_outside(leaf):
                found[leaf if row is None else row[0]] = None
        return [*first, *found]

    @cached_property
    def by_operation(self) -> dict[Any, int]:
        """The number of each product."""
        return {p.operation: i for i, p in enumerate(self.products)}

    @cached_property
    def after(self) -> dict[LoopProduct, int]:
        """The stage behind which each product is computed."""
        stages: dict[LoopProduct, int] = {}
        for product in self.products:
            stages[product] = max(self._stage(piece.values, stages) for piece in product.left)
        return stages

    def level(self, value: Any) -> int:
        """How many products in turn have to be computed before `value`."""
        return self._stage(value, self.after)

    def _stage(self, value: Any, stages: Mapping[LoopProduct, int]) -> int:
        numbers = [self.by_operation.get(leaf.owner) for leaf in self.body.leaves(value)]
        return max((stages[self.products[n]] + 1 for n in numbers if n is not None), default=0)

    def carried_left(self, product: LoopProduct) -> int | None:
        """The number of the carried value that a product reads where it is; None if its left operand is computed."""
        (first, *others) = product.left
        found = [i for i, c in enumerate(self.body.carries) if c.argument == first.values]
        return found[0] if found and not others else None

    @cached_property
    def stores(self) -> list[Store]:
        """What an iteration stores, by stage.

        A carried value is overwritten when nothing will read it any more. A value that is computed from carried values
        has their width, so in one stage those are stored together, after all of them are read.
        """
        found = []
        for stack in self.body.stacks:
            width = self.body.loop.results[stack.place].type.shape[2]
            found += [Store(self.level(p.values), p, stack, width, stack.step) for p in stack.pieces]
        for product in self.products:
            if self.carried_left(product) is None:
                stage = self.after[product]
                found += [Store(stage, p, product, product.summands, None) for p in product.left]
        carried = {c: self.level(c.piece.values) for c in self.body.carries}
        for product in self.products:
            if (place := self.carried_left(product)) is not None:
                carry = self.body.carries[place]
                carried[carry] = max(carried[carry], self.after[product] + 1)
        reads = [(s.stage, self.body.carried_in(s.piece.values)) for s in found]
        for _ in self.body.carries:
            for carry in self.body.carries:
                others = [(carried[c], self.body.carried_in(c.piece.values)) for c in self.body.carries]
                late = [stage for stage, read in (*reads, *others) if carry.argument in read]
                carried[carry] = max([carried[carry], *late])
        found += [Store(stage, c.piece, c, c.piece.columns, None) for c, stage in carried.items()]
        return sorted(found, key=lambda s: (s.stage, s.piece.columns))

    @property
    def made(self) -> list[ir.Type]:
        """The types of the tensors that the kernel writes: the loop's results, then working memory."""
        wide, half = ir.F32Type.get(), ir.BF16Type.get()
        working = [(p.columns, wide) for p in self.products]
        lefts = [p for p in self.products if self.carried_left(p) is None]
        working += [(p.summands, half if p.is_in_pairs else wide) for p in lefts]
        rows = ir.ShapedType.get_dynamic_size() if self.body.batch is None else self.body.batch
        kinds = [ir.RankedTensorType.get([rows, size], element) for size, element in working]
        return [*(r.type for r in self.body.loop.results), *kinds]

    @property
    def tensors(self) -> int:
        """The number of tensors that the kernel reads and writes."""
        return len(self.read) + len(self.products) + len(self.made)

    @property
    def operations(self) -> int | None:
        """The arithmetic operations of the products of all iterations; None if a launch gives sizes."""
        if self.body.trips is None or self.body.batch is None:
            return None
        return 2 * self.body.trips * self.body.batch * sum(p.summands * p.columns for p in self.products)
