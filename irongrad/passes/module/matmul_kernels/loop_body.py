"""The body of a loop over time steps, as what it stores and which products it takes.

The rows of a batch never meet in such a body: it consists of products with matrices that stay the same, of elementwise
code, and of slices of columns. So one thread can run all time steps for some of the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir

from irongrad.mlir.any_size import origin_along, origin_of
from irongrad.mlir.linalg import GENERIC, inputs_of, is_elementwise
from irongrad.mlir.walk import BOUNDS, around, block_of, constant_of
from irongrad.passes.module.matmul_kernels.loop_steps import FROM_AN_END, Step, step_of

_SLICE, _INSERT, _EMPTY = "tensor.extract_slice", "tensor.insert_slice", "tensor.empty"
_MARKS = frozenset({"iree_tensor_ext.compute_barrier.start", "iree_tensor_ext.compute_barrier.end"})
_INDICES = frozenset({"arith.addi", "arith.subi", "arith.constant", "arith.index_cast", "tensor.dim"})
_PRODUCT = "linalg.matmul"
_KNOWN = frozenset({GENERIC, _SLICE, _INSERT, _EMPTY, _PRODUCT, "linalg.fill", "scf.yield"}) | _MARKS | _INDICES

# The dialects of the operations that elementwise code may consist of, the types that it may compute, the types of the
# elements that it may hand on, and of those that a kernel reads and writes.
_SCALAR = ("arith.", "math.")
_TYPES = frozenset({"f32", "f64", "i1"})
_ELEMENTS = frozenset({"f32", "bf16", "i1"})
_STORED = frozenset({"f32", "bf16"})
_CONVERSIONS = frozenset({"arith.extf", "arith.truncf"})


@dataclass(frozen=True, eq=False)
class Piece:
    """A value that an iteration stores: `values`, (batch, columns), from the column `column` of its place on."""

    values: Any
    column: int

    @property
    def columns(self) -> int:
        """The number of columns."""
        return int(self.values.type.shape[1])


@dataclass(frozen=True, eq=False)
class Stack:
    """A result of a loop to which each iteration adds a row.

    Attributes:
        place: the index of the loop's result.
        step: the row that an iteration writes.
        pieces: the parts of the row.
    """

    place: int
    step: Step
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, eq=False)
class Carry:
    """A value (batch, columns) that an iteration hands to the next.

    Attributes:
        place: the index of the loop's result.
        argument: the value of the iteration before.
        piece: the next value.
    """

    place: int
    argument: Any
    piece: Piece


@dataclass(frozen=True, eq=False)
class LoopBody:
    """A loop whose iterations treat each row of a batch by itself.

    Attributes:
        loop: the `scf.for`.
        trips: the number of iterations; None if it is known at run time alone.
        batch: the number of rows; None if it is known at run time alone.
        carries: the carried values.
        stacks: the stacked results.
        products: the matrix products, in order.
    """

    loop: Any
    trips: int | None
    batch: int | None
    carries: tuple[Carry, ...]
    stacks: tuple[Stack, ...]
    products: tuple[Any, ...]

    @property
    def size(self) -> Any | None:
        """The number of iterations as an index, if it is known at run time alone; else None."""
        return self.loop.operands[1] if self.trips is None else None

    @property
    def rows(self) -> Any | None:
        """A tensor with the batch's rows, if their number is known at run time alone; else None."""
        return self.loop.operands[BOUNDS + self.carries[0].place] if self.batch is None else None

    def is_outside(self, value: Any) -> bool:
        """Whether a value is defined outside of the loop."""
        return self.loop not in around(block_of(value))

    def row_of_stack(self, value: Any) -> tuple[Any, Step, int] | None:
        """The stack of which `value` is a row, or columns of one, which row, and the first column; else None.

        None, too, unless each iteration reads a row that exists. Of an unknown number of iterations, it does: MLIR
        leaves undefined what a slice is that lies outside.
        """
        if getattr(value.owner, "name", "") != _SLICE or _unknown_offsets(value.owner) != 1:
            return None
        stack, index = list(value.owner.operands)[:2]
        step = step_of(index, self.loop)
        column = _column_of_row(value.owner, stack.type)
        if step is None or column is None or not self.is_outside(stack):
            return None
        if self.trips is None or stack.type.is_dynamic_dim(0):
            return (stack, step, column) if self.trips is None and step in FROM_AN_END else None
        rows = step.first, step.first + step.sign * (self.trips - 1)
        return (stack, step, column) if all(0 <= row < stack.type.shape[0] for row in rows) else None

    def given(self, value: Any) -> list[Any]:
        """The values from which `value` is computed, matrices of the batch or shared; none for a leaf.

        Leaves are values from outside of the loop, rows of stacks, carried values, products, and results of operations
        that no kernel computes.
        """
        if self.is_outside(value) or isinstance(value.owner, ir.Block) or self.row_of_stack(value) is not None:
            return []
        if (sliced := slice_of(value)) is not None:
            return [sliced[0]]
        return [unmarked(v) for v in inputs_of(value.owner)] if value.owner.name == GENERIC else []

    def leaves(self, value: Any) -> list[Any]:
        """The leaves from which `value` is computed, each once."""
        waiting, seen, found = [unmarked(value)], set(), []
        while waiting:
            if (one := waiting.pop()) in seen:
                continue
            seen.add(one)
            given = self.given(one)
            waiting += reversed(given)
            found += [] if given else [one]
        return found

    def carried_in(self, value: Any) -> set[Any]:
        """The carried values from which `value` is computed, without those behind a product."""
        return {leaf for leaf in self.leaves(value) if isinstance(leaf.owner, ir.Block) and not self.is_outside(leaf)}


