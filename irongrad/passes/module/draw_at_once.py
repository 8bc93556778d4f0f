"""Compute random words, and other integers that depend on positions alone, in one operation for each result.

A draw of random numbers is a chain of some hundred operations on int64 (operators/random/philox.py). The first ones are
the same for all draws of one shape, so MLIR shares them. IREE 3.13.0 then keeps the shared values in memory, and it
fuses only a part of a chain of large values that have two readers each. A BERT with dropout took 30 of 110 ms to read
and write such integers. To compute them anew takes less time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from iree.compiler import ir
from iree.compiler.dialects import arith

from irongrad.mlir.linalg import GENERIC, RESHAPES, inputs_of, is_elementwise
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_INDEX = "linalg.index"
_YIELD = "linalg.yield"
_XOR = "arith.xori"


@dataclass(frozen=True)
class DrawAtOnce(ModulePass):
    """Merge the operations on integers that lead from positions, and from scalars, to a result.

    Before:
        %i = linalg.generic (position); %a = linalg.generic (i * 0xD2511F53) ins(%i); %b = linalg.generic ins(%a, %key)
        %mask = linalg.generic (b < 3865470566) ins(%b)
    After:
        %mask = linalg.generic (the same of each element) ins(%key)

    A result is what an operation reads that computes something else, such as a mask. A reshape of positions is computed
    from the positions in its result. Left alone: unknown sizes, and results that take one operation.
    """

    name: ClassVar[str] = "draw-at-once"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        chains = _Chains.of_module(module)
        merged = [root for root in chains.roots() if chains.merge(root)]
        for operation in reversed(chains.operations):
            if merged and not list(operation.results[0].uses):
                operation.erase()
        return PassResult(bool(merged), {"results": len(merged)})


@dataclass(frozen=True)
class _Chains:
    """The operations whose results depend on positions and scalars alone.

    Attributes:
        operations: these operations, each with its place in the module, in order.
    """

    operations: dict[Any, int]

    @classmethod
    def of_module(cls, module: ir.Module) -> _Chains:
        """Find the operations of a module."""
        found: dict[Any, int] = {}
        for operation in inside(module.operation):
            if _is_local(operation, found):
                found[operation] = len(found)
        return cls(found)

    def roots(self) -> list[Any]:
        """The operations of which something else reads a result that has several elements."""
        return [op for op in self.operations if _is_large(op) and any(r not in self.operations for r in _readers(op))]

    def merge(self, root: Any) -> bool:
        """Compute the result of `root` in one operation; return whether that replaces several."""
        chain = self._chain_of(root)
        if sum(map(_is_large, chain)) < 2:
            return False
        leaves = list(dict.fromkeys(v for op in chain for v in _given(op) if v.owner not in self.operations))
        kind = root.results[0].type
        with root.location, ir.InsertionPoint(root):
            merged = _elementwise(leaves, kind)
            body = merged.regions[0].blocks.append(*(v.type.element_type for v in (*leaves, merged.results[0])))
            with ir.InsertionPoint(body):
                places = _Places.of(kind.shape)
                values = dict(zip(leaves, body.arguments, strict=False))
                for operation in chain:
                    values[operation.results[0]] = _computed(operation, values, places)
                ir.Operation.create(_YIELD, operands=[values[root.results[0]]])
        for use in list(root.results[0].uses):  # other chains may lead over it
            if use.owner.operation not in self.operations:
                use.owner.operation.operands[use.operand_number] = merged.results[0]
        return True

    def _chain_of(self, root: Any) -> list[Any]:
        """The operations that lead to the result of `root`, in order."""
        found, waiting = {root}, [root]
        while waiting:
            new = {v.owner for v in _given(waiting.pop()) if v.owner in self.operations} - found
            found |= new
            waiting += new
        return sorted(found, key=self.operations.__getitem__)


@dataclass(frozen=True)
class _Places:
    """The position of an element.

    Attributes:
        indices: the index along each dimension of the result.
        number: the number of the element in row-major order.
    """

    indices: list[Any]
    number: Any

    @classmethod
    def of(cls, shape: Sequence[int]) -> _Places:
        """Write the position in a tensor of `shape` at the current insertion point."""
        kind = ir.IndexType.get()
        indices = [
            ir.Operation.create(
                _INDEX, [kind], [], {"dim": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), d)}
            ).result
            for d in range(len(shape))
        ]
        number = indices[0]
        for index, size in zip(indices[1:], shape[1:], strict=True):
            scaled = arith.muli(number, arith.constant(kind, size))
            number = arith.addi(scaled, index)
        return cls(indices, number)


def _is_local(operation: Any, found: Mapping[Any, int]) -> bool:
    """Whether a result is of integers, and depends on positions and scalars, and on what `found` computes, alone.

    Where the number of a draw enters, by an exclusive or of a constant, a chain begins: so equal draws share a kernel.
    """
    if operation.name in RESHAPES:
        (source,) = operation.operands if len(operation.operands) == 1 else (None,)
        return source is not None and source.owner in found and len(source.type.shape) == 1
    if not is_elementwise(operation) or len(operation.results) != 1 or not _is_of_integers(operation.results[0]):
        return False
    kind = operation.results[0].type
    body = [op.operation.name for op in operation.regions[0].blocks[0]]
    maps = [m.value for m in operation.attributes["indexing_maps"]]
    whole = ir.AffineMap.get_identity(len(kind.shape), operation.context)
    for value, read in zip(inputs_of(operation), maps, strict=False):
        is_scalar = not value.type.shape and _is_of_integers(value)
        is_known = value.owner in found and read == whole and list(value.type.shape) == list(kind.shape)
        is_number = not kind.shape and _XOR in body and _is_constant(value)
        if is_number or not (is_scalar or is_known):
            return False
    computes = all(name in (_INDEX, _YIELD) or name.startswith("arith.") for name in body)
    is_in_order = bool(maps[-1] == whole)
    return computes and is_in_order


def _is_constant(value: Any) -> bool:
    return not isinstance(value.owner, ir.Block) and value.owner.name == "arith.constant"


def _is_of_integers(value: Any) -> bool:
    kind = value.type
    return bool(kind.has_static_shape and isinstance(kind.element_type, ir.IntegerType))


def _is_large(operation: Any) -> bool:
    """Whether an operation computes several elements."""
    return bool(operation.name == GENERIC and prod(operation.results[0].type.shape) > 1)


def _given(operation: Any) -> list[Any]:
    """The tensors that an operation reads."""
    return inputs_of(operation) if operation.name == GENERIC else list(operation.operands)


def _readers(operation: Any) -> Iterator[Any]:
    return (use.owner.operation for use in operation.results[0].uses)


def _elementwise(scalars: Sequence[Any], kind: Any) -> Any:
    """An elementwise operation without its body, which reads `scalars`."""
    rank = len(kind.shape)
    maps = [ir.AffineMap.get(rank, 0, []) for _ in scalars] + [ir.AffineMap.get_identity(rank)]
    room = ir.Operation.create("tensor.empty", [kind]).result
    attributes = {
        "indexing_maps": ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in maps]),
        "iterator_types": ir.ArrayAttr.get([ir.Attribute.parse("#linalg.iterator_type<parallel>")] * rank),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([len(scalars), 1]),
    }
    return ir.Operation.create(GENERIC, [kind], [*scalars, room], attributes, regions=1)


def _computed(operation: Any, values: Mapping[Any, Any], places: _Places) -> Any:
    """Write what `operation` computes for one element; `values` are those of the tensors that it reads."""
    if operation.name in RESHAPES:
        return values[operation.operands[0]]
    (block,) = operation.regions[0].blocks
    known = dict(zip(block.arguments, (values[v] for v in inputs_of(operation)), strict=False))
    is_in_order = len(operation.results[0].type.shape) == 1
    for op in (o.operation for o in block):
        if op.name == _YIELD:
            return known.get(op.operands[0], op.operands[0])
        if op.name == _INDEX:
            dimension = op.attributes["dim"].value
            known[op.results[0]] = places.number if is_in_order else places.indices[dimension]
            continue
        copy = op.clone()
        for number, operand in enumerate(op.operands):
            if operand in known:
                copy.operands[number] = known[operand]
        known[op.results[0]] = copy.results[0]
    raise AssertionError("the body of a linalg.generic ends with linalg.yield")


PASS = DrawAtOnce
