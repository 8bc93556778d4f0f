"""Keep a reduction out of the kernel of readers that read its result both as rows and as columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import hold_behind
from irongrad.mlir.linalg import GENERIC, RESHAPES, reduces
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

# Where the dimensions of a reduction's result lie in a value: for each dimension that is longer than one, the dimension
# of the value, and its place among those that reshapes joined to that dimension.
Placement = tuple[tuple[Any, tuple[int, ...]], ...]
Placements = Mapping[Any, frozenset[Placement]]


@dataclass(frozen=True)
class KeepReductionsApart(ModulePass):
    """Give a reduction a kernel of its own if an operation reads its result along different dimensions.

    Before:
        %s = linalg.generic (sum) ...; %r = linalg.generic ins(%x, %s, %s) {(i, j), (i), (j)}
    After:
        %s = linalg.generic (sum) ...; %held = util.optimization_barrier %s; %r = linalg.generic ins(%x, %held, %held)

    The operation reads the result itself, or what elementwise operations and other reductions compute of it, as in
    `x.softmax(1) + x.softmax(1).T`. IREE 3.13.0 checks one of the reads (FormDispatchRegions.cpp), takes the reduction
    into the reader's kernel, and divides the kernel's work over the rows. Then a kernel has the sums of its own rows,
    and reads them for those of all columns: the numbers are wrong.
    tests/passes/module/test_keep_reductions_apart.py tells when IREE is right.
    """

    name: ClassVar[str] = "keep-reductions-apart"
    required: ClassVar[str] = "the numbers may be wrong without it"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        found: dict[Any, Placements] = {}
        apart: dict[Any, None] = {}
        for operation in inside(module.operation):
            if operation.name == GENERIC:
                read = _read(operation, found)
                apart.update(dict.fromkeys(p for p, places in read.items() if len(places) > 1))
                found.update(_results(operation, read))
            elif reduces(operation):
                found.update({result: _own(result) for result in operation.results})
            elif operation.name in RESHAPES and operation.operands[0] in found:
                found[operation.results[0]] = _reshaped(operation, found[operation.operands[0]])
        for reduction in apart:
            hold_behind(reduction)
        return PassResult(bool(apart), {"held": len(apart)})


def _read(operation: Any, found: Mapping[Any, Placements]) -> Placements:
    """The reductions whose results a `linalg.generic` reads, in terms of its loops."""
    read: defaultdict[Any, frozenset[Placement]] = defaultdict(frozenset)
    for value, order in zip(operation.operands, _orders(operation), strict=True):
        for reduction, places in found.get(value, {}).items():
            read[reduction] |= {tuple((_of(order, dim), path) for dim, path in place) for place in places}
    return read


def _results(operation: Any, read: Placements) -> Iterator[tuple[Any, Placements]]:
    """The results of a `linalg.generic`, with the reductions that they are computed from."""
    *_, order = _orders(operation)
    loops = {loop: dim for dim, loop in enumerate(order)}
    kept = {
        reduction: places
        for reduction, all_places in read.items()
        if (places := frozenset(p for place in all_places if (p := _moved(place, loops)) is not None))
    }
    for result in operation.results:
        if placements := kept | (_own(result) if reduces(operation) else {}):
            yield result, placements


def _own(result: Any) -> dict[Any, frozenset[Placement]]:
    """The result of a reduction, in terms of its own dimensions; nothing for a single number."""
    dims = _long_dims(result)
    return {result: frozenset({tuple((dim, ()) for dim in dims)})} if dims else {}


def _moved(place: Placement, loops: Mapping[Any, int]) -> Placement | None:
    """A placement in terms of a result's dimensions; None if a loop over it is reduced."""
    if not all(loop in loops or isinstance(loop, tuple) for loop, _ in place):
        return None
    return tuple((loops.get(loop, loop), path) for loop, path in place)


def _orders(operation: Any) -> list[list[Any]]:
    """For each operand of a `linalg.generic`, the loop of each dimension, or the expression if there is no one loop."""
    maps = [attribute.value for attribute in operation.attributes["indexing_maps"]]
    return [[f"d{x.position}" if isinstance(x, ir.AffineDimExpr) else str(x) for x in m.results] for m in maps]


def _of(order: list[Any], dim: Any) -> Any:
    return order[dim] if isinstance(dim, int) else dim


def _long_dims(value: Any) -> list[int]:
    """The dimensions that may be longer than one."""
    kind = ir.ShapedType(value.type)
    return [d for d in range(kind.rank) if kind.is_dynamic_dim(d) or kind.get_dim_size(d) != 1]


def _reshaped(operation: Any, placements: Placements) -> Placements:
    """The placements in the result of a reshape."""
    joins = operation.name == "tensor.collapse_shape"
    longer = operation.operands[0] if joins else operation.results[0]
    long_dims = set(_long_dims(longer))
    groups = [[d.value for d in group if d.value in long_dims] for group in operation.attributes["reassociation"]]

    def moved(dim: Any, path: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
        if not isinstance(dim, int):
            return dim, path
        if joins:
            number = next(n for n, group in enumerate(groups) if dim in group)
            return number, path if len(groups[number]) == 1 else (groups[number].index(dim), *path)
        group = groups[dim]
        if len(group) == 1:
            return group[0], path
        return (group[path[0]], path[1:]) if path and path[0] < len(group) else (tuple(group), path)

    return {
        reduction: frozenset(tuple(moved(*at) for at in place) for place in places)
        for reduction, places in placements.items()
    }


PASS = KeepReductionsApart