def body_of(loop: Any) -> LoopBody | None:
    """The body of a loop over time steps; None if it does anything else than described above."""
    first, trips, apart = (constant_of(value) for value in list(loop.operands)[:BOUNDS])
    if first != 0 or trips == 0 or apart != 1:
        return None
    block = loop.regions[0].blocks[0]
    operations = [op.operation for op in block]
    if not all(op.name in _KNOWN for op in operations):
        return None
    _, *arguments = block.arguments
    carries, stacks = [], []
    for place, (argument, value) in enumerate(zip(arguments, operations[-1].operands, strict=True)):
        value = unmarked(value)
        step = _written(argument, value, loop)
        if step is not None and _is_empty(unmarked(loop.operands[BOUNDS + place])):
            stacks.append(Stack(place, step, tuple(pieces_of(value.owner.operands[0]))))
        else:
            carries.append(Carry(place, argument, Piece(value, 0)))
    products = tuple(op for op in operations if op.name == _PRODUCT)
    if not products or not carries or not all(_is_matrix(c.argument) for c in carries):
        return None
    kind = carries[0].argument.type
    batch = None if kind.is_dynamic_dim(0) else kind.shape[0]
    body = LoopBody(loop, trips, batch, tuple(carries), tuple(stacks), products)
    return body if _has_rows_of_batch(body, operations) and _is_by_rows(body) else None


def unmarked(value: Any) -> Any:
    """The value that IREE's marks around computations pass on."""
    while getattr(value.owner, "name", "") in _MARKS:
        value = value.owner.operands[0]
    return value


def pieces_of(value: Any) -> Iterator[Piece]:
    """The parts of which a value is joined, from the last to the first; the value itself if it is not joined."""
    value = unmarked(value)
    if getattr(value.owner, "name", "") != _INSERT or not _is_whole_columns(value.owner, value.owner.operands[0].type):
        yield Piece(value, 0)
        return
    part, rest = list(value.owner.operands)[:2]
    _, column = _static(value.owner, "static_offsets")
    yield Piece(unmarked(part), column)
    if not _is_empty(unmarked(rest)):
        yield from pieces_of(rest)


def slice_of(value: Any) -> tuple[Any, int] | None:
    """The value and the first column of which `value` is a slice of columns; else None."""
    if getattr(value.owner, "name", "") != _SLICE or not _is_whole_columns(value.owner, value.type):
        return None
    return unmarked(value.owner.operands[0]), _static(value.owner, "static_offsets")[1]


