"""Loops, indices and vectors: what the code of kernels is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import affine, arith, scf, stream, vector

from irongrad.mlir.walk import OPERATIONS, inside


@contextmanager
def each(begin: Any, end: Any, step: int) -> Iterator[Any]:
    """Write the body of a loop, given its induction variable."""
    loop = scf.ForOp(begin, end, constant(step))
    with ir.InsertionPoint(loop.body):
        yield loop.induction_variable
        scf.yield_([])


def loop(
    begin: Any, end: Any, step: int, values: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Write a loop with the carried values `values`; `body` maps induction variable and values to the next values."""
    loop = scf.ForOp(begin, end, constant(step), list(values))
    with ir.InsertionPoint(loop.body):
        scf.yield_(body(loop.induction_variable, list(loop.inner_iter_args)))
    return list(loop.results)


def vector_of(width: int) -> ir.VectorType:
    """A vector of `width` numbers of float32."""
    return ir.VectorType.get([width], ir.F32Type.get())


@dataclass(frozen=True)
class Lanes:
    """The lanes of a vector that are read and written; those of a part of a vector are its first.

    Attributes:
        kind: the type of the vector that is written.
        mask: which lanes there are; None for all.
    """

    kind: ir.VectorType
    mask: Any = None

    def first(self, count: int) -> Lanes:
        """The first `count` of the lanes."""
        kind = ir.VectorType.get(self.kind.shape, ir.IntegerType.get_signless(1))
        return Lanes(self.kind, vector.create_mask(kind, [constant(count)]))

    def load(self, memory: Any, place: Any) -> Any:
        """The vector at an index of a memref of rank 1, of its elements; lanes that are left out are zero."""
        kind = ir.VectorType.get(self.kind.shape, memory.type.element_type)
        if self.mask is None:
            return vector.load(kind, memory, [place])
        return vector.maskedload(kind, memory, [place], self.mask, zeros(kind))

    def store(self, values: Any, memory: Any, place: Any) -> None:
        """Store a vector at an index of a memref of rank 1."""
        if self.mask is None:
            vector.store(values, memory, [place])
        else:
            vector.maskedstore(memory, [place], self.mask, values)


def widened(values: Any, kind: ir.Type) -> Any:
    """A vector as one of `kind`, to whose elements narrower ones are widened."""
    return values if values.type == kind else arith.extf(kind, values)


def zeros(kind: ir.VectorType) -> Any:
    """A vector of zeros, of floats or integers."""
    element = kind.element_type
    zero = ir.IntegerAttr.get(element, 0) if isinstance(element, ir.IntegerType) else ir.FloatAttr.get(element, 0)
    return arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, zero))


def number(expression: ir.AffineExpr, *values: Any) -> Any:
    """The index that the affine `expression` computes from `values`."""
    return affine.apply(ir.AffineMap.get(len(values), 0, [expression]), values)


def smaller(x: Any, y: Any) -> Any:
    """The smaller one of two indices of 0 or more."""
    return arith.minui(x, y)


def bounded(end: Any, size: int, given: Any) -> Any:
    """The smaller one of an index and a size, which is the index `given` if a launch gives it."""
    return least([ir.AffineExpr.get_dim(0), fixed(size)], end) if given is None else smaller(end, given)


def least(expressions: Sequence[ir.AffineExpr], *values: Any) -> Any:
    """The minimum of affine `expressions` of `values`."""
    return affine.AffineMinOp(ir.AffineMap.get(len(values), 0, list(expressions)), values).result


def fixed(number: int) -> ir.AffineExpr:
    """A constant in affine expressions."""
    return ir.AffineExpr.get_constant(number)


def constant(number: int) -> Any:
    """A constant index."""
    return arith.constant(ir.IndexType.get(), number)


