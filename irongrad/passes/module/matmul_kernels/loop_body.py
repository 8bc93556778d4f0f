"""The body of a loop over time steps, as what it stores and which products it takes.

The rows of a batch never meet in such a body: it consists of products with matrices that stay the same, of elementwise
code, and of slices of columns. So one thread can run all time steps for some of the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir

from irongrad.mlir.linalg import GENERIC, inputs_of, is_elementwise
from irongrad.mlir.walk import BOUNDS, around, block_of, constant_of

_SLICE, _INSERT, _EMPTY = "tensor.extract_slice", "tensor.insert_slice", "tensor.empty"
_MARKS = frozenset({"iree_tensor_ext.compute_barrier.start", "iree_tensor_ext.compute_barrier.end"})
_INDICES = frozenset({"arith.subi", "arith.constant"})
_PRODUCT = "linalg.matmul"
_KNOWN = frozenset({GENERIC, _SLICE, _INSERT, _EMPTY, _PRODUCT, "linalg.fill", "scf.yield"}) | _MARKS | _INDICES

# The dialects of the operations that elementwise code may consist of, the types that it may compute, the types of the
# elements that it may hand on, and of those that a kernel reads and writes.
_SCALAR = ("arith.", "math.")
_TYPES = frozenset({"f32", "f64", "i1"})
_ELEMENTS = frozenset({"f32", "bf16", "i1"})
_STORED = frozenset({"f32", "bf16"})
_CONVERSIONS = frozenset({"arith.extf", "arith.truncf"})


@dataclass(frozen=True)
class Step:
    """The row of a stack that an iteration reads or writes: `first + sign * iteration`."""

    first: int
    sign: int


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
        trips: the number of iterations.
        batch: the number of rows.
        carries: the carried values.
        stacks: the stacked results.
        products: the matrix products, in order.
    """

    loop: Any
    trips: int
    batch: int
    carries: tuple[Carry, ...]
    stacks: tuple[Stack, ...]
    products: tuple[Any, ...]

    @property
    def iteration(self) -> Any:
        """The number of an iteration."""
        return self.loop.regions[0].blocks[0].arguments[0]

    def is_outside(self, value: Any) -> bool:
        """Whether a value is defined outside of the loop."""
        return self.loop not in around(block_of(value))

    def row_of_stack(self, value: Any) -> tuple[Any, Step, int] | None:
        """The stack of which `value` is a row, or columns of one, which row, and the first column; else None.

        None, too, unless each iteration reads a row that exists.
        """
        if getattr(value.owner, "name", "") != _SLICE or len(value.owner.operands) != 2:
            return None
        stack, index = value.owner.operands
        step = _step(index, self.iteration)
        column = _column_of_row(value.owner, stack.type)
        if step is None or column is None or not self.is_outside(stack):
            return None
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
    """The body of a loop of a known number of iterations; None if it does anything else than described above."""
    bounds = [constant_of(value) for value in list(loop.operands)[:BOUNDS]]
    if bounds[0] != 0 or not bounds[1] or bounds[2] != 1:
        return None
    block = loop.regions[0].blocks[0]
    operations = [op.operation for op in block]
    if not all(op.name in _KNOWN for op in operations):
        return None
    iteration, *arguments = block.arguments
    carries, stacks = [], []
    for place, (argument, value) in enumerate(zip(arguments, operations[-1].operands, strict=True)):
        value = unmarked(value)
        step = _written(argument, value, iteration, bounds[1])
        if step is not None and _is_empty(unmarked(loop.operands[BOUNDS + place])):
            stacks.append(Stack(place, step, tuple(pieces_of(value.owner.operands[0]))))
        else:
            carries.append(Carry(place, argument, Piece(value, 0)))
    batches = {tuple(c.argument.type.shape[:1]) for c in carries if _is_matrix(c.argument)}
    products = tuple(op for op in operations if op.name == _PRODUCT)
    if len(batches) != 1 or not all(_is_matrix(c.argument) for c in carries) or not products:
        return None
    ((batch,),) = batches
    body = LoopBody(loop, bounds[1], batch, tuple(carries), tuple(stacks), products)
    return body if _is_by_rows(body) else None


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
    part, rest = value.owner.operands
    _, column = _static(value.owner, "static_offsets")
    yield Piece(unmarked(part), column)
    if not _is_empty(unmarked(rest)):
        yield from pieces_of(rest)


def slice_of(value: Any) -> tuple[Any, int] | None:
    """The value and the first column of which `value` is a slice of columns; else None."""
    if getattr(value.owner, "name", "") != _SLICE or not _is_whole_columns(value.owner, value.type):
        return None
    return unmarked(value.owner.operands[0]), _static(value.owner, "static_offsets")[1]


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
    if not _is_matrix(value, _ELEMENTS) or value.type.shape[0] != body.batch:
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
    matrix = isinstance(kind, ir.RankedTensorType) and kind.rank == 2 and kind.has_static_shape
    return bool(matrix and str(kind.element_type) in elements)


def _is_empty(value: Any) -> bool:
    return getattr(value.owner, "name", "") == _EMPTY


def _written(argument: Any, value: Any, iteration: Any, trips: int) -> Step | None:
    """The row of `argument` that `value` replaces, if nothing else reads `argument`; None unless each row is once."""
    owner = value.owner
    if getattr(owner, "name", "") != _INSERT or len(owner.operands) != 3 or owner.operands[1] != argument:
        return None
    step = _step(owner.operands[2], iteration)
    each_once = argument.type.shape[0] == trips and step in (Step(0, 1), Step(trips - 1, -1))
    return step if each_once and _is_whole_row(owner, argument.type) and len(list(argument.uses)) == 1 else None


def _step(index: Any, iteration: Any) -> Step | None:
    if index == iteration:
        return Step(0, 1)
    if getattr(index.owner, "name", "") != "arith.subi" or index.owner.operands[1] != iteration:
        return None
    first = constant_of(index.owner.operands[0])
    return None if first is None else Step(first, -1)


def _column_of_row(operation: Any, stack: Any) -> int | None:
    """The first column of a slice of one matrix of a stack, with all rows of the matrix; else None."""
    offsets, sizes, strides = (_static(operation, f"static_{x}") for x in ("offsets", "sizes", "strides"))
    known = stack.rank == 3 and stack.has_static_shape and str(stack.element_type) in _STORED
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
    dynamic = len(operation.operands) - (operation.name == _INSERT)
    if dynamic != 1 or part.rank != 2 or whole.rank != 2 or not whole.has_static_shape:
        return False
    offsets, sizes, strides = (_static(operation, f"static_{x}") for x in ("offsets", "sizes", "strides"))
    return offsets[0] == 0 and sizes == [whole.shape[0], part.shape[1]] and strides == [1, 1]


def _static(operation: Any, name: str) -> list[int]:
    return [int(x) for x in ir.DenseI64ArrayAttr(operation.attributes[name])]