def _has_rows_of_batch(body: LoopBody, operations: Sequence[Any]) -> bool:
    """Whether carried values have the batch's rows, and slices whose size is not known have all of them."""
    if body.batch is not None:
        return all(c.argument.type.shape[0] == body.batch for c in body.carries)
    sizes = [size for op in operations if op.name in (_SLICE, _INSERT) for size in op.opview.sizes]
    rows = origin_along(body.rows, 0)
    return all(_has_as_many_rows(c.argument, body) for c in body.carries) and all(origin_of(s) == rows for s in sizes)


def _is_by_rows(body: LoopBody) -> bool:
    """Whether every value that an iteration stores or multiplies is computed as described above."""
    joined = [(s.pieces, body.loop.results[s.place].type.shape[2]) for s in body.stacks]
    joined += [(tuple(pieces_of(p.operands[0])), p.operands[0].type.shape[1]) for p in body.products]
    values = [c.piece.values for c in body.carries] + [piece.values for pieces, _ in joined for piece in pieces]
    return all(_is_matrix(value, _STORED) and _are_known(value, body) for value in values) and all(
        _covers(*one) for one in joined
    )


def _covers(pieces: Sequence[Piece], columns: int) -> bool:
    """Whether pieces lie side by side and fill all columns."""
    end = 0
    for piece in sorted(pieces, key=lambda p: p.column):
        if piece.column != end:
            return False
        end += piece.columns
    return end == columns


def _are_known(value: Any, body: LoopBody) -> bool:
    """Whether `value` and all values from which it is computed are matrices of the batch's rows, or shared."""
    waiting, seen = [unmarked(value)], set()
    while waiting:
        if (one := waiting.pop()) in seen:
            continue
        seen.add(one)
        if not _is_known(one, body):
            return False
        waiting += [v for v in body.given(one) if not _is_shared(v, body)]
    return True


def _is_known(value: Any, body: LoopBody) -> bool:
    """Whether `value` is a matrix of the batch's rows, and computed in a known way."""
    if not _is_matrix(value, _ELEMENTS) or not _has_all_rows(value, body):
        return False
    if not body.is_outside(value) and getattr(value.owner, "name", "") == GENERIC:
        return _is_plain(value.owner)
    if not _is_matrix(value, _STORED):
        return False
    if body.is_outside(value) or value.owner in body.products or body.row_of_stack(value) is not None:
        return True
    if isinstance(value.owner, ir.Block):
        return any(c.argument == value for c in body.carries)
    # A thread may overwrite a column of a carried value before it reads the column for another place.
    sliced = slice_of(value)
    return sliced is not None and not body.carried_in(sliced[0])


def _has_all_rows(value: Any, body: LoopBody) -> bool:
    """Whether a matrix has a row for each of the batch. One of an iteration has, if its number of rows is not known."""
    if body.batch is not None:
        return bool(value.type.shape[0] == body.batch)
    return _has_as_many_rows(value, body) if body.is_outside(value) else bool(value.type.is_dynamic_dim(0))


def _has_as_many_rows(value: Any, body: LoopBody) -> bool:
    """Whether a matrix has the batch's number of rows for certain, which is not known."""
    return bool(value.type.is_dynamic_dim(0)) and origin_along(value, 0) == origin_along(body.rows, 0)


def _is_shared(value: Any, body: LoopBody) -> bool:
    """Whether `value` is a row for all rows of the batch, or a number for all elements."""
    return len(value.type.shape) <= 1 and str(value.type.element_type) in _STORED and body.is_outside(value)