def computed(operation: Any, inputs: Sequence[Any], width: int | None) -> Any:
    """Write the body of an elementwise `linalg.generic` at the current insertion point.

    Args:
        operation: the operation; its body consists of operations on numbers, and of constants.
        inputs: its inputs, as vectors or as numbers.
        width: the number of elements in a vector; None for numbers.

    Returns:
        The result, as the inputs are.
    """
    block = operation.regions[0].blocks[0]
    known = dict(zip(block.arguments, inputs, strict=False))

    def value(of: Any) -> Any:
        if of not in known:
            known[of] = _constant(of, width)
        return known[of]

    *body, last = (op.operation for op in block)
    for op in body:
        if op.name != "arith.constant":
            kinds = [r.type if width is None else ir.VectorType.get([width], r.type) for r in op.results]
            attributes = {name: op.attributes[name] for name in op.attributes}
            made = ir.Operation.create(op.name, kinds, [value(o) for o in op.operands], attributes)
            known |= dict(zip(op.results, made.results, strict=True))
    return value(last.operands[0])


def _constant(value: Any, width: int | None) -> Any:
    """A constant as a number, or as a vector of it."""
    number = value.owner.attributes["value"]
    if width is None:
        return arith.constant(value.type, number)
    kind = ir.VectorType.get([width], value.type)
    return arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, number))


@dataclass(frozen=True)
class PartsOf:
    """As many workgroups as parts of a size that a launch gives.

    Attributes:
        each: how much of it one workgroup computes.
        size: which of the sizes it is.
    """

    each: int
    size: int = 0


@contextmanager
def new_executable(
    name: str,
    counts: Sequence[int | PartsOf],
    tensors: int,
    operations: int | None,
    *,
    sizes: int = 0,
    results: int = 1,
) -> Iterator[tuple[Any, list[Any]]]:
    """Write the body of a kernel, given the new operation `stream.executable` and the kernel's arguments.

    These are its bindings. The sizes that a launch gives come before those of the results.

    Args:
        name: the name of the executable and of its one entry point.
        counts: the numbers of workgroups in its three dimensions.
        tensors: the number of tensors that it reads and writes.
        operations: the arithmetic operations of one launch; None if they depend on sizes that it gives.
        sizes: how many sizes a launch gives.
        results: how many of the tensors are written.
    """
    x, y, z = map(_count, counts)
    workload = ", ".join(f"%size{i}: index" for i in range(sizes))
    kinds = ["!stream.binding"] * tensors
    kinds[tensors - results : tensors - results] = ["index"] * sizes
    arguments = ", ".join(f"%{i}: {kind}" for i, kind in enumerate(kinds))
    executable = ir.Operation.parse(f"""stream.executable private @{name} {{
        stream.executable.export public @{name} workgroups({workload}) -> (index, index, index) {{
          %x = {x}
          %y = {y}
          %z = {z}
          stream.return %x, %y, %z : index, index, index
        }}
        builtin.module {{
          func.func @{name}({arguments}) {{
            return
          }}
        }}
    }}""")
    known = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), operations or 0)
    executable.attributes[OPERATIONS] = known if operations is not None else ir.UnitAttr.get()
    (function,) = (op for op in inside(executable) if op.name == "func.func")
    body = function.regions[0].blocks[0]
    with ir.InsertionPoint.at_block_terminator(body):
        yield executable, list(body.arguments)


def _count(count: int | PartsOf) -> str:
    """A number of workgroups as MLIR computes it."""
    if isinstance(count, int):
        return f"arith.constant {count} : index"
    return f"affine.apply affine_map<(d0) -> (d0 ceildiv {count.each})>(%size{count.size})"


def row_of(binding: Any, elements: Any, element: ir.Type | None = None) -> Any:
    """The memory of a binding as a memref of rank 1, of float32 if no element type is given.

    Args:
        binding: the binding.
        elements: the number of its elements; an index if a launch gives it.
        element: the type of an element.
    """
    known = isinstance(elements, int)
    kind = ir.MemRefType.get([elements if known else ir.ShapedType.get_dynamic_size()], element or ir.F32Type.get())
    return stream.binding_subspan(kind, binding, constant(0), [] if known else [elements])