def _is_plain(operation: Any) -> bool:
    """Whether an elementwise operation is on matrices whose elements stay in place, and of types that vectors have."""
    *of_inputs, of_result = [m.value for m in operation.attributes["indexing_maps"]]
    whole = ir.AffineMap.get_identity(2)
    shared = ir.AffineMap.get(2, 0, [ir.AffineDimExpr.get(1)]), ir.AffineMap.get(2, 0, [])
    block = operation.regions[0].blocks[0]
    body = [op.operation for op in block]
    return (
        is_elementwise(operation)
        and len(operation.results) == 1
        and not list(block.arguments[-1].uses)
        and of_result == whole
        and all(m in (whole, *shared) for m in of_inputs)
        and all(op.name.startswith(_SCALAR) and not op.regions for op in body[:-1])
        and all(_has_vectors(op) for op in body[:-1])
        and all(_is_inside_or_constant(value, block) for op in body for value in op.operands)
        and all(str(i.type.element_type) in _ELEMENTS for i in inputs_of(operation))
    )


def _has_vectors(operation: Any) -> bool:
    """Whether vectors have the types of an operation; numbers of bfloat16 are widened and rounded, nothing else."""
    types = _TYPES | {"bf16"} if operation.name in _CONVERSIONS else _TYPES
    return all(str(value.type) in types for value in (*operation.operands, *operation.results))


def _is_inside_or_constant(value: Any, block: Any) -> bool:
    return block_of(value) == block or getattr(value.owner, "name", "") == "arith.constant"


def _is_matrix(value: Any, elements: Collection[str] = ("f32",)) -> bool:
    kind = value.type
    matrix = isinstance(kind, ir.RankedTensorType) and kind.rank == 2 and not kind.is_dynamic_dim(1)
    return bool(matrix and str(kind.element_type) in elements)


def _is_empty(value: Any) -> bool:
    return getattr(value.owner, "name", "") == _EMPTY


def _written(argument: Any, value: Any, loop: Any) -> Step | None:
    """The row of `argument` that `value` replaces, if nothing else reads `argument`; None unless each row is once."""
    owner, trips = value.owner, constant_of(loop.operands[1])
    if getattr(owner, "name", "") != _INSERT or _unknown_offsets(owner) != 1:
        return None
    if owner.operands[1] != argument:
        return None
    step = step_of(owner.operands[2], loop)
    if trips is None:
        each_once = argument.type.is_dynamic_dim(0) and step in FROM_AN_END
    else:
        each_once = argument.type.shape[0] == trips and step in (Step(0, 1), Step(trips - 1, -1))
    readers = [use for use in argument.uses if use.owner.name != "tensor.dim"]
    return step if each_once and _is_whole_row(owner, argument.type) and len(readers) == 1 else None


def _column_of_row(operation: Any, stack: Any) -> int | None:
    """The first column of a slice of one matrix of a stack, with all rows of the matrix; else None."""
    offsets, sizes, strides = (_static(operation, f"static_{x}") for x in ("offsets", "sizes", "strides"))
    known = stack.rank == 3 and not stack.is_dynamic_dim(2) and str(stack.element_type) in _STORED
    if not known or offsets[1] != 0 or sizes[:2] != [1, stack.shape[1]] or strides != [1, 1, 1]:
        return None
    inside = min(offsets[2], sizes[2]) >= 0 and offsets[2] + sizes[2] <= stack.shape[2]
    return offsets[2] if inside else None


def _is_whole_row(operation: Any, stack: Any) -> bool:
    """Whether a slice is one matrix of a stack."""
    return _column_of_row(operation, stack) == 0 and _static(operation, "static_sizes")[2] == stack.shape[2]


def _is_whole_columns(operation: Any, part: Any) -> bool:
    """Whether a slice of known place is columns of a matrix, with all of their rows; `part` is the slice's type."""
    whole = operation.operands[1].type if operation.name == _INSERT else operation.operands[0].type
    if _unknown_offsets(operation) or part.rank != 2 or whole.rank != 2 or whole.is_dynamic_dim(1):
        return False
    offsets, sizes, strides = (_static(operation, f"static_{x}") for x in ("offsets", "sizes", "strides"))
    return offsets[0] == 0 and sizes == [whole.shape[0], part.shape[1]] and strides == [1, 1]


def _unknown_offsets(operation: Any) -> int:
    """How many offsets of a slice are known at run time alone."""
    return len(operation.opview.offsets)


def _static(operation: Any, name: str) -> list[int]:
    return [int(x) for x in ir.DenseI64ArrayAttr(operation.attributes[name])]
